"""The aten table of :class:`GridTensor`: what moves whole blocks acts on data and scales.

An op is carried out here when, in every direction that the tensor holds, the result is made of whole blocks of it;
otherwise it falls back to the dequantized values. What shares a scale counts as one block. A block that has all rows,
or all columns, may be cut in two along them: the parts go on sharing its scale, and know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ottava.layout import as_matrix_shape
from ottava.tensors.aten import OpImplementation, implements
from ottava.tensors.grid import Direction, GridTensor, in_order
from ottava.tensors.tensor_ops import VIEWS, all_or_none, blocks, bounds, new_dtype, on_meta

_aten = torch.ops.aten
# Data and scales of a direction, in the order of the tensor -> those of the result; None where blocks do not allow it.
_Change = Callable[[Direction, bool], Direction | None]


def _on_grid(*ops: Any) -> Callable[[OpImplementation], OpImplementation]:
    """Register an op for tensors whose blocks can be cut; where one scale serves all, any view is data's."""

    def register(function: OpImplementation) -> OpImplementation:
        def run(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
            whole = tensor.grid_layout.block == (None, None)
            return (_moved if whole else function)(op, tensor, *args, **kwargs)

        implements(GridTensor, *ops)(run)
        return function

    return register


def _moved(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    """One scale serves any view, so that moving data is all."""
    held, from_columns = tensor._held()
    data = in_order(held, tensor.grid_layout, from_columns)[0]
    if from_columns and op in VIEWS and tensor.is_contiguous() and not data.is_contiguous():
        # Its rowwise data was dropped since: no view of the transposed data has this shape.
        return NotImplemented
    moved = op(data, *args, **kwargs)
    return [_alias(tensor, held, v, op) for v in moved] if isinstance(moved, list) else _alias(tensor, held, moved, op)


def _alias(tensor: GridTensor, held: Direction, data: torch.Tensor, op: Any) -> GridTensor:
    """A view of ``tensor`` around ``data``, a view of its data: writes to either reach both."""
    rows = tensor._rows()
    view: Any = tensor.around((data, held[1]), None)
    part = rows is None or data.numel() != tensor.numel()
    if op is _aten.as_strided.default and rows is not None:
        part |= data.stride() != rows.stride() or data.storage_offset() != rows.storage_offset()
    # The scale is that of the rest of the tensor too.
    view.mark_view(tensor, part=part)
    columns = tensor.direction(columnwise=True)
    keeps = op in VIEWS and rows is not None and columns is not None and data.dim() > 0 and tensor.dim() > 0
    if keeps and tensor.grid_layout.transposed and data.shape[-1] == tensor.shape[-1] and columns[0].is_contiguous():  # type: ignore[index]
        turned = columns[0].view(data.shape[-1], *data.shape[:-1])  # type: ignore[index]
        view._put((data, held[1]), (turned, columns[1]))  # type: ignore[index]
    return view  # type: ignore[no-any-return]


def _changed(tensor: GridTensor, change: _Change, *, swap: bool = False, alias: bool = True, part: bool = False) -> Any:
    """``tensor`` with every direction changed; ``swap`` exchanges the two."""
    layout = tensor.grid_layout
    made_of: list[Direction | None] = []
    rows = tensor.ordered(columnwise=False)
    for columnwise in (False, True):
        # One buffer that serves both usages is that of the rows.
        source = columnwise != swap and not layout.one_buffer
        held = rows if not source else tensor.ordered(columnwise=True)
        # Columns that are made of rows are made again when they are asked for.
        derived = layout.transposed and layout.square and rows is not None and source
        if held is None or derived or (layout.one_buffer and columnwise):
            made_of.append(None)
            continue
        result = change(held, source)
        if result is None:
            return NotImplemented
        made_of.append(in_order(result, layout, columnwise, back=True))
    turned = {"values_from_columns": not tensor._values_from_columns} if swap else {}
    made = tensor.around(made_of[0], made_of[1], **turned)
    if alias:
        made.mark_view(tensor, part=part)
    return made


def _viewed(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A view of the scales of this shape, if there is one."""
    if tuple(scales.shape) == shape:
        return scales
    try:
        return scales.view(shape)
    except (RuntimeError, ValueError):  # the latter while a graph is traced
        return None


def _reshaped(tensor: GridTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What keeps all elements in their order."""
    old_columns, layout = (tensor.shape[-1] if tensor.dim() else 1), tensor.grid_layout

    def change(held: Direction, columnwise: bool) -> Direction | None:
        try:
            data, scales = function(held[0]), held[1]
        except (RuntimeError, ValueError):
            if columnwise and layout.transposed:
                return None
            raise
        columns = data.shape[-1] if data.dim() else 1
        if columns != old_columns and data.numel():
            rows, side = layout.block_of(columnwise, shared=True)
            # Rows of whole blocks may be joined and cut, what has one scale in all may be anything.
            whole = rows is None and side is None
            if not whole and (rows != 1 or side is None or columns % side or old_columns % side):
                return None
        viewed = _viewed(scales, layout.grid(as_matrix_shape(data.shape), columnwise))
        return None if viewed is None else (data, viewed)

    return _changed(tensor, change)


_SQUEEZES = (_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)


@_on_grid(*VIEWS, *_SQUEEZES, _aten.unsqueeze.default, _aten.expand.default)
def _same_elements(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    if op(on_meta(tensor), *args, **kwargs).numel() != tensor.numel():
        return NotImplemented
    return _reshaped(tensor, lambda data: op(data, *args, **kwargs))


def _narrowed(tensor: GridTensor, dim: int, start: int, stop: int) -> Any:
    """Entries [start, stop) of a dimension."""
    layout, size, last = tensor.grid_layout, tensor.shape[dim], dim == tensor.dim() - 1
    if (start, stop) == (0, size):
        return _changed(tensor, lambda held, _: held)
    at, step = int(last), 1 if last else math.prod(tensor.shape[dim + 1 : -1])
    place = start * step, stop * step, size * step

    def change(held: Direction, columnwise: bool) -> Direction | None:
        data, scales = held[0].narrow(dim, start, stop - start), held[1]
        # What shares a scale has to stay whole, whatever is stored of each block in it.
        block = layout.block_of(columnwise)
        span = blocks(block[at], *place)
        if span is None or blocks(layout.block_of(columnwise, shared=True)[at], *place) is None:
            return None
        if last:
            return data, scales[:, span]
        if block[0] is None or math.prod(tensor.shape[:dim]) == 1:
            return data, scales[span]
        by_entry = _viewed(scales, (*tensor.shape[:-1], scales.shape[1])) if block[0] == 1 else None
        if by_entry is not None:
            by_entry = by_entry.narrow(dim, start, stop - start)
            by_entry = _viewed(by_entry, layout.grid(as_matrix_shape(data.shape), columnwise))
        return None if by_entry is None else (data, by_entry)

    # A write to the part with another scale would change what the rest means.
    spanned = [c for c in (False, True) if layout.block_of(c)[at] is None and tensor.direction(columnwise=c)]
    return _changed(tensor, change, part=bool(spanned))


@_on_grid(_aten.slice.Tensor)
def _slice(
    op: Any, tensor: GridTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    op(on_meta(tensor), dim, start, end, step)  # refuses what torch refuses
    dim %= tensor.dim()
    first, stop, _ = slice(start, end).indices(tensor.shape[dim])
    if step != 1:
        return NotImplemented
    return _narrowed(tensor, dim, first, max(first, stop))


@_on_grid(_aten.select.int)
def _select(op: Any, tensor: GridTensor, dim: int, index: int) -> Any:
    op(on_meta(tensor), dim, index)
    dim %= tensor.dim()
    if dim == tensor.dim() - 1:
        return NotImplemented
    index %= tensor.shape[dim]
    entry = _narrowed(tensor, dim, index, index + 1)
    return entry if entry is NotImplemented else _reshaped(entry, lambda data: data.squeeze(dim))


@_on_grid(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
def _split(op: Any, tensor: GridTensor, sizes: Any, dim: int = 0) -> Any:
    return all_or_none([_narrowed(tensor, dim % tensor.dim(), *own) for own in bounds(op, tensor, sizes, dim)])


@_on_grid(_aten.unbind.int)
def _unbind(op: Any, tensor: GridTensor, dim: int = 0) -> Any:
    op(on_meta(tensor), dim)
    return all_or_none([_select(_aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])])


@_on_grid(_aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose(op: Any, tensor: GridTensor, *args: Any) -> Any:
    # Which dimension comes where, told by strides.
    numbered = torch.empty_strided((2,) * tensor.dim(), tuple(range(tensor.dim())), device="meta")
    order = op(numbered, *args).stride()
    if order == (1, 0):
        # Blocks along the rows of a matrix lie along the columns of its transpose.
        return _changed(tensor, lambda held, _: (held[0].t(), held[1].t()), swap=True)
    if order == tuple(range(tensor.dim())):
        return _changed(tensor, lambda held, _: held)
    return NotImplemented


@implements(GridTensor, _aten.as_strided.default)
def _as_strided(
    op: Any, tensor: GridTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Rows of a contiguous tensor, in another shape; those of a view are of the tensor that it is a view of."""
    offset: Any = tensor.storage_offset() if storage_offset is None else storage_offset
    if tensor.grid_layout.block != (None, None):
        base = tensor if tensor._view_of is None else tensor._view_of
        return _strided_rows(base, tuple(size), tuple(stride), offset - base.storage_offset())
    data = tensor._in_order()
    if data.stride() != tensor.stride():
        # Its rowwise data was dropped since.
        return NotImplemented
    return _moved(op, tensor, size, stride, data.storage_offset() + offset - tensor.storage_offset())


def _strided_rows(tensor: GridTensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    columns = tensor.shape[-1] if tensor.dim() else 1
    wanted = torch.empty(size, device="meta")
    if not tensor.is_contiguous() or wanted.stride() != stride or not columns or offset % columns:
        return NotImplemented
    if wanted.numel() % columns or offset + wanted.numel() > tensor.numel():
        return NotImplemented
    if tensor.dim() == 2:
        rows = _narrowed(tensor, 0, offset // columns, (offset + wanted.numel()) // columns)
    else:
        rows = tensor if wanted.numel() == tensor.numel() else NotImplemented
    return rows if rows is NotImplemented else _reshaped(rows, lambda data: data.view(size))


# Where one scale serves all; no diagonal is made of blocks.
_on_grid(_aten.diagonal.default)(lambda *args, **kwargs: NotImplemented)


@implements(GridTensor, _aten.clone.default)
def _clone(op: Any, tensor: GridTensor, *, memory_format: Any = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented

    def cloned(held: Direction, columnwise: bool) -> Direction:
        return held[0].clone(memory_format=memory_format), held[1].clone()

    copied = _changed(tensor, cloned, alias=False)
    copied.update_quantizer(tensor._copied_quantizer())
    return copied


@implements(GridTensor, _aten.new_zeros.default, _aten.new_empty.default, _aten.new_empty_strided.default)
def _new(op: Any, tensor: GridTensor, shape: Sequence[int], *strides: Any, **kwargs: Any) -> Any:
    """A tensor of another shape with the directions of this one."""
    dtype, layout = new_dtype(tensor, kwargs), tensor.grid_layout
    device = torch.device(kwargs.get("device") or tensor.device)
    whole = layout.block == (None, None)
    contiguous = not strides or torch.empty(tuple(shape), device="meta").stride() == tuple(strides[0])
    if dtype is None or not (whole or contiguous):
        return NotImplemented

    def made(shape: Sequence[int], dtype: torch.dtype, *strides: Any) -> torch.Tensor:
        # A byte of 0 is the value 0 with any scale, so that new_zeros may do with data as it does with values.
        empty = op if strides or op is _aten.new_zeros.default else _aten.new_empty.default
        return empty(torch.empty(0, dtype=dtype, device=device), shape, *strides)  # type: ignore[no-any-return]

    sides: list[Direction | None] = []
    for columnwise in (False, True):
        held = tensor.direction(columnwise=columnwise)
        if layout.one_buffer or (layout.square and layout.transposed):
            # Columns are rows, or are made of them.
            held = None if columnwise else tensor._held()[0]
        if held is None:
            sides.append(None)
            continue
        data = made(layout.data_shape(shape, columnwise), torch.uint8, *(strides if whole else ()))
        old, size = held[1], tuple(held[1].shape) if whole else layout.scale_shape(shape, columnwise)
        # What all rows have in common stays: rows of this tensor can be copied into rows of the new one.
        spans = layout.block_of(columnwise)[0] is None and tuple(old.shape) == size
        kept = spans and (device.type == "meta" or not old.is_meta)
        sides.append((data, old.to(device, copy=True) if kept else made(size, layout.stored_scale).fill_(1)))
    return tensor.around(*sides, dtype=dtype, quantizer=tensor._copied_quantizer())


# zeros_like is not here: optimizers make their moments with it, and moments in FP8 are wrong.
@implements(GridTensor, _aten.empty_like.default)
def _empty_like(op: Any, tensor: GridTensor, **kwargs: Any) -> Any:
    return _new(_aten.new_empty.default, tensor, tensor.shape, **kwargs)
