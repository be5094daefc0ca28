"""Elements in plain PyTorch: float32 values as codes of a format, and back.

Rounding works on the bits of float32, so that no result depends on torch's conversions to float8
(that to E5M2 does not saturate, see the numerics page).
"""

import math

import torch

from ottava.formats import ElementFormat, FloatFormat, IntegerFormat
from ottava.kernels.checks import Tensor

_TWO_TO_32 = 2.0**32


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns of a float32 tensor, as int32."""
    return x.contiguous().view(torch.int32)


def float_bits(value: float) -> int:
    """The bit pattern of one float32 value."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def encode(x: Tensor, fmt: ElementFormat, random: Tensor | None = None) -> Tensor:
    """float32 values as codes, uint8, of the shape of ``x``.

    Values saturate. NaN becomes ``fmt.nan_code``. Float formats keep the sign of zero.

    Args:
        random: numbers from 0 to 2^32 - 1, int64, one for each value. A magnitude between two
            neighbours ``a < b`` of the format goes to ``b`` if the number is less than
            ``floor((magnitude - a) / (b - a) * 2^32)``, else to ``a``. Without random numbers
            values are rounded to nearest, ties to even.
    """
    if isinstance(fmt, IntegerFormat):
        codes = _encode_integers(x, fmt, random)
    else:
        codes = _encode_floats(x, fmt, random)
    return codes.masked_fill(x.isnan(), fmt.nan_code).to(torch.uint8)


def _encode_integers(x: Tensor, fmt: IntegerFormat, random: Tensor | None) -> Tensor:
    # The step is a power of two, so the division is exact.
    units = torch.nan_to_num(x, 0.0).clamp(fmt.least, fmt.max) / fmt.step
    rounded = _rounded(units.abs(), random)
    return (rounded * units.sign()).to(torch.int32) & ((1 << fmt.bits) - 1)


def _encode_floats(x: Tensor, fmt: FloatFormat, random: Tensor | None) -> Tensor:
    bits = bits_of(x)
    least = float_bits(fmt.min_normal) >> 23
    clamped = (bits & 0x7FFFFFFF).clamp(max=float_bits(fmt.max))
    # A value below the smallest normal number has the unit in the last place of the subnormals,
    # every other one that of its binade.
    exponent = (clamped >> 23).clamp(min=least)
    unit = ((exponent - fmt.mantissa_bits) << 23).view(torch.float32)
    # Division by this power of two loses nothing: the quotient is at most 2^(mantissa_bits + 1),
    # and a quotient that underflows in float32 is far below half a unit.
    units = torch.div(clamped.view(torch.float32), unit)
    magnitude = ((exponent - least) << fmt.mantissa_bits) + _rounded(units, random).to(torch.int32)
    if not fmt.signed:
        return magnitude
    return magnitude | (bits >> (32 - fmt.bits)) & 1 << (fmt.bits - 1)


def _rounded(units: Tensor, random: Tensor | None) -> Tensor:
    """Whole numbers next to the numbers ``units`` >= 0, as float32."""
    if random is None:
        return torch.round(units)
    below = torch.floor(units)
    # The difference and its product with 2^32 are exact.
    threshold = torch.floor((units - below) * _TWO_TO_32).to(torch.int64)
    return below + (random < threshold).to(torch.float32)


def values_of_codes(fmt: ElementFormat) -> list[float]:
    """The number that each code of a format stands for, by the code."""
    count = 1 << fmt.bits
    if isinstance(fmt, IntegerFormat):
        half = count >> 1
        values = [(code - count if code >= half else code) * fmt.step for code in range(count)]
        if fmt.has_nan:
            values[fmt.nan_code] = math.nan
        return values
    magnitudes = [_float_of(code, fmt) for code in range(count >> int(fmt.signed))]
    if not fmt.signed:
        return magnitudes
    return [*magnitudes, *(-magnitude for magnitude in magnitudes)]


def _float_of(code: int, fmt: FloatFormat) -> float:
    field, fraction = divmod(code, 1 << fmt.mantissa_bits)
    if field:
        fraction += 1 << fmt.mantissa_bits
    value = math.ldexp(fraction, max(field, 1) - fmt.bias - fmt.mantissa_bits)
    return value if value <= fmt.max else math.nan


def decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """The float32 values of codes, uint8. Bits above those of the format do not count."""
    if fmt.torch_dtype is not torch.uint8:
        values = codes.contiguous().view(fmt.torch_dtype).to(torch.float32)
        if isinstance(fmt, IntegerFormat):
            values = values.masked_fill(codes == fmt.nan_code, math.nan)
        return values
    table = torch.tensor(values_of_codes(fmt), dtype=torch.float32, device=codes.device)
    return table[(codes & (len(table) - 1)).to(torch.int64)]


def pack(codes: Tensor) -> Tensor:
    """Codes of four bits, two in a byte along the last dimension, the even one in the low half.

    An odd last one gets a byte of its own, with 0 in the high half.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, [0, 1])
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(data: Tensor) -> Tensor:
    """The inverse of :func:`pack`: twice as many codes as bytes."""
    return torch.stack([data & 0xF, data >> 4], dim=-1).flatten(-2)
