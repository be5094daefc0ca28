"""Parts of quantized tensors: what they have in common with the other rows of their whole, and writing to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ottava.errors import UsageError

if TYPE_CHECKING:
    from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage


def shared_inner(storage: QuantizedTensorStorage) -> list[InnerTensor]:
    """The inner tensors held that belong to all rows alike: one scale for the tensor, say."""
    return [
        inner
        for inner in storage.inner_tensors
        if inner.usage == "both" and not inner.gather and getattr(storage, inner.attribute) is not None
    ]


def shares_scales(one: QuantizedTensorStorage, other: QuantizedTensorStorage) -> bool:
    """Whether what all rows of ``one`` have in common is equal in ``other``, so that its rows mean the same there."""
    return all(_equal(getattr(one, i.attribute), getattr(other, i.attribute)) for i in shared_inner(one))


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two scales are equal; those on the meta device have no values to differ in."""
    if one is other or other is None:
        return one is other
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    # Comparing values would break a graph that is being traced.
    return not torch.compiler.is_compiling() and torch.equal(one, other)


def write_rows(part: QuantizedTensorStorage, src: QuantizedTensorStorage, noop_flag: torch.Tensor | None) -> None:
    """Write to a part with scales that are also those of other rows: the whole is quantized again.

    Raises:
        UsageError: the whole does not hold the rows that the part is.
    """
    whole = part._whole
    inner = part.raw_inner()[0]
    mine = getattr(part, inner.attribute)
    if whole is None or (theirs := getattr(whole, inner.attribute)) is None:
        raise UsageError("this part cannot be written in place", remedy="write to the whole tensor instead")
    row = theirs.stride(0) * theirs.element_size()
    first = (mine.data_ptr() - theirs.data_ptr()) // row if row and mine.numel() else 0
    values = whole.dequantize().detach()
    values[first : first + part.size(0)] = src.dequantize()
    whole.quantize_(values, noop_flag=noop_flag)
