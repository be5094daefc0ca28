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

from ottava.layout import Block, as_matrix_shape
from ottava.tensors.aten import OpImplementation, implements
from ottava.tensors.grid import Direction, GridTensor, in_order, stored
from ottava.tensors.tensor_ops import bounds, new_dtype
from ottava.torch_private import aten_overloads

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
    if from_columns and op in _VIEWS and tensor.is_contiguous() and not data.is_contiguous():
        # Its rowwise data was dropped since: no view of the transposed data has this shape.
        return NotImplemented
    moved = op(data, *args, **kwargs)
    return [_alias(tensor, held, v, op) for v in moved] if isinstance(moved, list) else _alias(tensor, held, moved, op)


def _alias(tensor: GridTensor, held: Direction, data: torch.Tensor, op: Any) -> GridTensor:
    """A view of ``tensor`` around ``data``, a view of its data: writes to either reach both."""
    rows = tensor._rows()
    metadata = tensor.get_metadata() | tensor.arguments_of((data, held[1]), None) | {"shape": None}
    view: Any = type(tensor)(**metadata)
    view._writes = tensor._writes
    view.mark_view(tensor)
    less = rows is None or data.numel() != tensor.numel()
    if op is _aten.as_strided.default and rows is not None:
        less |= data.stride() != rows.stride() or data.storage_offset() != rows.storage_offset()
    # The scale is that of the rest of the tensor too.
    view._whole = tensor if tensor._whole is None and less else tensor._whole
    columns = tensor.direction(columnwise=True)
    keeps = op in _VIEWS and rows is not None and columns is not None and data.dim() > 0 and tensor.dim() > 0
    if keeps and tensor.grid_layout.transposed and data.shape[-1] == tensor.shape[-1] and columns[0].is_contiguous():  # type: ignore[index]
        turned = columns[0].view(data.shape[-1], *data.shape[:-1])  # type: ignore[index]
        view._put((data, held[1]), (turned, columns[1]))  # type: ignore[index]
    return view  # type: ignore[no-any-return]


def _changed(tensor: GridTensor, change: _Change, *, swap: bool = False, alias: bool = True) -> Any:
    """``tensor`` with every direction changed; ``swap`` exchanges the two."""
    layout, made_of = tensor.grid_layout, []
    rows = tensor.ordered(columnwise=False)
    for columnwise in (False, True):
        # One buffer that serves both usages is that of the rows.
        source = columnwise != swap and layout.columnwise != "same"
        held = rows if not source else tensor.ordered(columnwise=True)
        # Columns that are made of rows are made again when they are asked for.
        derived = layout.transposed and layout.square and rows is not None and source
        derived |= layout.columnwise == "same" and columnwise
        result = None if held is None or derived else change(held, source)
        if held is not None and result is None and not derived:
            return NotImplemented
        made_of.append(None if result is None else stored(result, layout, columnwise))
    metadata = tensor.get_metadata() | tensor.arguments_of(*made_of) | {"shape": None}
    if swap:
        metadata["values_from_columns"] = not tensor._values_from_columns
    made = type(tensor)(**metadata)
    if alias:
        made.share_writes(tensor)
        made.mark_view(tensor)
        made._whole = tensor._whole
    return made


def _viewed(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    """A view of the scales of this shape, if there is one."""
    if tuple(scales.shape) == shape:
        return scales
    try:
        return scales.view(shape)
    except RuntimeError:
        return None


def _reshaped(tensor: GridTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What keeps all elements in their order."""
    old_columns, layout = (tensor.shape[-1] if tensor.dim() else 1), tensor.grid_layout

    def change(held: Direction, columnwise: bool) -> Direction | None:
        try:
            data, scales = function(held[0]), held[1]
        except RuntimeError:
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


_VIEWS = (_aten.view.default, *aten_overloads("_unsafe_view"))


@_on_grid(*_VIEWS)
def _view(op: Any, tensor: GridTensor, shape: Any) -> Any:
    return _reshaped(tensor, lambda data: op(data, shape))


@_on_grid(
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.expand.default,
)
def _same_elements(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    shape = op(torch.empty(tensor.shape, device="meta"), *args, **kwargs).shape
    if shape.numel() != tensor.numel():
        return NotImplemented
    return _reshaped(tensor, lambda data: op(data, *args, **kwargs))


def _blocks(side: int | None, start: int, stop: int, size: int) -> slice | None:
    """The blocks of entries [start, stop) of a side of a matrix; None where they cut one in two."""
    if side is None:
        return slice(None)
    if start % side or (stop % side and stop != size):
        return None
    return slice(start // side, -(-stop // side))


def _narrowed(tensor: GridTensor, dim: int, start: int, stop: int) -> Any:
    """Entries [start, stop) of a dimension."""
    layout, last = tensor.grid_layout, tensor.dim() - 1
    each, before = math.prod(tensor.shape[dim + 1 : -1]), math.prod(tensor.shape[:dim])
    size, at = tensor.shape[dim], int(dim == last)
    whole = start == 0 and stop == size

    def change(held: Direction, columnwise: bool) -> Direction | None:
        data, scales = held
        if whole:
            return held
        cut = data.narrow(dim, start, stop - start)
        # Squares have to stay whole, whatever is stored of each.
        common: Block = layout.block_of(columnwise, shared=True)
        block: Block = layout.block_of(columnwise)
        step = 1 if dim == last else each
        if _blocks(common[at], start * step, stop * step, size * step) is None:
            return None
        span = _blocks(block[at], start * step, stop * step, size * step)
        if span is None:
            return None
        if dim == last:
            return cut, scales[:, span]
        if before == 1 or block[0] is None:
            return cut, scales[span]
        by_entry = None if block[0] != 1 else _leading(scales, tensor)
        rows = None if by_entry is None else by_entry.narrow(dim, start, stop - start)
        viewed = None if rows is None else _viewed(rows, layout.grid(as_matrix_shape(cut.shape), columnwise))
        return None if viewed is None else (cut, viewed)

    made = _changed(tensor, change)
    if made is not NotImplemented and not whole and made._whole is None:
        held = [c for c in (False, True) if made.direction(columnwise=c) is not None]
        if any(layout.block_of(columnwise)[at] is None for columnwise in held):
            # A write to the part with another scale would change what the rest means.
            made._whole = tensor
    return made


def _leading(scales: torch.Tensor, tensor: GridTensor) -> torch.Tensor | None:
    """Scales of rows ``[M, blocks]`` with the tensor's leading dimensions."""
    try:
        return scales.view(*tensor.shape[:-1], scales.shape[1])
    except RuntimeError:
        return None


@_on_grid(_aten.slice.Tensor)
def _slice(
    op: Any, tensor: GridTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    op(torch.empty(tensor.shape, device="meta"), dim, start, end, step)  # refuses what torch refuses
    dim %= tensor.dim()
    first, stop, _ = slice(start, end).indices(tensor.shape[dim])
    if step != 1:
        return NotImplemented
    return _narrowed(tensor, dim, first, max(first, stop))


@_on_grid(_aten.select.int)
def _select(op: Any, tensor: GridTensor, dim: int, index: int) -> Any:
    op(torch.empty(tensor.shape, device="meta"), dim, index)
    dim %= tensor.dim()
    if dim == tensor.dim() - 1:
        return NotImplemented
    index %= tensor.shape[dim]
    entry = _narrowed(tensor, dim, index, index + 1)
    return entry if entry is NotImplemented else _reshaped(entry, lambda data: data.squeeze(dim))


def _all_or_none(views: list[Any]) -> Any:
    return NotImplemented if any(view is NotImplemented for view in views) else views


@_on_grid(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
def _split(op: Any, tensor: GridTensor, sizes: Any, dim: int = 0) -> Any:
    cuts = bounds(op, tensor.shape[dim], sizes)
    return _all_or_none([_narrowed(tensor, dim % tensor.dim(), *own) for own in cuts])


@_on_grid(_aten.unbind.int)
def _unbind(op: Any, tensor: GridTensor, dim: int = 0) -> Any:
    op(torch.empty(tensor.shape, device="meta"), dim)
    return _all_or_none([_select(_aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])])


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
    view = op(data, size, stride, data.storage_offset() + offset - tensor.storage_offset())
    return _alias(tensor, tensor._held()[0], view, op)


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


@_on_grid(_aten.diagonal.default)
def _diagonal(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented


@implements(GridTensor, _aten.clone.default)
def _clone(op: Any, tensor: GridTensor, *, memory_format: Any = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented

    def cloned(held: Direction, columnwise: bool) -> Direction:
        return held[0].clone(memory_format=memory_format), held[1].clone()

    copied = _changed(tensor, cloned, alias=False)
    copied.update_quantizer(None if tensor._quantizer is None else tensor._quantizer.copy())
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
        if layout.square and layout.columnwise != "own":
            # Columns are rows, or are made of them.
            held = None if columnwise else tensor._held()[0]
        if held is None:
            sides.append(None)
            continue
        data = made(layout.data_shape(shape, columnwise), torch.uint8, *(strides if whole else ()))
        old, size = held[1], () if whole and not held[1].dim() else layout.scale_shape(shape, columnwise)
        # What all rows have in common stays: rows of this tensor can be copied into rows of the new one.
        spans = layout.block_of(columnwise)[0] is None and tuple(old.shape) == size
        kept = spans and (device.type == "meta" or not old.is_meta)
        scales = old.to(device, copy=True) if kept else made(size, layout.stored_scale).fill_(1)
        sides.append((data, scales))
    metadata = tensor.get_metadata() | tensor.arguments_of(*sides) | {"shape": None, "dtype": dtype}
    return type(tensor)(**(metadata | {"quantizer": None if tensor._quantizer is None else tensor._quantizer.copy()}))


# zeros_like is not here: optimizers make their moments with it, and moments in FP8 are wrong.
@implements(GridTensor, _aten.empty_like.default)
def _empty_like(op: Any, tensor: GridTensor, **kwargs: Any) -> Any:
    return _new(_aten.new_empty.default, tensor, tensor.shape, **kwargs)
