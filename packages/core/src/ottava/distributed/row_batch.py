"""``RowBatch``: shards of whole rows whose quantization needs more than the amaxes of blocks.

That is so if scales have a second level, if amaxes are those of rotated values, or if elements are
rounded at random. A shard of rows still needs only a few numbers of the other shards::

    amaxes that span the rows ──┐
    seed of the first rows    ──┴── one all-reduce(MAX) ──> quantized rows
"""

import torch

from ottava.distributed.shards import ShardBatch, ShardJob
from ottava.layout import as_matrix_shape
from ottava.tensors import GridQuantizer
from ottava.tensors.row_shard import RowShard


class RowBatch(ShardBatch):
    """Shards of whole rows of weights, whose holders have these rows.

    The numbers of each weight are those of :meth:`RowShard.numbers`. Its seed is that of the rank
    with the first rows.
    """

    def amaxes(self) -> torch.Tensor:
        numbers = []
        for job in self.jobs:
            numbers.append(_row_shard(job).numbers(is_first=job.start_offset == 0))
        return torch.cat(numbers)

    def cast(self, amaxes: torch.Tensor) -> None:
        shards = [_row_shard(job) for job in self.jobs]
        numbers = amaxes.split([shard.number_count for shard in shards])
        for job, shard, numbers_of_weight in zip(self.jobs, shards, numbers, strict=True):
            columns = as_matrix_shape(job.shape)[1]
            first_row = job.start_offset // max(columns, 1)
            sides = shard.quantize(numbers_of_weight, first_row)
            holder = job.output.holder
            shape = torch.Size(holder.size())
            quantizer = _grid_quantizer(job)
            holder.copy_from_storage(quantizer.storage_of_sides(sides, job.dtype, shape))


def _row_shard(job: ShardJob) -> RowShard:
    """The rows of a job, with their present values."""
    return _grid_quantizer(job).row_shard(job.rounded().view(job.output.holder.size()))


def _grid_quantizer(job: ShardJob) -> GridQuantizer:
    # The rule gives this batch to no other quantizers.
    assert isinstance(job.quantizer, GridQuantizer)
    return job.quantizer
