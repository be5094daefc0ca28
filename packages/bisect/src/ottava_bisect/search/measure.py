"""Measures of how wrong a step is: its loss, the norm of its gradients, or their distance from high
precision."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ottava_bisect.bundle import norm_of
from ottava_debug.measures import Measures


@dataclass(frozen=True)
class Outcome:
    """The result of one replay: the loss, NaN where there is none, and the gradients by
    parameter."""

    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A measure of the distance between a step and the same step in high precision.

    Attributes:
        value: ``value(outcome, reference, noisy)``, the value that is shown; the value of the
            reference itself is the right one.
        distance: ``distance(outcome, reference, noisy)``: 0 for the reference, infinite where the
            outcome is not finite.
        tolerance: a distance that healthy FP8 recipes stay below.
        backward: whether the measure needs gradients.
        words: a description of the distance.
        noise: whether gradients that are noise must be excluded.
    """

    value: Callable[[Outcome, Outcome, frozenset[str]], float]
    distance: Callable[[Outcome, Outcome, frozenset[str]], float]
    tolerance: float
    backward: bool
    words: str
    noise: bool = False


def _loss_distance(outcome: Outcome, reference: Outcome, noisy: frozenset[str]) -> float:
    difference = abs(outcome.loss - reference.loss) / max(abs(reference.loss), 1e-12)
    return difference if math.isfinite(difference) else math.inf


def _norm_distance(outcome: Outcome, reference: Outcome, noisy: frozenset[str]) -> float:
    ours, theirs = norm_of(outcome.gradients), norm_of(reference.gradients)
    if not math.isfinite(ours) or not ours or not theirs:
        return 0.0 if ours == theirs else math.inf
    return max(ours / theirs, theirs / ours) - 1


def relative_distance(values: torch.Tensor, reference: torch.Tensor) -> float:
    """``‖values - reference‖ / ‖reference‖``; infinite where that is no number."""
    size = float(reference.double().norm())
    difference = float((values.double() - reference.double()).norm())
    if not math.isfinite(difference) or (difference and not size):
        return math.inf
    return difference / size if size else 0.0


def relative_distances(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """Parameter -> the relative distance of its gradient, where the reference is not zero."""
    return {
        name: relative_distance(outcome.gradients[name], right)
        for name, right in reference.gradients.items()
        if float(right.double().norm())
    }


def _gradient_distance(outcome: Outcome, reference: Outcome, noisy: frozenset[str]) -> float:
    distances = relative_distances(outcome, reference)
    return max((distance for name, distance in distances.items() if name not in noisy), default=0.0)


MEASURES = {
    "loss": Measure(
        lambda o, r, n: o.loss,
        _loss_distance,
        0.02,
        False,
        "|loss - its value in high precision|, relative",
    ),
    "grad-norm": Measure(
        lambda o, r, n: norm_of(o.gradients),
        _norm_distance,
        0.1,
        True,
        "ratio of the gradient norms, less 1",
    ),
    "grad-distance": Measure(
        _gradient_distance,
        _gradient_distance,
        0.3,
        True,
        "the largest ‖g - g₀‖ / ‖g₀‖ of a parameter, g₀ its gradient in high precision",
        noise=True,
    ),
}


def loss_of_operand(measures: Measures) -> float:
    """The loss of an operand by quantization, as one number that orders operands.

    It is the largest of three: the share of values that become zero, the share of clamped values,
    and the noise-to-signal ratio of amplitudes. The ratio alone would not suffice, because outliers
    hide all other losses in it.
    """
    if math.isfinite(measures.sqnr):
        noise = 10 ** (-max(measures.sqnr, -600) / 20)
    else:
        noise = 0.0 if measures.sqnr > 0 else math.inf
    return max(measures.underflow / 100, (measures.saturation or 0.0) / 100, noise)
