"""Weights and shards of their master weights, as they are given, checked as a whole before anything is written."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ottava.collectives import check_group, find_group
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import ShardJob, ShardOutput, check_bytes, check_places, ordered_bytes, shard_output
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError, UsageError
from ottava.kernels.checks import check_device, check_high_precision
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava.tensors.declaration import same_kind
from ottava.torch_private import is_distributed, local_tensor


class ShardedWeight(NamedTuple):
    """One weight: what errors call it, and what its quantizer is told.

    Attributes:
        storage: the quantized data that this rank has: the whole weight, or its rows.
        group: the ranks that share the weight, if it says so itself.
    """

    what: str
    storage: QuantizedTensorStorage
    job: ShardJob
    group: Any


def checked_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    quantizers: Sequence[Quantizer | None] | Quantizer | None,
    start_offsets: Sequence[int | None] | None,
    outs: Sequence[Any] | None,
) -> list[ShardedWeight]:
    """All of them, or a typed error for the first thing that does not fit."""
    count = len(model_weights) if isinstance(model_weights, (list, tuple)) else 0
    lists = {
        "model_weights": model_weights,
        "master_weights": master_weights,
        "quantizers": [quantizers] * count if quantizers is None or isinstance(quantizers, Quantizer) else quantizers,
        "start_offsets": [None] * count if start_offsets is None else start_offsets,
        "fsdp_shard_model_weights": [None] * count if outs is None else outs,
    }
    for name, entries in lists.items():
        if not isinstance(entries, (list, tuple)):
            raise DTypeError(f"{name} is a {type(entries).__name__}", expected="a list, an entry for each weight")
        if len(entries) != count:
            raise ShapeError(f"{len(entries)} {name} for {count} model_weights", expected=f"{count}")
    numbered = enumerate(zip(*lists.values(), strict=True))
    weights = [_weight(f"weight {place}", start_offsets is not None, *entries) for place, entries in numbered]
    _check_agreement(weights)
    if outs is not None:
        check_places([data for weight in weights for data in weight.job.output.data])
    return weights


def _weight(
    what: str, offsets_given: bool, weight: Any, master: Any, quantizer: Any, offset: Any, out: Any
) -> ShardedWeight:
    storage, (rows, group) = local_tensor(weight), _rows_of(weight, what)
    if not isinstance(storage, QuantizedTensorStorage):
        remedy = "leave weights in high precision out: their optimizer writes them itself"
        raise DTypeError(f"{what} is a {type(storage).__name__}", expected="a quantized tensor", remedy=remedy)
    quantizer = storage._quantizer if quantizer is None else quantizer
    if quantizer is None:
        raise UsageError(f"{what} has no quantizer", remedy="pass quantizers, or set one with update_quantizer()")
    if not isinstance(quantizer, Quantizer):
        raise DTypeError(f"the quantizer of {what} is a {type(quantizer).__name__}", expected="an ottava.Quantizer")
    shape, held = tuple(weight.size()), None if master is None else local_tensor(master)
    if isinstance(held, QuantizedTensorStorage):
        raise DTypeError(f"the master of {what} is quantized", expected="a dense tensor, or None for no shard")
    if held is not None:
        check_high_precision(held, f"the master of {what}")
        check_device(held, storage.device, f"the master of {what}")
    start = _offset(offset, offsets_given, None if held is None else held.numel(), shape, rows, what)
    _check_holds(storage, what)
    if storage._whole is not None and storage is weight:
        raise UsageError(f"{what} is a view of another tensor, whose scale it has", remedy="give the whole tensor")
    empty = torch.empty(0, dtype=torch.float32, device=storage.device)
    shard = empty if held is None else held.detach().reshape(-1)
    output = _output(out, storage, shape, start, shard.numel(), what)
    return ShardedWeight(what, storage, ShardJob(quantizer, shard, shape, storage.dtype, start, output), group)


def _check_holds(storage: QuantizedTensorStorage, what: str) -> None:
    if not any(storage.get_usages().values()):
        raise UsageError(f"{what} holds no data to write to", remedy="it was cleared or saved")


def _offset(
    offset: Any, offsets_given: bool, held: int | None, shape: Sequence[int], rows: range | None, what: str
) -> int:
    """Where a shard of so many elements starts; it must lie in the weight, or be the rows of it that are here."""
    numel, row, count = math.prod(shape), math.prod(shape[1:]), held or 0
    first, own = (0, numel) if rows is None else (rows.start * row, len(rows) * row)
    if offset is not None:
        if isinstance(offset, bool) or not hasattr(offset, "__index__"):
            raise OptionError(f"the start offset of {what} is {offset!r}", expected="an integer, or None for no shard")
        offset = operator.index(offset)
    elif held is not None and rows is None and (offsets_given or count != numel):
        what = f"{what} has a master of {count} elements and no start offset"
        expected = f"the index of its first element among the {numel} of the weight"
        raise OptionError(what, expected=expected, remedy="pass start_offsets, with None only where the master is None")
    start: int = first if offset is None else offset
    expected = f"{own} from {first} on, its rows here"
    fits = held is None or (count == own and (start == first or not count))
    if rows is None:
        fits, expected = 0 <= start <= numel - count, f"a range inside the {numel} of the weight"
    if not fits:
        kind = OptionError if rows is not None and count == own else ShapeError
        raise kind(f"the master of {what} has {count} elements from {start} on", expected=expected)
    return start if held is not None and rows is None else first


def _rows_of(weight: Any, what: str) -> tuple[range | None, Any]:
    """The rows of a DTensor that are here, and the group that has them all."""
    if not is_distributed(weight):
        return None, None
    sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if not sharded:
        return range(weight.shape[0]), None
    placement = weight.placements[sharded[0]]
    if len(sharded) > 1 or not placement.is_shard(0):
        what = f"{what} is placed as {weight.placements}"
        raise ShapeError(what, expected="rows sharded along one dimension of the mesh, as fully_shard does")
    mesh, rows = weight.device_mesh, weight.shape[0]
    chunk = math.ceil(rows / mesh.size(sharded[0]))
    start = min(mesh.get_local_rank(sharded[0]) * chunk, rows)
    return range(start, min(start + chunk, rows)), mesh.get_group(sharded[0])


def _check_agreement(weights: Sequence[ShardedWeight]) -> None:
    """What must be the same in a batch: the device, and the options that a class of quantizers names."""
    seen: dict[type[Quantizer], ShardedWeight] = {}
    places: dict[int, ShardedWeight] = {}
    fitting: dict[Any, bool] = {}
    for weight in weights:
        what, storage, quantizer = weight.what, weight.storage, weight.job.quantizer
        twin, first = places.setdefault(id(storage), weight), seen.setdefault(type(quantizer), weight)
        if twin is not weight:
            expected, remedy = (
                "each weight once, with one shard on a rank",
                "list weights that several layers share once",
            )
            raise OptionError(f"{what} is {twin.what} again", expected=expected, remedy=remedy)
        if not _fits(weight, fitting):
            what = f"the quantizer of {what}, {quantizer!r}, makes other tensors than this {type(storage).__name__}"
            remedy = "leave quantizers out, or make the weight with this quantizer"
            raise DTypeError(what, expected="a quantizer of its format and options, whatever the shape", remedy=remedy)
        if storage.device != weights[0].storage.device:
            what = f"{what} is on {storage.device}, {weights[0].what} on {weights[0].storage.device}"
            raise DeviceError(what, expected="one device for a batch")
        for name in rule_of(quantizer).options:
            own, other = getattr(quantizer, name), getattr(first.job.quantizer, name)
            if own != other:
                what = f"{name} is {own!r} for {what} and {other!r} for {first.what}"
                expected = "one value for all weights of a batch"
                raise OptionError(what, expected=expected, remedy="quantize them in two batches")


def _fits(weight: ShardedWeight, known: dict[Any, bool]) -> bool:
    """Whether what the quantizer makes is of the weight's kind; ``known`` has what was found before."""
    storage, quantizer, usages = weight.storage, weight.job.quantizer, weight.storage.get_usages()
    static = tuple(getattr(storage, field.attribute) for field in type(storage).static_fields)
    shape = (1,) * len(weight.job.shape)
    key = (type(storage), static, tuple(usages.values()), storage.dtype, shape, quantizer)
    if key not in known:
        example = quantizer.with_usage(**usages).make_empty(shape, dtype=storage.dtype, device=storage.device)
        known[key] = same_kind(example, storage)
    return known[key]


def _output(
    out: Any, storage: QuantizedTensorStorage, shape: tuple[int, ...], start: int, count: int, what: str
) -> ShardOutput:
    """Where a shard goes: into the weight itself, into another tensor that is the shard, or into bytes."""
    if isinstance(out, (list, tuple)):
        # TransformerEngine's users write a pair with None for what there is no shard of.
        out = [buffer for buffer in out if buffer is not None] or None
    out = storage if out is None else out
    if isinstance(out, QuantizedTensorStorage):
        _check_holds(out, f"the shard of {what}")
        if not same_kind(out, storage):
            raise DTypeError(f"the shard of {what} is of another kind", expected=f"a {type(storage).__name__} like it")
        if out.device != storage.device:
            raise DeviceError(f"the shard of {what} is on {out.device}, the weight on {storage.device}")
        return shard_output(out, shape, start, count, what)
    raw, given = ordered_bytes(storage, what), list(out) if isinstance(out, (list, tuple)) else [out]
    if len(given) != len(raw):
        what = f"the shard of {what} has {len(given)} tensors of bytes"
        raise ShapeError(what, expected=f"{len(raw)}, one for each of {', '.join(inner.argument for inner in raw)}")
    what = f"the buffer for the shard of {what}"
    buffers = [check_bytes(buffer, storage, inner, count, what) for buffer, inner in zip(given, raw, strict=True)]
    data = tuple(buffer.view(-1).view(torch.uint8) for buffer in buffers)
    return ShardOutput(storage, data, range(shape[0] if shape else 1))


def default_group(weights: Sequence[ShardedWeight], group: Any) -> Any:
    """The group to reduce over: the one given, that of the sharded weights, or None for the default group."""
    check_group(group)
    if group is not None:
        return find_group(group)
    groups = {weight.group.group_name: weight.group for weight in weights if weight.group is not None}
    if len(groups) > 1:
        what = f"the weights are sharded over {len(groups)} groups"
        remedy = "quantize the weights of each group by themselves, or pass a group that contains them all"
        raise OptionError(what, expected="one group for a batch", remedy=remedy)
    return next(iter(groups.values()), None)
