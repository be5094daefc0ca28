"""Timing of alternatives in turns: by events on the GPU, by the wall clock in a rehearsal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.on_gpu.place import Gpu

Run = Callable[[], Any]


class Clock:
    """Medians of the alternatives' seconds, and how far repeats of one lie apart.

    Args:
        place: where they run.
        rounds: how often the alternatives take their turns.
    """

    def __init__(self, place: Gpu, rounds: int) -> None:
        self.place, self.rounds = place, 1 if place.rehearsal else rounds

    def _once(self, run: Run, repeats: int) -> float:
        """Seconds of one call, of ``repeats`` one after the other."""
        if self.place.rehearsal:
            start = time.perf_counter()
            run()
            return max(time.perf_counter() - start, 1e-9)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def seconds(self, runs: Mapping[str, Run], *, least: float = 2e-3, warmup: int = 3) -> dict[str, float]:
        """Median seconds of each, in turns; a turn repeats a run until it takes about ``least`` seconds."""
        return {name: statistics.median(values) for name, values in self.samples(runs, least, warmup).items()}

    def samples(self, runs: Mapping[str, Run], least: float, warmup: int) -> dict[str, list[float]]:
        """Every turn's seconds of one call."""
        repeats = {}
        for name, run in runs.items():
            for _ in range(1 if self.place.rehearsal else warmup):
                run()
            repeats[name] = min(200, max(1, round(least / self._once(run, 1))))
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                taken[name].append(self._once(run, repeats[name]))
        return taken


def rotated(place: Gpu, calls: Sequence[Run]) -> tuple[Run, int]:
    """What runs all ``calls`` (of one kernel on different memory) without the host in between, and their number.

    A graph, so that the time of small kernels is not that of their launches. The results of the calls stay alive with
    it: each has memory of its own.
    """
    kept, replay = place.capture(lambda: [call() for call in calls])

    def run(kept: Any = kept) -> None:
        replay()

    return run, len(calls)
