"""Times alternatives in turns, so that other work of the machine slows all of them alike."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[], object]
#: A row of a table. A measured row has the name, the seconds of each alternative, the errors of
#: those that could not be timed, and the other figures.
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
        calls: the number of calls that one run makes.
        figures: alternative -> a function that gives another figure of it than its seconds.
    """

    name: str
    runs: Mapping[str, Callable[[], Run]]
    calls: int = 1
    figures: Mapping[str, Callable[[], float]] = field(default_factory=dict)


def ready(run: Run) -> Callable[[], Run]:
    """An alternative that needs no preparation."""
    return lambda: run


def _nothing() -> None:
    pass


def _seconds(run: Run, calls: int = 1, wait: Run = _nothing, end: Run = _nothing) -> float:
    """Seconds of one call, when ``calls`` of them are queued after ``wait`` and before ``end``."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    end()
    return (time.perf_counter() - start) / calls


def interleaved(
    runs: Mapping[str, Run],
    *,
    rounds: int,
    warmup: int = 3,
    calls: int = 1,
    at_most: float = 120.0,
    least: int = 3,
    wait: Run = _nothing,
    host: bool = False,
    turn_seconds: float = 0.0,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Seconds of a call of each alternative, run in turns.

    Args:
        runs: the alternatives by name.
        rounds: the number of timed turns.
        warmup: the number of turns before them that are not timed.
        calls: the number of calls of an alternative in a turn.
        at_most: seconds after which ``least`` turns are enough.
        least: the number of timed turns that are made in any case.
        wait: waits for the work that calls have queued.
        host: whether only the time until the calls return counts, and not that of ``wait``.
        turn_seconds: an alternative is called as often as fits into this time, 1 to 200 times.
        statistic: the figure of the seconds of the turns.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    number = dict.fromkeys(runs, calls)
    order, shuffle = list(runs), random.Random(0).shuffle
    end = _nothing if host else wait
    begin = time.perf_counter()
    for turn in range(-warmup, rounds):
        late = time.perf_counter() - begin > at_most
        if late and turn >= least:
            break
        if late and turn < 0:
            continue
        # The order changes, because an alternative finds the caches as its predecessor left them.
        shuffle(order)
        for name in order:
            seconds = _seconds(runs[name], number[name], wait, end)
            if turn >= 0:
                times[name].append(seconds)
            elif turn_seconds:
                number[name] = min(200, max(1, round(turn_seconds / seconds)))
    wait()
    return {name: statistic(values) for name, values in times.items()}


def _is_slow(run: Run) -> float | None:
    """Seconds of a call that takes longer than ``SLOW``.

    It is the second call, because the first may have compiled.
    """
    if _seconds(run) <= SLOW or (again := _seconds(run)) <= SLOW:
        return None
    return again


def measure(
    timing: Timing,
    seconds: Callable[[Mapping[str, Run]], Mapping[str, float]],
    prepare: Callable[[Run], Run] = lambda run: run,
    until: float = math.inf,
) -> Row:
    """Measure a row: seconds of one call of each alternative, and its other figures.

    An alternative whose calls take longer than ``SLOW`` seconds takes no turns.

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
            run = prepare(make())
            once = _is_slow(run)
        except Exception as error:
            # An alternative that is missing, or that this machine cannot run, has no time.
            errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if once is None:
            runs[name] = run
        else:
            slow[name] = once
    measured = {**seconds(runs), **slow}
    row: Row = {
        "name": timing.name,
        "seconds": {
            name: measured[name] / timing.calls for name in timing.runs if name in measured
        },
        "errors": errors,
    }
    if timing.figures:
        row["figures"] = {name: figure() for name, figure in timing.figures.items()}
    return row
