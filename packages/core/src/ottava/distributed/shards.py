"""One shard of a weight to be quantized: its values, and where its data and scales go.

A shard is a range of the flattened weight.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.kernels.checks import check_device
from ottava.tensors.declaration import InnerTensor, bump_versions, native_dtype
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class ShardOutput:
    """Where the quantized shard of a weight goes.

    Attributes:
        holder: takes what is not elements, the scales: the whole weight, or a tensor that is this
            rank's shard of it.
        data: the bytes of the shard's elements, flat, one tensor for each of
            ``holder.raw_inner()``.
        rows: the rows of the weight, along its first dimension, that ``holder`` has.
    """

    holder: QuantizedTensorStorage
    data: tuple[torch.Tensor, ...]
    rows: range

    def write(self, whole: QuantizedTensorStorage, start_offset: int) -> None:
        """Copy this rank's shard of ``whole``, the quantized weight: its own range of the elements,
        and the scales."""
        raw = self.holder.raw_inner()
        for inner, data in zip(raw, self.data, strict=True):
            elements: torch.Tensor = getattr(whole, inner.attribute)
            data.copy_(elements.reshape(-1)[start_offset : start_offset + data.numel()])
        for inner in self.holder.inner_tensors:
            if inner not in raw and not self.holder.is_derived(inner):
                self.write_inner(inner, getattr(whole, inner.attribute))
        bump_versions(self.written_tensors())
        self.holder.mark_written()

    def places(
        self, inner: InnerTensor, whole: torch.Tensor | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where an inner tensor of the whole weight that is not its elements goes, if it is held,
        and its rows here."""
        held: torch.Tensor | None = getattr(self.holder, inner.attribute)
        if held is None or whole is None:
            return []
        if held.numel() != whole.numel():
            first = row_of(inner, self.holder.size(), self.rows.start)
            whole = inner.as_held(
                inner.by_rows(whole)[first : first + inner.by_rows(held).shape[0]]
            )
        return [(held, whole.view(held.shape))]

    def write_inner(self, inner: InnerTensor, whole: torch.Tensor | None) -> None:
        """Copy an inner tensor of the whole weight that is not its elements, or the rows of it that
        are held."""
        for held, values in self.places(inner, whole):
            held.copy_(values)

    def written_tensors(self) -> list[torch.Tensor]:
        """Whose versions change when the elements are written, so that autograd sees it."""
        tensors = [
            self.holder,
            *(getattr(self.holder, inner.attribute) for inner in self.holder.raw_inner()),
        ]
        return [
            each for each in tensors if isinstance(each, torch.Tensor) and not each.is_inference()
        ]


@dataclass(frozen=True)
class ShardJob:
    """One shard to quantize.

    Attributes:
        quantizer: the weight's.
        shard: flat, contiguous, of a high-precision dtype; empty where this rank holds nothing of
            the weight.
        shape: of the whole weight.
        dtype: nominal dtype of the weight: what the shard is rounded to before anything else.
        start_offset: index of the shard's first element in the flattened weight.
        output: where the result goes.
    """

    quantizer: Quantizer
    shard: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_offset: int
    output: ShardOutput

    def rounded(self) -> torch.Tensor:
        """The shard in the weight's nominal dtype."""
        return self.shard.to(self.dtype)


def ordered_bytes(holder: QuantizedTensorStorage, what: str) -> tuple[InnerTensor, ...]:
    """The inner tensors that hold the elements of ``holder``; those made of others are in another
    order."""
    raw = holder.raw_inner()
    found = [
        getattr(holder, inner.attribute)
        for inner in raw
        if not (inner.transposed or holder.is_derived(inner))
    ]
    if len(found) < len(raw) or not all(
        t.is_contiguous() and t.shape == holder.size() for t in found
    ):
        what = f"the bytes of {what} are not in the order of its elements"
        raise UsageError(
            what, "contiguous data that is not transposed", "keep the rowwise usage of such weights"
        )
    return raw


def shard_output(
    holder: QuantizedTensorStorage, shape: Sequence[int], start_offset: int, count: int, what: str
) -> ShardOutput:
    """Where ``count`` elements of a weight of ``shape`` go, from ``start_offset`` on: in the whole
    weight, or in the tensor that is this rank's shard of it; refused where that does not fit."""
    tensors = [getattr(holder, inner.attribute).view(-1) for inner in ordered_bytes(holder, what)]
    own, row = tuple(holder.size()), math.prod(shape[1:])
    if own == tuple(shape):
        elements = tuple(tensor[start_offset : start_offset + count] for tensor in tensors)
        return ShardOutput(holder, elements, range(shape[0] if shape else 1))
    if own[1:] != tuple(shape[1:]) or count != math.prod(own) or (count and start_offset % row):
        what = (
            f"{what} has shape {own}, its share of the weight {count} elements from "
            f"{start_offset} on"
        )
        raise ShapeError(
            what, expected=f"rows of the whole, {tuple(shape)}, as many as its master weight has"
        )
    first = start_offset // row if row else 0
    rows = range(first, first + own[0])
    if count:
        check_blocks(holder.inner_tensors, shape, rows, what)
    return ShardOutput(holder, tuple(tensors), rows)


def row_of(inner: InnerTensor, size: Sequence[int], row: int) -> int:
    """The row of an inner tensor with which a row of a weight of ``size`` begins, or after which
    rows end."""
    # Without blocks a row is an index of the first dimension.
    return row if inner.block_rows is None else -(-row * math.prod(size[1:-1]) // inner.block_rows)


def check_blocks(
    inner_tensors: Iterable[InnerTensor], size: Sequence[int], rows: range, what: str
) -> None:
    """Refuse rows of a weight of ``size`` that cut blocks of those inner tensors that are gathered,
    and vectors, which are one row of blocks."""
    leading = math.prod(size[1:-1])
    for inner, step in (
        (inner, inner.block_rows) for inner in inner_tensors if inner.gather and inner.block_rows
    ):
        if len(size) < 2:
            how, expected = (
                "is one row of blocks, as a shard of a vector",
                "a weight with rows and columns",
            )
        elif rows.start * leading % step or (rows.stop < size[0] and rows.stop * leading % step):
            how = (
                f"has rows {rows.start} to {rows.stop} of {size[0]}, which cut the blocks of "
                f"{inner.argument!r}"
            )
            expected = f"multiples of {step}"
        else:
            continue
        raise ShapeError(
            f"{what} {how}",
            expected,
            "shard over fewer ranks, or keep it whole or in high precision",
        )


def check_bytes(
    buffer: Any, storage: QuantizedTensorStorage, inner: InnerTensor, count: int, what: str
) -> torch.Tensor:
    """``buffer`` itself, unless it cannot take ``count`` elements of an inner tensor."""
    dtypes = torch.uint8, getattr(storage, inner.attribute).dtype, native_dtype(storage, inner)
    if not isinstance(buffer, torch.Tensor) or buffer.dtype not in dtypes:
        raise DTypeError(
            f"{what} is of {getattr(buffer, 'dtype', type(buffer).__name__)}", "torch.uint8"
        )
    if buffer.numel() != count:
        raise ShapeError(f"{what} has {buffer.numel()} elements", expected=f"{count}")
    check_device(buffer, storage.device, what)
    if not buffer.is_contiguous():
        raise UsageError(f"{what} is not contiguous", expected="contiguous memory")
    return buffer


def check_places(written: Iterable[torch.Tensor], read: Sequence[torch.Tensor] = ()) -> None:
    """Refuse contiguous tensors that are written and overlap each other, or others that are read
    meanwhile."""
    places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in written if t.numel()]
    places += {(t.data_ptr(), t.data_ptr() + t.nbytes) for t in read if t.numel()} - set(places)
    if any(end > start for (_, end), (start, _) in pairwise(sorted(places))):
        raise ShapeError(
            "two places to write to or to read from overlap", expected="memory of its own for each"
        )
