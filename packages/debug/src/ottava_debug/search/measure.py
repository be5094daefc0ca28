"""What tells how wrong a step went: its loss, the norm of its gradients, or how far these are from
high precision."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ottava_debug.bundle import norm_of
from ottava_debug.measures import Measures


@dataclass(frozen=True)
class Outcome:
    """What one replay gives: the loss, and the gradients by parameter. NaN where there is no
    loss."""

    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """How far a step is from the same step in high precision.

    Attributes:
        value: ``value(outcome, reference, noisy)``, what is shown: of the reference itself what it
            ought to be.
        distance: ``distance(outcome, reference, noisy)``: 0 of the reference, infinite where
            something is not finite.
        tolerance: a distance that a healthy FP8 recipe stays below.
        backward: whether it needs gradients.
        words: what the distance is.
        noise: whether gradients that are noise must not count.
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


def relative_distances(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """``‖g - g₀‖ / ‖g₀‖`` of each parameter whose reference ``g₀`` is not zero."""
    found: dict[str, float] = {}
    for name, right in reference.gradients.items():
        size = float(right.double().norm())
        if size:
            distance = float((outcome.gradients[name].double() - right.double()).norm()) / size
            found[name] = distance if math.isfinite(distance) else math.inf
    return found


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


def loss_of_operand(made: Measures) -> float:
    """How much an operand loses by quantization, to order operands by: the largest of the share of
    values that become zero, the share that is clamped, and the noise-to-signal ratio of amplitudes,
    in which outliers hide all else."""
    noise = (
        10 ** (-max(made.sqnr, -600) / 20)
        if math.isfinite(made.sqnr)
        else (0.0 if made.sqnr > 0 else math.inf)
    )
    return max(made.underflow / 100, (made.saturation or 0.0) / 100, noise)
