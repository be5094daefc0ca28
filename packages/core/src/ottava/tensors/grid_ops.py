"""The aten table of :class:`GridTensor`, beside that of all classes.

An op is carried out here when, in every direction that the tensor holds, the result is made of whole blocks of it;
otherwise it falls back to the dequantized values.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ottava.tensors.aten import implements
from ottava.tensors.grid import Direction, GridTensor
from ottava.tensors.tensor_ops import new_dtype

_aten = torch.ops.aten


@implements(GridTensor, _aten.slice.Tensor, _aten.expand.default, _aten.diagonal.default, _aten.as_strided.default)
def _moved(op: Any, tensor: GridTensor, *args: Any, **kwargs: Any) -> Any:
    """Where one scale serves all, any view is one of the data."""
    if tensor.grid_layout.block != (None, None):
        return NotImplemented
    strided = op is _aten.as_strided.default
    if strided:
        data, (size, stride, offset, *_) = tensor._in_order(), (*args, None)
        if data.stride() != tensor.stride():
            # Its rowwise data was dropped since.
            return NotImplemented
        args = size, stride, data.storage_offset() + (0 if offset is None else offset - tensor.storage_offset())
    return tensor.changed(lambda held, _: (op(held[0], *args, **kwargs), held[1]), part=strided)


@implements(GridTensor, _aten.t.default, _aten.transpose.int, _aten.permute.default)
def _transpose(op: Any, tensor: GridTensor, *args: Any) -> Any:
    # Which dimension comes where, told by strides.
    numbered = torch.empty_strided((2,) * tensor.dim(), tuple(range(tensor.dim())), device="meta")
    order = op(numbered, *args).stride()
    if tensor.grid_layout.block == (None, None) or order == tuple(range(tensor.dim())):
        return tensor.changed(lambda held, _: (op(held[0], *args), held[1]))
    # Blocks along the rows of a matrix lie along the columns of its transpose.
    swap = order == (1, 0)
    return tensor.changed(lambda held, _: (held[0].t(), held[1].t()), swap=True) if swap else NotImplemented


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
implements(GridTensor, _aten.empty_like.default)(
    lambda op, tensor, **kwargs: _new(_aten.new_empty.default, tensor, tensor.shape, **kwargs)
)
