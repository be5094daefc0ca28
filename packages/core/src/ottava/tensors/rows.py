"""Rows of quantized tensors of any class, derived from the storage declaration: what sharding by rows needs.

A part shares its inner tensors with the whole. Classes that define an op of their own decide by themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from ottava.kernels import HIGH_PRECISION
from ottava.tensors.aten import defines, implements
from ottava.tensors.parts import shared_inner
from ottava.tensors.storage import InnerTensor
from ottava.tensors.tensor import QuantizedTensor

_aten = torch.ops.aten


def _span(tensor: QuantizedTensor, inner: InnerTensor, start: int, stop: int) -> slice | None:
    """The rows of an inner tensor that belong to these rows of the tensor; None where they cut a block."""
    if inner.block_rows is None:
        return slice(start, stop)
    step = inner.block_rows
    if tensor.dim() != 2 or start % step or (stop % step and stop != tensor.shape[0]):
        return None
    return slice(start // step, -(-stop // step))


def rows_of(tensor: QuantizedTensor, start: int, stop: int) -> Any:
    """The rows ``start`` to ``stop`` as a part of ``tensor``; NotImplemented where its declaration forbids it."""
    taken: dict[str, Any] = {}
    for inner in tensor.inner_tensors:
        value: torch.Tensor | None = getattr(tensor, inner.attribute)
        if value is None or (not inner.gather and inner.usage == "both"):
            taken[inner.argument] = value
        elif tensor.is_derived(inner):
            taken[inner.argument] = None
        else:
            span = _span(tensor, inner, start, stop)
            if span is None or (inner.block_rows is None and value.shape[:1] != tensor.shape[:1]):
                return NotImplemented
            taken[inner.argument] = value[span]
    part = tensor.make_like(tensor, shape=(stop - start, *tensor.shape[1:]), **taken)
    part._whole = tensor if tensor._whole is None else tensor._whole
    return part


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
    # torch says which parts there are, and refuses sizes that are wrong.
    indices = op(torch.arange(tensor.shape[0]), sizes)
    parts, first = [], 0
    for own in indices:
        part = rows_of(tensor, first, first + len(own))
        if part is NotImplemented:
            return NotImplemented
        parts.append(part)
        first += len(own)
    return parts


@implements(QuantizedTensor, _aten.new_zeros.default, _aten.new_empty.default)
def _new_rows(op: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> Any:
    """Zeros with another number of rows: what pads an uneven shard. What all rows share is that of ``tensor``."""
    if not _allowed(op, tensor, 0) or tuple(size[1:]) != tuple(tensor.shape[1:]) or not size:
        return NotImplemented
    device = torch.device(kwargs.get("device") or tensor.device)
    plain = (kwargs.get("dtype") or tensor.dtype) != tensor.dtype or kwargs.get("layout") not in (None, torch.strided)
    quantizer = tensor._quantizer
    if plain or device != tensor.device or quantizer is None or tensor.dtype not in HIGH_PRECISION:
        return NotImplemented
    usages = tensor.get_usages()
    made = quantizer.with_usage(usages["rowwise"], usages["columnwise"]).make_empty(
        size, dtype=tensor.dtype, device=device
    )
    if type(made) is not type(tensor):
        return NotImplemented
    for inner in shared_inner(tensor):
        getattr(made, inner.attribute).copy_(getattr(tensor, inner.attribute))
    return made
