"""Where cases run, what a case is, and what runs cases: results on the device against an
oracle's."""

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
#: What a case is made of: tensors by name, and whatever goes with them.
Args = dict[str, Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

#: The first three suit the float64 oracle: as it is, much clamped, much lost below the smallest
#: number.
SCALES = [1.0, 701.3, 2.0**-16, -2.0, 0.0, 1e-30, 3e38, 2.0**-127, math.inf, math.nan]
# A frame around results, which nobody may touch, and what it is filled with.
_FRAME, _FILL = 67, 0xA5


class Draw:
    """Fresh random inputs on the CPU; ``plain``: what a float64 oracle takes."""

    plain = False

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(
        self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=self.generator).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator).to(dtype)

    def values(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Normal ones, some of them far larger or smaller."""
        return (
            self.normal(shape, torch.float32) * torch.exp2(self.integers(-6, 7, shape).float())
        ).to(dtype)

    def bits(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Any bits: all exponents, NaN, infinities and subnormal numbers among them."""
        width = 8 * dtype.itemsize
        # Views need a dimension.
        flat = self.integers(0, 1 << width, (math.prod(shape),)).to(getattr(torch, f"uint{width}"))
        return flat.view(dtype).view(shape)

    def scale(self) -> Tensor:
        return torch.tensor(
            SCALES[int(self.integers(0, 3 if self.plain else len(SCALES), ()))], dtype=torch.float32
        )

    def result(
        self, shape: Sequence[int], dtype: torch.dtype = torch.uint8, shift: int = 0
    ) -> Tensor:
        """Room for a result in the middle of other memory, ``shift`` elements off a round
        address."""
        count = math.prod(shape)
        around = torch.full(
            ((2 * _FRAME + count + shift) * dtype.itemsize,), _FILL, dtype=torch.uint8
        ).view(dtype)
        # 64 elements, and so a round address where the memory begins at one.
        return around[(start := _FRAME - 3 + shift) : start + count].view(tuple(shape))


def storage_of(tensor: Tensor) -> Tensor:
    """All the memory behind a tensor, in one dimension of its dtype."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides at the same offset into memory of its own."""
    return (
        storage_of(tensor)
        .to(device, copy=True)
        .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    )


def tensors(tree: Any) -> Tensors:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def fill(there: Tensors, news: Tensors) -> None:
    for x, new in zip(there, news, strict=True):
        x.copy_(new)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that torch allocates is filled: with NaN, with 255. What a kernel leaves
    unwritten is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Gpu:
    """A GPU and the backend ``cuda``: an error, not the reference, if that is not there."""

    rehearsal, backend, compiler, rounds = False, "cuda", "inductor", 9

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def serving(self) -> AbstractContextManager[None]:
        """The backend that is checked serves."""
        return use_backend(self.backend)

    def put(self, arguments: Args) -> Args:
        """Copies there, with the same strides and offsets."""
        made: Args = tree_map_only(Tensor, lambda x: placed(x, self.device), arguments)
        return made

    def synchronize(self) -> None:
        """Waits; an error of a kernel comes up here at the latest."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """A stream of its own that begins busy, so that whatever is queued elsewhere runs before.

        It is waited for after an error as well: what is queued on it would write into memory that
        is freed by then.
        """
        self.synchronize()
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                torch.cuda._sleep(20_000_000)
                yield
        finally:
            self.synchronize()

    def capture(self, run: Run) -> tuple[Any, Run]:
        """A graph of what ``run`` queues: its result, which every replay writes anew, and the
        replay."""
        with self.side_stream():
            run()  # once outside: code is loaded at the first call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        return results, graph.replay

    def medians(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """Median seconds of a call of each, in turns."""
        return interleaved(
            runs,
            rounds=self.rounds,
            wait=self.synchronize,
            turn_seconds=0.01 * (not self.rehearsal),
        )


class Rehearsal(Gpu):
    """The CPU in a GPU's place, so that the checks themselves are run where there is none; no
    figure means anything."""

    rehearsal, compiler, rounds = True, "aot_eager", 1
    side_stream = nullcontext  # type: ignore[assignment]

    def __init__(self, backend: str = "reference") -> None:
        self.device, self.backend = torch.device("cpu"), backend

    def capture(self, run: Run) -> tuple[Any, Run]:
        results = run()
        return results, lambda: fill(tensors(results), tensors(run()))


Compare = Callable[[Tensors, Tensors], str | None]


def _bits(x: Tensor) -> Tensor:
    """A NaN equals a NaN: its payload is free."""
    x = x.detach().cpu().contiguous().view(-1)
    return (torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x).view(torch.uint8)


def same_bytes(got: Tensors, expected: Tensors) -> str | None:
    """All of them equal, in shape and dtype too."""
    kinds = [[f"{x.dtype} {tuple(x.shape)}" for x in tensors] for tensors in (got, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    for number, (mine, theirs) in enumerate(
        zip(map(_bits, got), map(_bits, expected), strict=True)
    ):
        if len(at := (mine != theirs).nonzero()):
            words = f"{len(at)} of {len(mine)} bytes differ, the first is {int(at[0])}"
            return f"tensor {number} (results, then arguments): {words}"
    return None


def distance(got: Tensor, exact: Tensor) -> float:
    """``||got - exact|| / ||exact||``; infinite where ``got`` has a NaN, or shapes differ."""
    mine, theirs = got.detach().cpu().double(), exact.detach().cpu().double()
    if mine.shape != theirs.shape or not bool(mine.isfinite().all()):
        return float("inf")
    return (mine - theirs).norm().item() / (theirs.norm().item() or 1.0)


def within(*bounds: float, few: float = 0.0) -> Compare:
    """The first results at most so far from what is expected, relatively; ``few``: that of less
    than 64 elements."""

    def compare(got: Tensors, expected: Tensors) -> str | None:
        for number, (bound, mine, theirs) in enumerate(zip(bounds, got, expected, strict=False)):
            far, allowed = distance(mine, theirs), max(bound, few) if theirs.numel() < 64 else bound
            if not far <= allowed:
                return f"result {number} is off by {far:.2e}, allowed {allowed:.2e}"
        return (
            None if len(got) == len(expected) else f"{len(got)} results instead of {len(expected)}"
        )

    return compare


@dataclass(frozen=True)
class Case:
    """One thing that is checked.

    Attributes:
        label: what tells it from the others in its table.
        make: draws the arguments on the CPU; tensors in them have the same shapes and strides each
            time.
        run: what is checked, of the arguments wherever they were put.
        oracle: the backend whose results and writes into the arguments are right; or what gives the
            right ones itself.
        compare: what is wrong with results, given the oracle's; None if nothing is.
    """

    label: str
    make: Callable[[Draw], Args]
    run: Callable[[Args], Any]
    oracle: str | Callable[[Args], Any] = "cpu"
    compare: Compare = same_bytes


#: The cases of each name: a kernel for one.
Table = Mapping[str, Sequence[Case]]


@dataclass
class Outcome:
    """What came of the cases of one name: how many were run, failed and, for want of time, left
    out; a few failures."""

    name: str
    cases: int = 0
    failed: int = 0
    left_out: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed, of something that there was to check."""
        return not self.failed and self.cases + self.left_out > 0


def _memory(arguments: Args) -> Tensors:
    """All of it, frames included."""
    return [storage_of(x) for x in tensors(arguments)]


def _attempt(case: Case, place: Gpu, seed: int, mode: str) -> str | None:
    """What is wrong with a case.

    ``stream``: on a stream that is busy still when the arguments are queued; on another they would
    be zeros. ``graph``:
    captured with other arguments, replayed on these.
    """
    arguments = case.make(Draw(seed))
    own, ready = Rehearsal().put(arguments), place.put(arguments)
    backend, oracle = (
        (case.oracle, case.run) if isinstance(case.oracle, str) else ("cpu", case.oracle)
    )
    with use_backend(backend):
        expected = [*tensors(oracle(own)), *_memory(own)]
    there = place.put(case.make(Draw(seed + 1000)) if mode == "graph" else arguments)

    # What torch allocates is filled only where bytes are compared: torch's own operations may
    # refuse to run so.
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


#: How cases are run -> how many of a name at most.
MODES = {"some bytes": 23, "stream": 11, "graph": 17, "bytes": 10**6}


def check(
    name: str,
    cases: Sequence[Case],
    place: Gpu,
    mode: str = "",
    seed: int = 0,
    seconds: float = 1e9,
) -> Outcome:
    """The cases of one name in one mode; what raises has failed."""
    stop, most = time.monotonic() + seconds, min(len(cases), MODES.get(mode, 10**6))
    outcome = Outcome(f"{name}, {mode}" if mode else name)
    # Spread over the table, and (a prime number) not in step with how it cycles.
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
    """Every name in every mode, each with an equal part of the time that is left.

    A few cases of every name come before all of any, and the longest tables last: time may run out.
    """
    stop = time.monotonic() + seconds
    plan = [
        (mode, name) for mode in modes for name in sorted(table, key=lambda name: len(table[name]))
    ]
    for number, (mode, name) in enumerate(plan):
        left = max(0.0, stop - time.monotonic()) / (len(plan) - number)
        yield check(name, table[name], place, mode, seed=seed, seconds=left)
