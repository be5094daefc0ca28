"""The arithmetic of per-tensor current scaling, step by step.

amax, scale and cast are those of NVIDIA's FP8 recipes; the rounding is IEEE 754's to nearest, ties
to even.
"""

from __future__ import annotations

import torch

from ottava.formats import fp8_format

#: The byte of NaN, in both formats.
_NAN = 0x7F


def amax(x: torch.Tensor) -> torch.Tensor:
    """``max |x|`` in float32 as a scalar. NaN is ignored; the amax of no values is 0."""
    magnitudes = x.to(torch.float32).abs()
    if not magnitudes.numel():
        return magnitudes.new_zeros(())
    return torch.where(magnitudes.isnan(), torch.zeros_like(magnitudes), magnitudes).max()


def scale_from_amax(
    amax: torch.Tensor, quant_dtype: torch.dtype, eps: float, pow_2_scales: bool
) -> torch.Tensor:
    """The factor when quantizing, float32: ``max / amax``, rounded once.

    It is 1 where amax is 0 or not finite, and the largest float32 where the quotient overflows.
    """
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    usable = amax.isfinite() & (amax != 0)
    # Both operands are tensors, because torch multiplies a number by a rounded reciprocal.
    largest = torch.full_like(amax, fp8_format(quant_dtype).max)
    divisor = torch.where(usable, amax, torch.ones_like(amax))
    scale = torch.where(usable, torch.div(largest, divisor), 1.0)
    limit = torch.full_like(scale, torch.finfo(torch.float32).max)
    scale = torch.where(scale.isinf(), limit, scale)
    if pow_2_scales:
        # Without its mantissa bits, a number is the power of two below it.
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def cast(x: torch.Tensor, scale: torch.Tensor, quant_dtype: torch.dtype) -> torch.Tensor:
    """The bytes (uint8) of ``x * scale``: rounded to nearest, ties to even, and saturated; NaN is
    0x7F."""
    scaled = x.to(torch.float32) * scale
    largest = fp8_format(quant_dtype).max
    is_nan = scaled.isnan()
    # Values are clamped first, because torch does not saturate when it converts to E5M2.
    within = torch.where(is_nan, torch.zeros_like(scaled), scaled).clamp(-largest, largest)
    data = within.to(quant_dtype).view(torch.uint8)
    return torch.where(is_nan, torch.full_like(data, _NAN), data)
