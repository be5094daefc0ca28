"""Shards of weights in high precision, which each rank quantizes when they are gathered.

A shard that can be quantized by itself (rows of blocks) is. Where the scales depend on all shards,
the amaxes of all parameters of a group are reduced at once, when the first of them is gathered.
Where neither is possible (shards that cut blocks, a quantizer that has to see all values) the
values themselves are gathered, and quantized by the layer.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ottava import torch_private
from ottava.distributed.rules import ShardBatches, rule_of
from ottava.distributed.shards import ShardJob, shard_output
from ottava.errors import UsageError
from ottava.kernels.checks import check_dtype, check_high_precision
from ottava.recipes.execution import NO_BACKWARD
from ottava.tensors import QuantizedTensor, Quantizer
from ottava.torch_private import graph_task_id


class ShardedWeight(NamedTuple):
    """A weight that FSDP gathers: this rank's values of it, in high precision, the size of the
    whole, and the layer that owns it."""

    values: torch.Tensor
    size: torch.Size
    module: torch.nn.Module


class _QuantizedShard(NamedTuple):
    """A shard as it was quantized of the values of a version, in a dtype."""

    version: int
    dtype: torch.dtype
    shard: QuantizedTensor


class _Amaxes(NamedTuple):
    """The reduced amaxes of the last gather of a group of weights, and the versions of all
    values."""

    versions: list[int]
    amaxes: list[torch.Tensor]


# Shards that were quantized with those of their group, until they are gathered.
_quantized: weakref.WeakKeyDictionary[torch.nn.Module, _QuantizedShard]
_quantized = weakref.WeakKeyDictionary()
# By the first module of a group.
_amaxes: weakref.WeakKeyDictionary[torch.nn.Module, _Amaxes] = weakref.WeakKeyDictionary()


def bound_quantizer(module: Any) -> Quantizer:
    """The quantizer of the recipe that is bound to a layer, for a gather of its weight.

    Raises:
        UsageError: no recipe is bound.
    """
    binding = getattr(module, "_binding", None)
    quantizer: Quantizer | None = None if binding is None else binding.gather_quantizer(module)
    if quantizer is None:
        raise UsageError(
            f"no recipe is bound to the {type(module).__name__} whose weight is gathered",
            "a layer of ottava.convert(model, recipe)",
            "convert it before gather_quantized(model)",
        )
    return quantizer


def gathers_quantized(quantizer: Quantizer, size: torch.Size, world: int) -> bool:
    """Whether shards can be quantized where they are; the same on every rank.

    Args:
        size: of the whole weight.
        world: the number of ranks that have shards.
    """
    rule = rule_of(quantizer)
    independent = rule.independent_rows(quantizer)
    if independent is None and rule.batch_for(quantizer) is None:
        return False
    if world == 1 or (independent is None and rule.one_amax(quantizer)):
        # FSDP pads uneven shards, of which nothing but data is gathered then.
        return True
    if size[0] % world or (independent is not None and len(size) == 1):
        return False
    rows = size[0] // world * math.prod(size[1:-1])
    return rows % rule.rows_of_blocks(quantizer) == 0


def take_quantized(
    module: torch.nn.Module, values: torch.Tensor, dtype: torch.dtype
) -> QuantizedTensor | None:
    """The shard that was quantized together with the weight that was gathered first, once; None if
    there is none of these values in this dtype."""
    known = _quantized.pop(module, None)
    if known is None or known[:2] != (torch_private.version_of(values), dtype):
        return None
    return known.shard


def quantize_together(
    weights: Sequence[ShardedWeight], param_dtype: torch.dtype | None, group: Any
) -> QuantizedTensor:
    """Quantize the shards of weights that are gathered together, with one all-reduce for all that
    need any.

    Args:
        weights: the first one is gathered now, and can be quantized where it is.
        param_dtype: that FSDP casts parameters to; None leaves them.
        group: process group of the ranks that have the shards.

    Returns:
        The shard of the first weight; :func:`take_quantized` gives those of the others.
    """
    jobs: list[ShardJob] = []
    shards: dict[torch.nn.Module, _QuantizedShard] = {}
    for weight in weights:
        quantizer = bound_quantizer(weight.module).with_usage(True, True)
        if not gathers_quantized(quantizer, weight.size, dist.get_world_size(group)):
            continue
        dtype = param_dtype or weight.values.dtype
        check_dtype(dtype, "a weight would be gathered in")
        shard: Any
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
        version = torch_private.version_of(weight.values)
        shards[weight.module] = _QuantizedShard(version, dtype, shard)
    if jobs:
        batches = ShardBatches.of(jobs)
        batches.cast(_amaxes_of(batches, shards, group))
    first = shards.pop(weights[0].module)
    _quantized.update(shards)
    return first.shard


def _job(weight: ShardedWeight, quantizer: Quantizer, dtype: torch.dtype, group: Any) -> ShardJob:
    """A shard to quantize by scales that depend on all shards."""
    values, size = weight.values, weight.size
    check_high_precision(values, "a sharded weight")
    rows = math.ceil(size[0] / dist.get_world_size(group))
    start = min(dist.get_rank(group) * rows, size[0]) * math.prod(size[1:])
    holder: Any = quantizer.make_empty(values.shape, dtype=dtype, device=values.device)
    output = shard_output(holder, size, start, values.numel(), "a sharded weight")
    return ShardJob(quantizer, values.reshape(-1), tuple(size), dtype, start, output)


def _amaxes_of(
    batches: ShardBatches, shards: dict[torch.nn.Module, _QuantizedShard], group: Any
) -> list[torch.Tensor]:
    """The amaxes of the weights, reduced over the ranks in a forward pass. A backward pass has
    those of the forward pass, because the values are the same."""
    first = next(iter(shards))
    versions = [shard.version for shard in shards.values()]
    known = _amaxes.get(first)
    if graph_task_id() == NO_BACKWARD or known is None or known.versions != versions:
        known = _amaxes[first] = _Amaxes(versions, batches.amaxes(group))
    return known.amaxes
