"""Kernels as a layer asks for them: nothing is checked a second time, and what nobody reads gets no tensor.

Allocations are most of what a small kernel costs, and how they are asked for is a good part of that: sizes in a tuple
take a microsecond longer than another tensor to be like.
"""

from __future__ import annotations

import torch

from ottava.formats import mx_scale_shapes
from ottava.kernels import ops
from ottava.kernels.backends import backend_module
from ottava.kernels.checks import check_counter, check_scalar
from ottava.kernels.direct import is_direct

Parts = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]
#: Codes and the scales of their blocks, of one direction.
Blocks = tuple[torch.Tensor, torch.Tensor]

_CODES = torch.uint8
# For each device a float32 scalar to be like.
_scalars: dict[torch.device, torch.Tensor] = {}


def _codes_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=_CODES, memory_format=torch.contiguous_format)


def _buffers(x: torch.Tensor, rowwise: bool, transposed: bool) -> Parts:
    """Codes of ``x``, their transpose, and a float32 scalar, all of them still to be written."""
    device = x.device
    data = _codes_like(x) if rowwise else None
    transpose = torch.empty(x.shape[-1], *x.shape[:-1], dtype=_CODES, device=device) if transposed else None
    scalar = _scalars.get(device)
    return data, transpose, _first_scalar(device) if scalar is None else torch.empty_like(scalar)


def _first_scalar(device: torch.device) -> torch.Tensor:
    made = torch.empty((), dtype=torch.float32, device=device)
    # What is made while a CUDA graph is captured belongs to the graph's memory, which it would keep.
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _scalars[device] = torch.empty_like(made)
    return made


def quantize_parts(
    x: torch.Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, rowwise: bool, transposed: bool
) -> Parts:
    """:func:`~ottava.kernels.quantize` of what was checked: ``(data, transpose, scale_inv)``, None if not asked for."""
    if not is_direct(x):
        data, transpose, _, scale_inv, _ = ops.quantize(x, fp8_dtype, epsilon, force_pow_2, rowwise, transposed)
        return data if rowwise else None, transpose if transposed else None, scale_inv
    parts = data, transpose, scale_inv = _buffers(x, rowwise, transposed)
    backend = backend_module(x.device.type)
    backend.quantize_out(x, fp8_dtype, epsilon, force_pow_2, data, transpose, None, scale_inv, None)
    return parts


def _check_state(
    x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, saturated: torch.Tensor | None
) -> None:
    """A quantizer's state can be replaced at any time, and is read and written by its address.

    Raises:
        DTypeError, ShapeError, DeviceError: as the checks of the kernels.
    """
    device, fits = x.device, True
    for state, dtype in ((scale, torch.float32), (amax, torch.float32), (saturated, torch.int64)):
        fits = fits and (state is None or (state.dtype is dtype and state.device == device and state.numel() == 1))
    if not fits:
        check_scalar(scale, x, "scale")
        if amax is not None:
            check_scalar(amax, x, "amax")
        if saturated is not None:
            check_counter(saturated, x)


def cast_parts(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    saturated: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    transposed: bool,
) -> Parts:
    """Codes with a known scale, of what was checked: ``(data, transpose, scale_inv)``, None if not asked for.

    With ``amax`` it records as :func:`~ottava.kernels.cast_amax` does. A backend that leaves out what is not asked for
    offers ``cast_amax_out(x, scale, amax, saturated, fp8_dtype, data, transpose, scale_inv)``: all but ``x``,
    ``scale`` and ``scale_inv`` may be None.
    """
    _check_state(x, scale, amax, saturated)
    if is_direct(x, scale, amax, saturated):
        into = getattr(backend_module(x.device.type), "cast_amax_out", None)
        if into is not None:
            parts = data, transpose, scale_inv = _buffers(x, rowwise, transposed)
            into(x, scale, amax, saturated, fp8_dtype, data, transpose, scale_inv)
            return parts
    if amax is not None:
        data, transpose, scale_inv = ops.cast_amax(x, scale, amax, saturated, fp8_dtype, transposed)
    else:
        scale = scale.reshape(())
        scale_inv = torch.div(torch.ones_like(scale), scale)
        data, transpose = (
            ops.cast_transpose(x, scale, fp8_dtype) if transposed else (ops.cast(x, scale, fp8_dtype), None)
        )
    return data if rowwise else None, transpose if transposed else None, scale_inv


def mx_quantize_parts(
    x: torch.Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, two_dimensional: bool, floor: bool
) -> tuple[Blocks | None, Blocks | None]:
    """:func:`~ottava.kernels.mx_quantize` of what was checked: rowwise and columnwise blocks, None if not asked for."""
    if not is_direct(x):
        made = torch.ops.ottava.mx_quantize(x, fp8_dtype, rowwise, columnwise, two_dimensional, floor)
        return made[:2] if rowwise else None, made[2:] if columnwise else None
    device, (of_rows, of_columns) = x.device, mx_scale_shapes(x.shape)
    rows = columns = None
    if rowwise:
        rows = _codes_like(x), torch.empty(*of_rows, dtype=_CODES, device=device)
    if columnwise:
        columns = _codes_like(x), torch.empty(*of_columns, dtype=_CODES, device=device)
    backend_module(device.type).mx_quantize_out(x, fp8_dtype, rows, columns, two_dimensional, floor)
    return rows, columns
