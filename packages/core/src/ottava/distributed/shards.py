"""``ShardJob``: one shard of a weight that is to be quantized, and where the results go.

A ``ShardBatch`` quantizes many of them together.

A shard is a range of the flattened weight. Its elements are written into a range of the weight's
data, and its scales into the holder, which is the whole weight or has some rows of it. Where two
elements share a byte, two shards may, and both write it::

    flattened weight   |............|== shard ==|..................|
                       0            start_offset
    holder (whole)     |-------------------------------------------|  or
    holder (rows)                   |-----------|

The functions below check that rows cut no blocks, that buffers fit, and that no two places overlap.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        holder: receives the scales. It is the whole weight, or a tensor that is this rank's shard
            of the weight.
        data: the memory of the shard's elements, flat uint8, one tensor for each of
            ``holder.raw_inner()``.
        rows: the rows of the weight, along its first dimension, that ``holder`` has.
    """

    holder: QuantizedTensorStorage
    data: tuple[torch.Tensor, ...]
    rows: range

    def write(self, whole: QuantizedTensorStorage, start_offset: int) -> None:
        """Copy this rank's elements and scales from the quantized weight ``whole``.

        The elements are those from ``start_offset`` on.
        """
        raw = self.holder.raw_inner()
        for inner, data in zip(raw, self.data, strict=True):
            elements: torch.Tensor = getattr(whole, inner.attribute)
            place = whole.element_range(inner, start_offset, 0)
            # The quantizer makes tensors of the holder's kind, whose elements are in order.
            assert place is not None
            data.copy_(elements.reshape(-1)[place.start : place.start + data.numel()])
        for inner in self.holder.inner_tensors:
            if inner not in raw and not self.holder.is_derived(inner):
                self.write_inner(inner, getattr(whole, inner.attribute))
        bump_versions(self.written_tensors())
        self.holder.mark_written()

    def places(
        self, inner: InnerTensor, whole: torch.Tensor | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, values) for an inner tensor other than the elements, such as scales.

        The target is the holder's own tensor, and the values are its rows of ``whole``, the inner
        tensor of the whole weight. The list is empty where either of the two is None.
        """
        target: torch.Tensor | None = getattr(self.holder, inner.attribute)
        if target is None or whole is None:
            return []
        if target.numel() != whole.numel():
            first = row_of(inner, self.holder.size(), self.rows.start)
            count = inner.by_rows(target).shape[0]
            whole = inner.as_held(inner.by_rows(whole)[first : first + count])
        return [(target, whole.view(target.shape))]

    def write_inner(self, inner: InnerTensor, whole: torch.Tensor | None) -> None:
        """Copy the holder's rows of ``whole``, an inner tensor of the weight other than its
        elements."""
        for target, values in self.places(inner, whole):
            target.copy_(values)

    def written_tensors(self) -> list[torch.Tensor]:
        """The tensors whose version counters rise when the elements are written, for autograd."""
        data = [getattr(self.holder, inner.attribute) for inner in self.holder.raw_inner()]
        return [
            tensor
            for tensor in (self.holder, *data)
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        ]


@dataclass(frozen=True)
class ShardJob:
    """One shard to quantize.

    Attributes:
        quantizer: the quantizer of the weight.
        shard: the values, flat, contiguous, of a high-precision dtype; empty where this rank has no
            shard of the weight.
        shape: the shape of the whole weight.
        dtype: the nominal dtype of the weight; the shard is first rounded to it.
        start_offset: the index of the shard's first element in the flattened weight.
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


class ShardBatch(ABC):
    """Shards whose quantizers are of one class, quantized together from their amaxes.

    A batch may be quantized many times.
    """

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)
        self._written_tensors = [tensor for job in jobs for tensor in job.output.written_tensors()]

    @abstractmethod
    def amaxes(self) -> torch.Tensor:
        """The amaxes of this rank's shards, one shard after the other: flat, float32, the same
        number on every rank."""

    @abstractmethod
    def cast(self, amaxes: torch.Tensor) -> None:
        """Write data and scales from :meth:`amaxes` that were reduced over all ranks, of this batch
        or an equal one."""

    def written(self) -> None:
        """Raise the versions of the written tensors, and mark their holders as written."""
        torch.autograd.graph.increment_version(self._written_tensors)
        for job in self.jobs:
            job.output.holder.mark_written()


def ordered_bytes(holder: QuantizedTensorStorage, name: str) -> tuple[InnerTensor, ...]:
    """The inner tensors that hold the elements of ``holder``, in the order of the flattened tensor.

    Raises:
        UsageError: the data is transposed or not contiguous, so its order is another one. The
            message calls the holder ``name``.
    """
    raw = holder.raw_inner()
    if any(holder.element_range(inner, 0, 0) is None for inner in raw):
        raise UsageError(
            f"the bytes of {name} are not in the order of its elements",
            "contiguous data that is not transposed",
            "keep the rowwise usage of such weights",
        )
    return raw


def element_bytes(
    holder: QuantizedTensorStorage, start: int, count: int, name: str
) -> list[tuple[InnerTensor, range]]:
    """Each inner tensor of :func:`ordered_bytes`, and the part of it that has ``count`` elements
    from ``start`` on.

    Raises:
        UsageError: see :func:`ordered_bytes`.
    """
    places = []
    for inner in ordered_bytes(holder, name):
        place = holder.element_range(inner, start, count)
        assert place is not None
        places.append((inner, place))
    return places


def shard_output(
    holder: QuantizedTensorStorage, shape: Sequence[int], start_offset: int, count: int, name: str
) -> ShardOutput:
    """Where ``count`` elements of a weight of ``shape`` go, from ``start_offset`` on.

    ``holder`` is the whole weight, or a tensor that is this rank's shard of it.

    Raises:
        ShapeError: ``holder`` is neither, or its rows cut blocks.
        UsageError: see :func:`ordered_bytes`.
    """
    size = tuple(holder.size())
    row = math.prod(shape[1:])
    if size == tuple(shape):
        elements = tuple(
            getattr(holder, inner.attribute).view(-1)[place.start : place.stop]
            for inner, place in element_bytes(holder, start_offset, count, name)
        )
        # A scalar counts as one row.
        return ShardOutput(holder, elements, range(math.prod(shape[:1])))
    tensors = [getattr(holder, inner.attribute).view(-1) for inner in ordered_bytes(holder, name)]
    has_rows = size[1:] == tuple(shape[1:]) and count == math.prod(size)
    if not has_rows or (count and start_offset % row):
        raise ShapeError(
            f"{name} has shape {size}, its shard of the weight {count} elements from "
            f"{start_offset} on",
            expected=f"rows of the whole, {tuple(shape)}, as many as its master weight has",
        )
    first = start_offset // max(row, 1)
    rows = range(first, first + size[0])
    if count:
        check_blocks(holder.inner_tensors, shape, rows, name)
    return ShardOutput(holder, tuple(tensors), rows)


def row_of(inner: InnerTensor, size: Sequence[int], row: int) -> int:
    """The first row of an inner tensor whose block begins at ``row`` of a weight of ``size``, or
    later."""
    if inner.block_rows is None:
        # Without blocks the inner tensor has the first dimension of the weight.
        return row
    return -(-row * math.prod(size[1:-1]) // inner.block_rows)


def check_blocks(
    inner_tensors: Iterable[InnerTensor], size: Sequence[int], rows: range, name: str
) -> None:
    """Refuse rows of a weight of ``size`` that cut blocks of the inner tensors that are gathered.

    A vector is refused as well, because it is one row of blocks.

    Raises:
        ShapeError: the rows cut blocks. The message calls the shard ``name``.
    """
    leading = math.prod(size[1:-1])
    remedy = "shard over fewer ranks, or keep it whole or in high precision"
    for inner in inner_tensors:
        step = inner.block_rows
        if not inner.gather or not step:
            continue
        if len(size) < 2:
            raise ShapeError(
                f"{name} is one row of blocks, as a shard of a vector",
                "a weight with rows and columns",
                remedy,
            )
        if rows.start * leading % step or (rows.stop < size[0] and rows.stop * leading % step):
            raise ShapeError(
                f"{name} has rows {rows.start} to {rows.stop} of {size[0]}, which cut the blocks "
                f"of {inner.argument!r}",
                f"multiples of {step}",
                remedy,
            )


def check_kind(
    value: object, kinds: type | tuple[type, ...], name: str, expected: str, remedy: str = ""
) -> None:
    """Raise DTypeError unless a value is of one of the types. The message calls it ``name``."""
    if not isinstance(value, kinds):
        raise DTypeError(f"{name} is a {type(value).__name__}", expected, remedy)


def check_bytes(
    buffer: object, storage: QuantizedTensorStorage, inner: InnerTensor, count: int, name: str
) -> torch.Tensor:
    """``buffer`` itself, if it can take ``count`` elements of an inner tensor of ``storage``.

    Raises:
        DTypeError, ShapeError, DeviceError, UsageError: it cannot. The message calls it ``name``.
    """
    dtypes = torch.uint8, getattr(storage, inner.attribute).dtype, native_dtype(storage, inner)
    if not isinstance(buffer, torch.Tensor) or buffer.dtype not in dtypes:
        kind = getattr(buffer, "dtype", type(buffer).__name__)
        raise DTypeError(f"{name} is of {kind}", "torch.uint8")
    if buffer.numel() != count:
        raise ShapeError(f"{name} has {buffer.numel()} elements", expected=f"{count}")
    check_device(buffer, storage.device, name)
    if not buffer.is_contiguous():
        raise UsageError(f"{name} is not contiguous", expected="contiguous memory")
    return buffer


def check_places(targets: Iterable[torch.Tensor], sources: Sequence[torch.Tensor] = ()) -> None:
    """Refuse targets that overlap each other or a source.

    All tensors are contiguous. A source may lie exactly where a target lies.

    Raises:
        ShapeError: two of them overlap.
    """
    places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in targets if t.numel()]
    places += {(t.data_ptr(), t.data_ptr() + t.nbytes) for t in sources if t.numel()} - set(places)
    if any(end > start for (_, end), (start, _) in pairwise(sorted(places))):
        raise ShapeError(
            "two places to write to or to read from overlap", expected="memory of its own for each"
        )
