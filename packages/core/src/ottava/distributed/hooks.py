"""FSDP2's gather hooks of quantized tensors, derived from the storage declaration.

A rank sends its shards of the inner tensors that are declared with ``gather=True``, as bytes. The
whole tensor is built around the gathered bytes; tensors that derive from them, such as a transpose,
are rebuilt::

    shard ── pre_all_gather ──> bytes of inner tensors, padded ──> FSDP's all-gather ──┐
                 └─────────────> GatherMetadata: shapes, scales, fields ────────────┐  │
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
from ottava.distributed.layers import is_converted, read_by_dgrad
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import check_blocks
from ottava.errors import ShapeError, UsageError, listed
from ottava.recipes.backward import QUANTIZED
from ottava.recipes.execution import NO_BACKWARD
from ottava.tensors import InnerTensor, QuantizedTensor, Quantizer, StorageSpec
from ottava.torch_private import KNOWS_BACKWARD, graph_task_id

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class GatherInput(NamedTuple):
    """An inner tensor whose bytes FSDP gathers.

    Attributes:
        inner: the declaration.
        shape: the shape of a rank's shard, rows first.
        is_padded: whether each rank sends its shard as one row with padding at the end.
    """

    inner: InnerTensor
    shape: torch.Size
    is_padded: bool


class GatherMetadata(NamedTuple):
    """The description of a gather that the hook after it needs besides the gathered bytes.

    Attributes:
        inputs: the inner tensors that FSDP gathers.
        local_inner: the inner tensors that FSDP does not gather, by argument; None for those that
            the whole lacks.
        spec: the class, the static fields and the quantizer of the whole.
        size: the size of the whole.
    """

    inputs: tuple[GatherInput, ...]
    local_inner: dict[str, torch.Tensor | None]
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


def pad_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``values`` with zeros up to ``rows`` rows."""
    missing_rows = rows - values.shape[0]
    if missing_rows == 0:
        return values
    other_dimensions = [0, 0] * (values.dim() - 1)
    return torch.nn.functional.pad(values, [*other_dimensions, 0, missing_rows])


def pre_all_gather(
    tensor: QuantizedTensor, mesh: "DeviceMesh", size: torch.Size, module: torch.nn.Module
) -> tuple[tuple[torch.Tensor, ...], GatherMetadata]:
    """The bytes that this rank sends, padded to the length of the longest shard, and the metadata
    for :func:`post_all_gather`.

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
        # This comes before the ranks compare their weights, because a rank whose shard cuts a block
        # has a plain tensor without hooks, and takes no part in the comparison.
        _check_rows(tensor, size, world)
    compare_weights(tensor, size, group, module)
    check_shard(tensor.shape, size, module)
    if is_converted(module):
        module._binding.give_shard_quantizer(module, tensor)
    _share_scales(tensor, size, group, module)
    fsdp2.drop_flat_copies(module)
    lengths = _gather_lengths(tensor, module)
    input_lengths: dict[InnerTensor, int | None] = {**lengths}
    if world == 1:
        # FSDP gathers nothing: it copies the first input, and no other.
        input_lengths = {next(iter(lengths)): None}
    rows = math.ceil(size[0] / world)
    inputs: list[GatherInput] = []
    tensors: list[torch.Tensor] = []
    for inner, length in input_lengths.items():
        gather_input, values = _gather_input(tensor, inner, rows, length)
        inputs.append(gather_input)
        tensors.append(values)
    spec = tensor.flatten_storage()[1]
    local_inner = _local_inner(tensor, lengths, input_lengths)
    return tuple(tensors), GatherMetadata(tuple(inputs), local_inner, spec, size)


def _gather_input(
    tensor: QuantizedTensor, inner: InnerTensor, rows: int, length: int | None
) -> tuple[GatherInput, torch.Tensor]:
    """The description of an inner tensor that FSDP gathers, and the values that this rank sends.

    Args:
        tensor: this rank's shard.
        inner: the declaration of the inner tensor.
        rows: the number of rows of the longest shard.
        length: the number of elements that each rank sends; None for those of ``rows`` rows.
    """
    values = inner.by_rows(getattr(tensor, inner.attribute))
    if not inner.block_rows:
        values = pad_rows(values, rows)
    shape = values.shape
    padding = 0
    if length is not None:
        padding = length - values.numel()
    if padding > 0:
        values = torch.nn.functional.pad(values.reshape(1, -1), [0, padding])
    return GatherInput(inner, shape, padding > 0), _as_bytes(values.contiguous())


def _as_bytes(data: torch.Tensor) -> torch.Tensor:
    """8-bit data as uint8, because collectives do not know float8; other data as it is."""
    if data.element_size() == 1:
        return data.view(torch.uint8)
    return data


def _local_inner(
    tensor: QuantizedTensor,
    inner_of_pass: Collection[InnerTensor],
    input_inner: Collection[InnerTensor],
) -> dict[str, torch.Tensor | None]:
    """The inner tensors that FSDP does not gather, by argument; None for those that the whole
    lacks.

    Args:
        tensor: this rank's shard.
        inner_of_pass: the inner tensors with data of the pass.
        input_inner: those of them that FSDP gathers.
    """
    # The whole needs no scales of a usage whose data it lacks.
    usages = {"both", *(inner.usage for inner in inner_of_pass)}
    local_inner: dict[str, torch.Tensor | None] = {}
    for inner in tensor.inner_tensors:
        if inner in input_inner:
            continue
        serves_pass = inner in inner_of_pass or (inner.shared and inner.usage in usages)
        local_inner[inner.argument] = getattr(tensor, inner.attribute) if serves_pass else None
    return local_inner


def post_all_gather(
    metadata: GatherMetadata,
    outputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    out: QuantizedTensor | None,
) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
    """The whole tensor around the gathered bytes.

    Args:
        metadata: the metadata of :func:`pre_all_gather`.
        outputs: the gathered values of each input.
        dtype: the high-precision dtype that the whole tensor stands for.
        out: the whole tensor of an earlier gather, whose memory FSDP has filled again and whose
            other inner tensors are replaced; None makes a new one.

    Returns:
        The tensor, and no tensors for FSDP to free; None with ``out``.
    """
    inner_tensors = dict(metadata.local_inner)
    for gather_input, output in zip(metadata.inputs, outputs, strict=True):
        inner = gather_input.inner
        inner_tensors[inner.argument] = inner.as_held(
            _rows_of_whole(gather_input, output, metadata.size)
        )
    if out is not None:
        for inner in out.inner_tensors:
            if inner.shared or inner.gather:
                setattr(out, inner.attribute, inner_tensors[inner.argument])
        out.mark_written()
        return None
    spec = metadata.spec
    fields = {
        field.argument: value
        for field, value in zip(spec.cls.all_static_fields(), spec.static, strict=True)
    }
    fields |= {"shape": tuple(metadata.size), "dtype": dtype, "quantizer": spec.quantizer}
    whole: QuantizedTensor = spec.cls(**inner_tensors, **fields)
    # FSDP frees the gathered bytes after the pass, so that a transpose is made only where it is
    # read.
    whole.rebuilds_derived = False
    return whole, ()


def _rows_of_whole(
    gather_input: GatherInput, output: torch.Tensor, size: torch.Size
) -> torch.Tensor:
    """The rows of an inner tensor of the whole weight, of ``size``, from the gathered values."""
    rows = output
    shape = gather_input.shape
    if gather_input.is_padded:
        # Each rank sent its shard as one row, with the padding at its end.
        rows = rows[:, : shape.numel()].reshape(-1, *shape[1:])
    if gather_input.inner.block_rows is None:
        # Only the last rank that has rows is padded, so that all padding lies at the end.
        rows = rows[: size[0]]
    return rows


def _gather_lengths(tensor: QuantizedTensor, module: torch.nn.Module) -> dict[InnerTensor, int]:
    """The inner tensors with data of the pass, and the number of elements that a rank sends of
    each.

    They are those of rows in a forward pass and of columns in a backward pass, or both; always
    those of rows for a recipe whose backward pass reads no columns.

    Raises:
        UsageError: the tensor holds none.
    """
    data = _gatherable_data(tensor)
    both = {inner: values.numel() for inner, values in data.items()}
    if not both:
        raise UsageError(
            f"{type(tensor).__name__} holds no inner tensor that can be gathered",
            "one declared with gather=True",
            "keep the rowwise usage of sharded weights",
        )
    rowwise = {inner: length for inner, length in both.items() if inner.usage != "columnwise"}
    columnwise = {inner: length for inner, length in both.items() if inner.usage != "rowwise"}
    if rowwise == both or columnwise == both:
        return both
    reads_columns = read_by_dgrad(module) == QUANTIZED
    if tensor.rowwise_serves_columnwise or not reads_columns:
        return rowwise
    # FSDP allocates memory once, so that tensors that are gathered in turns must have the same
    # dtypes and lengths.
    row_dtypes = [data[inner].dtype for inner in rowwise]
    column_dtypes = [data[inner].dtype for inner in columnwise]
    if row_dtypes != column_dtypes or not KNOWS_BACKWARD:
        return both
    if getattr(module, "recomputes", False) or not fsdp2.resharded_after_forward(module):
        # One gather serves both passes.
        return both
    lengths = map(max, rowwise.values(), columnwise.values())
    in_forward = graph_task_id() == NO_BACKWARD
    return dict(zip(rowwise if in_forward else columnwise, lengths, strict=True))


def _gatherable_data(tensor: QuantizedTensor) -> dict[InnerTensor, torch.Tensor]:
    """The inner tensors that ``tensor`` holds and a gather can move, and their values."""
    data: dict[InnerTensor, torch.Tensor | None] = {
        inner: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors if inner.gather
    }
    return {inner: values for inner, values in data.items() if values is not None}


def _check_rows(tensor: QuantizedTensor, size: torch.Size, world: int) -> None:
    """Refuse shards whose inner tensors cannot be joined to those of the whole; a ShapeError.

    Rows and columns are both checked, so that the error does not depend on the pass that gathers
    first.
    """
    inner_tensors = list(_gatherable_data(tensor))
    if tensor.rowwise_serves_columnwise:
        inner_tensors = [inner for inner in tensor.inner_tensors if inner.gather]
    if size[0] % world:
        _check_uneven(tensor, inner_tensors, size, world)
    # The rows of the first rank are checked, so that all ranks raise the same error.
    rows = range(math.ceil(size[0] / world))
    name = f"a shard of a {type(tensor).__name__}"
    check_blocks(inner_tensors, size, rows, name)
    _check_shared_scales(tensor, size, rows, name)


def _check_shared_scales(tensor: QuantizedTensor, size: torch.Size, rows: range, name: str) -> None:
    """Refuse rows that cut an area of blocks that share a scale; a ShapeError.

    Each of the blocks has a scale of its own in memory, but a rank alone cannot compute it.
    """
    quantizer = tensor._quantizer
    if not isinstance(quantizer, Quantizer):
        return
    quantizer = quantizer.with_usage(**tensor.get_usages())
    step = rule_of(quantizer).rows_of_blocks(quantizer)
    if rows.stop < size[0] and rows.stop * math.prod(size[1:-1]) % step:
        raise ShapeError(
            f"{name} has rows 0 to {rows.stop} of {size[0]}, which cut blocks that share a scale",
            f"multiples of {step}",
            "shard over fewer ranks, or keep it whole or in high precision",
        )


def _check_uneven(
    tensor: QuantizedTensor, inner_tensors: Sequence[InnerTensor], size: torch.Size, world: int
) -> None:
    """Refuse uneven shards of inner tensors that FSDP cannot pad; a ShapeError.

    FSDP pads to rows of the size of the parameter's rows. Inner tensors with blocks of rows, or
    with rows of another size, do not have it.
    """
    for inner in inner_tensors:
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
_comparisons: weakref.WeakKeyDictionary[torch.nn.Module, set[tuple[str, torch.Size]]] = (
    weakref.WeakKeyDictionary()
)


def _share_scales(
    tensor: QuantizedTensor, size: torch.Size, group: "ProcessGroup", module: torch.nn.Module
) -> None:
    """At the first gather, check that all shards have the same scales, and give the tensor a
    quantizer that keeps them equal.

    Args:
        tensor: this rank's shard.
        size: the size of the whole weight.
        group: the ranks that have the shards.
        module: the layer that owns the weight.

    Raises:
        UsageError: the scales differ, on all ranks; or the quantizer cannot keep them equal.
    """
    # The name is stored, not the group, because a tensor must not keep a destroyed group alive.
    name = group.group_name
    if tensor._shard_group == name:
        return
    comparisons = _comparisons.setdefault(module, set())
    # FSDP pads the last shard again after a load, so that one rank may have a new tensor where the
    # others have not: a second comparison would wait for them forever.
    if (name, size) not in comparisons:
        _compare_scales(tensor, group)
    if tensor._quantizer is not None:
        _check_shares_scales(tensor, tensor._quantizer)
        tensor.update_quantizer(tensor._quantizer.for_shards(name))
    comparisons.add((name, size))
    tensor._shard_group = name
    rows = math.ceil(size[0] / dist.get_world_size(group))
    tensor._first_row = min(dist.get_rank(group) * rows, size[0]) * math.prod(size[1:-1])
    # The padded shard of FSDP is a view of a larger tensor. It is treated as a whole, because zeros
    # are zeros at any scale.
    tensor._whole = None


def _compare_scales(tensor: QuantizedTensor, group: "ProcessGroup") -> None:
    """Refuse shards whose scales differ, by one all-reduce; a UsageError on all ranks."""
    scales = tensor.shared_inner()
    if not scales:
        return
    values = torch.cat([getattr(tensor, inner.attribute).float().reshape(-1) for inner in scales])
    largest, smallest = all_reduce_max(torch.stack([values, -values]), group)
    if not torch.equal(largest, -smallest):
        raise UsageError(
            f"the shards of a {type(tensor).__name__} have different "
            f"{listed([inner.argument for inner in scales])}",
            "one value for all shards of a weight",
            "set the values before it is sharded",
        )


def _check_shares_scales(tensor: QuantizedTensor, quantizer: Quantizer) -> None:
    """Refuse a quantizer that would give each shard a scale of its own; a UsageError."""
    scales = tensor.shared_inner()
    if not scales or type(quantizer).for_shards is not Quantizer.for_shards:
        return
    if rule_of(quantizer).independent_rows(quantizer) is None:
        raise UsageError(
            f"the shards of a {type(tensor).__name__} share {scales[0].argument!r}, and a "
            f"{type(quantizer).__name__} does not say how they are to keep one value",
            "a quantizer that defines for_shards(group)",
            "define it, or keep high precision",
        )
