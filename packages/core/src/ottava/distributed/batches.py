"""Shards of any mix of quantizers, quantized together with as few collectives as possible.

The rules of the quantizers (:mod:`ottava.distributed.rules`) sort the shards into batches::

    ShardBatch     the shards of one class of quantizers, where amaxes suffice:
                   amaxes of the shards ── one all-reduce(MAX) ──> amaxes of the weights ──> cast
    GatheredBatch  all other shards:
                   values of the shards ── one all-gather ──> whole weights ──> quantize
    ShardBatches   all batches; one all-reduce serves every ShardBatch
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar, NamedTuple, Self

import torch

from ottava.collectives import Group, all_gather, all_reduce_max, process_groups_ready
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import ShardBatch, ShardJob, shard_output
from ottava.kernels import draw_seed, fixed_seed
from ottava.layout import Layout
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.tensor import QuantizedTensor


class GatheredBatch:
    """Shards whose values every rank needs, because amaxes do not suffice for their quantizers."""

    #: Ranks pad what they send to a multiple of this many bytes. The number of such units is
    #: reduced as a float32, which counts them exactly.
    UNIT: ClassVar[int] = 4096

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)

    def values(self) -> torch.Tensor:
        """This rank's shards as uint8.

        Three int64 for each job say where its shard begins, how many elements it has, and a seed
        for its rounding; the values of all shards follow.
        """
        numbers = [
            number
            for job in self.jobs
            for number in (job.start_offset, job.shard.numel(), _seed_of(job))
        ]
        header = torch.tensor(numbers, device=self.jobs[0].shard.device)
        tensors = [header, *(job.rounded() for job in self.jobs)]
        # The tensors are cloned, because contiguous() leaves a tensor of one element with strides
        # that a view as bytes refuses.
        return torch.cat(
            [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in tensors]
        )

    def cast(self, values_of_ranks: Sequence[torch.Tensor]) -> None:
        """Quantize the weights from the :meth:`values` of all ranks; an element that no rank has
        counts as 0.

        Every rank rounds with the seeds of the first one.
        """
        weights = [
            torch.zeros(math.prod(job.shape), dtype=job.dtype, device=job.shard.device)
            for job in self.jobs
        ]
        for values in values_of_ranks:
            self._copy_shards(values, weights)
        seeds = self._header(values_of_ranks[0])[2::3]
        for job, weight, seed in zip(self.jobs, weights, seeds, strict=True):
            quantizer = rule_of(job.quantizer).for_whole(job.quantizer)
            quantizer = quantizer.with_usage(**job.output.holder.get_usages())
            with fixed_seed(seed) if _is_stochastic(quantizer) else nullcontext():
                whole = quantizer.quantize_impl(weight.view(job.shape), job.dtype)
            job.output.write(whole, job.start_offset)

    def _header(self, values: torch.Tensor) -> list[int]:
        """The numbers at the beginning of the :meth:`values` of a rank."""
        numbers: list[int] = values[: 24 * len(self.jobs)].view(torch.int64).tolist()
        return numbers

    def _copy_shards(self, values: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        """Copy the shards of one rank, from its :meth:`values`, into flat weights."""
        numbers = self._header(values)
        begin = 8 * len(numbers)
        for weight, start, count in zip(weights, numbers[::3], numbers[1::3], strict=True):
            end = begin + count * weight.element_size()
            # The bytes are copied, because they may begin at an address that is not aligned for a
            # wider dtype.
            weight[start : start + count] = values[begin:end].clone().view(weight.dtype)
            begin = end


def _is_stochastic(quantizer: Quantizer) -> bool:
    """Whether the layout of a quantizer, if it has one, has stochastic rounding."""
    layout = getattr(quantizer, "layout", None)
    return isinstance(layout, Layout) and layout.stochastic


def _seed_of(job: ShardJob) -> int:
    """A seed for the rounding of a weight; 0 where nothing is rounded at random."""
    if not _is_stochastic(job.quantizer):
        return 0
    return int(draw_seed(job.shard.device))


class _BatchKey(NamedTuple):
    """Equal for jobs that one batch can quantize.

    Attributes:
        batch: the class of the batch.
        quantizer: the class of the quantizers.
        dtype: the nominal dtype of the weights.
        layout: the layout of the quantizers; None for those without one.
        options: the options that the rule names.
    """

    batch: type[ShardBatch]
    quantizer: type[Quantizer]
    dtype: torch.dtype
    layout: object
    options: tuple[object, ...]


def _batch_key(job: ShardJob, of_rows: bool) -> _BatchKey | None:
    """The key of the batch of a job, of whole rows or not; None where amaxes do not suffice."""
    quantizer = job.quantizer
    rule = rule_of(quantizer)
    batch = rule.batch_of_rows(quantizer) if of_rows else rule.batch_for(quantizer)
    if batch is None:
        return None
    options = tuple(getattr(quantizer, name) for name in rule.options)
    layout = getattr(quantizer, "layout", None)
    return _BatchKey(batch, type(quantizer), job.dtype, layout, options)


class ShardBatches(NamedTuple):
    """Shards of any mix of quantizers, in batches.

    Attributes:
        shard_batches: one batch for each class of quantizers for which amaxes suffice.
        gathered_batch: all other shards; None if there are none.
    """

    shard_batches: tuple[ShardBatch, ...]
    gathered_batch: GatheredBatch | None

    @classmethod
    def of(cls, jobs: Sequence[ShardJob], *, of_rows: bool = False) -> Self:
        """The batches of ``jobs``.

        The jobs of a batch agree in the options that their rule names.

        Args:
            jobs: the shards.
            of_rows: whether the shards are whole rows that cut no blocks, and their holders have
                these rows alone.
        """
        jobs_by_key: dict[_BatchKey, list[ShardJob]] = {}
        other_jobs: list[ShardJob] = []
        for job in jobs:
            key = _batch_key(job, of_rows)
            if key is None:
                other_jobs.append(job)
            else:
                jobs_by_key.setdefault(key, []).append(job)
        shard_batches = tuple(key.batch(batch_jobs) for key, batch_jobs in jobs_by_key.items())
        return cls(shard_batches, GatheredBatch(other_jobs) if other_jobs else None)

    def quantize(self, group: Group) -> None:
        """Quantize all shards.

        One all-reduce over ``group`` serves all amaxes, and one all-gather all values that are
        needed.
        """
        if self.gathered_batch is None:
            self.cast(self.amaxes(group))
            return
        # Ranks send different amounts, so the all-reduce of the amaxes also finds the largest one.
        values = self.gathered_batch.values()
        unit = self.gathered_batch.UNIT
        own_units = torch.tensor([math.ceil(values.numel() / unit)], device=values.device).float()
        *amaxes, largest_units = self.amaxes(group, own_units)
        self.cast(amaxes)
        padding = int(largest_units.item()) * unit - values.numel()
        message = torch.nn.functional.pad(values, [0, padding])
        if process_groups_ready():
            self.gathered_batch.cast(list(all_gather(message, group)))
        else:
            self.gathered_batch.cast([message])

    def amaxes(self, group: Group, *numbers: torch.Tensor) -> list[torch.Tensor]:
        """The amaxes of each batch, and ``numbers``, reduced over ``group`` in one
        all-reduce(MAX)."""
        tensors = [*(batch.amaxes() for batch in self.shard_batches), *numbers]
        if not tensors or not process_groups_ready():
            return tensors
        if len(tensors) == 1:
            return [all_reduce_max(tensors[0], group)]
        packed = all_reduce_max(torch.cat(tensors), group)
        return list(packed.split([tensor.numel() for tensor in tensors]))

    def cast(self, amaxes: Sequence[torch.Tensor]) -> None:
        """Write the shards of the shard batches from ``amaxes``, one tensor for each batch."""
        for batch, amaxes_of_batch in zip(self.shard_batches, amaxes, strict=True):
            batch.cast(amaxes_of_batch)


def requantize(writes: Sequence[tuple[QuantizedTensor, torch.Tensor]]) -> None:
    """Quantize new values into tensors; ``writes`` are pairs (tensor, values).

    Shards that share a scale, or a seed, are reduced together, once for each group.
    """
    jobs_by_group: dict[str, list[ShardJob]] = {}
    for target, values in writes:
        group, quantizer = target._shard_group, target._quantizer
        if group is None or quantizer is None or not _depends_on_numbers(quantizer):
            target.quantize_(values)
            continue
        jobs_by_group.setdefault(group, []).append(_job_of_rows(target, quantizer, values))
    for group, jobs in jobs_by_group.items():
        with torch.no_grad():
            ShardBatches.of(jobs, of_rows=True).quantize(group)


def _depends_on_numbers(quantizer: Quantizer) -> bool:
    """Whether a few numbers, reduced over all shards, suffice to quantize a shard of rows, whatever
    the size of the whole."""
    rule = rule_of(quantizer)
    if rule.one_amax(quantizer):
        return True
    by_blocks = rule.batch_for(quantizer) is not None
    alone = rule.independent_rows(quantizer) is not None
    return not by_blocks and not alone and rule.batch_of_rows(quantizer) is not None


def _job_of_rows(target: QuantizedTensor, quantizer: Quantizer, values: torch.Tensor) -> ShardJob:
    """The job that writes values into a shard of rows.

    The shard is treated as a whole weight, except for the place of its rows: neither one amax nor
    the other numbers depend on the size of the whole.
    """
    quantizer = quantizer.with_usage(**target.get_usages())
    shape, flat = tuple(target.shape), values.detach().reshape(-1)
    output = shard_output(target, shape, 0, flat.numel(), "a shard")
    start = 0
    if not rule_of(quantizer).one_amax(quantizer):
        start = target._first_row * shape[-1]
    return ShardJob(quantizer, flat, shape, values.dtype, start, output)
