"""Defines cases and the places where they run, and runs them.

Results on the device are compared with those of an oracle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.timing import Run, interleaved
from ottava.kernels import use_backend

Tensor = torch.Tensor
Tensors = list[torch.Tensor]
Shape = tuple[int, ...]
#: The arguments of a case by name: tensors and other values.
Args = dict[str, Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = [1.0, 701.3, 2.0**-16, -2.0, 0.0, 1e-30, 3e38, 2.0**-127, math.inf, math.nan]
# The size of the frame around results, which no kernel may write to, and the byte that fills it.
_FRAME, _FILL = 67, 0xA5


class Draw:
    """Draws random inputs on the CPU."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(
        self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=self.generator).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator).to(dtype)

    def values(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Normally distributed values, some of them scaled to be far larger or smaller."""
        normal = self.normal(shape, torch.float32)
        return (normal * torch.exp2(self.integers(-6, 7, shape).float())).to(dtype)

    def bits(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Random bits, among them all exponents, NaN, infinities and subnormal numbers."""
        width = 8 * dtype.itemsize
        # Views need a dimension.
        flat = self.integers(0, 1 << width, (math.prod(shape),)).to(getattr(torch, f"uint{width}"))
        return flat.view(dtype).view(shape)

    def scale(self) -> Tensor:
        return torch.tensor(SCALES[int(self.integers(0, len(SCALES), ()))], dtype=torch.float32)


def framed(shape: Sequence[int], dtype: torch.dtype, shift: int = 0) -> Tensor:
    """Memory for a result inside of other memory, ``shift`` elements off a round address."""
    count = math.prod(shape)
    size = (2 * _FRAME + count + shift) * dtype.itemsize
    around = torch.full((size,), _FILL, dtype=torch.uint8).view(dtype)
    # The result begins after 64 elements, which is a round address if the memory begins at one.
    start = _FRAME - 3 + shift
    return around[start : start + count].view(tuple(shape))


def storage_of(tensor: Tensor) -> Tensor:
    """All the memory behind a tensor, in one dimension of its dtype."""
    memory: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole: Tensor = memory.set_(tensor.untyped_storage())
    return whole


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device`` with the same strides, at the same offset into memory of its own."""
    memory = storage_of(tensor).to(device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def tensors(tree: Any) -> Tensors:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def fill(there: Tensors, news: Tensors) -> None:
    for x, new in zip(there, news, strict=True):
        x.copy_(new)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside a ``with`` block torch fills memory that it allocates with NaN or 255.

    Elements that a kernel fails to write are found in this way.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Gpu:
    """A GPU with the backend ``cuda``; without that backend checks fail."""

    rehearsal, backend, compiler, rounds, turn_seconds = False, "cuda", "inductor", 9, 0.01

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def serving(self) -> AbstractContextManager[None]:
        """Inside a ``with`` block the backend that is checked serves all kernels."""
        return use_backend(self.backend)

    def put(self, arguments: Args) -> Args:
        """Copies of arguments on the device, with the same strides and offsets."""
        on_device: Args = tree_map_only(Tensor, lambda x: placed(x, self.device), arguments)
        return on_device

    def synchronize(self) -> None:
        """Wait for the device; this raises errors of kernels that no earlier call has raised."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Inside a ``with`` block another stream is current, which begins with a long wait.

        Work that is queued on other streams by mistake therefore runs first. The block waits for
        the stream at its end, after an error too, because its work would write into freed memory.
        """
        self.synchronize()
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                torch.cuda._sleep(20_000_000)
                yield
        finally:
            self.synchronize()

    def capture(self, run: Run) -> tuple[Any, Run]:
        """Capture the work that ``run`` queues in a graph.

        Returns:
            The result of ``run``, which every replay writes again, and the function that replays.
        """
        with self.side_stream():
            run()  # once outside: code is loaded at the first call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        return results, graph.replay

    def seconds(self, runs: Mapping[str, Run], **options: Any) -> dict[str, float]:
        """Seconds of a call of each alternative, run in turns; options as of ``interleaved``."""
        defaults = {"rounds": self.rounds, "turn_seconds": self.turn_seconds}
        return interleaved(runs, wait=self.synchronize, **(options or defaults))


class Rehearsal(Gpu):
    """The CPU in place of a GPU, so that the checks can be tested without one.

    The figures mean nothing.
    """

    rehearsal, compiler, rounds, turn_seconds = True, "eager", 1, 0.0
    side_stream = nullcontext  # type: ignore[assignment]

    def __init__(self, backend: str = "reference") -> None:
        self.device, self.backend = torch.device("cpu"), backend

    def capture(self, run: Run) -> tuple[Any, Run]:
        results = run()
        return results, lambda: fill(tensors(results), tensors(run()))


Compare = Callable[[Tensors, Tensors], str | None]


def _bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, where all NaNs are the same, because their payload is free."""
    x = x.detach().cpu().contiguous().view(-1)
    return (torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x).view(torch.uint8)


def same_bytes(actual: Tensors, expected: Tensors) -> str | None:
    """A message unless all tensors are equal in bytes, shape and dtype."""
    kinds = [[f"{x.dtype} {tuple(x.shape)}" for x in tensors] for tensors in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    for number, pair in enumerate(zip(actual, expected, strict=True)):
        mine, theirs = map(_bits, pair)
        if len(at := (mine != theirs).nonzero()):
            words = f"{len(at)} of {len(mine)} bytes differ, the first is {int(at[0])}"
            return f"tensor {number} (results, then arguments): {words}"
    return None


def distance(actual: Tensor, exact: Tensor) -> float:
    """``||actual - exact|| / ||exact||``; infinite for another shape and for NaN."""
    mine, theirs = actual.detach().cpu().double(), exact.detach().cpu().double()
    if mine.shape != theirs.shape or not bool(mine.isfinite().all()):
        return math.inf
    return (mine - theirs).norm().item() / (theirs.norm().item() or 1.0)


def within(*bounds: float, few: float = 0.0) -> Compare:
    """A comparison in which the first results may differ relatively by ``bounds``.

    Results of less than 64 elements may differ by ``few``, if that is more.
    """

    def compare(actual: Tensors, expected: Tensors) -> str | None:
        if len(actual) != len(expected):
            return f"{len(actual)} results instead of {len(expected)}"
        for number, (bound, mine, theirs) in enumerate(zip(bounds, actual, expected, strict=False)):
            allowed = max(bound, few) if theirs.numel() < 64 else bound
            far = distance(mine, theirs)
            if not far <= allowed:
                return f"result {number} is off by {far:.2e}, allowed {allowed:.2e}"
        return None

    return compare


@dataclass(frozen=True)
class Case:
    """A single check.

    Attributes:
        label: a label that is unique in its table.
        make: draws the arguments on the CPU; their tensors have the same shapes and strides each
            time.
        run: the function that is checked; it takes the arguments on any device.
        oracle: the backend whose results and writes into the arguments are right, or a function
            that gives right results.
        compare: compares results with the oracle's, and returns a message or None.
    """

    label: str
    make: Callable[[Draw], Args]
    run: Callable[[Args], Any]
    oracle: str | Callable[[Args], Any] = "cpu"
    compare: Compare = same_bytes


#: Cases by name, for example that of a kernel.
Table = Mapping[str, Sequence[Case]]


@dataclass
class Outcome:
    """The outcome of the cases of one name.

    It has the numbers of cases that were run, that failed, and that were left out for want of time,
    and a few of the failures.
    """

    name: str
    cases: int = 0
    failed: int = 0
    left_out: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether there were cases, and none failed."""
        return not self.failed and self.cases + self.left_out > 0


def _memory(arguments: Args) -> Tensors:
    """All memory behind the arguments, frames included."""
    return [storage_of(x) for x in tensors(arguments)]


def _attempt(case: Case, place: Gpu, seed: int, mode: str) -> str | None:
    """Run a case; the message about what is wrong, or None.

    In the mode ``stream`` it runs on a stream that is still busy when the copies of the arguments
    are queued, so that a kernel on another stream would read zeros. In the mode ``graph`` it is
    captured with other arguments and replayed with these.
    """
    arguments = case.make(Draw(seed))
    own, ready = Rehearsal().put(arguments), place.put(arguments)
    backend, oracle = "cpu", case.oracle
    if isinstance(oracle, str):
        backend, oracle = oracle, case.run
    with use_backend(backend):
        expected = [*tensors(oracle(own)), *_memory(own)]
    there = place.put(case.make(Draw(seed + 1000)) if mode == "graph" else arguments)

    # Memory is poisoned only where bytes are compared, because some of torch's operations refuse to
    # run in that mode.
    with place.serving(), poisoned() if case.compare is same_bytes else nullcontext():
        if mode == "graph":
            results, replay = place.capture(lambda: case.run(there))
            fill(_memory(there), _memory(ready))
            replay()
        else:
            for x in _memory(there) if mode == "stream" else ():
                x.zero_()
            with place.side_stream() if mode == "stream" else nullcontext():
                fill(_memory(there), _memory(ready))
                results = case.run(there)
    place.synchronize()
    return case.compare([*tensors(results), *_memory(there)], expected)


#: Mode -> the largest number of cases of a name.
MODES = {"some bytes": 23, "stream": 11, "graph": 17, "bytes": 10**6}


def check(
    name: str,
    cases: Sequence[Case],
    place: Gpu,
    mode: str = "",
    seed: int = 0,
    seconds: float = 1e9,
) -> Outcome:
    """Run the cases of one name in one mode; a case that raises an exception has failed."""
    stop, most = time.monotonic() + seconds, min(len(cases), MODES.get(mode, 10**6))
    outcome = Outcome(f"{name}, {mode}" if mode else name)
    # The chosen cases are spread over the table. Their number is prime, so that they are not in
    # step with choices that cycle.
    for number, case in enumerate(cases[(i * len(cases)) // most] for i in range(most)):
        if seconds <= 0 or time.monotonic() > stop:
            outcome.left_out += 1
            continue
        try:
            problem = _attempt(case, place, seed + number, mode)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        outcome.cases += 1
        if problem:
            outcome.failed += 1
            outcome.failures += [f"{case.label}: {problem}"] * (len(outcome.failures) < 5)
    return outcome


def run(
    table: Table, place: Gpu, modes: Sequence[str] = ("",), seed: int = 0, seconds: float = 1e9
) -> Iterator[Outcome]:
    """Run every name in every mode, each with an equal share of the time that is left.

    A mode with a few cases of every name comes first and the longest tables come last, because time
    may run out.
    """
    stop = time.monotonic() + seconds
    names = sorted(table, key=lambda name: len(table[name]))
    plan = [(mode, name) for mode in modes for name in names]
    for number, (mode, name) in enumerate(plan):
        seconds_left = max(0.0, stop - time.monotonic()) / (len(plan) - number)
        yield check(name, table[name], place, mode, seed=seed, seconds=seconds_left)
