"""FSDP2's gather hooks of quantized tensors, derived from the storage declaration.

A rank sends its shards of the inner tensors that are declared with ``gather=True``, as bytes. The
whole tensor is built around the gathered bytes; tensors that derive from them, such as a transpose,
are rebuilt::

    shard ── pre_all_gather ──> bytes of inner tensors, padded ──> FSDP's all-gather ──┐
                 └─────────────> GatherPlan: shapes, scales, fields ────────────────┐  │
    whole weight <────────────────────────────────────────────── post_all_gather <──┴──┘

Inner tensors that serve every usage and are not gathered, as the scale of a per-tensor recipe, are
the same on every shard. That is checked at the first gather, and from then on
:meth:`ottava.Quantizer.for_shards` keeps it so.
"""

import math
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ottava.collectives import all_reduce_max
from ottava.distributed import fsdp2
from ottava.distributed.agreement import compare_weights
from ottava.distributed.layers import is_converted
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import check_blocks
from ottava.errors import ShapeError, UsageError, listed
from ottava.recipes.execution import NO_BACKWARD
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

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class SentTensor(NamedTuple):
    """An inner tensor that is gathered.

    Attributes:
        inner: the declaration.
        shape: the shape of a rank's shard, rows first.
        padded: whether each rank sends its shard as one row with padding at the end.
    """

    inner: InnerTensor
    shape: torch.Size
    padded: bool


class GatherPlan(NamedTuple):
    """What the hook after a gather needs besides the gathered bytes.

    Attributes:
        sent: the inner tensors that are gathered.
        shared: the inner tensors that are not gathered, by argument; None for those that the whole
            lacks.
        spec: the class, the static fields and the quantizer of the whole.
        size: the size of the whole.
    """

    sent: tuple[SentTensor, ...]
    shared: dict[str, torch.Tensor | None]
    spec: StorageSpec
    size: torch.Size


def check_shard(shape: Sequence[int], size: Sequence[int], module: torch.nn.Module) -> None:
    """Refuse shards of columns, and fewer shards after the forward pass, because gather hooks do
    not allow them.

    Raises:
        ShapeError: a shard of ``shape`` is not rows of a weight of ``size``.
        UsageError: FSDP reshards to fewer ranks.
    """
    if tuple(shape[1:]) != tuple(size[1:]):
        raise ShapeError(
            f"a weight of shape {tuple(size)} has shards of {tuple(shape)}",
            "shards of rows, the default of fully_shard",
            "leave shard_placement_fn out",
        )
    if fsdp2.resharded_to_fewer(module):
        raise UsageError(
            "reshard_after_forward is a number, which torch refuses for gather hooks",
            "True or False",
        )


def padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``values`` with zeros up to ``rows`` rows."""
    missing = rows - values.shape[0]
    if missing == 0:
        return values
    other_dimensions = [0, 0] * (values.dim() - 1)
    return torch.nn.functional.pad(values, [*other_dimensions, 0, missing])


def pre_all_gather(
    tensor: QuantizedTensor, mesh: "DeviceMesh", size: torch.Size, module: torch.nn.Module
) -> tuple[tuple[torch.Tensor, ...], GatherPlan]:
    """The bytes that this rank sends, padded to the length of the longest shard, and the plan.

    Args:
        tensor: this rank's shard.
        mesh: FSDP's device mesh.
        size: the size of the whole weight.
        module: the layer that owns the weight.

    Raises:
        ShapeError: shards of columns, or of rows that cut a block.
        UsageError: the ranks differ in weights or scales, or nothing can be gathered.
    """
    group = mesh.get_group()
    world = dist.get_world_size(group)
    if world > 1:
        # This comes before the ranks compare their weights, because a rank whose shard makes no
        # blocks has no hook and takes no part in the comparison.
        _check_rows(tensor, size, world)
    compare_weights(tensor, size, group, module)
    check_shard(tensor.shape, size, module)
    if is_converted(module):
        module._binding.own_shard(module, tensor)
    _agree(tensor, size, group, module)
    fsdp2.drop_flat_copies(module)
    lengths = _lengths_to_gather(tensor, module)
    moved = list(lengths)
    if world == 1:
        # FSDP gathers nothing: it copies the first input, and no other.
        moved = moved[:1]
    rows = math.ceil(size[0] / world)
    inputs: list[torch.Tensor] = []
    sent: list[SentTensor] = []
    for inner in moved:
        data = inner.by_rows(getattr(tensor, inner.attribute))
        if not inner.block_rows:
            data = padded(data, rows)
        missing = 0
        if world > 1:
            missing = lengths[inner] - data.numel()
        sent.append(SentTensor(inner, data.shape, missing > 0))
        if missing > 0:
            data = torch.nn.functional.pad(data.reshape(1, -1), [0, missing])
        inputs.append(_as_bytes(data.contiguous()))
    spec = tensor.flatten_storage()[1]
    shared = _not_sent(tensor, lengths, moved)
    return tuple(inputs), GatherPlan(tuple(sent), shared, spec, size)


def _as_bytes(data: torch.Tensor) -> torch.Tensor:
    """8-bit data as uint8, because collectives do not know float8; other data as it is."""
    if data.element_size() == 1:
        return data.view(torch.uint8)
    return data


def _not_sent(
    tensor: QuantizedTensor, gathered: Collection[InnerTensor], sent: Collection[InnerTensor]
) -> dict[str, torch.Tensor | None]:
    """The inner tensors that are not sent, by argument; None for those that the whole lacks.

    Args:
        tensor: this rank's shard.
        gathered: the inner tensors with data of the pass.
        sent: those of them that FSDP moves.
    """
    # The whole needs no scales of a usage whose data it lacks.
    usages = {"both", *(inner.usage for inner in gathered)}
    inner_tensors: dict[str, torch.Tensor | None] = {}
    for inner in tensor.inner_tensors:
        if inner in sent:
            continue
        serves = inner in gathered or (inner.shared and inner.usage in usages)
        inner_tensors[inner.argument] = getattr(tensor, inner.attribute) if serves else None
    return inner_tensors


def post_all_gather(
    plan: GatherPlan,
    outputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    out: QuantizedTensor | None,
) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
    """The whole tensor around the gathered bytes.

    Args:
        plan: the plan of :func:`pre_all_gather`.
        outputs: the gathered inputs of all ranks.
        dtype: the high-precision dtype that the whole tensor stands for.
        out: the whole tensor of an earlier gather, whose memory FSDP has filled again and whose
            other inner tensors are replaced; None makes a new one.

    Returns:
        The tensor, and no tensors for FSDP to free; None with ``out``.
    """
    inner_tensors = dict(plan.shared)
    for (inner, shape, is_padded), output in zip(plan.sent, outputs, strict=True):
        rows = output
        if is_padded:
            # Each rank sent its shard as one row, with the padding at its end.
            rows = rows[:, : shape.numel()].reshape(-1, *shape[1:])
        if inner.block_rows is None:
            # Only the last rank that has rows is padded, so that all padding lies at the end.
            rows = rows[: plan.size[0]]
        inner_tensors[inner.argument] = inner.as_held(rows)
    if out is not None:
        for inner in out.inner_tensors:
            if inner.shared or inner.gather:
                setattr(out, inner.attribute, inner_tensors[inner.argument])
        out.mark_written()
        return None
    fields = {
        field.argument: value
        for field, value in zip(plan.spec.cls.all_static_fields(), plan.spec.static, strict=True)
    }
    fields |= {"shape": tuple(plan.size), "dtype": dtype, "quantizer": plan.spec.quantizer}
    whole: QuantizedTensor = plan.spec.cls(**inner_tensors, **fields)
    # FSDP frees the gathered bytes after the pass, so that a transpose is made only where it is
    # read.
    whole.rebuilds_derived = False
    return whole, ()


def _lengths_to_gather(tensor: QuantizedTensor, module: torch.nn.Module) -> dict[InnerTensor, int]:
    """The inner tensors that are gathered, and how many elements of each.

    They are those of rows in a forward pass and of columns in a backward pass, or both.

    Raises:
        UsageError: the tensor holds none.
    """
    tensors = _gatherable(tensor)
    both = {inner: data.numel() for inner, data in tensors.items()}
    if not both:
        raise UsageError(
            f"{type(tensor).__name__} holds no inner tensor that can be gathered",
            "one declared with gather=True",
            "keep the rowwise usage of sharded weights",
        )
    rowwise = {inner: length for inner, length in both.items() if inner.usage != "columnwise"}
    columnwise = {inner: length for inner, length in both.items() if inner.usage != "rowwise"}
    if both in (rowwise, columnwise):
        return both
    if tensor.rowwise_serves_columnwise:
        return rowwise
    # FSDP allocates memory once, so that tensors that are gathered in turns must have the same
    # dtypes and lengths.
    row_dtypes = [tensors[inner].dtype for inner in rowwise]
    column_dtypes = [tensors[inner].dtype for inner in columnwise]
    if row_dtypes != column_dtypes or not KNOWS_BACKWARD:
        return both
    if getattr(module, "recomputes", False) or not fsdp2.resharded_after_forward(module):
        # One gather serves both passes.
        return both
    lengths = map(max, rowwise.values(), columnwise.values())
    in_forward = graph_task_id() == NO_BACKWARD
    return dict(zip(rowwise if in_forward else columnwise, lengths, strict=True))


def _gatherable(tensor: QuantizedTensor) -> dict[InnerTensor, torch.Tensor]:
    """The inner tensors that ``tensor`` holds and a gather can move."""
    tensors: dict[InnerTensor, torch.Tensor | None] = {
        inner: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors if inner.gather
    }
    return {inner: data for inner, data in tensors.items() if data is not None}


def _check_rows(tensor: QuantizedTensor, size: torch.Size, world: int) -> None:
    """Refuse shards whose inner tensors do not make those of the whole, whichever pass is the
    first; a ShapeError."""
    gathered = list(_gatherable(tensor))
    if tensor.rowwise_serves_columnwise:
        gathered = [inner for inner in tensor.inner_tensors if inner.gather]
    if size[0] % world:
        _check_uneven(tensor, gathered, size, world)
    # The rows of the first rank are checked, so that all ranks raise the same error.
    rows = range(math.ceil(size[0] / world))
    check_blocks(gathered, size, rows, f"a shard of a {type(tensor).__name__}")


def _check_uneven(
    tensor: QuantizedTensor, gathered: Sequence[InnerTensor], size: torch.Size, world: int
) -> None:
    """Refuse uneven shards of inner tensors that FSDP cannot pad; a ShapeError.

    FSDP asks for the padded size of the parameter itself.
    """
    for inner in gathered:
        data: torch.Tensor | None = getattr(tensor, inner.attribute)
        of_other_size = data is not None and inner.by_rows(data).shape[1:] != tensor.shape[1:]
        if inner.block_rows or of_other_size:
            raise ShapeError(
                f"{size[0]} rows are sharded over {world} ranks, and {inner.argument!r} has "
                f"rows of another size",
                f"a number of rows that {world} divides",
                "keep the weight in high precision, or choose its rows so",
            )


# Module -> the name of the group whose ranks have compared the scales of a weight, and the size of
# the weight.
_agreed: weakref.WeakKeyDictionary[torch.nn.Module, set[tuple[str, torch.Size]]] = (
    weakref.WeakKeyDictionary()
)


def _agree(
    tensor: QuantizedTensor, size: torch.Size, group: "ProcessGroup", module: torch.nn.Module
) -> None:
    """At the first gather, check that all shards have the same scales, and have the quantizer keep
    it so.

    Args:
        tensor: this rank's shard.
        size: the size of the whole weight.
        group: the ranks that have the shards.
        module: the layer that owns the weight.

    Raises:
        UsageError: the scales differ, on all ranks; or the quantizer cannot keep them alike.
    """
    # The name is stored, not the group, because a tensor must not keep a destroyed group alive.
    name = group.group_name
    if tensor._shard_group == name:
        return
    agreed = _agreed.setdefault(module, set())
    # FSDP pads the last shard again after a load, so that one rank may have a new tensor where the
    # others have not: a second comparison would wait for them forever.
    if (name, size) not in agreed:
        _compare_scales(tensor, group)
    if tensor._quantizer is not None:
        _check_shares_scales(tensor, tensor._quantizer)
        tensor.update_quantizer(tensor._quantizer.for_shards(name))
    agreed.add((name, size))
    tensor._shard_group = name
    # FSDP pads an uneven shard, so that the shard is a view. The view may have a scale of its own,
    # because the padding is zero at any scale.
    tensor._whole = None


def _compare_scales(tensor: QuantizedTensor, group: "ProcessGroup") -> None:
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
