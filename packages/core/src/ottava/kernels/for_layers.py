"""Kernels as a layer asks for them: nothing is checked a second time, and what nobody reads gets no tensor."""

from __future__ import annotations

import torch

from ottava.kernels import table
from ottava.kernels.checks import check_counter, check_scalar

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
    device, fits = x.device, True
    for state, dtype in ((scale, torch.float32), (amax, torch.float32), (saturated, torch.int64)):
        fits = fits and (state is None or (state.dtype is dtype and state.device == device and state.numel() == 1))
    if not fits:
        check_scalar(scale, x, "scale")
        if amax is not None:
            check_scalar(amax, x, "amax")
        if saturated is not None:
            check_counter(saturated, x, "saturated")
    data, turned, scale_inv = table.cast_amax.for_layer(x, scale, amax, saturated, fp8_dtype, rowwise, transposed)
    return data if rowwise else None, turned if transposed else None, scale_inv


def grid_quantize(x: torch.Tensor, text: str, rowwise: bool, columnwise: bool) -> tuple[torch.Tensor | None, ...]:
    """:func:`ottava.kernels.grid_quantize` of the layout's text, with None for what is not asked for."""
    row, row_scales, column, column_scales = table.grid_quantize.for_layer(x, text, rowwise, columnwise)
    if not rowwise:
        row = row_scales = None
    return row, row_scales, *((column, column_scales) if columnwise else (None, None))
