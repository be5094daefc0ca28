"""The checks of quantized weights and of the master weights that are written into them.

A :class:`CheckedWeight` checks the arguments of one weight: that the shard lies in the weight, and
that the target can take the shard. Its ``job`` is the shard to quantize. :func:`check_batch`
checks that each quantizer makes tensors of the kind of its weight, and that the weights can be a
batch.
"""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ottava.collectives import Group, find_group
from ottava.distributed.rules import rule_of
from ottava.distributed.shards import (
    ShardJob,
    ShardOutput,
    check_bytes,
    check_kind,
    element_bytes,
    shard_output,
)
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError, UsageError
from ottava.kernels.checks import check_device, check_high_precision
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava.tensors.declaration import same_kind
from ottava.torch_private import Private, is_distributed, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: A quantized weight: a tensor or a storage, or a DTensor of quantized tensors.
Weight = QuantizedTensorStorage | torch.Tensor
#: Where a shard is written: a quantized tensor, its bytes, or bytes for each direction.
ShardTarget = Weight | Sequence[torch.Tensor | None] | None


class WeightArguments(NamedTuple):
    """The arguments of :class:`MasterWeights` for one weight, and its name in errors."""

    name: str
    weight: Weight
    master: torch.Tensor | None
    quantizer: Quantizer | None
    offset: int | None
    has_offsets: bool
    target: ShardTarget


class CheckedWeight:
    """One weight whose arguments fit together.

    Attributes:
        name: the weight's name in errors.
        storage: the quantized data of this rank: the whole weight, or its rows.
        group: the ranks that have the shards of a DTensor; None for other weights.
        shape: the shape of the whole weight.
        job: the shard to quantize.
    """

    def __init__(self, arguments: WeightArguments) -> None:
        self.name = arguments.name
        self.storage = _local_storage(arguments.weight, self.name)
        rows, self.group = _rows_of(arguments.weight, self.name)
        quantizer = self._quantizer(arguments.quantizer)
        self.shape: tuple[int, ...] = tuple(arguments.weight.size())
        shard = self._shard(arguments.master)
        start = self._start(arguments, shard, rows)
        _check_has_data(self.storage, self.name)
        if self.storage._whole is not None and self.storage is arguments.weight:
            raise UsageError(
                f"{self.name} is a view of another tensor, whose scale it has",
                remedy="give the whole tensor",
            )
        if shard is None:
            shard = torch.empty(0, dtype=torch.float32, device=self.storage.device)
        output = self._output(arguments.target, start, shard.numel())
        self.job = ShardJob(quantizer, shard, self.shape, self.storage.dtype, start, output)

    def _quantizer(self, quantizer: Quantizer | None) -> Quantizer:
        """``quantizer``, or the weight's own for None."""
        if quantizer is None:
            quantizer = self.storage._quantizer
        if quantizer is None:
            raise UsageError(
                f"{self.name} has no quantizer",
                remedy="pass quantizers, or set one with update_quantizer()",
            )
        check_kind(quantizer, Quantizer, f"the quantizer of {self.name}", "an ottava.Quantizer")
        return quantizer

    def _shard(self, master: torch.Tensor | None) -> torch.Tensor | None:
        """The flat values of this rank's master, or None for no shard."""
        if master is None:
            return None
        local = local_tensor(master)
        if isinstance(local, QuantizedTensorStorage):
            raise DTypeError(
                f"the master of {self.name} is quantized",
                expected="a dense tensor, or None for no shard",
            )
        check_high_precision(local, f"the master of {self.name}")
        check_device(local, self.storage.device, f"the master of {self.name}")
        return local.detach().reshape(-1)

    def _start(
        self, arguments: WeightArguments, shard: torch.Tensor | None, rows: range | None
    ) -> int:
        """The index of the first element of ``shard`` in the flattened weight; 0 for no shard.

        The shard must lie in the weight, and must be the ``rows`` of a DTensor that this rank has.
        """
        offset = _integer(arguments.offset, self.name)
        if rows is not None:
            return self._start_of_rows(offset, shard, rows)
        if shard is None:
            self._check_range(offset or 0, 0)
            return 0
        count = shard.numel()
        numel = math.prod(self.shape)
        if offset is None and (arguments.has_offsets or count != numel):
            raise OptionError(
                f"{self.name} has a master of {count} elements and no start offset",
                f"the index of its first element among the {numel} of the weight",
                "pass start_offsets, with None only where the master is None",
            )
        start = offset or 0
        self._check_range(start, count)
        return start

    def _start_of_rows(self, offset: int | None, shard: torch.Tensor | None, rows: range) -> int:
        """:meth:`_start` for a DTensor, of which this rank has ``rows``."""
        row = math.prod(self.shape[1:])
        first = rows.start * row
        if shard is None:
            return first
        count = shard.numel()
        count_of_rows = len(rows) * row
        start = first if offset is None else offset
        fault = f"the master of {self.name} has {count} elements from {start} on"
        expected = f"{count_of_rows} from {first} on, its rows here"
        if count != count_of_rows:
            raise ShapeError(fault, expected)
        if count and start != first:
            raise OptionError(fault, expected)
        return first

    def _check_range(self, start: int, count: int) -> None:
        numel = math.prod(self.shape)
        if not 0 <= start <= numel - count:
            raise ShapeError(
                f"the master of {self.name} has {count} elements from {start} on",
                f"a range in the {numel} of the weight",
            )

    def _output(self, target: ShardTarget, start: int, count: int) -> ShardOutput:
        """Where the shard goes: the weight itself, another tensor that is the shard, or buffers of
        bytes."""
        if isinstance(target, (list, tuple)):
            # TransformerEngine's users write a pair, with None for a direction without a shard.
            target = [buffer for buffer in target if buffer is not None] or None
        if target is None:
            target = self.storage
        if isinstance(target, QuantizedTensorStorage):
            self._check_target(target)
            return shard_output(target, self.shape, start, count, self.name)
        name = f"the shard of {self.name}"
        raw = element_bytes(self.storage, start, count, self.name)
        buffers = list(target) if isinstance(target, (list, tuple)) else [target]
        if len(buffers) != len(raw):
            expected = f"one for each of {', '.join(inner.argument for inner, _ in raw)}"
            raise ShapeError(f"{name} has {len(buffers)} tensors of bytes", expected)
        data = [
            check_bytes(buffer, self.storage, inner, len(place), f"the buffer for {name}").view(-1)
            for buffer, (inner, place) in zip(buffers, raw, strict=True)
        ]
        # A scalar counts as one row.
        rows = range(math.prod(self.shape[:1]))
        return ShardOutput(self.storage, tuple(flat.view(torch.uint8) for flat in data), rows)

    def _check_target(self, target: QuantizedTensorStorage) -> None:
        """Check that a quantized tensor can be the shard of this weight."""
        name = f"the shard of {self.name}"
        storage = self.storage
        _check_has_data(target, name)
        if not same_kind(target, storage):
            raise DTypeError(
                f"{name} is of another kind", expected=f"a {type(storage).__name__} like it"
            )
        if target.device != storage.device:
            raise DeviceError(f"{name} is on {target.device}, the weight on {storage.device}")


def _local_storage(weight: Weight, name: str) -> QuantizedTensorStorage:
    storage = local_tensor(weight)
    if not isinstance(storage, QuantizedTensorStorage):
        raise DTypeError(
            f"{name} is a {type(storage).__name__}",
            "a quantized tensor",
            "leave it to its optimizer",
        )
    return storage


def _integer(offset: int | None, name: str) -> int | None:
    """A start offset, which may be any integer type, as an int."""
    if offset is None:
        return None
    if isinstance(offset, bool) or not hasattr(offset, "__index__"):
        raise OptionError(
            f"the start offset of {name} is {offset!r}", "an integer, or None for no shard"
        )
    return operator.index(offset)


def _check_has_data(storage: QuantizedTensorStorage, name: str) -> None:
    if not any(storage.get_usages().values()):
        raise UsageError(f"{name} holds no data to write to", remedy="it was cleared or saved")


def _rows_of(weight: Weight, name: str) -> "tuple[range | None, ProcessGroup | None]":
    """This rank's rows of a DTensor, and the group that has all rows.

    The group is None for a DTensor that is not sharded, and both are None for other tensors.
    """
    if not is_distributed(weight):
        return None, None
    distributed: Private = weight
    placements = distributed.placements
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not sharded:
        return range(distributed.shape[0]), None
    if len(sharded) > 1 or not placements[sharded[0]].is_shard(0):
        raise ShapeError(
            f"{name} is placed as {placements}",
            expected="rows sharded along one dimension of the mesh, as fully_shard does",
        )
    (box,) = distributed.__create_chunk_list__()
    rows = range(box.offsets[0], box.offsets[0] + box.sizes[0])
    return rows, distributed.device_mesh.get_group(sharded[0])


def check_batch(weights: Sequence[CheckedWeight]) -> None:
    """Check, on this rank alone, that the weights can be quantized together.

    Each weight is listed once, and its quantizer fits it. All weights agree in their device, and in
    the options that their class of quantizers names.
    """
    first_of_class: dict[type[Quantizer], CheckedWeight] = {}
    first_of_storage: dict[int, CheckedWeight] = {}
    # Whether quantizers fit their weights: one example answers for all weights with an equal key.
    fits: dict[Hashable, bool] = {}
    for weight in weights:
        storage = weight.storage
        quantizer = weight.job.quantizer
        twin = first_of_storage.setdefault(id(storage), weight)
        if twin is not weight:
            raise OptionError(
                f"{weight.name} is {twin.name} again",
                "each weight once",
                "list weights that layers share once",
            )
        key = _key_of_quantizer(weight)
        if key not in fits:
            fits[key] = _quantizer_fits(weight)
        if not fits[key]:
            raise DTypeError(
                f"the quantizer of {weight.name}, {quantizer!r}, makes other tensors than this "
                f"{type(storage).__name__}",
                "a quantizer of its format and options, whatever the shape",
                "leave quantizers out, or make the weight with this quantizer",
            )
        device = weights[0].storage.device
        if storage.device != device:
            raise DeviceError(
                f"{weight.name} is on {storage.device}, {weights[0].name} on {device}",
                "one device for a batch",
            )
        _check_options(weight, first_of_class.setdefault(type(quantizer), weight))


def _key_of_quantizer(weight: CheckedWeight) -> Hashable:
    """Equal for weights of which all or none have a quantizer that fits."""
    storage = weight.storage
    static = tuple(getattr(storage, field.attribute) for field in type(storage).static_fields)
    usages = tuple(storage.get_usages().values())
    dimensions = len(weight.shape)
    return type(storage), static, usages, storage.dtype, dimensions, weight.job.quantizer


def _quantizer_fits(weight: CheckedWeight) -> bool:
    """Whether the quantizer makes tensors of the kind of the weight."""
    storage = weight.storage
    quantizer = weight.job.quantizer.with_usage(**storage.get_usages())
    shape = (1,) * len(weight.shape)
    example = quantizer.make_empty(shape, dtype=storage.dtype, device=storage.device)
    return same_kind(example, storage)


def _check_options(weight: CheckedWeight, first: CheckedWeight) -> None:
    """Check that the quantizers of two weights of a batch, of one class, agree in its options."""
    quantizer = weight.job.quantizer
    for option in rule_of(quantizer).options:
        value = getattr(quantizer, option)
        first_value = getattr(first.job.quantizer, option)
        if value != first_value:
            raise OptionError(
                f"{option} is {value!r} for {weight.name} and {first_value!r} for {first.name}",
                "one value for all weights of a batch",
                "quantize them in two batches",
            )


def default_group(weights: Sequence[CheckedWeight], group: Group) -> "ProcessGroup | None":
    """The group to reduce over: ``group``, the one of the sharded weights, or None for the default
    group."""
    if group is not None:
        return find_group(group)
    groups = {
        weight.group.group_name: weight.group for weight in weights if weight.group is not None
    }
    if len(groups) > 1:
        raise OptionError(
            f"the weights are sharded over {len(groups)} groups",
            "one group for a batch",
            "quantize the weights of each group by themselves, or pass a group that contains them "
            "all",
        )
    return next(iter(groups.values()), None)
