"""Steps of the interpreter, taken another way.

Each function gets the interpreter, the step as the contract has it, and the step's arguments. What
goes wrong in it is said in the table of :mod:`ottava_verify.turns`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ottava_verify.arrays import (
    Interpreter,
    Level,
    Scales,
    below,
    magnitudes_of,
    middles_of,
    nearest,
)
from ottava_verify.numbers import format_of, rounded
from ottava_verify.steps import Grid

#: A step in another way.
Way = Callable[..., Any]


def one_over(values: Tensor) -> Tensor:
    """1 / values."""
    return torch.div(torch.ones_like(values), values)


def _maximum(self: Interpreter, like: Tensor) -> Tensor:
    return torch.full_like(like, self.steps.scale.maximum)


# Scales in float32.


def reciprocal(self: Interpreter, step: Way, amax: Tensor) -> Tensor:
    """maximum * (1 / amax)."""
    return _maximum(self, amax) * one_over(amax)


def quotient_of_inverse(self: Interpreter, step: Way, amax: Tensor) -> Tensor:
    """1 / (amax / maximum)."""
    return one_over(torch.div(amax, _maximum(self, amax)))


def quotient_of_product(self: Interpreter, step: Way, amax: Tensor) -> Tensor:
    """1 / (amax * (1 / maximum))."""
    return one_over(amax * rounded(1 / self.steps.scale.maximum))


def inverse_quotient(self: Interpreter, step: Way, scale: Tensor, amax: Tensor) -> Tensor:
    """amax / maximum, where the amax has a scale."""
    usable = amax.isfinite() & (amax != 0)
    return torch.where(usable, torch.div(amax, _maximum(self, amax)), step(scale, amax))


def inverse_product(self: Interpreter, step: Way, scale: Tensor, amax: Tensor) -> Tensor:
    """amax * (1 / maximum), where the amax has a scale."""
    usable = amax.isfinite() & (amax != 0)
    return torch.where(usable, amax * rounded(1 / self.steps.scale.maximum), step(scale, amax))


def amax_stored(self: Interpreter, step: Way, scale: Tensor, amax: Tensor) -> Tensor:
    """The amax itself."""
    return amax


def _unrounded(self: Interpreter, step: Way, *arguments: Any) -> Tensor:
    """Float32 scales that are not made powers of two."""
    steps = self.steps
    self.steps = steps._replace(scale=replace(steps.scale, rule="quotient"))
    scale: Tensor = step(*arguments)
    self.steps = steps
    return scale


def power_up(self: Interpreter, step: Way, *arguments: Any) -> Tensor:
    """The next power of two that is not smaller."""
    mantissa, exponent = torch.frexp(_unrounded(self, step, *arguments).double())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).float()


def power_nearest(self: Interpreter, step: Way, *arguments: Any) -> Tensor:
    """The power of two with the nearest logarithm."""
    return torch.exp2(torch.log2(_unrounded(self, step, *arguments)).round())


def stored_in(dtype: torch.dtype, used: bool) -> Way:
    """Stored scales rounded to a dtype; ``used``: elements are made with them."""

    def way(self: Interpreter, step: Way, *arguments: Any) -> Scales:
        scales: Scales = step(*arguments)
        stored = scales.stored.to(dtype).float()
        return Scales(stored, stored, one_over(stored) if used else scales.multiplier)

    return way


def result_in(dtype: torch.dtype) -> Way:
    """The result of the step, rounded to a dtype."""
    return lambda self, step, *arguments: step(*arguments).to(dtype).float()


# Stored forms of scales.


def multiplier_stored(self: Interpreter, step: Way, *arguments: Any) -> Scales:
    """Scales that multiply when quantizing, stored."""
    scales: Scales = step(*arguments)
    if self.steps.scale.format == "E8M0":
        return scales._replace(stored=(254 - scales.stored).clamp(min=0))
    return scales._replace(stored=scales.multiplier)


def shifted(shift: int) -> Way:
    """Codes of scales with another bias."""

    def way(self: Interpreter, step: Way, *arguments: Any) -> Scales:
        scales: Scales = step(*arguments)
        return scales._replace(stored=(scales.stored + shift).clamp(0, 255))

    return way


def even_of_e2m1(self: Interpreter, step: Way, amax: Tensor) -> Tensor:
    """The rule `even`, with the addend that elements of E2M1 have."""
    bits = amax.view(torch.int32) + (1 << 21)
    largest = math.frexp(self.steps.scale.maximum)[1] - 1
    codes = torch.where(amax.isinf(), 254, ((bits >> 23) - largest).clamp(0, 254))
    return torch.where(amax.isnan(), 255, codes)


# Amaxes.


def added(epsilon: float) -> Way:
    """Epsilon added to each amax."""
    return lambda self, step, amax: step(amax) + rounded(epsilon)


def largest_value(self: Interpreter, step: Way, values: Tensor) -> Tensor:
    """Negative values do not count."""
    return values.clamp(min=0)


# Scales in a byte, and their second level.


def divided_first(
    self: Interpreter, step: Way, amax: Tensor, level: Level, factor: float | None
) -> Tensor:
    """(amax / maximum) * S."""
    return torch.div(amax, _maximum(self, amax)) * level.scale * rounded(factor or 1.0)


def divided_by_inverse(
    self: Interpreter, step: Way, amax: Tensor, level: Level, factor: float | None
) -> Tensor:
    """(amax / maximum) / S_inv."""
    return torch.div(torch.div(amax, _maximum(self, amax)), level.inverse) * rounded(factor or 1.0)


def divided_last(
    self: Interpreter, step: Way, amax: Tensor, level: Level, factor: float | None
) -> Tensor:
    """(amax * S) / maximum."""
    return torch.div(amax * level.scale, _maximum(self, amax)) * rounded(factor or 1.0)


def level_inverted(
    self: Interpreter, step: Way, amax: Tensor, level: Level, factor: float | None
) -> Any:
    """S and S_inv exchanged."""
    return step(amax, Level(level.amax, level.inverse, level.scale), factor)


def level_left_out(self: Interpreter, step: Way, number: Tensor, level: Level) -> Any:
    """S_inv is 1."""
    return step(number, level._replace(inverse=torch.ones(())))


def level_twice(self: Interpreter, step: Way, number: Tensor, level: Level) -> Any:
    """S in the place of S_inv."""
    return step(number, level._replace(inverse=level.scale))


def level_from_outside(self: Any, step: Way, values: Tensor) -> Level:
    """The level that was stored, whatever the amax is."""
    level: Level = step(values)
    stored, form = self.level_outside
    if level.amax is None or stored is None or stored.numel() != level.amax.numel():
        return level
    number = stored.reshape(level.amax.shape)
    whole = torch.full_like(number, self.top())
    if form in ((), ("amax",)):
        scale = torch.div(whole, number).clamp(max=torch.finfo().max)
        return Level(number, scale, one_over(scale))
    if form == ("whole/amax",):
        return Level(torch.div(whole, number), number, one_over(number))
    return Level(number * whole, one_over(number), number)


def level_inverse_first(self: Interpreter, step: Way, values: Tensor) -> Level:
    """S_inv = amax / (bound * maximum), and S = 1 / S_inv."""
    level: Level = step(values)
    if level.amax is None:
        return level
    inverse = torch.div(level.amax, torch.full_like(level.amax, self.top()))
    return Level(level.amax, one_over(inverse), inverse)


def level_reciprocal(self: Interpreter, step: Way, values: Tensor) -> Level:
    """S = bound * maximum * (1 / amax)."""
    level: Level = step(values)
    if level.amax is None:
        return level
    scale = (one_over(level.amax) * self.top()).clamp(max=torch.finfo().max)
    return Level(level.amax, scale, one_over(scale))


def divided_in(dtype: torch.dtype) -> Way:
    """amax / maximum, rounded to a dtype before it is multiplied by S."""

    def way(
        self: Interpreter, step: Way, amax: Tensor, level: Level, factor: float | None
    ) -> Tensor:
        quotient = torch.div(amax, _maximum(self, amax)).to(dtype).float()
        return quotient * level.scale * rounded(factor or 1.0)

    return way


def exact_multiplier(
    self: Interpreter, step: Way, amax: Tensor, level: Level, factor: float | None
) -> Scales:
    """Multipliers of scales that are not rounded."""
    scales: Scales = step(amax, level, factor)
    largest = float(magnitudes_of(self.steps.scale.format)[-1])
    exact = self.exact_scales(amax, level, factor).clamp(max=largest)
    return scales._replace(multiplier=self.undone(exact, level))


def byte_below(self: Interpreter, step: Way, exact: Tensor) -> Tensor:
    """The largest number of the format that is not larger."""
    return below(exact, self.steps.scale.format)


def byte_above(self: Interpreter, step: Way, exact: Tensor) -> Tensor:
    """The smallest number of the format that is not smaller."""
    places = below(exact, self.steps.scale.format)
    return places + (magnitudes_of(self.steps.scale.format)[places] < exact)


def byte_not_zero(self: Interpreter, step: Way, exact: Tensor) -> Any:
    """At least the smallest number above zero."""
    return step(exact).clamp(min=1)


def byte_via(dtype: torch.dtype) -> Way:
    """Scales rounded to a dtype before they are rounded to a byte."""
    return lambda self, step, exact: step(exact.to(dtype).float())


def last_of_equals(self: Interpreter, step: Way, error: Tensor, least: Tensor) -> Tensor:
    """The later one of equal candidates."""
    return error <= least


# Elements.


def divided(self: Interpreter, step: Way, values: Tensor, scales: Scales, areas: Grid) -> Tensor:
    """Values divided by the numbers of scales."""
    return torch.div(values, self.spread(areas, scales.number))


def divided_by_multiplier(
    self: Interpreter, step: Way, values: Tensor, scales: Scales, areas: Grid
) -> Tensor:
    """Values divided by what the step has as multipliers."""
    return torch.div(values, self.spread(areas, scales.multiplier))


def not_inverted(dtype: torch.dtype) -> Way:
    """What undoes scales in a byte, rounded to a dtype and not inverted."""
    return lambda self, step, number, level: (number * level.inverse).to(dtype).float()


def number_over_scale(self: Interpreter, step: Way, number: Tensor, level: Level) -> Tensor:
    """scale / S, not inverted."""
    return torch.div(number, level.scale)


def level_in(dtype: torch.dtype) -> Way:
    """S, rounded to a dtype."""

    def way(self: Interpreter, step: Way, values: Tensor) -> Level:
        level: Level = step(values)
        scale = level.scale.to(dtype).float()
        return Level(level.amax, scale, one_over(scale))

    return way


def level_reciprocal_in(dtype: torch.dtype) -> Way:
    """S = bound * maximum * (1 / amax), with both operations in a dtype."""

    def way(self: Interpreter, step: Way, values: Tensor) -> Level:
        level: Level = step(values)
        if level.amax is None:
            return level
        inverse = one_over(level.amax).to(dtype).float()
        scale = (inverse * self.top()).to(dtype).float()
        return Level(level.amax, scale, one_over(scale))

    return way


def scale_over_number(self: Interpreter, step: Way, number: Tensor, level: Level) -> Tensor:
    """S / scale."""
    return torch.div(level.scale, number).clamp(max=torch.finfo().max)


def via_format(name: str) -> Way:
    """Scaled values rounded to another format before they are rounded to elements."""

    def way(self: Interpreter, step: Way, scaled: Tensor) -> Any:
        numbers = magnitudes_of(name)[nearest(scaled.abs().nan_to_num(0.0), name)]
        return step(torch.where(scaled.isnan(), scaled, numbers.copysign(scaled)))

    return way


def truncated(self: Interpreter, step: Way, numbers: Tensor, name: str) -> Tensor:
    """Towards zero."""
    return below(numbers, name)


def ties(away: bool) -> Way:
    """Ties away from zero, or towards it."""
    return lambda self, step, numbers, name: torch.bucketize(
        numbers.contiguous(), middles_of(name), right=away
    )


def flushed(self: Interpreter, step: Way, numbers: Tensor, name: str) -> Tensor:
    """Zero for what is subnormal."""
    places: Tensor = step(numbers, name)
    return torch.where(places < 1 << format_of(name).mantissa_bits, 0, places)


def overflow(code: int) -> Way:
    """A code, with a sign, for what would be rounded beyond the largest element."""

    def way(self: Interpreter, step: Way, scaled: Tensor) -> Tensor:
        magnitudes = magnitudes_of(self.steps.element.format)
        limit = magnitudes[-1] + (magnitudes[-1] - magnitudes[-2]) / 2
        # A tie goes to the even code, which is that of the largest element or the next one.
        beyond = scaled.abs() > limit if len(magnitudes) % 2 else scaled.abs() >= limit
        return torch.where(beyond, scaled.signbit().long() << 7 | code, step(scaled))

    return way


def nan_signed(self: Interpreter, step: Way, scaled: Tensor) -> Tensor:
    """NaN with its sign."""
    return torch.where(scaled.isnan(), scaled.signbit().long() << 7 | 0x7F, step(scaled))


def zero_unsigned(self: Interpreter, step: Way, places: Tensor, negative: Tensor) -> Any:
    """No sign for what is rounded to zero."""
    return step(places, negative & (places != 0))
