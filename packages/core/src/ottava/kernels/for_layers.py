"""Kernels as a layer asks for them: nothing is checked a second time, and what nobody reads gets no
tensor.

On a CPU one call of the compiled module reads the operand, allocates and writes the results, where
nobody would see an operator (see :mod:`ottava.kernels.direct`). It returns None where Python has to
do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ottava.formats import ELEMENTS, FP8
from ottava.kernels import backends, table
from ottava.kernels.checks import Maybe, Tensor, check_scalar
from ottava.torch_private import graph_task_id

#: Data and scales of rows, then data and scales of columns; None for what is not made. One scale
#: serves both.
Quantized = tuple[Maybe, Maybe, Maybe, Maybe]

_ABSENT = None, None
_CODES = {dtype: ELEMENTS[dtype].code for dtype in FP8}
# What Dynamo traces must not call compiled modules. Others who trace have tensors that these leave
# to Python.
_is_compiling = torch.compiler.is_dynamo_compiling


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    rowwise: bool,
    transposed: bool,
) -> Quantized:
    """:func:`ottava.kernels.quantize` by one scale for the tensor; columns are the transpose."""
    if not _is_compiling() and backends._chosen.get("cpu") == "cpu":
        native, code = backends._loaded["cpu"].native, _CODES[fp8_dtype]
        quantized: Quantized | None = native.quantize_operand(
            x, code, epsilon, force_pow_2, rowwise, transposed
        )
        if quantized is not None:
            return quantized
    data, transpose, _, scale_inv, _ = table.quantize.for_layer(
        x, fp8_dtype, epsilon, force_pow_2, rowwise, transposed
    )
    return _of_both(data, transpose, scale_inv, rowwise, transposed)


def cast(
    x: Tensor,
    scale: Tensor,
    amax: Maybe,
    saturated: Maybe,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    transposed: bool,
) -> Quantized:
    """With a known scale; with ``amax`` it records as :func:`ottava.kernels.cast_amax` does.

    Raises:
        DTypeError, ShapeError, DeviceError: the scale, the amax or the counter are not what they
            should be. They are a quantizer's state, which can be replaced at any time, and are read
            and written by their addresses.
    """
    if not _is_compiling() and backends._chosen.get("cpu") == "cpu":
        native, code = backends._loaded["cpu"].native, _CODES[fp8_dtype]
        quantized: Quantized | None = native.cast_operand(
            x, scale, amax, saturated, code, rowwise, transposed, -1
        )
        if quantized is not None:
            return quantized
    _check_state(x, scale, "scale", torch.float32)
    _check_state(x, amax, "amax", torch.float32)
    _check_state(x, saturated, "saturated", torch.int64)
    data, transpose, scale_inv = table.cast_amax.for_layer(
        x, scale, amax, saturated, fp8_dtype, rowwise, transposed
    )
    return _of_both(data, transpose, scale_inv, rowwise, transposed)


def cast_slot(
    x: Tensor,
    buffers: Mapping[str, Tensor],
    slot: int,
    recording: bool,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    transposed: bool,
) -> Quantized:
    """:func:`cast` with the scale of a slot of a layer's state; ``recording`` also takes the amax
    and the counter of the slot.

    Args:
        buffers: ``scale [slots]``, ``amax_history [steps, slots]``, whose first row is that of this
            step, and ``saturated [slots]``.
    """
    scale, amax, saturated = buffers["scale"], None, None
    if recording:
        amax, saturated = buffers["amax_history"], buffers["saturated"]
    if not _is_compiling() and backends._chosen.get("cpu") == "cpu":
        native, code = backends._loaded["cpu"].native, _CODES[fp8_dtype]
        quantized: Quantized | None = native.cast_operand(
            x, scale, amax, saturated, code, rowwise, transposed, slot
        )
        if quantized is not None:
            return quantized
    if amax is not None and saturated is not None:
        amax, saturated = amax[0, slot], saturated[slot]
    return cast(x, scale[slot], amax, saturated, fp8_dtype, rowwise, transposed)


def _check_state(x: Tensor, state: Maybe, name: str, dtype: torch.dtype) -> None:
    if state is None:
        return
    if state.dtype is dtype and state.device == x.device and state.numel() == 1:
        return
    check_scalar(state, x, name, dtype)


def _of_both(
    data: Maybe, transpose: Maybe, scale_inv: Tensor, rowwise: bool, transposed: bool
) -> Quantized:
    """Of the results of an operator, which has no None: those that were asked for."""
    rows = (data, scale_inv) if rowwise else _ABSENT
    columns = (transpose, scale_inv) if transposed else _ABSENT
    return *rows, *columns


def grid_quantize(x: Tensor, text: str, rowwise: bool, columnwise: bool) -> Quantized:
    """:func:`ottava.kernels.grid_quantize` by the layout of a text."""
    if not _is_compiling() and backends._chosen.get("cpu") == "cpu":
        cpu = backends._loaded["cpu"]
        quantized: Quantized | None = cpu.native.grid_quantize_operand(
            x, cpu.plan(text), rowwise, columnwise
        )
        if quantized is not None:
            return quantized
    data, scales, column_data, column_scales = table.grid_quantize.for_layer(
        x, text, rowwise, columnwise
    )
    rows = (data, scales) if rowwise else _ABSENT
    columns = (column_data, column_scales) if columnwise else _ABSENT
    return *rows, *columns


def update_slots(
    scales: Sequence[Tensor],
    histories: Sequence[Tensor],
    maxima: Sequence[float],
    most_recent: bool,
    own: bool,
) -> bool:
    """:func:`ottava.kernels.update_scales`, of buffers of layers' states if they are their ``own``,
    if the compiled module takes them: it checks what it is given. False leaves all as it was."""
    if _is_compiling() or backends._chosen.get("cpu") != "cpu" or graph_task_id() != -1:
        return False
    return bool(
        backends._loaded["cpu"].native.update_slots(scales, histories, maxima, most_recent, own)
    )
