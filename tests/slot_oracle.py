"""One slot of delayed scaling in Python's own arithmetic, written from the numerics page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)


def divide(a: float, b: float) -> float:
    """a / b, rounded once to float32."""
    with np.errstate(over="ignore", divide="ignore"):
        return float(np.float32(a) / np.float32(b))


def largest(history: list[float]) -> float:
    """The largest entry; a NaN counts at the front only."""
    best = history[0]
    for entry in history[1:]:
        if entry > best:
            best = entry
    return best


@dataclass
class Slot:
    """Scale and history of one tensor, and how many of its elements were clamped."""

    length: int
    fp8_max: float
    margin: float = 0.0
    amax_of: Callable[[list[float]], float] = largest
    scale_of: Callable[[float, float, float, float], float] | None = None
    scale: float = 1.0
    saturated: int = 0
    history: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = [0.0] * self.length

    @property
    def amax(self) -> float:
        """That of the current step."""
        return self.history[0]

    def observe(self, amax: float) -> None:
        if not amax <= self.history[0]:
            self.history[0] = amax

    def calibrate(self, amax: float) -> None:
        self.history[0] = amax

    def update(self) -> None:
        last = self.history[0]
        if last == 0:
            return
        amax = self.amax_of(self.history)
        if self.scale_of is not None:
            self.scale = self.scale_of(amax, self.scale, self.fp8_max, self.margin)
        elif math.isfinite(amax) and amax > 0:
            self.scale = min(divide(self.fp8_max * 2.0**-self.margin, amax), FLOAT32_MAX)
        self.history = [*self.history[1:], last]
        self.history[0] = 0.0
