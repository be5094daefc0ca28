"""Kernels as a layer asks for them: nothing is checked a second time, and what nobody reads gets no
tensor.

On a CPU one call of the compiled module reads the operand, allocates and writes the results, where
nobody would see an operator (see :mod:`ottava.kernels.direct`). It returns None where Python has to
do it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.formats import ELEMENTS, FP8
from ottava.kernels import backends, table
from ottava.kernels.checks import Maybe, Tensor, check_scalar
from ottava.torch_private import graph_task_id

#: Data, the transpose and ``scale_inv``; None for what is not wanted.
Quantized = tuple[Maybe, Maybe, Tensor]

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
    """:func:`ottava.kernels.quantize`, without the scale and the amax."""
    if not _is_compiling() and backends._chosen.get("cpu") == "cpu":
        native, code = backends._loaded["cpu"].native, _CODES[fp8_dtype]
        made: Quantized | None = native.quantize_operand(
            x, code, epsilon, force_pow_2, rowwise, transposed
        )
        if made is not None:
            return made
    data, turned, _, scale_inv, _ = table.quantize.for_layer(
        x, fp8_dtype, epsilon, force_pow_2, rowwise, transposed
    )
    return data if rowwise else None, turned if transposed else None, scale_inv


def cast(
    x: Tensor,
    scale: Tensor,
    amax: Maybe,
    saturated: Maybe,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    transposed: bool,
    slot: int = -1,
) -> Quantized:
    """With a known scale; with ``amax`` it records as :func:`ottava.kernels.cast_amax` does. With a
    ``slot`` the three are the buffers of a layer's state: ``[slots]``, of the amaxes the first row
    of ``[steps, slots]``.

    Raises:
        DTypeError, ShapeError, DeviceError: the scale, the amax or the counter are not what they
            should be. They are a quantizer's state, which can be replaced at any time, and are read
            and written by their addresses.
    """
    if not _is_compiling() and backends._chosen.get("cpu") == "cpu":
        native, code = backends._loaded["cpu"].native, _CODES[fp8_dtype]
        made: Quantized | None = native.cast_operand(
            x, scale, amax, saturated, code, rowwise, transposed, slot
        )
        if made is not None:
            return made
    if slot >= 0:
        scale, saturated = scale[slot], None if saturated is None else saturated[slot]
        amax = None if amax is None else amax[0, slot]
    device, floats = x.device, torch.float32
    for state, what, dtype in (
        (scale, "scale", floats),
        (amax, "amax", floats),
        (saturated, "saturated", torch.int64),
    ):
        if state is not None and not (
            state.dtype is dtype and state.device == device and state.numel() == 1
        ):
            check_scalar(state, x, what, dtype)
    data, turned, scale_inv = table.cast_amax.for_layer(
        x, scale, amax, saturated, fp8_dtype, rowwise, transposed
    )
    return data if rowwise else None, turned if transposed else None, scale_inv


def grid_quantize(x: Tensor, text: str, rowwise: bool, columnwise: bool) -> tuple[Maybe, ...]:
    """:func:`ottava.kernels.grid_quantize` of the layout's text, with None for what is not asked
    for."""
    if not _is_compiling() and backends._chosen.get("cpu") == "cpu":
        cpu = backends._loaded["cpu"]
        made: tuple[Maybe, ...] | None = cpu.native.grid_quantize_operand(
            x, cpu.plan(text), rowwise, columnwise
        )
        if made is not None:
            return made
    written, nothing = table.grid_quantize.for_layer(x, text, rowwise, columnwise), (None, None)
    return *(written[:2] if rowwise else nothing), *(written[2:] if columnwise else nothing)


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
