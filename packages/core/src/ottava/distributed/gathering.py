"""How FSDP2 gathers weights that are kept in high precision: quantized by each rank, with scales that all share.

A shard that can be quantized by itself (rows of blocks) is. Where the scales depend on all shards, the amaxes of all
parameters of a group are reduced at once, when the first of them is gathered. Where neither is possible (shards that
cut blocks, a quantizer that has to see all values) the values themselves are gathered, and quantized by the layer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ottava.distributed.fsdp2 import GatheredParameter, gathered_together
from ottava.distributed.hooks import GatherPlan, check_shard, pre_all_gather
from ottava.distributed.rules import ShardBatches, rule_of
from ottava.distributed.shards import ShardJob, shard_output
from ottava.errors import UsageError
from ottava.tensors import QuantizedTensor, Quantizer
from ottava.torch_private import graph_task_id, version_of

# Module that owns a parameter -> its shard as it was quantized together with those of its group, and the version of the
# values that it was quantized from.
_quantized: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, torch.dtype, QuantizedTensor]] = (
    weakref.WeakKeyDictionary()
)
# The first module of a group -> the versions of all values and the reduced amaxes of the weights, of the last gather.
_amaxes: weakref.WeakKeyDictionary[torch.nn.Module, tuple[list[int], list[torch.Tensor]]] = weakref.WeakKeyDictionary()


def gather_inputs(
    weight: Any, mesh: Any, size: torch.Size, module: Any, mp_policy: Any
) -> tuple[tuple[torch.Tensor, ...], GatherPlan | torch.Size]:
    """What this rank sends, padded to the length of the longest shard, and the plan; the size, where values are sent.

    Raises:
        UsageError: the module binds no recipe, or is resharded to fewer ranks after the forward pass.
        ShapeError: the weight is not sharded by rows.
    """
    dtype = mp_policy.param_dtype or weight.dtype
    group, values = mesh.get_group(), weight.high_precision()
    world = dist.get_world_size(group)
    check_shard(values.shape, size, module)
    known = _quantized.pop(module, None)
    if known is not None and known[:2] == (version_of(values), dtype):
        return pre_all_gather(known[2], mesh, size, module)
    if not _gathers_quantized(_quantizer_of(module), size, world):
        rows = math.ceil(size[0] / world)
        missing = rows - values.shape[0]
        values = values.to(dtype)
        if missing:
            values = torch.nn.functional.pad(values, [0, 0] * (values.dim() - 1) + [0, missing])
        return (values.contiguous(),), size
    together = [p for p in gathered_together(module) if p.module is not module and hasattr(p.shard, "high_precision")]
    _quantize_together([GatheredParameter(weight, size, module), *together], mp_policy.param_dtype, group, world)
    return pre_all_gather(_quantized.pop(module)[2], mesh, size, module)


def _quantizer_of(module: Any) -> Quantizer:
    quantizer: Quantizer | None = getattr(module, "gather_quantizer", lambda: None)()
    if quantizer is None:
        raise UsageError(
            f"no recipe is bound to the {type(module).__name__} whose weight is gathered",
            expected="a layer of ottava.convert(model, recipe)",
            remedy="convert the model before ottava.distributed.gather_quantized(model)",
        )
    return quantizer


def _gathers_quantized(quantizer: Quantizer, size: torch.Size, world: int) -> bool:
    """Whether shards can be quantized where they are; the same on every rank."""
    rule = rule_of(quantizer)
    independent = rule.independent_rows(quantizer)
    if independent is not None:
        rows = math.ceil(size[0] / world) * math.prod(size[1:-1])
        return world == 1 or (len(size) > 1 and size[0] % world == 0 and rows % independent == 0)
    if rule.batch is None:
        return False
    if size[0] % world == 0:
        return True
    # FSDP pads uneven shards, and gathers only inner tensors that have the shard's shape.
    shape = (1, *size[1:])
    example = quantizer.with_usage(True, True).make_empty(shape, dtype=torch.float32)
    sent = [getattr(example, inner.attribute) for inner in example.inner_tensors if inner.gather]
    return all(tensor is None or tuple(tensor.shape) == shape for tensor in sent)


def _quantize_together(
    parameters: Sequence[GatheredParameter], param_dtype: torch.dtype | None, group: Any, world: int
) -> None:
    """Quantize the shards of parameters that are gathered together, with one all-reduce for all that need any."""
    jobs: list[ShardJob] = []
    reducing: list[GatheredParameter] = []
    made: dict[torch.nn.Module, tuple[int, torch.dtype, QuantizedTensor]] = {}
    for parameter in parameters:
        weight: Any = parameter.shard
        values, dtype, size = weight.high_precision(), param_dtype or weight.dtype, parameter.size
        quantizer = _quantizer_of(parameter.module).with_usage(True, True)
        if not _gathers_quantized(quantizer, size, world):
            continue
        local: Any
        if rule_of(quantizer).independent_rows(quantizer) is not None:
            local = quantizer.quantize_impl(values.to(dtype), dtype)
        else:
            start = min(dist.get_rank(group) * math.ceil(size[0] / world), size[0]) * math.prod(size[1:])
            local = quantizer.make_empty(values.shape, dtype=dtype, device=values.device)
            output = shard_output(local, size, start, values.numel(), "a sharded weight")
            jobs.append(ShardJob(quantizer, values.reshape(-1), tuple(size), dtype, start, output))
            reducing.append(parameter)
        if not isinstance(local, QuantizedTensor):
            raise UsageError(
                f"the quantizer of a {type(parameter.module).__name__} gives a {type(local).__name__}",
                expected="a QuantizedTensor, which can be a parameter",
            )
        local._shard_group = group.group_name
        made[parameter.module] = (version_of(values), dtype, local)
    batches = ShardBatches.of(jobs)
    batches.cast(_shared_amaxes(reducing, batches, group))
    _quantized.update(made)


def _shared_amaxes(parameters: Sequence[GatheredParameter], batches: ShardBatches, group: Any) -> list[torch.Tensor]:
    """The amaxes of the whole weights. A backward pass has those of the forward pass: the values are the same."""
    if not parameters:
        return []
    versions = [version_of(parameter.shard.high_precision()) for parameter in parameters]  # type: ignore[attr-defined]
    known = _amaxes.get(parameters[0].module)
    if graph_task_id() != -1 and known is not None and known[0] == versions:
        return known[1]
    reduced = batches.amaxes(group)
    _amaxes[parameters[0].module] = (versions, reduced)
    return reduced
