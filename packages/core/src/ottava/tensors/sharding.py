"""FSDP2's hooks for quantized tensors, derived from the storage declaration.

A gather moves the inner tensors that are declared with ``gather=True``, as bytes, and builds the whole tensor around
them. Inner tensors that serve every usage and are not gathered (the scale of a per-tensor recipe) are the same on every
shard: checked at the first gather, and kept so by :meth:`ottava.Quantizer.for_shards` from then on. What derives from
gathered bytes, a transpose for example, is not moved but made again where it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ottava.errors import ShapeError, UsageError
from ottava.tensors.collectives import all_reduce_max
from ottava.tensors.storage import InnerTensor, StorageSpec

if TYPE_CHECKING:
    from ottava.tensors.tensor import QuantizedTensor


@dataclass(frozen=True)
class GatherPlan:
    """What the hook after a gather needs to know: which inner tensors come, and everything that does not."""

    gathered: tuple[InnerTensor, ...]
    shared: dict[str, torch.Tensor | None]
    spec: StorageSpec
    size: torch.Size


def pre_all_gather(tensor: QuantizedTensor, mesh: Any, size: torch.Size) -> tuple[tuple[torch.Tensor, ...], GatherPlan]:
    """This rank's part of what is gathered, padded to the length of the longest, and the plan.

    Raises:
        ShapeError: the shards are uneven and an inner tensor has rows of its own kind, which cannot be padded.
        UsageError: the shards do not agree in what must be the same on all of them.
    """
    group = mesh.get_group()
    _agree(tensor, group)
    world = dist.get_world_size(group)
    rows = math.ceil(size[0] / world)
    gathered = _to_gather(tensor)
    uneven = size[0] % world != 0
    inputs = []
    for inner in gathered:
        part: torch.Tensor = getattr(tensor, inner.attribute)
        if uneven:
            # FSDP asks for the padded size of the parameter itself.
            if part.shape != tensor.shape:
                raise ShapeError(
                    f"{size[0]} rows are sharded over {world} ranks, and {inner.argument!r} has rows of another size",
                    expected=f"a number of rows that {world} divides",
                )
            part = torch.nn.functional.pad(part, [0, 0] * (part.dim() - 1) + [0, rows - part.shape[0]])
        inputs.append(part.contiguous().view(torch.uint8) if part.element_size() == 1 else part.contiguous())
    taken = {inner.argument for inner in gathered}
    shared = {
        inner.argument: getattr(tensor, inner.attribute) if inner.usage == "both" else None
        for inner in tensor.inner_tensors
        if inner.argument not in taken
    }
    spec = tensor.flatten_storage()[1]
    return tuple(inputs), GatherPlan(gathered, shared, spec, size)


def post_all_gather(
    plan: GatherPlan, outputs: Sequence[torch.Tensor], dtype: torch.dtype, out: QuantizedTensor | None
) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
    """The whole tensor around the gathered bytes; with ``out``, its bytes were refilled and the rest follows."""
    if out is not None:
        for inner in out.inner_tensors:
            if inner.argument in plan.shared and inner.usage == "both":
                setattr(out, inner.attribute, plan.shared[inner.argument])
        out.mark_written()
        return None
    arguments: dict[str, Any] = dict(plan.shared)
    for inner, output in zip(plan.gathered, outputs, strict=True):
        # Padding lies at the end: ranks before the last non-empty one are full.
        same_rows = len(plan.gathered) == 1 or output.shape[0] >= plan.size[0]
        arguments[inner.argument] = output[: plan.size[0]] if same_rows else output
    arguments |= {f.argument: v for f, v in zip(plan.spec.cls.all_static_fields(), plan.spec.static, strict=True)}
    arguments |= {"shape": tuple(plan.size), "dtype": dtype, "quantizer": plan.spec.quantizer}
    build: Any = plan.spec.cls
    return build(**arguments), ()


def _to_gather(tensor: QuantizedTensor) -> tuple[InnerTensor, ...]:
    """In a backward pass what serves the columnwise usage, if anything does; otherwise everything that can be."""
    candidates = tuple(i for i in tensor.inner_tensors if i.gather and getattr(tensor, i.attribute) is not None)
    if not candidates:
        raise UsageError(
            f"{type(tensor).__name__} holds no inner tensor that can be gathered",
            expected="one declared with gather=True",
            remedy="keep the rowwise usage of sharded weights",
        )
    if torch._C._current_graph_task_id() != -1:
        columnwise = tuple(i for i in candidates if i.usage != "rowwise")
        return columnwise if any(i.usage == "columnwise" for i in columnwise) else candidates
    return candidates


def _agree(tensor: QuantizedTensor, group: Any) -> None:
    """Check once that all shards hold the same scales, and have their quantizers keep it so."""
    # The name, not the group: a tensor must not keep a group alive that was destroyed.
    if tensor._shard_group == group.group_name:
        return
    for inner in tensor.inner_tensors:
        value = getattr(tensor, inner.attribute)
        if inner.gather or inner.usage != "both" or value is None:
            continue
        extremes = all_reduce_max(torch.stack([value.float(), -value.float()]), group)
        if not torch.equal(extremes[0], -extremes[1]):
            raise UsageError(
                f"the shards of a {type(tensor).__name__} have different {inner.argument!r}",
                expected="one value for all shards of a weight",
                remedy="set the values of the weight before it is sharded",
            )
    if tensor._quantizer is not None:
        tensor.update_quantizer(tensor._quantizer.for_shards(group.group_name))
    tensor._shard_group = group.group_name
    # An uneven shard is a part of a padded one. The padding is zeros, the same at any scale: the shard is on its own.
    tensor._whole = None
