"""Shards of weights: what a quantizer is told of this rank's part of a weight, and where the result goes.

A shard is a range of the flattened weight. Quantizing all shards gives the bytes and scales of the whole in three
steps: each rank contributes amaxes, one all-reduce(MAX) makes them those of the whole, each rank casts its own part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ottava.errors import ShapeError, UsageError
from ottava.tensors.collectives import all_reduce_max, process_groups_ready
from ottava.tensors.freshness import bump_version, bump_versions
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage

if TYPE_CHECKING:
    from ottava.tensors.quantizer import Quantizer


@dataclass(frozen=True)
class ShardOutput:
    """Where the quantized part of a weight goes.

    Attributes:
        holder: takes what is not elements, the scales: the whole weight, or a tensor that is this rank's part of it.
        codes: the bytes of the part, flat, one tensor for each of ``holder.raw_inner()``.
        rows: the rows of the weight, along its first dimension, that ``holder`` has.
    """

    holder: QuantizedTensorStorage
    codes: tuple[torch.Tensor, ...]
    rows: range

    def write(self, whole: QuantizedTensorStorage, start_offset: int) -> None:
        """Copy this rank's part of ``whole``, the quantized weight: its own range of the elements, and the scales."""
        raw = self.holder.raw_inner()
        for inner, codes in zip(raw, self.codes, strict=True):
            values: torch.Tensor = getattr(whole, inner.attribute)
            codes.copy_(values.reshape(-1)[start_offset : start_offset + codes.numel()])
        for inner in self.holder.inner_tensors:
            if inner not in raw and not self.holder.is_derived(inner):
                self.write_inner(inner, getattr(whole, inner.attribute))
        self.written()

    def write_inner(self, inner: InnerTensor, whole: torch.Tensor | None) -> None:
        """Copy an inner tensor of the whole weight that is not its elements, or the rows of it that are held."""
        held: torch.Tensor | None = getattr(self.holder, inner.attribute)
        if held is None or whole is None:
            return
        if held.shape != whole.shape:
            step = inner.block_rows or 1
            leading = math.prod(self.holder.size()[1:-1]) if inner.block_rows is not None else 1
            first = self.rows.start * leading // step
            whole = whole[first : first + held.shape[0]]
        held.copy_(whole)
        bump_version(held)

    def written_tensors(self) -> list[torch.Tensor]:
        """Whose versions change when the elements are written, so that autograd sees it."""
        tensors = [getattr(self.holder, inner.attribute) for inner in self.holder.raw_inner()]
        return [*tensors, self.holder] if isinstance(self.holder, torch.Tensor) else tensors

    def written(self) -> None:
        """Tell the holder that its values changed, so that nothing derived from the old ones is read."""
        bump_versions([tensor for tensor in self.written_tensors() if not tensor.is_inference()])
        self.holder.mark_written()


@dataclass(frozen=True)
class ShardJob:
    """One shard to quantize.

    Attributes:
        quantizer: the weight's.
        shard: flat, contiguous, of a high-precision dtype; empty where this rank holds nothing of the weight.
        shape: of the whole weight.
        dtype: nominal dtype of the weight: what the shard is rounded to before anything else.
        weight: the whole weight; of a sharded one only ``shape`` and ``dtype`` can be told.
        start_offset: index of the shard's first element in the flattened weight.
        output: where the result goes.
    """

    quantizer: Quantizer
    shard: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: Any
    start_offset: int
    output: ShardOutput

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape as rows and columns."""
        return (math.prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)

    def rounded(self) -> torch.Tensor:
        """The shard in the weight's nominal dtype."""
        return self.shard.to(self.dtype)


class ShardBatch:
    """Shards whose quantizers are of one class, to be quantized together, once or many times.

    This one calls :meth:`ottava.Quantizer.shard_amaxes` and :meth:`ottava.Quantizer.cast_shard` of one after the other.
    """

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)
        self._lengths: list[int] = []
        self._written: list[torch.Tensor] | None = None

    def amaxes(self) -> torch.Tensor:
        """What this rank contributes, of all shards one after the other: flat, float32."""
        parts = [
            job.quantizer.shard_amaxes(job.rounded(), job.weight, job.start_offset).reshape(-1) for job in self.jobs
        ]
        self._lengths = [part.numel() for part in parts]
        return torch.cat(parts)

    def cast(self, amaxes: torch.Tensor) -> None:
        """Write all parts from the result of :meth:`amaxes`, reduced over all ranks."""
        if not self._lengths:
            # Amaxes of an equal batch: how many each shard has is not known here yet.
            self.amaxes()
        for job, own in zip(self.jobs, amaxes.split(self._lengths), strict=True):
            job.quantizer.cast_shard(job.rounded(), job.weight, job.start_offset, own, job.output)

    def written(self) -> None:
        """Tell all holders that their values changed."""
        if self._written is None:
            self._written = [t for job in self.jobs for t in job.output.written_tensors() if not t.is_inference()]
        bump_versions(self._written)
        for job in self.jobs:
            job.output.holder.mark_written()


def make_batches(jobs: Sequence[ShardJob]) -> list[ShardBatch]:
    """The jobs by the classes of their quantizers: a class does many at once."""
    classes: dict[type[Quantizer], list[ShardJob]] = {}
    for job in jobs:
        classes.setdefault(type(job.quantizer), []).append(job)
    return [cls.shard_batch(together) for cls, together in classes.items()]


def quantize_batches(batches: Sequence[ShardBatch], group: Any) -> None:
    """Quantize shards: the amaxes of all of them in one all-reduce over ``group``, then the casts."""
    cast_batches(batches, reduced_amaxes(batches, group))


def reduced_amaxes(batches: Sequence[ShardBatch], group: Any) -> list[torch.Tensor]:
    """What the ranks of ``group`` contribute to each batch, in one all-reduce(MAX) for all of them."""
    if not batches:
        return []
    own = [batch.amaxes() for batch in batches]
    packed = own[0] if len(own) == 1 else torch.cat(own)
    if process_groups_ready():
        packed = all_reduce_max(packed, group)
    return list(packed.split([amaxes.numel() for amaxes in own]))


def cast_batches(batches: Sequence[ShardBatch], amaxes: Sequence[torch.Tensor]) -> None:
    """Write the parts of all shards from the reduced amaxes of their weights."""
    for batch, own in zip(batches, amaxes, strict=True):
        batch.cast(own)


def requantize(written: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Quantize new values into tensors; shards whose scales are shared are reduced together, once for each group."""
    batches: dict[Any, list[ShardJob]] = {}
    for target, values in written:
        group, quantizer = target._shard_group, target._quantizer
        if group is None or quantizer is None or not quantizer.scale_per_tensor or len(written) == 1:
            target.quantize_(values)
            continue
        usages = target.get_usages()
        quantizer = quantizer.with_usage(usages["rowwise"], usages["columnwise"])
        options = tuple(getattr(quantizer, name) for name in quantizer.batch_options)
        # Its scale follows from one amax: as far as that goes, the shard may stand for the whole.
        shape, flat = tuple(target.shape), values.detach().reshape(-1)
        output = shard_output(target, shape, 0, flat.numel(), None, "a shard")
        job = ShardJob(quantizer, flat, shape, values.dtype, target, 0, output)
        batches.setdefault((group, type(quantizer), options), []).append(job)
    for (group, *_), jobs in batches.items():
        with torch.no_grad():
            quantize_batches(make_batches(jobs), group)


def values_as_amaxes(shard: torch.Tensor, numel: int, start_offset: int) -> torch.Tensor:
    """The values of a shard as numbers that survive an all-reduce(MAX): each 16 bits plus one, zeros elsewhere.

    float32 ``[numel]``, or ``[2 * numel]`` for float32 values: their upper halves, then the lower.
    """
    if shard.dtype == torch.float32:
        bits = shard.view(torch.int32)
        halves = [(bits >> 16) & 0xFFFF, bits & 0xFFFF]
    else:
        halves = [shard.view(torch.int16).to(torch.int32) & 0xFFFF]
    planes = torch.zeros(len(halves), numel, dtype=torch.float32, device=shard.device)
    for plane, half in zip(planes, halves, strict=True):
        plane[start_offset : start_offset + shard.numel()] = (half + 1).to(torch.float32)
    return planes.reshape(-1)


def values_from_amaxes(amaxes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of all ranks, flat, from the reduced result of :func:`values_as_amaxes`; 0 where none had any."""
    halves = (amaxes - 1).clamp(min=0).to(torch.int32)
    if dtype == torch.float32:
        upper, lower = halves.view(2, -1)
        halves, dtype = (upper << 16) | lower, torch.float32
    else:
        halves = halves.to(torch.int16)
    values: torch.Tensor = halves.view(dtype)
    return values


def shard_output(
    weight: QuantizedTensorStorage, shape: Sequence[int], start_offset: int, count: int, out: Any, what: str
) -> ShardOutput:
    """Where a part of ``count`` elements from ``start_offset`` on of a weight of ``shape`` goes.

    Args:
        weight: the whole weight, or the tensor that is this rank's part of it.
        out: None to write into ``weight``; another tensor that is the part, or its bytes: one uint8 tensor for each of
            ``weight.raw_inner()``, with ``count`` elements.

    Raises:
        ShapeError, UsageError: the part does not fit.
    """
    holder = out if isinstance(out, QuantizedTensorStorage) else weight
    raw = holder.raw_inner()
    if isinstance(out, QuantizedTensorStorage) or out is None:
        tensors = [getattr(holder, inner.attribute) for inner in raw]
        if not all(tensor.is_contiguous() and tensor.shape == holder.shape for tensor in tensors):
            raise UsageError(
                f"the bytes of {what} are not in the order of its elements",
                expected="contiguous data that is not transposed",
                remedy="keep the rowwise usage of weights that are cast from shards",
            )
        tensors = [tensor.view(-1) for tensor in tensors]
    else:
        given = list(out) if isinstance(out, (list, tuple)) else [out]
        # One tensor of bytes serves a weight with data for each usage, if the other usage's is in the weight itself.
        if len(given) != len(raw):
            raise ShapeError(
                f"{what} has {len(given)} tensors of bytes",
                expected=f"{len(raw)}, one for each of {', '.join(inner.argument for inner in raw)}",
            )
        tensors = [_bytes(tensor, what) for tensor in given]
        for tensor in tensors:
            if tensor.numel() != count:
                raise ShapeError(f"{what} has {tensor.numel()} bytes", expected=f"{count}, as its master weight")
        return ShardOutput(holder, tuple(tensors), range(shape[0] if shape else 1))
    if tuple(holder.size()) == tuple(shape):
        codes = tuple(tensor[start_offset : start_offset + count] for tensor in tensors)
        return ShardOutput(holder, codes, range(shape[0] if shape else 1))
    return ShardOutput(holder, tuple(tensors), _rows(holder, shape, start_offset, count, what))


def _bytes(tensor: Any, what: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.element_size() != 1 or not tensor.is_contiguous():
        raise UsageError(f"{what} is no contiguous tensor of bytes", expected="torch.uint8 or an 8-bit float dtype")
    return tensor.view(-1).view(torch.uint8)


def _rows(holder: QuantizedTensorStorage, shape: Sequence[int], start_offset: int, count: int, what: str) -> range:
    """The rows of the weight that ``holder`` is; a part of a weight has whole rows, and cuts no blocks."""
    row = math.prod(shape[1:])
    own = tuple(holder.size())
    if own[1:] != tuple(shape[1:]) or count != math.prod(own) or (count and start_offset % row):
        raise ShapeError(
            f"{what} has shape {own}, its part of the weight {count} elements from {start_offset} on",
            expected=f"rows of the whole, {tuple(shape)}, as many as its master weight has",
        )
    rows = range(start_offset // row if row else 0, (start_offset // row if row else 0) + own[0])
    lines = math.prod(shape[1:-1])
    for inner in holder.inner_tensors:
        if inner.block_rows is not None and len(shape) < 2:
            raise ShapeError(
                f"{what} is a part of a vector, which is one row of the blocks of {inner.argument!r}",
                expected="a weight with rows and columns",
                remedy="keep the weight whole and cast the shard into its bytes",
            )
        blocks = inner.block_rows or 1
        inside = rows.stop < shape[0] and rows.stop * lines % blocks
        if inner.gather and count and (rows.start * lines % blocks or inside):
            raise ShapeError(
                f"{what} has rows {rows.start} to {rows.stop}, which cut the blocks of {inner.argument!r}",
                expected=f"multiples of {blocks}",
                remedy="shard over fewer ranks, or keep the weight whole and cast the shard into its bytes",
            )
    return rows
