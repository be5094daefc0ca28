"""Times alternatives in turns, so that other work of the machine slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Run = Callable[[], object]
#: A measured row of a table: its name, the seconds of each alternative, and the errors of those
#: that could not be timed.
Row = dict[str, Any]
#: Seconds of a call; an alternative that takes longer is timed once.
SLOW = 20.0


@dataclass(frozen=True)
class Timing:
    """One row of a table of timings.

    Attributes:
        name: the name of the row.
        runs: alternative -> a function that prepares and returns the call to time; it may raise if
            the machine does not have the alternative.
        moved: bytes that a call reads and writes, each counted once.
        flops: floating-point operations of a call.
        calls: the number of calls that one run makes.
    """

    name: str
    runs: Mapping[str, Callable[[], Run]]
    moved: float = 0.0
    flops: float = 0.0
    calls: int = 1


def _once(run: Run, wait: Run, calls: int = 1) -> float:
    """Seconds of one call, when ``calls`` of them are queued."""
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
    """Median seconds of each alternative, run in turns.

    Args:
        runs: the alternatives by name.
        rounds: the number of timed turns.
        warmup: the number of turns before them that are not timed.
        at_most: seconds after which ``least`` turns are enough.
        least: the number of timed turns that are made in any case.
        wait: waits for the work that calls have queued.
        turn_seconds: an alternative is called as often as fits into this time, 1 to 200 times.
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
    """Measure a row: seconds of one call of each alternative.

    An alternative whose calls take longer than ``SLOW`` seconds takes no turns. Its second call is
    its time, because the first may have compiled.

    Args:
        timing: the row.
        seconds: measures the alternatives, such as :func:`interleaved`.
        prepare: replaces each run by another one, such as the replay of a graph.
        until: a time of the monotonic clock; alternatives whose turn comes later are left out.
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
        except Exception as error:
            # An alternative that is missing, or that this machine cannot run, has no time.
            runs.pop(name, None)
            errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
    measured = {**seconds(runs), **slow}
    of_a_call = {name: measured[name] / timing.calls for name in timing.runs if name in measured}
    return {
        "name": timing.name,
        "seconds": of_a_call,
        "errors": errors,
        "moved": timing.moved,
        "flops": timing.flops,
    }
