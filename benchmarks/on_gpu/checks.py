"""Runs the cases: the bytes of the backend under test against those of another one, in several surroundings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.on_gpu.block_cases import cases
from benchmarks.on_gpu.cases import Case, Tensors
from benchmarks.on_gpu.inputs import Draw, placed, storage_of
from benchmarks.on_gpu.place import Gpu, poisoned
from ottava.kernels import use_backend

_CPU = torch.device("cpu")
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Outcome:
    """What came of a check.

    Attributes:
        name: what was checked, and how.
        cases: how many were run.
        failures: the first few of those that failed, in words.
        failed: how many failed.
        left_out: how many were not run for want of time.
    """

    name: str
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    left_out: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing failed, of something that there was to check."""
        return not self.failed and self.cases + self.left_out > 0

    def note(self, label: str, problem: str | None) -> None:
        """One case more, with what is wrong about it."""
        self.cases += 1
        if problem is not None:
            self.failed += 1
            if len(self.failures) < 5:
                self.failures.append(f"{label}: {problem}")


def difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """How two tensors differ in shape, dtype or bytes, or None. A NaN equals a NaN: its payload is free."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    mine, theirs = got.contiguous().view(-1), expected.contiguous().view(-1)
    bits = _BY_SIZE[got.dtype.itemsize]
    other = mine.view(bits) != theirs.view(bits)
    if got.dtype.is_floating_point:
        other &= ~(mine.isnan() & theirs.isnan())
    if not other.any():
        return None
    at = int(other.nonzero()[0])
    return f"{int(other.sum())} of {other.numel()} differ; element {at} is {mine[at].item()}, not {theirs[at].item()}"


def _expected(case: Case, inputs: Tensors) -> Tensors:
    """Results of the oracle, and all the memory of its inputs afterwards, frames included."""
    own = [placed(x, _CPU) for x in inputs]
    with use_backend(case.oracle):
        results = list(case.call(own))
    return [*results, *(storage_of(x) for x in own)]


def _compare(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        problem = difference(mine.detach().to(_CPU), theirs)
        if problem is not None:
            return f"tensor {number} (results, then inputs): {problem}"
    return None


def plain(chosen: Sequence[Case], place: Gpu, seed: int, outcome: Outcome, deadline: float) -> None:
    """Each case by itself."""
    for number, case in enumerate(chosen):
        if time.monotonic() > deadline:
            outcome.left_out += len(chosen) - number
            return
        inputs = case.make(Draw(seed + number))
        expected = _expected(case, inputs)
        there = [place.put(x) for x in inputs]
        try:
            with place.serving(), poisoned():
                results = list(case.call(there))
            place.synchronize()
        except Exception as error:
            outcome.note(case.label, f"{type(error).__name__}: {error}")
            continue
        outcome.note(case.label, _compare([*results, *(storage_of(x) for x in there)], expected))


def _fill(there: Tensors, inputs: Tensors) -> None:
    for x, new in zip(there, inputs, strict=True):
        storage_of(x).copy_(storage_of(new))


def stream(chosen: Sequence[Case], place: Gpu, seed: int, outcome: Outcome, deadline: float) -> None:
    """On a stream that is still busy when the inputs are queued: a kernel on another stream would see zeros."""
    for number, case in enumerate(chosen):
        if time.monotonic() > deadline:
            outcome.left_out += len(chosen) - number
            return
        inputs = case.make(Draw(seed + number))
        expected = _expected(case, inputs)
        ready, there = [place.put(x) for x in inputs], [place.put(x) for x in inputs]
        for x in there:
            storage_of(x).zero_()
        try:
            with place.serving(), poisoned(), place.side_stream():
                _fill(there, ready)
                results = list(case.call(there))
            place.synchronize()
        except Exception as error:
            outcome.note(case.label, f"{type(error).__name__}: {error}")
            continue
        outcome.note(case.label, _compare([*results, *(storage_of(x) for x in there)], expected))


def graph(chosen: Sequence[Case], place: Gpu, seed: int, outcome: Outcome, deadline: float) -> None:
    """All cases captured in one graph, which is replayed on inputs of which it has seen none."""
    if time.monotonic() > deadline:
        outcome.left_out += len(chosen)
        return
    drawn = [case.make(Draw(seed + number)) for number, case in enumerate(chosen)]
    there = [[place.put(x) for x in inputs] for inputs in drawn]
    try:
        with place.serving(), poisoned():
            results, replay = place.capture(lambda: [list(c.call(t)) for c, t in zip(chosen, there, strict=True)])
        for turn in range(2):
            drawn = [case.make(Draw(seed + 1000 * (turn + 1) + number)) for number, case in enumerate(chosen)]
            for inputs, held in zip(drawn, there, strict=True):
                _fill(held, [place.put(x) for x in inputs])
            place.synchronize()
            with place.serving():
                replay()
            place.synchronize()
            for case, inputs, held, got in zip(chosen, drawn, there, results, strict=True):
                outcome.note(case.label, _compare([*got, *(storage_of(x) for x in held)], _expected(case, inputs)))
    except Exception as error:
        outcome.note("capture and replay", f"{type(error).__name__}: {error}")


Mode = Callable[[Sequence[Case], Gpu, int, Outcome, float], None]
#: Name -> how cases are run, and how many of a kernel's at most (0: all).
MODES: dict[str, tuple[Mode, int]] = {
    "some bytes": (plain, 23),
    "stream": (stream, 11),
    "graph": (graph, 17),
    "bytes": (plain, 0),
}


def check(kernel: str, mode: str, place: Gpu, *, small: bool = False, seed: int = 0, seconds: float = 1e9) -> Outcome:
    """One kernel in one mode."""
    run, most = MODES[mode]
    chosen = cases(kernel, small)
    if most and len(chosen) > most:
        # Spread over the table, and (a prime number) not in step with how it cycles.
        chosen = [chosen[(i * len(chosen)) // most] for i in range(most)]
    outcome = Outcome(f"{kernel}, {mode}")
    run(chosen, place, seed, outcome, time.monotonic() + seconds)
    return outcome
