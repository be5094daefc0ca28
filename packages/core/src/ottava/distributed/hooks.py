"""FSDP2's hooks of quantized tensors, derived from the storage declaration.

A gather moves the inner tensors that are declared with ``gather=True``, as bytes, and builds the whole tensor around
them; what derives from them is made again. Inner tensors that serve every usage and are not gathered (the scale of a
per-tensor recipe) are the same on every shard: checked at the first gather, and kept so by
:meth:`ottava.Quantizer.for_shards` from then on.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ottava.collectives import all_reduce_max
from ottava.distributed import fsdp2
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import check_blocks
from ottava.errors import ShapeError, UsageError
from ottava.tensors.declaration import InnerTensor
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import StorageSpec
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import KNOWS_BACKWARD, graph_task_id


class GatherPlan(NamedTuple):
    """What the hook after a gather needs to know: which inner tensors come, and everything that does not.

    Of what comes: the shape of a rank's shard of it, and whether that is padded.
    """

    inner: tuple[tuple[InnerTensor, torch.Size, bool], ...]
    shared: dict[str, torch.Tensor | None]
    spec: StorageSpec
    size: torch.Size


def check_shard(shape: Sequence[int], size: Sequence[int], module: Any) -> None:
    """Refuse what gather hooks do not allow: shards of columns, and fewer of them after the forward pass."""
    if tuple(shape[1:]) != tuple(size[1:]):
        what = f"a weight of shape {tuple(size)} has shards of {tuple(shape)}"
        expected = "shards of rows, which fully_shard makes by default"
        raise ShapeError(what, expected=expected, remedy="leave shard_placement_fn out for quantized weights")
    if fsdp2.resharded_to_fewer(module):
        what = "reshard_after_forward is a number, which torch does not support for weights with gather hooks"
        raise UsageError(what, expected="True or False")


def padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``values`` with zeros up to ``rows`` rows."""
    missing = rows - values.shape[0]
    return torch.nn.functional.pad(values, [0, 0] * (values.dim() - 1) + [0, missing]) if missing else values


def pre_all_gather(
    tensor: QuantizedTensor, mesh: Any, size: torch.Size, module: Any
) -> tuple[tuple[torch.Tensor, ...], GatherPlan]:
    """What this rank sends, padded to the length of the longest shard, and the plan.

    Raises:
        ShapeError, UsageError: as of :meth:`ottava.QuantizedTensor.fsdp_pre_all_gather`.
    """
    group = mesh.get_group()
    check_shard(tensor.shape, size, module)
    binding = getattr(module, "_binding", None)
    if binding is not None:
        binding.own_shard(module, tensor)
    _agree(tensor, group, module)
    fsdp2.drop_flat_copies(module)
    world, gathered = dist.get_world_size(group), _to_gather(tensor, module)
    if world > 1:
        _check_rows(tensor, size, world)
    # With one rank nothing is gathered: FSDP copies the first input, and no other.
    sent = dict(list(gathered.items())[: None if world > 1 else 1])
    inputs, coming = [], []
    for inner, count in sent.items():
        data = inner.by_rows(getattr(tensor, inner.attribute))
        data = data if inner.block_rows else padded(data, math.ceil(size[0] / world))
        missing = count - data.numel() if world > 1 else 0
        coming.append((inner, data.shape, missing > 0))
        if missing > 0:
            data = torch.nn.functional.pad(data.reshape(1, -1), [0, missing])
        inputs.append(data.contiguous().view(torch.uint8) if data.element_size() == 1 else data.contiguous())
    # Scales without the data that they are of say nothing.
    usages = {"both", *(inner.usage for inner in gathered)}
    kept = [i for i in tensor.inner_tensors if i in gathered or (i.shared and i.usage in usages)]
    others = [inner for inner in tensor.inner_tensors if inner not in sent]
    shared = {inner.argument: getattr(tensor, inner.attribute) if inner in kept else None for inner in others}
    return tuple(inputs), GatherPlan(tuple(coming), shared, tensor.flatten_storage()[1], size)


def post_all_gather(
    plan: GatherPlan, outputs: Sequence[torch.Tensor], dtype: torch.dtype, out: QuantizedTensor | None
) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
    """The whole tensor around the gathered bytes; with ``out``, its bytes were refilled and the rest follows."""
    whole: dict[str, torch.Tensor] = {}
    for (inner, shape, padded), output in zip(plan.inner, outputs, strict=True):
        if padded:
            # Each rank sent its shard as one row, with the padding at its end.
            output = output[:, : shape.numel()].reshape(-1, *shape[1:])
        # Only the last rank that has rows is padded, so that all padding lies at the end.
        whole[inner.argument] = inner.as_held(output[: plan.size[0]] if inner.block_rows is None else output)
    if out is not None:
        for inner in out.inner_tensors:
            data = whole.get(inner.argument)
            if data is not None:
                held = getattr(out, inner.attribute)
                if held is None or held.data_ptr() != data.data_ptr() or held.shape != data.shape:
                    setattr(out, inner.attribute, data)
            elif inner.shared or inner.gather:
                setattr(out, inner.attribute, plan.shared[inner.argument])
        out.mark_written()
        return None
    fields = {f.argument: v for f, v in zip(plan.spec.cls.all_static_fields(), plan.spec.static, strict=True)}
    about = {"shape": tuple(plan.size), "dtype": dtype, "quantizer": plan.spec.quantizer}
    build: Any = plan.spec.cls
    built: QuantizedTensor = build(**plan.shared | whole | fields | about)
    # FSDP frees the gathered bytes after the pass, so that a transpose is made only where it is read.
    built.rebuilds_derived = False
    return built, ()


def _to_gather(tensor: QuantizedTensor, module: Any) -> dict[InnerTensor, int]:
    """What is sent, and how many elements of each: rows in a forward pass, columns in a backward pass, or both."""
    held = {i: getattr(tensor, i.attribute) for i in tensor.inner_tensors if i.gather}
    both = {inner: int(data.numel()) for inner, data in held.items() if data is not None}
    if not both:
        what = f"{type(tensor).__name__} holds no inner tensor that can be gathered"
        raise UsageError(what, "one declared with gather=True", "keep the rowwise usage of sharded weights")
    rowwise, columnwise = ({i: n for i, n in both.items() if i.usage != other} for other in ("columnwise", "rowwise"))
    if both in (rowwise, columnwise):
        return both
    if tensor.rowwise_serves_columnwise:
        return rowwise
    # FSDP allocates once, so that what is gathered in turns must have the same dtypes and lengths.
    alike = [held[inner].dtype for inner in rowwise] == [held[inner].dtype for inner in columnwise]
    once = getattr(module, "recomputes", False) or not fsdp2.resharded_after_forward(module)
    if not alike or once or not KNOWS_BACKWARD:
        return both
    lengths = map(max, rowwise.values(), columnwise.values())
    return dict(zip(rowwise if graph_task_id() == -1 else columnwise, lengths, strict=True))


def _check_rows(tensor: QuantizedTensor, size: torch.Size, world: int) -> None:
    """Refuse shards whose inner tensors do not make those of the whole, whichever pass is the first."""
    values = {inner: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors if inner.gather}
    coming = [i for i, value in values.items() if value is not None or tensor.rowwise_serves_columnwise]
    for inner in coming if size[0] % world else ():
        value = values[inner]
        # FSDP asks for the padded size of the parameter itself.
        if inner.block_rows or (value is not None and inner.by_rows(value).shape[1:] != tensor.shape[1:]):
            what = f"{size[0]} rows are sharded over {world} ranks, and {inner.argument!r} has rows of another size"
            remedy = "keep the weight in high precision, or choose its rows so"
            raise ShapeError(what, expected=f"a number of rows that {world} divides", remedy=remedy)
    # Those of the first rank, so that all ranks say the same.
    check_blocks(coming, size, range(math.ceil(size[0] / world)), f"a shard of a {type(tensor).__name__}")


# Module -> the name of the group whose ranks have compared the scales of its weight.
_agreed: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


def _agree(tensor: QuantizedTensor, group: Any, module: Any) -> None:
    """Check once that all shards hold the same scales, and have their quantizers keep it so.

    One all-reduce serves all parameters that are gathered together.
    """
    # The name is kept, not the group, because a tensor must not keep a destroyed group alive.
    name = group.group_name
    if tensor._shard_group == name:
        return
    if isinstance(module, torch.nn.Module) and _agreed.get(module) == name:
        # FSDP pads the last shard again after a load, so that one rank may have a new tensor where the others have not:
        # a comparison here would wait for them forever.
        _share(tensor, name)
        return
    together = [(p.shard, p.module) for p in fsdp2.gathered_together(module)]
    shards: list[Any] = [(shard, owner) for shard, owner in together if getattr(shard, "_shard_group", name) != name]
    if not any(shard is tensor for shard, _ in shards):
        shards = [(tensor, module)]
    shared = [(shard, inner) for shard, _ in shards for inner in shard.shared_inner()]
    if shared:
        scales = [getattr(shard, inner.attribute).float().reshape(-1) for shard, inner in shared]
        values = torch.cat(scales)
        largest, smallest = all_reduce_max(torch.stack([values, -values]), group)
        differs = (largest != -smallest).split([each.numel() for each in scales])
        for (shard, inner), wrong in zip(shared, differs, strict=True):
            if wrong.any():
                what = f"the shards of a {type(shard).__name__} have different {inner.argument!r}"
                expected = "one value for all shards of a weight"
                raise UsageError(what, expected=expected, remedy="set the values of the weight before it is sharded")
    for shard, owner in shards:
        _share(shard, name)
        if isinstance(owner, torch.nn.Module):
            _agreed[owner] = name


def _share(shard: QuantizedTensor, group: str) -> None:
    """Have the quantizer of a shard keep the scale that all of them have, if it knows how."""
    quantizer: Any = shard._quantizer
    if quantizer is not None:
        silent, shared = type(quantizer).for_shards is Quantizer.for_shards, shard.shared_inner()
        if silent and shared and rule_of(quantizer).independent_rows(quantizer) is None:
            what = f"the shards of a {type(shard).__name__} share {shared[0].argument!r}, and a "
            what += f"{type(quantizer).__name__} does not say how they are to keep one value"
            remedy = "define it, or keep the weights in high precision"
            raise UsageError(what, expected="a quantizer that defines for_shards(group)", remedy=remedy)
        shard.update_quantizer(quantizer.for_shards(group))
    shard._shard_group = group
    # FSDP pads an uneven shard, so that it is a view; zeros are the same at any scale, so that it may have its own.
    shard._whole = None
