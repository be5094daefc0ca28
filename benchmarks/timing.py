"""Timing of alternatives side by side, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(runs: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 3) -> dict[str, float]:
    """Median seconds of each alternative, run in turns: ``rounds`` times after ``warmup`` untimed turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}
