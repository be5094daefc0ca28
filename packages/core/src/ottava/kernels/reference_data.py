"""Bits of float32 values, and their rounding to the data of small formats, for the reference kernels.

The rounding is done on the bits of float32 values, so that nothing depends on how a torch build converts to
float8 (its E5M2 conversion does not saturate, see the numerics page).
"""

from __future__ import annotations

import torch

from ottava.formats import FloatFormat

_ABS_MASK = 0x7FFFFFFF
_INF_BITS = 0x7F800000


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a float32 tensor, as int32."""
    return x.contiguous().view(torch.int32)


def float_bits(value: float) -> int:
    """The bit pattern of one float32 value."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def encode(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """float32 to data: round to nearest even, saturating, NaN to ``fmt.nan_code``, sign of zero kept."""
    bits = bits_of(x)
    magnitude = bits & _ABS_MASK
    clamped = magnitude.clamp(max=float_bits(fmt.max))
    # The unit in the last place of the value's binade, or of the subnormals below the smallest normal.
    exponent = (clamped >> 23).clamp(min=float_bits(fmt.min_normal) >> 23)
    unit_exponent = exponent - fmt.mantissa_bits
    # Dividing by a power of two is exact here (the quotient is at most 2^(mantissa_bits + 1), and what falls
    # below float32's subnormals is far below half a unit).
    unit = (unit_exponent << 23).view(torch.float32)
    steps = torch.round(torch.div(clamped.view(torch.float32), unit)).to(torch.int32)
    binade = exponent - (float_bits(fmt.min_normal) >> 23)
    code = (binade << fmt.mantissa_bits) + steps
    sign = (bits >> 24) & 0x80
    nan = torch.full_like(code, fmt.nan_code)
    return torch.where(magnitude > _INF_BITS, nan, code | sign).to(torch.uint8)
