"""Kernels for layers, which check nothing a second time and allocate no result that nobody reads.

On a CPU one call of the compiled module reads the operand, allocates the results and writes them.
The module returns None where dispatch is observed, or where an operand is not plain memory of the
CPU (:mod:`ottava.kernels.direct`). Then the operator does the same from Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ottava.errors import OptionError
from ottava.formats import ELEMENTS, FP8
from ottava.kernels import backends, table
from ottava.kernels.checks import Tensor, check_scalar
from ottava.layout import Layout
from ottava.torch_private import graph_task_id

if TYPE_CHECKING:
    # At run time the module is loaded when a backend is chosen: it may be missing.
    from ottava.kernels.cpu import CPUBackend

#: Data and scales of rows, then data and scales of columns; None for a direction that the caller
#: does not ask for. With one scale for the tensor both directions have the same scale.
SideTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_ABSENT = None, None
_LARGEST_SEED = 2**63 - 1
# The seed of :func:`fixed_seed`. Every thread reads it, because the backward pass has its own.
_fixed_seed: int | None = None
# Other tracers need no test, because the module declines their tensors.
_is_compiling = torch.compiler.is_dynamo_compiling
_CODES = {dtype: ELEMENTS[dtype].code for dtype in FP8}


def compiled_cpu() -> CPUBackend | None:
    """The compiled backend of the CPU, for calls of its module that no operator of torch hides.

    None before the first kernel has chosen it, where another backend serves the CPU, and in code
    that Dynamo traces, which cannot call compiled modules.
    """
    if _is_compiling() or backends._chosen.get("cpu") != "cpu":
        return None
    return backends._loaded["cpu"]  # type: ignore[return-value]


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    rowwise: bool,
    transposed: bool,
) -> SideTensors:
    """:func:`ottava.kernels.quantize`; data of columns are the transpose."""
    cpu = compiled_cpu()
    if cpu is not None:
        quantized: SideTensors | None = cpu.native.quantize_operand(
            x, _CODES[fp8_dtype], epsilon, force_pow_2, rowwise, transposed
        )
        if quantized is not None:
            return quantized
    data, transpose, _, scale_inv, _ = table.quantize.for_layer(
        x, fp8_dtype, epsilon, force_pow_2, rowwise, transposed
    )
    return _directions(rowwise, data, scale_inv, transposed, transpose, scale_inv)


def cast(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    saturated: Tensor | None,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    transposed: bool,
) -> SideTensors:
    """Quantize with a known scale; with ``amax`` as :func:`ottava.kernels.cast_amax`.

    Raises:
        DTypeError, ShapeError, DeviceError: the scale, the amax or the counter has another dtype,
            number of elements or device than it should. They are checked at every call, because
            kernels read and write them by address, and a user can replace a quantizer's state at
            any time.
    """
    cpu = compiled_cpu()
    if cpu is not None:
        quantized: SideTensors | None = cpu.native.cast_operand(
            x, scale, amax, saturated, _CODES[fp8_dtype], rowwise, transposed, -1
        )
        if quantized is not None:
            return quantized
    _check_state(x, scale, "scale", torch.float32)
    _check_state(x, amax, "amax", torch.float32)
    _check_state(x, saturated, "saturated", torch.int64)
    data, transpose, scale_inv = table.cast_amax.for_layer(
        x, scale, amax, saturated, fp8_dtype, rowwise, transposed
    )
    return _directions(rowwise, data, scale_inv, transposed, transpose, scale_inv)


def cast_slot(
    x: Tensor,
    buffers: Mapping[str, Tensor],
    slot: int,
    recording: bool,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    transposed: bool,
) -> SideTensors:
    """:func:`cast` with the scale of a slot of a layer's state.

    Args:
        buffers: ``scale [slots]``, ``amax_history [steps, slots]``, whose first row is that of this
            step, and ``saturated [slots]``.
        recording: whether the slot's amax and counter are updated.
    """
    scale, amax, saturated = buffers["scale"], None, None
    if recording:
        amax, saturated = buffers["amax_history"], buffers["saturated"]
    cpu = compiled_cpu()
    if cpu is not None:
        quantized: SideTensors | None = cpu.native.cast_operand(
            x, scale, amax, saturated, _CODES[fp8_dtype], rowwise, transposed, slot
        )
        if quantized is not None:
            return quantized
    if amax is not None and saturated is not None:
        amax, saturated = amax[0, slot], saturated[slot]
    return cast(x, scale[slot], amax, saturated, fp8_dtype, rowwise, transposed)


def _check_state(x: Tensor, state: Tensor | None, name: str, dtype: torch.dtype) -> None:
    if state is None:
        return
    if state.dtype is dtype and state.device == x.device and state.numel() == 1:
        return
    check_scalar(state, x, name, dtype)


def grid_quantize(x: Tensor, text: str, rowwise: bool, columnwise: bool) -> SideTensors:
    """:func:`ottava.kernels.grid_quantize` for the layout with this text."""
    cpu = compiled_cpu()
    plan = None if cpu is None else cpu.plan(text)
    if cpu is not None and plan is not None:
        quantized: SideTensors | None = cpu.native.grid_quantize_operand(
            x, plan, rowwise, columnwise
        )
        if quantized is not None:
            return quantized
    data, scales, column_data, column_scales = table.grid_quantize.for_layer(
        x, text, rowwise, columnwise
    )
    return _directions(rowwise, data, scales, columnwise, column_data, column_scales)


#: Data, scales and the amaxes of the second level of one direction. The amaxes are None in a layout
#: without a second level.
LevelTensors = tuple[Tensor, Tensor, Tensor | None]


def grid_quantize_levels(
    x: Tensor,
    text: str,
    rowwise: bool,
    columnwise: bool,
    seed: Tensor | None = None,
    first_row: int = 0,
) -> tuple[LevelTensors | None, LevelTensors | None]:
    """:func:`ottava.kernels.grid_quantize_levels` for the layout with this text: rows and columns.

    A seed of stochastic rounding that is not given is drawn from torch's generator of the device.
    """
    layout = Layout.of(text)
    if layout.stochastic and seed is None:
        seed = draw_seed(x.device)
    results = table.grid_quantize_levels.for_layer(x, seed, first_row, text, rowwise, columnwise)
    rows, columns = (
        _levels(results[start : start + 3], layout) if is_requested else None
        for start, is_requested in ((0, rowwise), (3, columnwise))
    )
    return rows, columns


def _levels(results: Sequence[Tensor | None], layout: Layout) -> LevelTensors:
    data, scales, amax = results
    assert data is not None
    assert scales is not None
    # Operators return an empty tensor where there is no second level.
    return data, scales, None if layout.second_level == "none" else amax


@contextmanager
def fixed_seed(seed: int = 0) -> Iterator[None]:
    """Let all stochastic rounding in this block use one seed, so that equal tensors give equal
    bytes.

    Torch's generators are not advanced. The seed holds for all threads, and is a constant of code
    that is compiled in the block. For tests: errors of equal values are then equal, too.

    Raises:
        OptionError: ``seed`` is no integer from 0 to 2^63 - 1.
    """
    global _fixed_seed
    if type(seed) is not int or not 0 <= seed <= _LARGEST_SEED:
        raise OptionError(f"the seed is {seed!r}", expected="an integer from 0 to 2**63 - 1")
    outer, _fixed_seed = _fixed_seed, seed
    try:
        yield
    finally:
        _fixed_seed = outer


def draw_seed(device: torch.device) -> Tensor:
    """A seed for stochastic rounding: 63 random bits of torch's generator of the device.

    Recomputation under activation checkpointing, which restores that generator, draws it again.
    Inside of :func:`fixed_seed` it is the seed of the block.
    """
    if _fixed_seed is not None:
        return torch.full((), _fixed_seed, dtype=torch.int64, device=device)
    return torch.randint(_LARGEST_SEED, (), dtype=torch.int64, device=device)


def _directions(
    rowwise: bool,
    data: Tensor | None,
    scales: Tensor | None,
    columnwise: bool,
    column_data: Tensor | None,
    column_scales: Tensor | None,
) -> SideTensors:
    """The results with None for a direction that the caller does not ask for.

    Operators return empty tensors there, because they cannot return None.
    """
    if not rowwise:
        data, scales = _ABSENT
    if not columnwise:
        column_data, column_scales = _ABSENT
    return data, scales, column_data, column_scales


def update_slots(
    scales: Sequence[Tensor],
    histories: Sequence[Tensor],
    maxima: Sequence[float],
    most_recent: bool,
    own: bool,
) -> bool:
    """:func:`ottava.kernels.update_scales` in one call of the compiled module.

    Args:
        own: whether the tensors are buffers of layers' states, which the module checks less.

    Returns:
        Whether the module has updated the tensors. If not, they are unchanged, and
        :func:`ottava.kernels.update_scales` does it or raises an error.
    """
    cpu = compiled_cpu()
    if cpu is None or graph_task_id() != -1:
        return False
    return bool(cpu.native.update_slots(scales, histories, maxima, most_recent, own))
