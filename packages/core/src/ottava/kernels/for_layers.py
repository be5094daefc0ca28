"""Kernels as a layer asks for them: nothing is checked a second time, and what nobody reads gets no tensor."""

from __future__ import annotations

import torch

from ottava.kernels import table
from ottava.kernels.checks import check_scalar

#: Data, the transpose and ``scale_inv``; None for what is not wanted.
Quantized = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]


def quantize(
    x: torch.Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, rowwise: bool, transposed: bool
) -> Quantized:
    """:func:`ottava.kernels.quantize`, without the scale and the amax."""
    data, turned, _, scale_inv, _ = table.quantize.for_layer(x, fp8_dtype, epsilon, force_pow_2, rowwise, transposed)
    return data if rowwise else None, turned if transposed else None, scale_inv


def cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    saturated: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    transposed: bool,
) -> Quantized:
    """With a known scale; with ``amax`` it records as :func:`ottava.kernels.cast_amax` does.

    Raises:
        DTypeError, ShapeError, DeviceError: the scale, the amax or the counter are not what they should be. They are a
            quantizer's state, which can be replaced at any time, and are read and written by their addresses.
    """
    device, floats = x.device, torch.float32
    for state, what, dtype in ((scale, "scale", floats), (amax, "amax", floats), (saturated, "saturated", torch.int64)):
        if state is not None and not (state.dtype is dtype and state.device == device and state.numel() == 1):
            check_scalar(state, x, what, dtype)
    data, turned, scale_inv = table.cast_amax.for_layer(x, scale, amax, saturated, fp8_dtype, rowwise, transposed)
    return data if rowwise else None, turned if transposed else None, scale_inv


def grid_quantize(x: torch.Tensor, text: str, rowwise: bool, columnwise: bool) -> tuple[torch.Tensor | None, ...]:
    """:func:`ottava.kernels.grid_quantize` of the layout's text, with None for what is not asked for."""
    row, row_scales, column, column_scales = table.grid_quantize.for_layer(x, text, rowwise, columnwise)
    if not rowwise:
        row = row_scales = None
    return row, row_scales, *((column, column_scales) if columnwise else (None, None))
