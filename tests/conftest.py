"""How the tests are divided between pytest's processes, and their threads."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# The tests on a GPU run without hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    # A busy machine exceeds any deadline.
    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")

# Threads that wait for each other would otherwise spin, at the cost of the other processes, whose
# processors they hold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor would first compile headers for all files to come, in five seconds, but few tests let it
# write C++.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a process for each processor, so more threads would only take turns. Before torch
    # starts its own; the processes that tests start inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Checks of the conformance kit that compile.
COMPILING = {"test_compile", "test_compile_quantized_weights", "test_compile_dynamic"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests that share a fixture of a module or a session together, so that it is made in
    one process.

    The checks of the conformance kit that compile or start processes share a launch of ranks with
    the tests of the group "ranks". Options of a recipe change its bytes, and not how it is
    compiled, saved or sharded, so these checks are slow for its variants. The first
    compilation of a process takes seconds, so the short run compiles most recipes side by side in
    tests/integration, and not in the session of each.
    """
    for item in items:
        if item.get_closest_marker("ottava_slow") is not None:
            item.add_marker(pytest.mark.xdist_group("ranks"))
            if item.get_closest_marker("variant") is not None:
                item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("compiled_together") is not None and item.name in COMPILING:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("xdist_group") is not None:
            continue
        info = getattr(item, "_fixtureinfo", None)
        for definitions in info.name2fixturedefs.values() if info is not None else ():
            shared = definitions[-1]
            if shared.scope != "function" and shared.baseid.startswith("tests/"):
                item.add_marker(pytest.mark.xdist_group(shared.baseid.removeprefix("tests/")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepares the process once everything is imported, before a test has done anything.

    The process of the ranks is forked, if a test may need it. The modules that are imported by now
    live as long as the process, so the garbage collector leaves them out. Its rounds are rarer,
    because tests make much that lives for long.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    _seed_the_cpu_alone()
    ranks = sys.modules.get("tests.ranks")
    if ranks is not None and session.items and not session.config.option.collectonly:
        ranks.Forker.current()


def _seed_the_cpu_alone() -> None:
    """Replaces ``torch.manual_seed`` in a build of torch for CPUs.

    torch's own keeps a stack trace for each kind of device that is not there, which takes two
    milliseconds.
    """
    torch: Any = sys.modules.get("torch")
    # To ask whether the machine has a device would keep forks of this process from using it.
    if torch is not None and torch.accelerator.current_accelerator() is None:
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same numbers in each run, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost small tensors more than they save."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
