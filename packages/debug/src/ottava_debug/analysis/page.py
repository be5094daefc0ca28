"""The report as one HTML page that requests nothing else."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    best = report.best_recipe()
    return rendered(
        __package__,
        report=report,
        rows=[_row(tensor, report, columns, axis) for tensor in report.tensors],
        metrics=columns,
        worst=[
            _worst(tensor, name, columns, report.threshold) for tensor, name in report.worst(_WORST)
        ],
        summaries=report.summaries(),
        losses=losses,
        best=best,
        reason=report.why_best(),
        kept=report.keeps(best),
        suggestion=suggestion,
        notes=list(notes(report)),
        limit=most_underflow(report.threshold),
        roles=list(dict.fromkeys(tensor.role for tensor in report.tensors)),
        axis=axis,
        height=_HEIGHT,
        bar=_BAR,
        reach=round(_REACH),
    )


def _row(
    tensor: TensorReport, report: Analysis, columns: tuple[Metric, ...], axis: tuple[int, int]
) -> dict[str, Any]:
    """A row of the heat map, with a cell for each recipe."""
    return {
        "tensor": tensor,
        "amax": f"{tensor.amax:.4g}",
        "histogram": _histogram(tensor, axis),
        "cells": [_cell(tensor.noise[name], columns, report.threshold) for name in report.recipes],
    }


def _worst(
    tensor: TensorReport, recipe: str, columns: tuple[Metric, ...], threshold: float
) -> dict[str, Any]:
    """A row of the table of the worst tensors."""
    noise = tensor.noise[recipe]
    return {
        "tensor": tensor,
        "recipe": recipe,
        "texts": [metric.text(metric.value(noise)) for metric in columns],
        "bad": bool(noise.complaint(threshold)),
    }


def _cell(noise: Noise, columns: tuple[Metric, ...], threshold: float) -> dict[str, str]:
    """A cell of the heat map: the text, the colour and the sorting value of each metric."""
    values = [metric.value(noise) for metric in columns]
    pairs = list(zip(columns, values, strict=True))
    texts = ["fails" if noise.error else metric.text(value) for metric, value in pairs]
    return {
        "text": texts[0],
        "texts": "|".join(texts),
        "colours": "".join(str(metric.colour(noise)) for metric in columns),
        "numbers": "|".join("" if value is None else f"{value:.6g}" for value in values),
        "complaint": noise.complaint(threshold),
    }


def _axis(tensors: tuple[TensorReport, ...]) -> tuple[int, int]:
    """The first and the last exponent of the histograms."""
    every = [exponent for tensor in tensors for exponent in tensor.exponents]
    last = max(every, default=0)
    return max(min(every, default=0), last - _MOST_BARS + 1), last


def _histogram(tensor: TensorReport, axis: tuple[int, int]) -> dict[str, str]:
    """Two paths of bars, for values within the range of one scale and for smaller values, and the
    histogram in words."""
    first = axis[0]
    if not tensor.exponents:
        return {"reached": "", "lost": "", "words": "no value but zeros"}
    highest = max(tensor.exponents.values())
    lost = math.log2(tensor.amax) - _REACH
    paths = {"reached": "", "lost": ""}
    for exponent, count in _counts(tensor.exponents, first).items():
        tall = _HEIGHT * math.log1p(count) / math.log1p(highest)
        kind = "lost" if exponent + 1 <= lost else "reached"
        left = (exponent - first) * _BAR
        paths[kind] += f"M{left} {_HEIGHT}v-{min(tall, _HEIGHT):.3g}h{_BAR - 1}V{_HEIGHT}z"
    lowest = min(tensor.exponents)
    return paths | {"words": f"values from 2^{lowest} to 2^{max(tensor.exponents) + 1}"}


def _counts(exponents: Mapping[int, int], first: int) -> dict[int, int]:
    """The histogram, with the exponents below ``first`` counted as ``first``."""
    counts: Counter[int] = Counter()
    for exponent, count in exponents.items():
        counts[max(exponent, first)] += count
    return counts
