"""Tests that run on ranks: processes of one gloo group.

The body of such a test runs on each rank, with the device mesh and the test's other arguments::

    @on_ranks(2)
    def test_ranks_share_an_amax(mesh: DeviceMesh, recipe: str) -> None: ...

Arguments are parameters and fixtures that can be pickled. The test fails if a rank fails or waits
for ever; its message has what each rank that failed has printed. ``@on_ranks(2, 4)`` makes a test
for each number of ranks. A function that is no test runs by ``run``, which returns what the ranks
return, and ``exit_codes``, for ranks that are killed.

The ranks are forks of a process that lives as long as pytest, and that tests/conftest.py forks from
pytest once the tests are collected, so that ranks cost a tenth of a second, know nothing of what
tests have done, and leave nothing to the next test.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ottava

ROOT = Path(__file__).parents[1]
#: After which ranks that wait for each other are killed.
SECONDS = 120.0
#: In which the other ranks can fail by themselves, once one has failed.
GRACE = 2.0
# What every rank would import for itself; ``fully_shard`` imports the first.
IMPORTS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "ottava.nn",
    "ottava.kernels.cpu",
)


# -- in the process of pytest --


def on_ranks(*worlds: int, seconds: float = SECONDS) -> Callable[[Callable[..., None]], Any]:
    """The body of a test, whose first argument is the device mesh, on ``worlds`` ranks."""
    import pytest

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def test(world: int = worlds[0], **arguments: Any) -> None:
            _, message, _ = _launch(body, world, seconds, arguments)
            if message:
                pytest.fail(message, pytrace=False)

        signature = inspect.signature(body)
        parameters = list(signature.parameters.values())[1:]
        if len(worlds) > 1:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter("world", kind))
            test = pytest.mark.parametrize("world", worlds)(test)
        vars(test)["__signature__"] = signature.replace(parameters=parameters)
        return test

    return decorate


def run(
    function: Callable[..., Any], world: int, *, seconds: float = SECONDS, **arguments: Any
) -> list[Any]:
    """What ``function(mesh, **arguments)`` returns on each rank.

    Raises:
        AssertionError: it failed on a rank.
    """
    results, message, _ = _launch(function, world, seconds, arguments)
    assert not message, message
    return results


def exit_codes(
    function: Callable[..., Any], world: int, *, seconds: float = SECONDS, **arguments: Any
) -> list[int]:
    """How each rank ended: 0, 1 after an error, minus the signal where one was killed."""
    return _launch(function, world, seconds, arguments)[2]


def _launch(
    function: Callable[..., Any],
    world: int,
    seconds: float,
    arguments: dict[str, Any],
) -> tuple[list[Any], str, list[int]]:
    """What the ranks returned; a message where some failed, the first one first; exit codes."""
    module = Path(inspect.getfile(function)).relative_to(ROOT).with_suffix("")
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        request = {
            "folder": path,
            "module": ".".join(module.parts),
            "function": function.__name__,
            "world": world,
            "seconds": seconds,
        }
        codes = Forker.current().ask(request)
        errors = sorted(folder.glob("error-*"), key=lambda file: file.stat().st_mtime_ns)
        message = "\n".join(file.read_text() for file in errors)
        if any(codes) and not message:
            message = f"the ranks ended with {codes}; they are killed after {seconds:.0f} s"
        results = [folder / f"result-{rank}" for rank in range(world)]
        return [pickle.loads(r.read_bytes()) for r in results if r.exists()], message, codes


class Forker:
    """The process that forks ranks, itself a fork of pytest."""

    _current: Forker | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        for name in IMPORTS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self.connection, theirs = Pipe()
        with warnings.catch_warnings():
            # The thread of pytest-xdist waits for messages, and holds nothing that a fork uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            _serve(theirs)
        theirs.close()

    @classmethod
    def current(cls) -> Forker:
        """The one of this process, which is made by the first call."""
        if cls._current is None or cls._current.owner != os.getpid():
            cls._current = cls()
        return cls._current

    def ask(self, request: dict[str, Any]) -> list[int]:
        """The exit codes of the ranks."""
        self.connection.send(request)
        codes: list[int] = self.connection.recv()
        return codes


class Collectives:
    """Records the collectives of a block: (name, the tensor's dtype, its bytes on this rank)."""

    NAMES = (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        # What FSDP2 calls, from torch 2.13 on.
        "all_gather_single",
        "all_gather_object",
        "broadcast",
        "barrier",
    )

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, int]] = []
        self.inside = False

    def __enter__(self) -> Collectives:
        self.originals = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name in self.originals:
            setattr(dist, name, functools.partial(self._record, name))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def _record(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.inside:
            # One collective calls another.
            return self.originals[name](*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        # The last one is what a rank sends.
        sent = tensors[-1] if tensors else torch.empty(0)
        self.calls.append((name, sent.dtype, sent.nbytes))
        self.inside = True
        try:
            return self.originals[name](*args, **kwargs)
        finally:
            self.inside = False

    @property
    def count(self) -> int:
        """All-reduces."""
        return sum(name == "all_reduce" for name, *_ in self.calls)

    @property
    def gathered(self) -> list[int]:
        """The bytes that this rank sent in each all-gather of tensors."""
        names = ("all_gather", "all_gather_into_tensor", "all_gather_single")
        return [size for name, _, size in self.calls if name in names]


# -- in the process that forks --


def _serve(connection: Connection) -> None:
    """Fork the ranks of each request until pytest has ended."""
    try:
        # An interrupt of pytest ends this process by closing its connection.
        os.setsid()
        # FSDP2 asks for the machine's name.
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        torch.set_num_threads(1)
        # Every rank would look for the recipes in all packages, and import those it uses. What
        # fails here fails in the rank, too, which reports it.
        with contextlib.suppress(Exception):
            for recipe in ottava.list_recipes():
                pkgutil.resolve_name(recipe.factory)
        while True:
            request = connection.recv()
            # The collector of a rank does not look at what it shares with this process.
            gc.collect()
            gc.freeze()
            connection.send(_fork(request))
    finally:
        os._exit(0)


def _fork(request: dict[str, Any]) -> list[int]:
    """The exit codes of the ranks of one request."""
    pids: dict[int, int] = {}
    for rank in range(request["world"]):
        pid = os.fork()
        if pid == 0:
            _rank(rank, request)
        pids[pid] = rank
    codes = [-signal.SIGKILL] * request["world"]
    end = time.monotonic() + request["seconds"]
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
            end = min(end, time.monotonic() + GRACE) if status else end
        elif time.monotonic() > end:
            for each in pids:
                os.kill(each, signal.SIGKILL)
            end = float("inf")
        else:
            time.sleep(0.002)
    return codes


def _rank(rank: int, request: dict[str, Any]) -> None:
    """The whole life of a rank."""
    from torch.distributed.device_mesh import init_device_mesh

    folder, world, code = Path(request["folder"]), request["world"], 1
    try:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        store = dist.FileStore(str(folder / "store"), world)
        timeout = timedelta(seconds=request["seconds"])
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timeout)
        mesh = init_device_mesh("cpu", (world,))
        function = getattr(importlib.import_module(request["module"]), request["function"])
        function = getattr(function, "__wrapped__", function)
        result = function(mesh, **pickle.loads((folder / "arguments").read_bytes()))
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        # The store of a rank that ends first would be missing to others.
        dist.barrier()
        code = 0
    except BaseException:
        error = f"rank {rank} of {world}:\n{traceback.format_exc()}"
        (folder / f"error-{rank}").write_text(error, errors="replace")
    finally:
        # Without the interpreter's finalization, which gloo's threads can abort.
        os._exit(code)
