"""The aten table of :class:`MXFP8Tensor`: what moves whole blocks acts on data and scales.

An op is carried out here when, in every direction that the tensor holds, the result is made of whole blocks of it;
otherwise it falls back to the dequantized values. A square block counts as one in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ottava.formats import MX_BLOCK, mx_scale_shapes
from ottava.tensors import implements
from ottava.tensors.tensor_ops import bounds, new_dtype
from ottava.torch_private import aten_overloads
from ottava_mxfp8.tensors.storage import Direction
from ottava_mxfp8.tensors.tensor import MXFP8Tensor

_aten = torch.ops.aten
# Data and scales of a direction -> those of the result; None where blocks do not allow it.
_Change = Callable[[Direction, bool], Direction | None]


def _changed(tensor: MXFP8Tensor, change: _Change, *, swap: bool = False, alias: bool = True) -> Any:
    """``tensor`` with every direction changed; ``swap`` exchanges the two."""
    results: dict[bool, Direction | None] = {}
    for columnwise in (False, True):
        held = tensor.direction(columnwise=columnwise)
        result = None if held is None else change(held, columnwise)
        if held is not None and result is None:
            return NotImplemented
        results[columnwise != swap] = result
    rows, columns = results[False] or (None, None), results[True] or (None, None)
    made = MXFP8Tensor(
        dtype=tensor.dtype,
        rowwise_data=rows[0],
        rowwise_scale_inv=rows[1],
        columnwise_data=columns[0],
        columnwise_scale_inv=columns[1],
        fp8_dtype=tensor._fp8_dtype,
        with_2d_quantization=tensor._with_2d_quantization,
        values_from_columns=tensor._values_from_columns != swap,
        quantizer=tensor._quantizer,
    )
    if alias:
        made.share_writes(tensor)
        made.mark_view(tensor)
    return made


def _viewed(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    """A view of the scales of this shape, if there is one."""
    if tuple(scales.shape) == shape:
        return scales
    try:
        return scales.view(shape)
    except RuntimeError:
        return None


def _reshaped(tensor: MXFP8Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What keeps all elements in their order."""
    old_columns = tensor.shape[-1] if tensor.dim() else 1

    def change(held: Direction, columnwise: bool) -> Direction | None:
        data, scales = function(held[0]), held[1]
        columns = data.shape[-1] if data.dim() else 1
        if columns != old_columns and data.numel():
            # Rows of whole blocks may be joined and cut; columns, and squares, may not.
            square = tensor._with_2d_quantization
            if columnwise or square or columns % MX_BLOCK or old_columns % MX_BLOCK:
                return None
        viewed = _viewed(scales, mx_scale_shapes(data.shape)[int(columnwise)])
        return None if viewed is None else (data, viewed)

    return _changed(tensor, change)


@implements(MXFP8Tensor, _aten.view.default, *aten_overloads("_unsafe_view"))
def _view(op: Any, tensor: MXFP8Tensor, shape: Any) -> Any:
    return _reshaped(tensor, lambda data: op(data, shape))


@implements(
    MXFP8Tensor,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.expand.default,
)
def _same_elements(op: Any, tensor: MXFP8Tensor, *args: Any, **kwargs: Any) -> Any:
    shape = op(torch.empty(tensor.shape, device="meta"), *args, **kwargs).shape
    if shape.numel() != tensor.numel():
        return NotImplemented
    return _reshaped(tensor, lambda data: op(data, *args, **kwargs))


def _on_boundary(start: int, stop: int, size: int) -> bool:
    return start % MX_BLOCK == 0 and (stop % MX_BLOCK == 0 or stop == size)


def _rows_on_boundary(tensor: MXFP8Tensor, dim: int, start: int, stop: int) -> bool:
    """Whether entries [start, stop) of a leading dimension are whole rows of blocks."""
    each = math.prod(tensor.shape[dim + 1 : -1])
    before = math.prod(tensor.shape[:dim])
    return before == 1 and _on_boundary(start * each, stop * each, tensor.shape[dim] * each)


def _narrowed(tensor: MXFP8Tensor, dim: int, start: int, stop: int) -> Any:
    """Entries [start, stop) of a dimension."""
    last = tensor.dim() - 1
    square = tensor._with_2d_quantization
    whole = start == 0 and stop == tensor.shape[dim]

    def change(held: Direction, columnwise: bool) -> Direction | None:
        data, scales = held
        if whole:
            return held
        cut = data.narrow(dim, start, stop - start)
        if dim == last:
            if columnwise and not (square and not _on_boundary(start, stop, tensor.shape[dim])):
                return cut, scales[:, start:stop]
            if not columnwise and _on_boundary(start, stop, tensor.shape[dim]):
                return cut, scales[:, start // MX_BLOCK : -(-stop // MX_BLOCK)]
            return None
        if (columnwise or square) and not _rows_on_boundary(tensor, dim, start, stop):
            return None
        if columnwise:
            each = math.prod(tensor.shape[dim + 1 : -1])
            return cut, scales[start * each // MX_BLOCK : -(-stop * each // MX_BLOCK)]
        by_entry = _leading(scales, tensor)
        rows = None if by_entry is None else by_entry.narrow(dim, start, stop - start)
        viewed = None if rows is None else _viewed(rows, mx_scale_shapes(cut.shape)[0])
        return None if viewed is None else (cut, viewed)

    return _changed(tensor, change)


def _leading(scales: torch.Tensor, tensor: MXFP8Tensor) -> torch.Tensor | None:
    """Scales of rows ``[M, blocks]`` with the tensor's leading dimensions."""
    try:
        return scales.view(*tensor.shape[:-1], scales.shape[1])
    except RuntimeError:
        return None


@implements(MXFP8Tensor, _aten.slice.Tensor)
def _slice(
    op: Any, tensor: MXFP8Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    op(torch.empty(tensor.shape, device="meta"), dim, start, end, step)  # refuses what torch refuses
    dim %= tensor.dim()
    first, stop, _ = slice(start, end).indices(tensor.shape[dim])
    if step != 1:
        return NotImplemented
    return _narrowed(tensor, dim, first, max(first, stop))


@implements(MXFP8Tensor, _aten.select.int)
def _select(op: Any, tensor: MXFP8Tensor, dim: int, index: int) -> Any:
    op(torch.empty(tensor.shape, device="meta"), dim, index)
    dim %= tensor.dim()
    if dim == tensor.dim() - 1:
        return NotImplemented
    index %= tensor.shape[dim]
    entry = _narrowed(tensor, dim, index, index + 1)
    return entry if entry is NotImplemented else _reshaped(entry, lambda data: data.squeeze(dim))


def _all_or_none(views: list[Any]) -> Any:
    return NotImplemented if any(view is NotImplemented for view in views) else views


@implements(MXFP8Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
def _split(op: Any, tensor: MXFP8Tensor, sizes: Any, dim: int = 0) -> Any:
    cuts = bounds(op, tensor.shape[dim], sizes)
    return _all_or_none([_narrowed(tensor, dim % tensor.dim(), *own) for own in cuts])


@implements(MXFP8Tensor, _aten.unbind.int)
def _unbind(op: Any, tensor: MXFP8Tensor, dim: int = 0) -> Any:
    op(torch.empty(tensor.shape, device="meta"), dim)
    return _all_or_none([_select(_aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])])


@implements(MXFP8Tensor, _aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose(op: Any, tensor: MXFP8Tensor, *args: Any) -> Any:
    # Which dimension comes where, told by strides.
    numbered = torch.empty_strided((2,) * tensor.dim(), tuple(range(tensor.dim())), device="meta")
    order = op(numbered, *args).stride()
    if order == (1, 0):
        # Blocks along the rows of a matrix lie along the columns of its transpose.
        return _changed(tensor, lambda held, _: (held[0].t(), held[1].t()), swap=True)
    if order == tuple(range(tensor.dim())):
        return _changed(tensor, lambda held, _: held)
    return NotImplemented


@implements(MXFP8Tensor, _aten.as_strided.default)
def _as_strided(
    op: Any, tensor: MXFP8Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Rows of a contiguous tensor, in another shape; those of a view are of the tensor that it is a view of."""
    offset: Any = tensor.storage_offset() if storage_offset is None else storage_offset
    base = tensor if tensor._view_of is None else tensor._view_of
    return _strided_rows(base, tuple(size), tuple(stride), offset - base.storage_offset())


def _strided_rows(tensor: MXFP8Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
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


@implements(MXFP8Tensor, _aten.clone.default)
def _clone(op: Any, tensor: MXFP8Tensor, *, memory_format: Any = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    quantizer = None if tensor._quantizer is None else tensor._quantizer.copy()
    copied = _changed(
        tensor, lambda held, _: (held[0].clone(memory_format=memory_format), held[1].clone()), alias=False
    )
    copied.update_quantizer(quantizer)
    return copied


def _new(tensor: MXFP8Tensor, shape: Sequence[int], make: Any, kwargs: dict[str, Any]) -> Any:
    """A tensor of another shape with the directions of this one; ``make`` gives data and scales."""
    dtype = new_dtype(tensor, kwargs)
    if dtype is None:
        return NotImplemented
    device = kwargs.get("device") or tensor.device
    scale_shapes = mx_scale_shapes(shape)

    def change(held: Direction, columnwise: bool) -> Direction:
        return tuple(make(tuple(s), dtype=torch.uint8, device=device) for s in (shape, scale_shapes[int(columnwise)]))

    made = _changed(tensor, change, alias=False)
    made.update_quantizer(None if tensor._quantizer is None else tensor._quantizer.copy())
    return made if dtype == tensor.dtype else made.make_like(made, dtype=dtype)


@implements(MXFP8Tensor, _aten.new_zeros.default)
def _new_zeros(op: Any, tensor: MXFP8Tensor, shape: Any, **kwargs: Any) -> Any:
    # A byte of 0 is the value 0 with any scale.
    return _new(tensor, shape, torch.zeros, kwargs)


@implements(MXFP8Tensor, _aten.new_empty.default)
def _new_empty(op: Any, tensor: MXFP8Tensor, shape: Any, **kwargs: Any) -> Any:
    return _new(tensor, shape, torch.empty, kwargs)


@implements(MXFP8Tensor, _aten.new_empty_strided.default)
def _new_empty_strided(op: Any, tensor: MXFP8Tensor, shape: Any, stride: Any, **kwargs: Any) -> Any:
    if torch.empty(tuple(shape), device="meta").stride() != tuple(stride):
        return NotImplemented
    return _new(tensor, shape, torch.empty, kwargs)


# zeros_like is not here: optimizers make their moments with it, and moments in FP8 are wrong.
@implements(MXFP8Tensor, _aten.empty_like.default)
def _empty_like(op: Any, tensor: MXFP8Tensor, **kwargs: Any) -> Any:
    return _new(tensor, tensor.shape, torch.empty, kwargs)
