"""What a case is, and what runs cases: results on the device against an oracle's, in several surroundings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.on_gpu.inputs import Args, Draw, Tensor, Tensors, storage_of
from benchmarks.on_gpu.place import Gpu, Rehearsal, poisoned
from ottava.kernels import use_backend

Compare = Callable[[Tensors, Tensors], str | None]
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(got: Tensor, expected: Tensor) -> str | None:
    """How two tensors differ in shape, dtype or bytes, or None. A NaN equals a NaN: its payload is free."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    mine, theirs = got.detach().cpu().contiguous().view(-1), expected.contiguous().view(-1)
    bits = _BY_SIZE[got.dtype.itemsize]
    other = mine.view(bits) != theirs.view(bits)
    if got.dtype.is_floating_point:
        other &= ~(mine.isnan() & theirs.isnan())
    if not other.any():
        return None
    at = int(other.nonzero()[0])
    return f"{int(other.sum())} of {other.numel()} differ; element {at} is {mine[at].item()}, not {theirs[at].item()}"


def same_bytes(got: Tensors, expected: Tensors) -> str | None:
    """All of them equal."""
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    found = (difference(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    return next((f"tensor {n} (results, then arguments): {words}" for n, words in enumerate(found) if words), None)


def distance(got: Tensor, exact: Tensor) -> float:
    """``||got - exact|| / ||exact||``; infinite where ``got`` has a NaN, or shapes differ."""
    mine, theirs = got.detach().cpu().double(), exact.detach().cpu().double()
    if mine.shape != theirs.shape or not bool(mine.isfinite().all()):
        return float("inf")
    return (mine - theirs).norm().item() / (theirs.norm().item() or 1.0)


def within(*bounds: float, few: float = 0.0) -> Compare:
    """The first results at most so far from what is expected, relatively; ``few``: that of less than 64 elements."""

    def compare(got: Tensors, expected: Tensors) -> str | None:
        for number, (bound, mine, theirs) in enumerate(zip(bounds, got, expected, strict=False)):
            far, allowed = distance(mine, theirs), max(bound, few) if theirs.numel() < 64 else bound
            if not far <= allowed:
                return f"result {number} is off by {far:.2e}, allowed {allowed:.2e}"
        return None if len(got) == len(expected) else f"{len(got)} results instead of {len(expected)}"

    return compare


@dataclass(frozen=True)
class Case:
    """One thing that is checked.

    Attributes:
        label: what tells it from the others in its table.
        make: draws the arguments on the CPU; tensors in them have the same shapes and strides each time.
        run: what is checked, of the arguments wherever they were put.
        oracle: the backend whose results and writes into the arguments are right; or what gives the right ones itself.
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
    """What came of the cases of one name: how many were run, failed and, for want of time, left out; a few failures."""

    name: str
    cases: int = 0
    failed: int = 0
    left_out: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed, of something that there was to check."""
        return not self.failed and self.cases + self.left_out > 0


def _tensors(tree: Any) -> Tensors:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _seen(results: Any, arguments: Args) -> Tensors:
    """Results, and all the memory of the arguments, frames included."""
    return [*_tensors(results), *map(storage_of, _tensors(arguments))]


def _fill(there: Args, arguments: Args) -> None:
    for x, new in zip(_tensors(there), _tensors(arguments), strict=True):
        storage_of(x).copy_(storage_of(new))


def _attempt(case: Case, place: Gpu, seed: int, mode: str) -> str | None:
    """What is wrong with a case.

    ``stream``: on a stream that is busy still when the arguments are queued; on another they would be zeros. ``graph``:
    captured with other arguments, replayed on these.
    """
    arguments = case.make(Draw(seed))
    own, ready = Rehearsal().put(arguments), place.put(arguments)
    with use_backend(case.oracle if isinstance(case.oracle, str) else "cpu"):
        expected = _seen(case.run(own) if isinstance(case.oracle, str) else case.oracle(own), own)
    there = place.put(case.make(Draw(seed + 1000)) if mode == "graph" else arguments)
    # What torch allocates is filled only where bytes are compared: torch's own operations may refuse to run so.
    with place.serving(), poisoned() if case.compare is same_bytes else nullcontext():
        if mode == "graph":
            results, replay = place.capture(lambda: case.run(there))
            _fill(there, ready)
            replay()
        elif mode == "stream":
            for x in _tensors(there):
                storage_of(x).zero_()
            with place.side_stream():
                _fill(there, ready)
                results = case.run(there)
        else:
            results = case.run(there)
    place.synchronize()
    return case.compare(_seen(results, there), expected)


#: How cases are run -> how many of a name at most.
MODES = {"some bytes": 23, "stream": 11, "graph": 17, "bytes": 10**6}


def check(
    name: str, cases: Sequence[Case], place: Gpu, mode: str = "", *, seed: int = 0, seconds: float = 1e9
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
    table: Table, place: Gpu, modes: Sequence[str] = ("",), *, seed: int = 0, seconds: float = 1e9
) -> Iterator[Outcome]:
    """Every name in every mode, each with an equal part of the time that is left.

    A few cases of every name come before all of any, and the longest tables last: time may run out.
    """
    stop = time.monotonic() + seconds
    plan = [(mode, name) for mode in modes for name in sorted(table, key=lambda name: len(table[name]))]
    for number, (mode, name) in enumerate(plan):
        left = max(0.0, stop - time.monotonic()) / (len(plan) - number)
        yield check(name, table[name], place, mode, seed=seed, seconds=left)
