"""From amaxes to scales, in plain PyTorch: the rules by name, two levels, and the choice among
candidates.

:data:`E8M0_RULES` is the table of the rules for powers of two. The numerics page has each with its
formula and source.
"""

import math
from collections.abc import Callable

import torch

from ottava.errors import ShapeError
from ottava.formats import E8M0, ElementFormat, FloatFormat
from ottava.kernels.checks import Tensor, check_tensor
from ottava.kernels.elements import bits_of, decode, encode, float_bits
from ottava.layout import OWN_RULES, SCALES, Block, Layout

FLOAT32_MAX = torch.finfo(torch.float32).max
# The largest scale of E8M0, and 2^-127, which in float32 is a subnormal.
_LARGEST_SCALE = 254
_TWO_TO_MINUS_127 = 0x00400000
# The mantissa of the largest float32 below the square root of two, and the largest subnormal below
# 2^-126.5.
_ROOT_OF_TWO = 0x3504F3
_ROOT_BELOW_NORMAL = 0x5A8279


def as_float32(value: float) -> float:
    """The nearest float32, which is infinite for a value beyond its range."""
    return float(torch.tensor(value, dtype=torch.float32))


def inverse(scale: Tensor) -> Tensor:
    """``1 / scale``, correctly rounded."""
    # torch.div of two tensors is correctly rounded. With a Python number as the numerator it may
    # multiply by a reciprocal.
    return torch.div(torch.ones_like(scale), scale)


def float_scale(
    amax: Tensor, maximum: Tensor, epsilon: float, floor: bool, largest: float
) -> Tensor:
    """``maximum / amax``, at most ``largest``, with ``floor`` rounded down to a power of two.

    The scale is 1 where the amax is 0 or not finite.
    """
    # The tensor is filled on the device, because a CUDA graph cannot capture a copy from the host.
    least = torch.full_like(amax, as_float32(epsilon))
    a = torch.where(amax < least, least, amax)
    usable = a.isfinite() & (a != 0)
    numerator = maximum.expand_as(a)
    scale = torch.div(numerator, torch.where(usable, a, numerator))
    scale = scale.masked_fill(scale.isinf(), largest)
    if not floor:
        return scale
    # Clearing the mantissa rounds down to a power of two.
    return (bits_of(scale) & -0x800000).view(torch.float32).view(scale.shape)


# -- powers of two --


def _scaled_bits(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    """The bits of ``amax * float32(1 / max)``, which rounds once."""
    return bits_of(magnitude * as_float32(1.0 / fmt.max))


def _largest_exponent(fmt: ElementFormat) -> int:
    """The exponent of the largest power of two of a format."""
    return (float_bits(fmt.max) >> 23) - 127


def _up(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    bits = _scaled_bits(magnitude, fmt)
    exponent = bits >> 23
    # Rounding up adds 1 to the exponent of numbers whose mantissa is above 0. Subnormal numbers
    # have the exponent 0, which means 2^-127 as a scale, so it goes up for those above 2^-127.
    bound = torch.full_like(bits, _TWO_TO_MINUS_127).masked_fill(exponent > 0, 0)
    return exponent + ((bits & 0x7FFFFF) > bound).to(torch.int32)


def _nearest(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    bits = _scaled_bits(magnitude, fmt)
    exponent = bits >> 23
    bound = torch.full_like(bits, _ROOT_BELOW_NORMAL).masked_fill(exponent > 0, _ROOT_OF_TWO)
    return exponent + ((bits & 0x7FFFFF) > bound).to(torch.int32)


def _floor(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    return (bits_of(magnitude) >> 23) - _largest_exponent(fmt)


def _even(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    # Half of the unit in the last place of an element rounds the amax as elements are rounded.
    half = 1 << (23 - fmt.significant_bits)
    return ((bits_of(magnitude) + half) >> 23) - _largest_exponent(fmt)


#: Rule -> the code of an amax, before it is limited to 0 and 254.
E8M0_RULES: dict[str, Callable[[Tensor, ElementFormat], Tensor]] = {
    "up": _up,
    "nearest": _nearest,
    "floor": _floor,
    "even": _even,
}


def e8m0_codes(amax: Tensor, fmt: ElementFormat, rule: str) -> Tensor:
    """The bytes of E8M0 scales: 254 for an infinite amax, 255 for NaN."""
    magnitude = amax.contiguous().to(torch.float32).abs()
    codes = E8M0_RULES[rule](magnitude, fmt).clamp(min=0, max=_LARGEST_SCALE)
    codes = codes.masked_fill(magnitude.isinf(), _LARGEST_SCALE)
    return codes.masked_fill(magnitude.isnan(), E8M0.nan_code).to(torch.uint8)


def multiplier(codes: Tensor) -> Tensor:
    """2^(127 - byte) for the bytes of E8M0 scales, as float32; NaN for 255."""
    scale = codes.to(torch.int32)
    bits = ((_LARGEST_SCALE - scale) << 23).masked_fill(scale == _LARGEST_SCALE, _TWO_TO_MINUS_127)
    return bits.view(torch.float32).masked_fill(scale == E8M0.nan_code, math.nan)


# -- every layout --


def scales_of(
    amax: Tensor, layout: Layout, dtype: torch.dtype, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The float32 multipliers of elements, and the scales to store, for values in ``dtype``.

    Args:
        amax: of the blocks.
        largest: of the second level, in a shape that broadcasts to that of ``amax``.
    """
    number = SCALES[layout.scale].number
    if layout.rounding in OWN_RULES:
        return _scales_by_own_rule(amax, layout, largest)
    if number is None:
        infinite = FLOAT32_MAX
        if layout.finite_as == "input":
            infinite = torch.finfo(dtype).max
        maximum = torch.full_like(amax, layout.format.max)
        floor = layout.rounding == "floor"
        scale = float_scale(amax, maximum, layout.epsilon, floor, infinite)
        return scale, inverse(scale)
    if number is E8M0:
        codes = e8m0_codes(amax, layout.format, layout.rounding)
        return multiplier(codes), codes
    second = second_scale(largest, layout, amax)
    factor = second * as_float32(1.0 / layout.format.max)
    codes = _codes_of(_finite(amax) * factor, number)
    return _multipliers(codes, number, second), codes


def _scales_by_own_rule(
    amax: Tensor, layout: Layout, largest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scales that a registered rule gives.

    Raises:
        DTypeError, ShapeError: it gives something else.
    """
    second = second_scale(largest, layout, amax)
    stored = OWN_RULES[layout.rounding](_finite(amax) * second, layout)
    check_tensor(stored, f"the result of the rule {layout.rounding!r}", layout.stored_scale)
    if stored.shape != amax.shape:
        raise ShapeError(
            f"the result of the rule {layout.rounding!r} has shape {tuple(stored.shape)}",
            expected=f"{tuple(amax.shape)}, that of the amaxes",
        )
    number = SCALES[layout.scale].number
    if number is None:
        return inverse(stored), stored
    if number is E8M0:
        return multiplier(stored), stored
    return _multipliers(stored, number, second), stored


def _finite(amax: Tensor) -> Tensor:
    """An infinite amax counts as the largest float32."""
    return amax.clamp(max=FLOAT32_MAX)


def second_scale(largest: Tensor | None, layout: Layout, like: Tensor) -> Tensor:
    """The scale of the second level, ``min(bound * max / amax, largest float32)``.

    It is 1 without a second level.
    """
    if largest is None:
        return torch.ones((), dtype=torch.float32, device=like.device)
    top = torch.full_like(largest, top_of(layout))
    return torch.div(top, largest).clamp(max=FLOAT32_MAX)


def top_of(layout: Layout) -> float:
    """What the largest amax of the second level becomes: the bound times the largest element."""
    number = SCALES[layout.scale].number
    assert number is not None
    bound = number.max if layout.bound is None else layout.bound
    return as_float32(bound * layout.format.max)


def _codes_of(scales: Tensor, number: FloatFormat) -> Tensor:
    return encode(scales.clamp(max=number.max), number)


def _multipliers(codes: Tensor, number: FloatFormat, second: Tensor) -> Tensor:
    """``min(1 / (scale * (1 / second)), largest float32)``."""
    return inverse(decode(codes, number) * inverse(second)).clamp(max=FLOAT32_MAX)


def multipliers_of(stored: Tensor, layout: Layout) -> Tensor:
    """The float32 multipliers of elements that belong to stored scales of bytes, of one level."""
    number = SCALES[layout.scale].number
    assert number is not None
    if number is E8M0:
        return multiplier(stored)
    return _multipliers(stored, number, torch.ones((), device=stored.device))


def scale_values(stored: Tensor, layout: Layout) -> Tensor:
    """The numbers that stored scales are: float64 for powers of two, which holds all of them."""
    number = SCALES[layout.scale].number
    if number is None:
        return stored
    if number is E8M0:
        # 2^(scale - 127) as the bits of a float64, whose exponents have the bias 1023.
        powers = ((stored.to(torch.int64) - E8M0.bias + 1023) << 52).view(torch.float64)
        return powers.masked_fill(stored == E8M0.nan_code, math.nan)
    return decode(stored, number)


# -- candidates --


def choice(
    rows: Tensor,
    amax: Tensor,
    layout: Layout,
    dtype: torch.dtype,
    largest: Tensor | None,
    spread: Callable[[Tensor], Tensor],
    sums: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """:func:`scales_of` with the candidate of the least error for each block, the first of equals.

    Args:
        rows: the values, a float32 matrix.
        spread: repeats the entry of each block for each of its elements.
        sums: the sum over the block, or over the area that shares its scale, for each block.
    """
    chosen: tuple[Tensor, Tensor] | None = None
    least = amax
    for factor in layout.candidates:
        multipliers, codes = _candidate(amax, factor, layout, dtype, largest)
        error = sums(_errors(rows, multipliers, codes, layout, largest, spread))
        if chosen is None:
            chosen, least = (multipliers, codes), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        chosen = (
            torch.where(better, multipliers, chosen[0]),
            torch.where(better, codes, chosen[1]),
        )
    assert chosen is not None
    return chosen


def _candidate(
    amax: Tensor, factor: float, layout: Layout, dtype: torch.dtype, largest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Multipliers and stored scales that are ``factor`` times as large as those of the amax."""
    number = SCALES[layout.scale].number
    factor = as_float32(factor)
    if number is None or number is E8M0 or layout.rounding in OWN_RULES:
        return scales_of(amax * factor, layout, dtype, largest)
    second = second_scale(largest, layout, amax)
    maximum = torch.full_like(amax, layout.format.max)
    base = torch.div(_finite(amax), maximum) * second
    codes = _codes_of(base * factor, number)
    return _multipliers(codes, number, second), codes


def _errors(
    rows: Tensor,
    multipliers: Tensor,
    codes: Tensor,
    layout: Layout,
    largest: Tensor | None,
    spread: Callable[[Tensor], Tensor],
) -> Tensor:
    """The error of each element, if blocks have these scales, in float32."""
    elements = decode(encode(rows * spread(multipliers), layout.format), layout.format)
    values = elements * spread(scale_values(codes, layout).to(torch.float32))
    if largest is not None:
        top = torch.full_like(values, top_of(layout))
        values = torch.div(values * spread(largest.expand(codes.shape)), top)
    errors = (values - rows).abs()
    if layout.error == "MSE":
        errors = errors * errors
    return errors


def sums_of_blocks(errors: Tensor, block: Block) -> Tensor:
    """The sums of the columns of a block in order, then of its rows by halves, in float32."""
    height, width = (
        max(size, 1) if side is None else side
        for side, size in zip(block, errors.shape, strict=True)
    )
    columns = _sides(errors, 1, width)
    sums = columns[:, :, 0]
    for column in range(1, width):
        sums = sums + columns[:, :, column]
    # Halves are equal where the number of rows is a power of two.
    full = 1 << (height - 1).bit_length()
    rows = _sides(sums, 0, height)
    rows = torch.nn.functional.pad(rows, [0, 0, 0, full - height])
    while full > 1:
        full //= 2
        rows = rows[:, :full] + rows[:, full : 2 * full]
    return rows[:, 0]


def _sides(errors: Tensor, dim: int, side: int) -> Tensor:
    """A dimension cut into runs of ``side``, the last one padded with zeros."""
    count = max(-(-errors.shape[dim] // side), 1)
    missing = count * side - errors.shape[dim]
    padding = [0, missing] if dim == 1 else [0, 0, 0, missing]
    runs: Tensor = torch.nn.functional.pad(errors, padding).unflatten(dim, (count, side))
    return runs
