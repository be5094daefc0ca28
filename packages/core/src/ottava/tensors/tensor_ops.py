"""Aten ops on quantized tensors of any class, derived from the storage declaration; rows are what sharding needs.

A view of rows shares its inner tensors with the whole. Classes that define an op of their own decide by themselves.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch

from ottava.errors import DeviceError, ShapeError
from ottava.kernels import HIGH_PRECISION
from ottava.kernels.checks import check_dense
from ottava.tensors.aten import defines, implements
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import aten_overloads, to_copy

_aten = torch.ops.aten
VIEWS = (_aten.view.default, *aten_overloads("_unsafe_view"))


def new_dtype(tensor: QuantizedTensor, options: dict[str, Any]) -> torch.dtype | None:
    """Nominal dtype of a new tensor; None when the options ask for something that is not quantized."""
    dtype: torch.dtype = options.get("dtype") or tensor.dtype
    plain = dtype not in HIGH_PRECISION or options.get("layout") not in (None, torch.strided)
    return None if plain else dtype


@implements(QuantizedTensor, _aten.detach.default, _aten.alias.default)
def _detach(op: Any, tensor: QuantizedTensor) -> Any:
    return tensor.make_like(tensor)


def _laid_out(tensor: QuantizedTensor) -> torch.Tensor:
    """The values where the strides of the tensor say that they lie."""
    values = tensor.dequantize()
    if (values.stride(), values.storage_offset()) == (tensor.stride(), 0):
        return values
    placed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return placed.copy_(values)


@implements(QuantizedTensor, *VIEWS)
def _view(op: Any, tensor: QuantizedTensor, size: Any) -> Any:
    return op(_laid_out(tensor), size)


@implements(QuantizedTensor, _aten.as_strided.default)
def _as_strided(op: Any, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """The tensor itself, as FSDP asks for it, or values; which layouts keep the class is for a subclass to define."""
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    if (tuple(size), tuple(stride), offset) == (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()):
        return tensor.make_like(tensor)
    base = tensor if tensor._view_of is None else tensor._view_of
    return op(_laid_out(base), size, stride, offset - base.storage_offset())


@implements(QuantizedTensor, _aten.clone.default)
def _clone(op: Any, tensor: QuantizedTensor, *, memory_format: Any = None) -> Any:
    return tensor.clone_storage()


@implements(QuantizedTensor, *aten_overloads("_pin_memory"))
def _pin_memory(op: Any, tensor: QuantizedTensor, device: Any = None) -> Any:
    return tensor.apply_to_inner(lambda t: t.pin_memory())


@implements(QuantizedTensor, _aten.is_pinned.default)
def _is_pinned(op: Any, tensor: QuantizedTensor, device: Any = None) -> bool:
    return all(t.is_pinned() for t in tensor.inner_list() if t is not None)


@implements(QuantizedTensor, *aten_overloads("_to_copy"))
def _to_copy(op: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    dtype = new_dtype(tensor, kwargs)
    if dtype is None:
        return NotImplemented
    given = {name: value for name, value in kwargs.items() if name not in ("dtype", "memory_format")}
    moved: Any = tensor.apply_to_inner(lambda t: to_copy(t, **given))
    return moved if dtype == tensor.dtype else moved.make_like(moved, dtype=dtype)


@implements(QuantizedTensor, _aten.copy_.default)
def _copy_(op: Any, dst: Any, src: Any, non_blocking: bool = False) -> Any:
    if not isinstance(dst, QuantizedTensor):
        return dst.copy_(src.dequantize(), non_blocking)
    if isinstance(src, QuantizedTensor) and dst.adopts_bytes_of(src):
        dst.copy_from_storage(src)
    else:
        values = src.dequantize() if isinstance(src, QuantizedTensor) else src
        check_dense(values, "source")
        if values.is_meta and not dst.is_meta:
            raise DeviceError("the source is on meta and has no values", expected="a tensor with values")
        try:
            values = values.expand(dst.shape)
        except RuntimeError as error:
            raise ShapeError(f"source has shape {tuple(values.shape)}", expected=str(tuple(dst.shape))) from error
        dst.quantize_(values.to(dst.device))
    return dst


# -- rows --


def blocks(side: int | None, start: int, stop: int, size: int) -> slice | None:
    """The blocks of entries [start, stop) of a side of a matrix; None where they cut one in two."""
    if side is None:
        return slice(None)
    if start % side or (stop % side and stop != size):
        return None
    return slice(start // side, -(-stop // side))


def rows_of(tensor: QuantizedTensor, start: int, stop: int) -> Any:
    """A view of the rows ``start`` to ``stop`` of ``tensor``; NotImplemented where its declaration forbids it."""
    if (start, stop) == (0, tensor.shape[0]):
        return tensor.make_like(tensor)
    taken: dict[str, Any] = {}
    for inner in tensor.inner_tensors:
        value: torch.Tensor | None = getattr(tensor, inner.attribute)
        if value is None or inner.shared:
            taken[inner.argument] = value
        elif tensor.is_derived(inner):
            taken[inner.argument] = None
        else:
            of_blocks, value = inner.block_rows is not None, inner.by_rows(value)
            span = blocks(inner.block_rows or 1, start, stop, tensor.shape[0])
            if span is None or (tensor.dim() != 2 if of_blocks else value.shape[:1] != tensor.shape[:1]):
                return NotImplemented
            taken[inner.argument] = inner.as_held(value[span])
    rows = tensor.make_like(tensor, shape=(stop - start, *tensor.shape[1:]), **taken)
    rows.mark_view(tensor, part=True)
    return rows


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape without memory, by which torch says what an op gives, and refuses what it refuses."""
    return torch.empty(tensor.shape, device="meta")


def bounds(op: Any, tensor: torch.Tensor, sizes: Any, dim: int) -> list[tuple[int, int]]:
    """Where each view begins and ends that ``op`` cuts a dimension into."""
    return list(pairwise(accumulate((own.shape[dim] for own in op(on_meta(tensor), sizes, dim)), initial=0)))


def all_or_none(views: list[Any]) -> Any:
    """The views, if the class allows all of them."""
    return NotImplemented if any(view is NotImplemented for view in views) else views


def _allowed(op: Any, tensor: QuantizedTensor, dim: int) -> bool:
    return tensor.dim() > 0 and dim in (0, -tensor.dim()) and not defines(type(tensor), op, below=QuantizedTensor)


@implements(QuantizedTensor, _aten.slice.Tensor)
def _slice(op: Any, tensor: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if not _allowed(op, tensor, dim) or step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(tensor.shape[0])
    return rows_of(tensor, first, max(first, last))


@implements(QuantizedTensor, _aten.split.Tensor, _aten.split_with_sizes.default)
def _split(op: Any, tensor: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    if not _allowed(op, tensor, dim):
        return NotImplemented
    return all_or_none([rows_of(tensor, *own) for own in bounds(op, tensor, sizes, 0)])


@implements(QuantizedTensor, _aten.new_zeros.default, _aten.new_empty.default)
def _new_rows(op: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> Any:
    """Zeros with another number of rows: what pads an uneven shard. What all rows share is that of ``tensor``."""
    if not _allowed(op, tensor, 0) or tuple(size[1:]) != tuple(tensor.shape[1:]) or not size:
        return NotImplemented
    device = torch.device(kwargs.get("device") or tensor.device)
    quantizer = tensor._quantizer
    plain = new_dtype(tensor, kwargs) != tensor.dtype or device != tensor.device
    if plain or not isinstance(quantizer, Quantizer):
        return NotImplemented
    made = quantizer.with_usage(**tensor.get_usages()).make_empty(size, dtype=tensor.dtype, device=device)
    if type(made) is not type(tensor):
        return NotImplemented
    for inner in tensor.shared_inner():
        getattr(made, inner.attribute).copy_(getattr(tensor, inner.attribute))
    return made
