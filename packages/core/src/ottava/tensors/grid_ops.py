"""The aten table of :class:`GridTensor`, beside that of all classes.

An op is carried out here when, in every direction that the tensor holds, the result is made of whole blocks of it;
otherwise it falls back to the dequantized values.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ottava.tensors.aten import implements
from ottava.tensors.grid import Direction, GridTensor, in_order
from ottava.tensors.tensor_ops import SHAPES, SPLITS, VIEWS, new_dtype

_aten = torch.ops.aten


@implements(
    GridTensor,
    *(*SHAPES, *SPLITS, _aten.slice.Tensor, _aten.select.int, _aten.unbind.int),
    *(_aten.as_strided.default, _aten.diagonal.default),
)
def _moved(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    """One scale serves any view, so that moving data is all."""
    if tensor.grid_layout.block != (None, None):
        return NotImplemented
    held, from_columns = tensor._held()
    data = in_order(held, tensor.grid_layout, from_columns)[0]
    if op is _aten.as_strided.default:
        size, stride, offset, *_ = (*args, None)
        args = size, stride, data.storage_offset() + (0 if offset is None else offset - tensor.storage_offset())
        dropped = data.stride() != tensor.stride()
    else:
        dropped = from_columns and op in VIEWS and tensor.is_contiguous() and not data.is_contiguous()
    if dropped:
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


@implements(GridTensor, _aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose(op: Any, tensor: GridTensor, *args: Any) -> Any:
    if tensor.grid_layout.block == (None, None):
        return _moved(op, tensor, *args)
    # Which dimension comes where, told by strides.
    numbered = torch.empty_strided((2,) * tensor.dim(), tuple(range(tensor.dim())), device="meta")
    order = op(numbered, *args).stride()
    if order == (1, 0):
        # Blocks along the rows of a matrix lie along the columns of its transpose.
        return tensor.changed(lambda held, _: (held[0].t(), held[1].t()), swap=True)
    return tensor.changed(lambda held, _: held) if order == tuple(range(tensor.dim())) else NotImplemented


@implements(GridTensor, _aten.clone.default)
def _clone(op: Any, tensor: GridTensor, *, memory_format: Any = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    copied = tensor.changed(lambda held, _: (held[0].clone(memory_format=memory_format), held[1].clone()), alias=False)
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
