"""Alternatives that are timed side by side, so that whatever else the machine does falls on all of
them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Run = Callable[[], object]
#: What was measured of one row of a table: a name, seconds of each alternative, why others have
#: none.
Row = dict[str, Any]
#: Of one call: so much is not waited for again and again.
SLOW = 20.0


@dataclass(frozen=True)
class Timing:
    """One row of a table of timings.

    Attributes:
        name: what is timed.
        runs: alternative -> what makes the call that is timed; it may raise, where an alternative
            is not there.
        moved: bytes that a call reads and writes, each once.
        flops: what it multiplies and adds.
        calls: how many calls of what is named one run makes.
    """

    name: str
    runs: Mapping[str, Callable[[], Run]]
    moved: float = 0.0
    flops: float = 0.0
    calls: int = 1


def _once(run: Run, wait: Run, calls: int = 1) -> float:
    """Seconds of one call, when so many are queued."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return (time.perf_counter() - start) / calls


def interleaved(
    runs: Mapping[str, Run],
    *,
    rounds: int,
    warmup: int = 3,
    at_most: float = 120.0,
    least: int = 3,
    wait: Run = lambda: None,
    turn_seconds: float = 0.0,
) -> dict[str, float]:
    """Median seconds of each alternative, run in turns: ``rounds`` times after ``warmup`` untimed
    turns.

    When ``at_most`` seconds are over, ``least`` turns are enough. ``wait``: for what a call has
    queued. In a turn an alternative is called as often as fits ``turn_seconds``, 1 to 200 times.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    calls = dict.fromkeys(runs, 1)
    begin = time.perf_counter()
    for turn in range(-warmup, rounds):
        late = time.perf_counter() - begin > at_most
        if late and turn >= least:
            break
        if late and turn < 0:
            continue
        for name, run in runs.items():
            seconds = _once(run, wait, calls[name])
            if turn >= 0:
                times[name].append(seconds)
            elif turn_seconds:
                calls[name] = min(200, max(1, round(turn_seconds / seconds)))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(
    timing: Timing,
    seconds: Callable[[Mapping[str, Run]], Mapping[str, float]],
    prepare: Callable[[Run], Run] | None = None,
    until: float = math.inf,
) -> Row:
    """Seconds of one call of each alternative, by ``seconds`` of what ``prepare`` makes of each.

    What would be made after ``until``, on the monotonic clock, is left out. An alternative whose
    calls take longer than ``SLOW`` seconds takes no turns: its second call stands for it, since the
    first may have compiled.
    """
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    slow: dict[str, float] = {}
    for name, make in timing.runs.items():
        try:
            if time.monotonic() > until:
                raise TimeoutError("not run for want of time")
            run = make()
            runs[name] = prepare(run) if prepare else run
            if (
                _once(runs[name], lambda: None) > SLOW
                and (again := _once(runs[name], lambda: None)) > SLOW
            ):
                slow[name] = again
                del runs[name]
        except (
            Exception
        ) as error:  # what is missing, or does not fit this machine, is left out of its row
            runs.pop(name, None)
            errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
    measured = {**seconds(runs), **slow}
    found = {name: measured[name] / timing.calls for name in timing.runs if name in measured}
    return {
        "name": timing.name,
        "seconds": found,
        "errors": errors,
        "moved": timing.moved,
        "flops": timing.flops,
    }
