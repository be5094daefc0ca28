"""MX blocks: 32 elements that share a power of two, along rows, along columns, or both.

A tensor ``[*leading, K]`` is seen as a matrix of ``M`` rows. Data keep the tensor's shape, in both directions; scales
are uint8 codes of E8M0, unpadded: ``[M, ceil(K / 32)]`` along rows, ``[ceil(M / 32), K]`` along columns. Blocks at
ragged edges are smaller. Source of the formats: OCP Microscaling Formats Specification 1.0.
"""

from __future__ import annotations

import torch

from ottava.errors import OptionError
from ottava.kernels import table

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
    check_scale_rounding(scale_rounding)
    return table.mx_scale_from_amax.checked(amax, fp8_dtype, scale_rounding == "floor")  # type: ignore[no-any-return]


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
        ``(rowwise data, rowwise scales, columnwise data, columnwise scales)``; empty tensors for a direction that is
        not asked for. Columnwise data are not transposed.
    """
    check_scale_rounding(scale_rounding)
    floor = scale_rounding == "floor"
    return table.mx_quantize.checked(x, fp8_dtype, two_dimensional, floor, rowwise, columnwise)  # type: ignore[no-any-return]


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
    return table.mx_decode.checked(data, scales, fp8_dtype, columnwise, dtype)  # type: ignore[no-any-return]
