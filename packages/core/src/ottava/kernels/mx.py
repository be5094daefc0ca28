"""MX blocks: 32 elements that share a power of two, along rows, along columns, or both.

A tensor ``[*leading, K]`` is seen as a matrix of ``M`` rows. Codes keep the tensor's shape, in both directions; scales
are uint8 codes of E8M0, unpadded: ``[M, ceil(K / 32)]`` along rows, ``[ceil(M / 32), K]`` along columns. Blocks at
ragged edges are smaller. Source of the formats: OCP Microscaling Formats Specification 1.0.
"""

from __future__ import annotations

import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.formats import fp8_format, mx_scale_shapes
from ottava.kernels import mx_ops as _mx_ops
from ottava.kernels.checks import HIGH_PRECISION, check_codes, check_device, check_high_precision

SCALE_ROUNDINGS = ("up", "floor")


def check_scale_rounding(scale_rounding: str) -> None:
    """Raises OptionError unless ``scale_rounding`` is ``"up"`` or ``"floor"``."""
    if scale_rounding not in SCALE_ROUNDINGS:
        raise OptionError(f"scale_rounding is {scale_rounding!r}", expected="'up' or 'floor'")


def mx_scale_from_amax(amax: torch.Tensor, fp8_dtype: torch.dtype, scale_rounding: str = "up") -> torch.Tensor:
    """The E8M0 code of each amax, uint8 of the same shape.

    ``"up"``: ``amax * float32(1 / max)`` with its exponent rounded up. ``"floor"``: the exponent of ``amax`` less the
    format's largest (8 for E4M3, 15 for E5M2). In both: 0 gives 0, infinity 254, NaN 255, and nothing else
    more than 254.
    """
    fp8_format(fp8_dtype)
    check_scale_rounding(scale_rounding)
    if not isinstance(amax, torch.Tensor) or amax.dtype != torch.float32:
        raise DTypeError("amax is not a float32 tensor", expected="a float32 tensor")
    result: torch.Tensor = _mx_ops.mx_scale_from_amax(amax, fp8_dtype, scale_rounding == "floor")
    return result


def _check_request(
    x: torch.Tensor, fp8_dtype: torch.dtype, scale_rounding: str, rowwise: bool, columnwise: bool
) -> None:
    check_high_precision(x)
    fp8_format(fp8_dtype)
    check_scale_rounding(scale_rounding)
    if not (rowwise or columnwise):
        raise OptionError("neither rowwise nor columnwise blocks are asked for", expected="at least one")


def mx_quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    two_dimensional: bool = False,
    scale_rounding: str = "up",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize along rows, columns or both, each from ``x`` itself, in one pass over it.

    Args:
        two_dimensional: one scale for 32 rows and columns, so that both directions hold the same values.
        scale_rounding: see :func:`mx_scale_from_amax`. The amax of a block ignores NaN.

    Returns:
        ``(rowwise codes, rowwise scales, columnwise codes, columnwise scales)``; empty tensors for a direction that is
        not asked for. Columnwise codes are not transposed.
    """
    _check_request(x, fp8_dtype, scale_rounding, rowwise, columnwise)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _mx_ops.mx_quantize(
        x, fp8_dtype, rowwise, columnwise, two_dimensional, scale_rounding == "floor"
    )
    return result


def _check_blocks(data: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype, columnwise: bool) -> None:
    check_codes(data)
    check_codes(scales)
    fp8_format(fp8_dtype)
    expected = mx_scale_shapes(data.shape)[int(columnwise)]
    if tuple(scales.shape) != expected:
        raise ShapeError(
            f"scales of codes {tuple(data.shape)} have shape {tuple(scales.shape)}", expected=f"{expected}, unpadded"
        )
    check_device(scales, data.device, "the scales")


def mx_decode(
    data: torch.Tensor,
    scales: torch.Tensor,
    fp8_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
) -> torch.Tensor:
    """``element * 2^(scale - 127)``, rounded once to ``dtype``; what overflows it is infinite.

    ``dtype`` may be float64 besides, which holds all values exactly.
    """
    _check_blocks(data, scales, fp8_dtype, columnwise)
    if dtype not in (*HIGH_PRECISION, torch.float64):
        raise DTypeError(f"cannot decode to {dtype}", expected="torch.float64, float32, bfloat16 or float16")
    result: torch.Tensor = _mx_ops.mx_decode(data, scales, fp8_dtype, dtype, columnwise)
    return result
