"""The oracle of the kernels on MX blocks, in plain PyTorch, on any device."""

from __future__ import annotations

import math

import torch

from ottava.formats import E8M0, MX_BLOCK, FloatFormat, fp8_format
from ottava.kernels.reference_data import bits_of, encode, float_bits

_MANTISSA = 0x7FFFFF
_INF_BITS = 0x7F800000
_LARGEST_CODE = 254
# 2^-127, which in float32 is a subnormal.
_TWO_TO_MINUS_127 = 0x00400000


def mx_scale_from_amax(amax: torch.Tensor, fp8_dtype: torch.dtype, floor: bool, out: torch.Tensor) -> None:
    """The E8M0 code of each amax."""
    out.copy_(_scales(amax, fp8_dtype, floor))


def _scales(amax: torch.Tensor, fp8_dtype: torch.dtype, floor: bool) -> torch.Tensor:
    fmt = fp8_format(fp8_dtype)
    magnitude = amax.contiguous().to(torch.float32).abs()
    code = _floor_code(magnitude, fmt) if floor else _up_code(magnitude, fmt)
    code = torch.where(magnitude.isinf(), torch.full_like(code, _LARGEST_CODE), code)
    code = torch.where(magnitude.isnan(), torch.full_like(code, E8M0.nan_code), code)
    return code.to(torch.uint8)


def _up_code(amax: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    bits = bits_of(amax * torch.tensor(1.0 / fmt.max, dtype=torch.float32, device=amax.device))
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    # At most 2^-127 is code 0: the exponent field of 0 holds everything below 2^-126.
    reached = torch.where(exponent > 0, torch.zeros_like(bits), torch.full_like(bits, _TWO_TO_MINUS_127))
    return (exponent + (mantissa > reached).to(torch.int32)).clamp(max=_LARGEST_CODE)


def _floor_code(amax: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    largest = (float_bits(fmt.max) >> 23) - 127
    return ((bits_of(amax) >> 23) - largest).clamp(min=0, max=_LARGEST_CODE)


def multiplier(codes: torch.Tensor) -> torch.Tensor:
    """2^(127 - code) as float32, NaN for 255."""
    code = codes.to(torch.int32)
    bits = torch.where(code == _LARGEST_CODE, torch.full_like(code, _TWO_TO_MINUS_127), (_LARGEST_CODE - code) << 23)
    values = bits.view(torch.float32)
    return torch.where(code == E8M0.nan_code, torch.full_like(values, float("nan")), values)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def block_amax(magnitude: torch.Tensor, dim: int) -> torch.Tensor:
    """Largest magnitude of each block of 32 along ``dim`` of a matrix."""
    size = magnitude.shape[dim]
    blocks = -(-size // MX_BLOCK)
    padding = [0, blocks * MX_BLOCK - size] if dim == 1 else [0, 0, 0, blocks * MX_BLOCK - size]
    padded: torch.Tensor = torch.nn.functional.pad(magnitude, padding).unflatten(dim, (blocks, MX_BLOCK))
    # amax refuses what is empty.
    amax: torch.Tensor = padded.amax(dim + 1) if padded.numel() else padded.select(dim + 1, 0)
    return amax


def spread(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """One entry for each element from one for each block."""
    return scales.repeat_interleave(MX_BLOCK, dim).narrow(dim, 0, size)


def mx_quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    two_dimensional: bool,
    floor: bool,
    row: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    column: torch.Tensor | None,
    column_scales: torch.Tensor | None,
) -> None:
    """Data and scales along rows and columns."""
    fmt = fp8_format(fp8_dtype)
    matrix = _matrix(x).to(torch.float32)
    magnitude = matrix.abs()
    magnitude = torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude)
    for data, scales, dim in ((row, row_scales, 1), (column, column_scales, 0)):
        if data is None or scales is None:
            continue
        amax = block_amax(magnitude, dim)
        if two_dimensional:
            amax = spread(block_amax(amax, 1 - dim), 1 - dim, matrix.shape[1 - dim])
        scales.copy_(_scales(amax, fp8_dtype, floor))
        data.copy_(encode(matrix * spread(multiplier(scales), dim, matrix.shape[dim]), fmt).view(x.shape))


def mx_decode_exact(data: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype, columnwise: bool) -> torch.Tensor:
    """The values in float64, which holds all of them."""
    matrix = _matrix(data).contiguous()
    # 2^(scale - 127) from the bits of a float64, whose exponents are biased by 1023.
    powers = ((scales.to(torch.int64) - E8M0.bias + 1023) << 52).view(torch.float64)
    factor = torch.where(scales == E8M0.nan_code, torch.full_like(powers, float("nan")), powers)
    dim = 0 if columnwise else 1
    return (matrix.view(fp8_dtype).to(torch.float64) * spread(factor, dim, matrix.shape[dim])).view(data.shape)


def mx_decode(
    data: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype, columnwise: bool, out: torch.Tensor
) -> None:
    """``element * 2^(scale - 127)``, rounded to the dtype of ``out``; in float32 only what overflows is not exact."""
    exact = mx_decode_exact(data, scales, fp8_dtype, columnwise)
    out.copy_(exact if out.dtype == torch.float64 else exact.to(torch.float32))
