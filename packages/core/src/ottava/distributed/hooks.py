"""FSDP2's hooks of quantized tensors, derived from the storage declaration.

A gather moves the inner tensors that are declared with ``gather=True``, as bytes, and builds the
whole tensor around them; what derives from them is made again. Inner tensors that serve every usage
and are not gathered (the scale of a per-tensor recipe) are the same on every shard: checked at the
first gather, and kept so by :meth:`ottava.Quantizer.for_shards` from then on.
"""

import math
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ottava.collectives import all_reduce_max
from ottava.distributed import fsdp2
from ottava.distributed.agreement import compare_weights
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import check_blocks
from ottava.errors import ShapeError, UsageError, listed
from ottava.tensors import (
    InnerTensor,
    QuantizedTensor,
    Quantizer,
    StorageSpec,
)
from ottava.torch_private import (
    KNOWS_BACKWARD,
    graph_task_id,
)


class GatherPlan(NamedTuple):
    """What the hook after a gather needs to know: which inner tensors come, with the shape of a
    rank's shard and whether that is padded, and everything that does not."""

    inner: tuple[tuple[InnerTensor, torch.Size, bool], ...]
    shared: dict[str, torch.Tensor | None]
    spec: StorageSpec
    size: torch.Size


def check_shard(shape: Sequence[int], size: Sequence[int], module: Any) -> None:
    """Refuse what gather hooks do not allow: shards of columns, and fewer of them after the forward
    pass."""
    if tuple(shape[1:]) != tuple(size[1:]):
        what = f"a weight of shape {tuple(size)} has shards of {tuple(shape)}"
        raise ShapeError(
            what, "shards of rows, the default of fully_shard", "leave shard_placement_fn out"
        )
    if fsdp2.resharded_to_fewer(module):
        raise UsageError(
            "reshard_after_forward is a number, which torch refuses for gather hooks",
            "True or False",
        )


def padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``values`` with zeros up to ``rows`` rows."""
    missing = rows - values.shape[0]
    return (
        torch.nn.functional.pad(values, [0, 0] * (values.dim() - 1) + [0, missing])
        if missing
        else values
    )


def pre_all_gather(
    tensor: QuantizedTensor, mesh: Any, size: torch.Size, module: Any
) -> tuple[tuple[torch.Tensor, ...], GatherPlan]:
    """What this rank sends, padded to the length of the longest shard, and the plan.

    Args:
        tensor: this rank's shard.
        mesh: FSDP's device mesh.
        size: of the whole weight.
        module: the layer that owns the weight.

    Raises:
        ShapeError: shards of columns, or of rows that cut a block.
        UsageError: the ranks differ in weights or scales, or nothing can be gathered.
    """
    group = mesh.get_group()
    world = dist.get_world_size(group)
    if world > 1:
        # Before the ranks compare their weights: one whose shard no blocks make has no hook, and
        # takes no part.
        _check_rows(tensor, size, world)
    compare_weights(tensor, size, group, module)
    check_shard(tensor.shape, size, module)
    binding = getattr(module, "_binding", None)
    if binding is not None:
        binding.own_shard(module, tensor)
    _agree(tensor, size, group, module)
    fsdp2.drop_flat_copies(module)
    gathered = _to_gather(tensor, module)
    # With one rank nothing is gathered: FSDP copies the first input, and no other.
    sent = dict(list(gathered.items())[: None if world > 1 else 1])
    inputs: list[torch.Tensor] = []
    coming: list[tuple[InnerTensor, torch.Size, bool]] = []
    for inner, count in sent.items():
        data = inner.by_rows(getattr(tensor, inner.attribute))
        if not inner.block_rows:
            data = padded(data, math.ceil(size[0] / world))
        missing = count - data.numel() if world > 1 else 0
        coming.append((inner, data.shape, missing > 0))
        if missing > 0:
            data = torch.nn.functional.pad(data.reshape(1, -1), [0, missing])
        data = data.contiguous()
        inputs.append(data.view(torch.uint8) if data.element_size() == 1 else data)
    spec = tensor.flatten_storage()[1]
    return tuple(inputs), GatherPlan(tuple(coming), _staying(tensor, gathered, sent), spec, size)


def _staying(
    tensor: QuantizedTensor, gathered: Collection[InnerTensor], sent: Collection[InnerTensor]
) -> dict[str, torch.Tensor | None]:
    """The inner tensors that are not sent, by argument; None for those that the whole lacks."""
    # Scales without the data that they are of say nothing.
    usages = {"both", *(inner.usage for inner in gathered)}
    staying: dict[str, torch.Tensor | None] = {}
    for inner in tensor.inner_tensors:
        if inner in sent:
            continue
        serves = inner in gathered or (inner.shared and inner.usage in usages)
        staying[inner.argument] = getattr(tensor, inner.attribute) if serves else None
    return staying


def post_all_gather(
    plan: GatherPlan,
    outputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    out: QuantizedTensor | None,
) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
    """The whole tensor around the gathered bytes.

    Args:
        outputs: the gathered inputs of all ranks.
        dtype: the high-precision dtype that the whole tensor stands for.
        out: a tensor whose bytes were refilled, and which the rest follows; None makes one.

    Returns:
        The tensor, and no tensors for FSDP to free; None with ``out``.
    """
    arrived: dict[str, torch.Tensor] = {}
    for (inner, shape, is_padded), output in zip(plan.inner, outputs, strict=True):
        if is_padded:
            # Each rank sent its shard as one row, with the padding at its end.
            output = output[:, : shape.numel()].reshape(-1, *shape[1:])
        if inner.block_rows is None:
            # Only the last rank that has rows is padded, so that all padding lies at the end.
            output = output[: plan.size[0]]
        arrived[inner.argument] = inner.as_held(output)
    inner_tensors = plan.shared | arrived
    if out is not None:
        for inner in out.inner_tensors:
            if inner.shared or inner.gather:
                setattr(out, inner.attribute, inner_tensors[inner.argument])
        out.mark_written()
        return None
    cls: Any = plan.spec.cls
    fields = {
        field.argument: value
        for field, value in zip(cls.all_static_fields(), plan.spec.static, strict=True)
    }
    about = {"shape": tuple(plan.size), "dtype": dtype, "quantizer": plan.spec.quantizer}
    whole: QuantizedTensor = cls(**inner_tensors | fields | about)
    # FSDP frees the gathered bytes after the pass, so that a transpose is made only where it is
    # read.
    whole.rebuilds_derived = False
    return whole, ()


def _to_gather(tensor: QuantizedTensor, module: Any) -> dict[InnerTensor, int]:
    """What is sent, and how many elements of each: rows in a forward pass, columns in a backward
    pass, or both."""
    tensors = {
        inner: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors if inner.gather
    }
    both = {inner: int(data.numel()) for inner, data in tensors.items() if data is not None}
    if not both:
        raise UsageError(
            f"{type(tensor).__name__} holds no inner tensor that can be gathered",
            "one declared with gather=True",
            "keep the rowwise usage of sharded weights",
        )
    rowwise = {inner: count for inner, count in both.items() if inner.usage != "columnwise"}
    columnwise = {inner: count for inner, count in both.items() if inner.usage != "rowwise"}
    if both in (rowwise, columnwise):
        return both
    if tensor.rowwise_serves_columnwise:
        return rowwise
    # FSDP allocates once, so that what is gathered in turns must have the same dtypes and lengths.
    row_dtypes = [tensors[inner].dtype for inner in rowwise]
    column_dtypes = [tensors[inner].dtype for inner in columnwise]
    if row_dtypes != column_dtypes or not KNOWS_BACKWARD:
        return both
    if getattr(module, "recomputes", False) or not fsdp2.resharded_after_forward(module):
        # One gather serves both passes.
        return both
    lengths = map(max, rowwise.values(), columnwise.values())
    return dict(zip(rowwise if graph_task_id() == -1 else columnwise, lengths, strict=True))


def _check_rows(tensor: QuantizedTensor, size: torch.Size, world: int) -> None:
    """Refuse shards whose inner tensors do not make those of the whole, whichever pass is the
    first; a ShapeError."""
    values = {
        inner: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors if inner.gather
    }
    coming = [
        inner
        for inner, value in values.items()
        if value is not None or tensor.rowwise_serves_columnwise
    ]
    for inner in coming if size[0] % world else ():
        value = values[inner]
        # FSDP asks for the padded size of the parameter itself.
        of_other_size = value is not None and inner.by_rows(value).shape[1:] != tensor.shape[1:]
        if inner.block_rows or of_other_size:
            raise ShapeError(
                f"{size[0]} rows are sharded over {world} ranks, and {inner.argument!r} has "
                f"rows of another size",
                f"a number of rows that {world} divides",
                "keep the weight in high precision, or choose its rows so",
            )
    # Those of the first rank, so that all ranks say the same.
    rows = range(math.ceil(size[0] / world))
    check_blocks(coming, size, rows, f"a shard of a {type(tensor).__name__}")


# Module -> the name of the group whose ranks have compared the scales of a weight, and the size of
# the weight.
_agreed: weakref.WeakKeyDictionary[torch.nn.Module, set[tuple[str, torch.Size]]] = (
    weakref.WeakKeyDictionary()
)


def _agree(tensor: QuantizedTensor, size: torch.Size, group: Any, module: Any) -> None:
    """At the first gather, check that all shards hold the same scales, and have the quantizer keep
    it so.

    Args:
        tensor: this rank's shard.
        size: of the whole weight.

    Raises:
        UsageError: the scales differ, on all ranks; or the quantizer cannot keep them alike.
    """
    # The name is kept, not the group, because a tensor must not keep a destroyed group alive.
    name = group.group_name
    if tensor._shard_group == name:
        return
    agreed = _agreed.setdefault(module, set()) if isinstance(module, torch.nn.Module) else set()
    # FSDP pads the last shard again after a load, so that one rank may have a new tensor where the
    # others have not: a second comparison would wait for them forever.
    if (name, size) not in agreed:
        _compare_scales(tensor, group)
    if tensor._quantizer is not None:
        _check_shares_scales(tensor, tensor._quantizer)
        tensor.update_quantizer(tensor._quantizer.for_shards(name))
    agreed.add((name, size))
    tensor._shard_group = name
    # FSDP pads an uneven shard, so that it is a view; zeros are the same at any scale, so that it
    # may have its own.
    tensor._whole = None


def _compare_scales(tensor: QuantizedTensor, group: Any) -> None:
    """Refuse shards whose scales differ, by one all-reduce; a UsageError on all ranks."""
    shared = tensor.shared_inner()
    if not shared:
        return
    values = torch.cat([getattr(tensor, inner.attribute).float().reshape(-1) for inner in shared])
    largest, smallest = all_reduce_max(torch.stack([values, -values]), group)
    if not torch.equal(largest, -smallest):
        raise UsageError(
            f"the shards of a {type(tensor).__name__} have different "
            f"{listed([inner.argument for inner in shared])}",
            "one value for all shards of a weight",
            "set the values before it is sharded",
        )


def _check_shares_scales(tensor: QuantizedTensor, quantizer: Quantizer) -> None:
    """Refuse a quantizer that would give each shard a scale of its own; a UsageError."""
    shared = tensor.shared_inner()
    if not shared or type(quantizer).for_shards is not Quantizer.for_shards:
        return
    if rule_of(quantizer).independent_rows(quantizer) is None:
        raise UsageError(
            f"the shards of a {type(tensor).__name__} share {shared[0].argument!r}, and a "
            f"{type(quantizer).__name__} does not say how they are to keep one value",
            "a quantizer that defines for_shards(group)",
            "define it, or keep high precision",
        )
