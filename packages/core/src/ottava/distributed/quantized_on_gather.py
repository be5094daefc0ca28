"""Shards of weights in high precision, quantized by each rank when FSDP2 gathers them.

Each weight of the group that is gathered next takes one of three ways, the same on every rank:

1. Its shard can be quantized by itself, because its rows make whole blocks: no communication.
2. Its scales depend on all shards, by amaxes: one all-reduce(MAX) serves all such weights of the
   group, when the first of them is gathered. The shards of the others wait in a table until FSDP
   asks for them.
3. Neither is possible, because shards cut blocks or a quantizer has to see all values
   (:func:`can_quantize_shards` is False); or the backward pass, or some steps of training, read the
   weight in high precision.
   The values themselves are gathered, and the layer quantizes them.

Whether a rank reduces amaxes depends only on the pass and on which weights are gathered, and all
ranks agree on these. It must not depend on whether a shard has changed since: if only one rank had
written its shard, that rank would start an all-reduce alone, and wait for the others forever.
"""

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ottava.distributed.batches import ShardBatches
from ottava.distributed.layers import gathers_values, quantizer_for_gather, read_by_dgrad
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import ShardJob, shard_output
from ottava.errors import UsageError
from ottava.kernels.checks import check_dtype, check_high_precision
from ottava.recipes.backward import QUANTIZED
from ottava.recipes.execution import NO_BACKWARD
from ottava.tensors import QuantizedTensor, Quantizer
from ottava.torch_private import graph_task_id

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ShardedWeight(NamedTuple):
    """A weight in high precision that FSDP gathers.

    Attributes:
        values: this rank's shard.
        size: the size of the whole weight.
        module: the layer that owns the weight.
    """

    values: torch.Tensor
    size: torch.Size
    module: torch.nn.Module


# Module -> its shard that was quantized with the first one of the group, until it is gathered.
_waiting_shards: weakref.WeakKeyDictionary[torch.nn.Module, QuantizedTensor]
_waiting_shards = weakref.WeakKeyDictionary()
# The first module of a group -> the reduced amaxes of the last gather of the group.
_group_amaxes: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.Tensor]]
_group_amaxes = weakref.WeakKeyDictionary()


def can_quantize_shards(quantizer: Quantizer, size: torch.Size, world: int) -> bool:
    """Whether each rank can quantize its own shard; the same on every rank.

    Args:
        quantizer: the quantizer of the weight.
        size: the size of the whole weight.
        world: the number of ranks that have shards.
    """
    rule = rule_of(quantizer)
    independent = rule.independent_rows(quantizer)
    if independent is None and rule.batch_of_rows(quantizer) is None:
        return False
    if world == 1 or (independent is None and rule.one_amax(quantizer)):
        # FSDP pads uneven shards. With one scale for the tensor only data is gathered, so that the
        # padding cuts no block.
        return True
    if size[0] % world or len(size) == 1:
        # A vector is one row, which shards cut.
        return False
    rows = size[0] // world * math.prod(size[1:-1])
    return rows % rule.rows_of_blocks(quantizer) == 0


def take_quantized(module: torch.nn.Module) -> QuantizedTensor | None:
    """The shard that was quantized together with the first weight of the group; it is taken once.

    None: the weight is the first one, and quantizes the others with it. The shard has the present
    values, because FSDP calls the hooks of a group one after the other.
    """
    return _waiting_shards.pop(module, None)


def quantize_together(
    weights: Sequence[ShardedWeight], param_dtype: torch.dtype | None, group: "ProcessGroup"
) -> QuantizedTensor:
    """Quantize the shards of weights that are gathered together.

    One all-reduce serves all weights whose scales depend on all shards.

    Args:
        weights: the first one is gathered now, and can be quantized by each rank.
        param_dtype: the dtype that FSDP casts parameters to; None leaves them.
        group: the ranks that have the shards.

    Returns:
        The shard of the first weight; :func:`take_quantized` gives those of the others.
    """
    jobs: list[ShardJob] = []
    shards: dict[torch.nn.Module, QuantizedTensor] = {}
    for weight in weights:
        reads = read_by_dgrad(weight.module)
        quantizer = quantizer_for_gather(weight.module).with_usage(True, reads == QUANTIZED)
        world = dist.get_world_size(group)
        if gathers_values(weight.module):
            continue
        if not can_quantize_shards(quantizer, weight.size, world):
            continue
        dtype = param_dtype or weight.values.dtype
        check_dtype(dtype, "a weight would be gathered in")
        if rule_of(quantizer).independent_rows(quantizer) is not None:
            shard = quantizer.quantize_impl(weight.values.to(dtype), dtype)
        else:
            job = _job(weight, quantizer, dtype, group)
            jobs.append(job)
            shard = job.output.holder
        if not isinstance(shard, QuantizedTensor):
            raise UsageError(
                f"the quantizer of a {type(weight.module).__name__} gives a {type(shard).__name__}",
                expected="a QuantizedTensor, which can be a parameter",
            )
        shard._shard_group = group.group_name
        shards[weight.module] = shard
    first = weights[0].module
    if jobs:
        batches = ShardBatches.of(jobs, of_rows=True)
        batches.cast(_reduced_amaxes(batches, first, group))
    first_shard = shards.pop(first)
    _waiting_shards.update(shards)
    return first_shard


def _job(
    weight: ShardedWeight, quantizer: Quantizer, dtype: torch.dtype, group: "ProcessGroup"
) -> ShardJob:
    """A shard to quantize by scales that depend on all shards."""
    values, size = weight.values, weight.size
    check_high_precision(values, "a sharded weight")
    rows = math.ceil(size[0] / dist.get_world_size(group))
    start = min(dist.get_rank(group) * rows, size[0]) * math.prod(size[1:])
    holder = quantizer.make_empty(values.shape, dtype=dtype, device=values.device)
    output = shard_output(holder, size, start, values.numel(), "a sharded weight")
    return ShardJob(quantizer, values.reshape(-1), tuple(size), dtype, start, output)


def _reduced_amaxes(
    batches: ShardBatches, first: torch.nn.Module, group: "ProcessGroup"
) -> list[torch.Tensor]:
    """The amaxes of the weights, reduced over the ranks.

    A backward pass uses those of the forward pass, because the values are the same. Values that
    were written between the passes saturate where they exceed them.

    Args:
        batches: the shards of this rank.
        first: the module of the weight that is gathered first.
        group: the ranks that have the shards.
    """
    forward_amaxes = _group_amaxes.get(first)
    if forward_amaxes is not None and graph_task_id() != NO_BACKWARD:
        return forward_amaxes
    amaxes = batches.amaxes(group)
    _group_amaxes[first] = amaxes
    return amaxes
