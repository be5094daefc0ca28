"""Fixtures of core's tests: the kernels' code paths, and a recipe of core's base classes alone.

The process of pytest-xdist that runs no tests imports this module, so that its functions, and not
the module, import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

try:
    from ottava import _cpu
except (
    ImportError
):  # a checkout without the compiled module: its paths are reported as failing, not skipped
    _cpu = None

ISAS: list[str] = list(_cpu.available_isas()) if _cpu is not None else ["cpu"]
# What a build for x86 has; one for another processor has less.
X86_ISAS = ["avx512", "avx2"]
PATHS = ["reference", *ISAS, "grid"]
#: Orders of the threads and blocks of the CUDA kernels, by turns; a number seeds a shuffle.
ORDERS = itertools.cycle(["ascending", "descending", "7"])


def pytest_report_header() -> str:
    """What this machine cannot run, so that a report says what it leaves out."""
    missing = [isa for isa in X86_ISAS if isa not in ISAS]
    left_out = f"; not {', '.join(missing)}, which this machine does not have" if missing else ""
    return f"kernels run on: {', '.join(PATHS)}{left_out}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs the CUDA kernels as loops."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("code_path") == "grid" or {"grid", "on_every_path"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker("grid")


@contextmanager
def running(path: str) -> Iterator[None]:
    """Inside, kernels run on one of ``PATHS``: the reference, an instruction set, or the CUDA
    kernels as a loop."""
    from ottava.kernels.backends import use_backend
    from tests.core.sequential_grid import serving_cpu

    if path == "reference":
        with use_backend("reference"):
            yield
        return
    if path == "grid":
        with pytest.MonkeyPatch.context() as patch, serving_cpu():
            patch.setenv("OTTAVA_GRID_ORDER", next(ORDERS))
            yield
        return
    assert _cpu is not None, "the compiled module is missing"
    before = _cpu.isa()
    _cpu.set_isa(path)
    try:
        with use_backend("cpu"):
            yield
    finally:
        _cpu.set_isa(before)


@pytest.fixture(params=PATHS)
def code_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on each of the paths."""
    with running(request.param):
        yield request.param


Runs = Callable[[Callable[[], object]], None]


def on_each(paths: list[str]) -> Runs:
    """Runs a function on each of these paths."""

    def run_all(run: Callable[[], object]) -> None:
        for path in paths:
            with running(path):
                try:
                    run()
                except Exception as error:
                    error.add_note(f"on the path {path}")
                    raise

    return run_all


@pytest.fixture
def on_every_path() -> Runs:
    """All paths in one test, for what is costly to expect."""
    return on_each(PATHS)


@pytest.fixture
def on_every_isa() -> Runs:
    """The instruction sets of the CPU, for what only they do: streaming stores, threads."""
    return on_each(ISAS)


@pytest.fixture(params=["e4m3", "e5m2"])
def fmt(request: pytest.FixtureRequest) -> str:
    """Name of an element format."""
    return str(request.param)


@pytest.fixture
def recipe() -> Any:
    from tests.core.sample_recipe import SampleRecipe

    return SampleRecipe()


@pytest.fixture
def quantizer() -> Any:
    import torch

    from tests.core.sample_recipe import SampleQuantizer

    return SampleQuantizer(torch.float8_e4m3fn)
