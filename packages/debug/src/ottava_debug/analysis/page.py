"""The report as one HTML page that requests nothing else."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from ottava.formats import E4M3
from ottava_debug.analysis.report import (
    Analysis,
    Noise,
    TensorReport,
    most_underflow,
)
from ottava_debug.analysis.terminal import decibels, losses, notes, percent
from ottava_debug.output import rendered

# The range of magnitudes below the amax that one scale of E4M3 does not round to zero, in powers of
# two. A value becomes zero unless it exceeds half of the smallest number.
_REACH = math.log2(E4M3.max / (E4M3.min_subnormal / 2))
_BAR, _HEIGHT = 3, 26
#: The largest number of exponents on the axis of the histograms; smaller exponents are counted with
#: the first one.
_MOST_BARS = 64
_WORST = 12


@dataclass(frozen=True)
class Metric:
    """One of the measures on the page: its value and text; the value that decides the colour, and
    the six bounds between the seven colours, from bad to good."""

    title: str
    value: Callable[[Noise], float | None]
    text: Callable[[Any], str]
    coloured: Callable[[Noise], float | None]
    bounds: tuple[float, ...]
    more_is_better: bool

    def colour(self, noise: Noise) -> int:
        """The colour, from 0 (bad) to 6 (good); 4 for an unknown value."""
        value = self.coloured(noise)
        if value is None:
            return 4
        if self.more_is_better:
            return sum(value >= bound for bound in self.bounds)
        return sum(value <= bound for bound in self.bounds)


def metrics(threshold: float) -> tuple[Metric, ...]:
    """The measures of the page.

    The first three colours mark tensors that need high precision.
    """
    ratios = tuple(threshold + step for step in (-12, -6, 0, 3, 6, 9))
    limit = most_underflow(threshold)
    # The noise that goes with a cosine c is 2·(1 - c) of the signal.
    cosines = tuple(1 - 10 ** (-ratio / 10) / 2 for ratio in ratios)
    shares = (50.0, 30.0, limit) if limit < 30 else (100.0, 99.0, limit)
    sqnr, quality, underflow, saturation, cosine = map(
        attrgetter, ("sqnr", "quality", "underflow", "saturation", "cosine")
    )
    return (
        # SQNR hides underflow, so its cells are coloured by ``quality``.
        Metric("SQNR (dB)", sqnr, decibels, quality, ratios, True),
        Metric("underflow", underflow, percent, underflow, (*shares, 3, 0.3, 0.03), False),
        Metric("saturation", saturation, percent, saturation, (10, 3, 1, 0.1, 0.01, 0), False),
        Metric("cosine", cosine, lambda value: f"{value:.5f}", cosine, cosines, True),
    )


def page(report: Analysis, suggestion: str) -> str:
    """The page; ``suggestion`` is the text of the recipe file."""
    columns = metrics(report.threshold)
    axis = _axis(report.tensors)
    return rendered(
        __package__,
        report=report,
        metrics=columns,
        texts=partial(_texts, columns),
        numbers=partial(_numbers, columns),
        histogram=partial(_histogram, axis[0]),
        worst=report.worst(_WORST),
        losses=losses,
        best=report.best_recipe(),
        suggestion=suggestion,
        notes=list(notes(report)),
        limit=most_underflow(report.threshold),
        axis=axis,
        height=_HEIGHT,
        bar=_BAR,
        reach=round(_REACH),
    )


def _texts(columns: Sequence[Metric], noise: Noise) -> list[str]:
    """The text of each metric."""
    if noise.error:
        return ["fails"] * len(columns)
    return [metric.text(metric.value(noise)) for metric in columns]


def _numbers(columns: Sequence[Metric], noise: Noise) -> list[str]:
    """The value of each metric, by which the page sorts; empty for an unknown one."""
    values = [metric.value(noise) for metric in columns]
    return ["" if value is None else f"{value:.6g}" for value in values]


def _axis(tensors: tuple[TensorReport, ...]) -> tuple[int, int]:
    """The first and the last exponent of the histograms."""
    every = [exponent for tensor in tensors for exponent in tensor.exponents]
    last = max(every, default=0)
    return max(min(every, default=0), last - _MOST_BARS + 1), last


def _histogram(first: int, tensor: TensorReport) -> dict[str, str]:
    """Two paths of bars, for values within the range of one scale and for smaller values, and the
    histogram in words; exponents below ``first`` are counted as ``first``."""
    if not tensor.exponents:
        return {"reached": "", "lost": "", "words": "no value but zeros"}
    counts: Counter[int] = Counter()
    for exponent, count in tensor.exponents.items():
        counts[max(exponent, first)] += count
    highest = max(tensor.exponents.values())
    lost = math.log2(tensor.amax) - _REACH
    paths = {"reached": "", "lost": ""}
    for exponent, count in counts.items():
        tall = _HEIGHT * math.log1p(count) / math.log1p(highest)
        kind = "lost" if exponent + 1 <= lost else "reached"
        left = (exponent - first) * _BAR
        paths[kind] += f"M{left} {_HEIGHT}v-{min(tall, _HEIGHT):.3g}h{_BAR - 1}V{_HEIGHT}z"
    lowest = min(tensor.exponents)
    return paths | {"words": f"values from 2^{lowest} to 2^{max(tensor.exponents) + 1}"}
