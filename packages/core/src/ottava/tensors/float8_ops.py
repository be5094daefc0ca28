"""The aten table of :class:`Float8Tensor`: one scale serves any view, so data movement acts on the codes."""

from __future__ import annotations

from typing import Any

import torch

from ottava.tensors.aten import implements
from ottava.tensors.float8 import Float8Tensor

_aten = torch.ops.aten


def _alias(tensor: Float8Tensor, codes: torch.Tensor, transpose: torch.Tensor | None = None) -> Float8Tensor:
    """A view of ``tensor`` around ``codes``, a view of its codes: writes to either reach both."""
    view = Float8Tensor(
        dtype=tensor.dtype,
        data=codes,
        fp8_dtype=tensor._fp8_dtype,
        fp8_scale_inv=tensor._scale_inv,
        quantizer=tensor._quantizer,
    )
    view._writes = tensor._writes
    view._transpose = transpose
    view._whole = tensor._whole
    if view._whole is None and codes.numel() != tensor.numel():
        view._whole = tensor
    return view


def _codes(tensor: Any) -> torch.Tensor | None:
    return tensor._data if isinstance(tensor, Float8Tensor) else None


@implements(Float8Tensor, _aten.view.default, _aten._unsafe_view.default)
def _view(op: Any, tensor: Float8Tensor, shape: Any) -> Any:
    codes = _codes(tensor)
    if codes is None:
        return NotImplemented
    viewed = op(codes, shape)
    transpose = tensor._transpose
    keeps_columns = viewed.dim() > 0 and tensor.dim() > 0 and viewed.shape[-1] == tensor.shape[-1]
    if transpose is not None and keeps_columns and transpose.is_contiguous():
        return _alias(tensor, viewed, transpose.view(viewed.shape[-1], *viewed.shape[:-1]))
    return _alias(tensor, viewed)


@implements(
    Float8Tensor,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.as_strided.default,
    _aten.t.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
)
def _move(op: Any, tensor: Float8Tensor, *args: Any, **kwargs: Any) -> Any:
    codes = _codes(tensor)
    return NotImplemented if codes is None else _alias(tensor, op(codes, *args, **kwargs))


@implements(Float8Tensor, _aten.transpose.int, _aten.permute.default)
def _transpose(op: Any, tensor: Float8Tensor, *args: Any) -> Any:
    codes = _codes(tensor)
    if codes is None or tensor.dim() != 2:
        return NotImplemented
    return _alias(tensor, op(codes, *args))


@implements(Float8Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default)
def _split(op: Any, tensor: Float8Tensor, *args: Any, **kwargs: Any) -> Any:
    codes = _codes(tensor)
    return NotImplemented if codes is None else [_alias(tensor, part) for part in op(codes, *args, **kwargs)]


def _nominal(kwargs: dict[str, Any], tensor: Float8Tensor) -> torch.dtype | None:
    """Nominal dtype of a new tensor; None when the options ask for something that is not quantized."""
    dtype: torch.dtype = kwargs.get("dtype") or tensor.dtype
    plain = not dtype.is_floating_point or dtype.itemsize < 2 or kwargs.get("layout") not in (None, torch.strided)
    return None if plain else dtype


def _new(tensor: Float8Tensor, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Tensor:
    quantizer = None if tensor._quantizer is None else tensor._quantizer.copy()
    return Float8Tensor(dtype=dtype, data=codes, fp8_dtype=tensor._fp8_dtype, fp8_scale_inv=scale, quantizer=quantizer)


@implements(Float8Tensor, _aten.new_zeros.default, _aten.new_empty.default)
def _new_of_shape(op: Any, tensor: Float8Tensor, shape: Any, **kwargs: Any) -> Any:
    dtype = _nominal(kwargs, tensor)
    if dtype is None:
        return NotImplemented
    device = kwargs.get("device") or tensor.device
    # Code 0 is the value 0, so new_zeros may reuse the op on codes.
    codes = op(torch.empty(0, dtype=torch.uint8, device=device), shape)
    return _new(tensor, codes, torch.ones((), dtype=torch.float32, device=device), dtype)


@implements(Float8Tensor, _aten.empty_like.default, _aten.zeros_like.default)
def _like(op: Any, tensor: Float8Tensor, **kwargs: Any) -> Any:
    dtype = _nominal(kwargs, tensor)
    if dtype is None:
        return NotImplemented
    device = kwargs.get("device") or tensor.device
    make = torch.zeros if op is _aten.zeros_like.default else torch.empty
    codes = make(tensor.shape, dtype=torch.uint8, device=device)
    return _new(tensor, codes, torch.ones((), dtype=torch.float32, device=device), dtype)
