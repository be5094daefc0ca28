"""The aten table of :class:`Float8Tensor`: one scale serves any view, so data movement acts on the data."""

from __future__ import annotations

from typing import Any

import torch

from ottava.tensors.aten import implements
from ottava.tensors.float8 import Float8Tensor
from ottava.tensors.tensor_ops import new_dtype
from ottava.torch_private import aten_overloads

_aten = torch.ops.aten


def _alias(
    tensor: Float8Tensor, data: torch.Tensor, *, transpose: torch.Tensor | None = None, less: bool = False
) -> Float8Tensor:
    """A view of ``tensor`` around ``data``, a view of its data: writes to either reach both."""
    view = Float8Tensor(
        dtype=tensor.dtype,
        data=data,
        fp8_dtype=tensor._fp8_dtype,
        fp8_scale_inv=tensor._scale_inv,
        quantizer=tensor._quantizer,
    )
    view._writes = tensor._writes
    view._transpose = transpose
    # The scale is that of the rest of the tensor too, and transposed data is a copy of nothing that a view has.
    less = less or tensor._data is None or data.numel() != tensor.numel()
    view._whole = tensor if tensor._whole is None and less else tensor._whole
    view.mark_view(tensor)
    return view


@implements(Float8Tensor, _aten.view.default, *aten_overloads("_unsafe_view"))
def _view(op: Any, tensor: Float8Tensor, shape: Any) -> Any:
    data = tensor._in_order()
    if tensor._data is None and tensor.is_contiguous() and not data.is_contiguous():
        # Its rowwise data was dropped since: no view of the transposed data has this shape.
        return NotImplemented
    viewed = op(data, shape)
    transpose = tensor._transpose if tensor._data is not None else None
    keeps_columns = viewed.dim() > 0 and tensor.dim() > 0 and viewed.shape[-1] == tensor.shape[-1]
    if transpose is not None and keeps_columns and transpose.is_contiguous():
        return _alias(tensor, viewed, transpose=transpose.view(viewed.shape[-1], *viewed.shape[:-1]))
    return _alias(tensor, viewed)


@implements(
    Float8Tensor,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.diagonal.default,
    _aten.expand.default,
)
def _move(op: Any, tensor: Float8Tensor, *args: Any, **kwargs: Any) -> Any:
    return _alias(tensor, op(tensor._in_order(), *args, **kwargs))


@implements(Float8Tensor, _aten.as_strided.default)
def _as_strided(op: Any, tensor: Float8Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    data = tensor._in_order()
    if data.stride() != tensor.stride():
        # Its rowwise data was dropped since.
        return NotImplemented
    elements = 0 if storage_offset is None else storage_offset - tensor.storage_offset()
    view = op(data, size, stride, data.storage_offset() + elements)
    same = view.stride() == data.stride() and view.storage_offset() == data.storage_offset()
    return _alias(tensor, view, less=view.shape != data.shape or not same)


@implements(
    Float8Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.chunk.default,
    _aten.unbind.int,
)
def _split(op: Any, tensor: Float8Tensor, *args: Any, **kwargs: Any) -> Any:
    return [_alias(tensor, view) for view in op(tensor._in_order(), *args, **kwargs)]


@implements(Float8Tensor, _aten.clone.default)
def _clone(op: Any, tensor: Float8Tensor, *, memory_format: Any = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    data = tensor._in_order().clone(memory_format=memory_format)
    copied = _new(tensor, data, tensor._scale_inv.clone(), tensor.dtype)
    transpose = tensor._transpose
    if transpose is not None:
        copied._transpose = transpose.clone()
    return copied


# A new tensor keeps the scale: rows of the old one can be copied into rows of it without loss (sharding does).
def _new(tensor: Float8Tensor, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Tensor:
    quantizer = None if tensor._quantizer is None else tensor._quantizer.copy()
    return Float8Tensor(dtype=dtype, data=data, fp8_dtype=tensor._fp8_dtype, fp8_scale_inv=scale, quantizer=quantizer)


def _scale_for(tensor: Float8Tensor, device: Any) -> torch.Tensor:
    if tensor._scale_inv.is_meta and torch.device(device).type != "meta":
        return torch.ones((), dtype=torch.float32, device=device)
    return tensor._scale_inv.to(device, copy=True)


@implements(Float8Tensor, _aten.new_zeros.default, _aten.new_empty.default, _aten.new_empty_strided.default)
def _new_of_shape(op: Any, tensor: Float8Tensor, *layout: Any, **kwargs: Any) -> Any:
    dtype = new_dtype(tensor, kwargs)
    if dtype is None:
        return NotImplemented
    device = kwargs.get("device") or tensor.device
    # A byte of 0 is the value 0, so that new_zeros may do with data as it does with values.
    data = op(torch.empty(0, dtype=torch.uint8, device=device), *layout)
    return _new(tensor, data, _scale_for(tensor, device), dtype)


# zeros_like is not here: optimizers make their moments with it, and moments with the scale of a weight are wrong.
@implements(Float8Tensor, _aten.empty_like.default)
def _empty_like(op: Any, tensor: Float8Tensor, **kwargs: Any) -> Any:
    return _new_of_shape(_aten.new_empty.default, tensor, tensor.shape, **kwargs)
