"""Quantized weights from master weights that are sharded over ranks.

Every rank ends up with the bytes of its shard, and the scales, that quantizing the whole weight at
once would give. One all-reduce(MAX) serves all weights, whatever their recipes. Where amaxes do not
suffice for a quantizer, one additional all-gather brings the shards of all such weights. Everything
is checked before anything is written.
"""

import math
import operator
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from ottava.collectives import Group, find_group
from ottava.distributed.rules import ShardBatches, rule_of
from ottava.distributed.shards import (
    ShardJob,
    ShardOutput,
    check_bytes,
    check_places,
    ordered_bytes,
    shard_output,
)
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError, UsageError
from ottava.kernels.checks import check_device, check_high_precision
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava.tensors.declaration import InnerTensor, check_flag, same_kind
from ottava.torch_private import Private, is_distributed, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: A quantized weight: a tensor or a storage, or a DTensor of quantized tensors.
Weight = QuantizedTensorStorage | torch.Tensor
#: Where a shard is written: a quantized tensor, its bytes, or bytes for each direction.
ShardTarget = Weight | Sequence[torch.Tensor | None] | None


def quantize_master_weights(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None,
    group: Group = None,
    fsdp_shard_model_weights: Sequence[ShardTarget] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """:func:`cast_master_weights_to_fp8` with each weight's own quantizer."""
    MasterWeights(
        model_weights,
        master_weights,
        None,
        group,
        start_offsets,
        fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    ).quantize()


@overload
def cast_master_weights_to_fp8(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None = None,
    group: Group = None,
    fsdp_shard_model_weights: Sequence[ShardTarget] | None = None,
    manual_post_all_gather_processing: bool = False,
    *,
    quantizers: Sequence[Quantizer | None] | Quantizer | None = None,
    amax_reduce_group: Group = None,
) -> None: ...


@overload
def cast_master_weights_to_fp8(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    quantizers: Sequence[Quantizer | None] | Quantizer | None,
    amax_reduce_group: Group = None,
    /,
    *,
    start_offsets: Sequence[int | None] | None = None,
    fsdp_shard_model_weights: Sequence[ShardTarget] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None: ...


# The overloads say the types of both orders of the arguments.
def cast_master_weights_to_fp8(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    *positional: Any,
    **named: Any,
) -> None:
    """Write this rank's shards of quantized weights from its shards of their master weights.

    A master weight is first rounded to the nominal dtype of its weight. All ranks of the group call
    this with the same weights in the same order; a rank may have no shard of some weights, or of
    any.

    Args:
        model_weights: quantized tensors or storages, or DTensors of them that are sharded along
            their rows (FSDP2), whose local tensor is the shard.
        master_weights: for each weight the shard of this rank, float32 (or bfloat16, float16),
            flattened as the weight is; None for no shard. A DTensor stands for its local tensor.
        start_offsets: the index of each shard's first element in the flattened weight; None where
            there is no shard. Without the list, masters are whole, or have the rows of a DTensor.
        group: the ranks that have the shards; None is the group of the DTensors, or the default
            group. Without an initialized process group, this process has all shards.
        fsdp_shard_model_weights: the targets of shards that are not written into the weight itself:
            a quantized tensor that is the shard, or its bytes (uint8), one tensor for each
            direction that has its own data. An entry may be None, and so may both tensors of a
            pair.
        manual_post_all_gather_processing: leave rebuilding tensors that derive from the bytes, such
            as a transpose, to :func:`post_all_gather_processing`; otherwise the next forward pass
            rebuilds them.
        quantizers: one for each weight, or one for all; None is the weight's own.
        amax_reduce_group: another name of ``group``.

    The order of positional arguments used to be ``quantizers, amax_reduce_group``. Quantizers in
    the third place are still accepted, with a DeprecationWarning.

    Raises:
        ShapeError, OptionError, DTypeError, UsageError, DeviceError: an argument does not fit.
            Nothing has been written then. All but UsageError are ValueErrors.
        TypeError: an argument is unknown, or is given twice.
    """
    # If offsets are given by name, a third positional argument can only be quantizers.
    by_name = "start_offsets" in named
    if positional and (by_name or _are_quantizers(positional[0], master_weights)):
        if "quantizers" in named:
            raise OptionError(
                "quantizers are given twice, by position and by name",
                expected="one of them",
                remedy="pass quantizers by name alone",
            )
        warnings.warn(
            "cast_master_weights_to_fp8(weights, masters, quantizers, …) is deprecated: "
            "pass quantizers by name",
            DeprecationWarning,
            stacklevel=2,
        )
        _cast_old(model_weights, master_weights, *positional, **named)
        return
    _cast(model_weights, master_weights, *positional, **named)


def _are_quantizers(third: object, masters: object) -> bool:
    """Whether the third positional argument is quantizers, as it used to be, and not offsets."""
    if isinstance(third, Quantizer):
        return True
    if not isinstance(third, (list, tuple)) or not third:
        return False
    if any(isinstance(entry, Quantizer) for entry in third):
        return True
    # A list of None cannot be the offsets of shards, because each shard has an offset.
    shards = isinstance(masters, (list, tuple)) and any(master is not None for master in masters)
    return shards and all(entry is None for entry in third)


def _cast_old(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    quantizers: Sequence[Quantizer | None] | Quantizer | None,
    amax_reduce_group: Group = None,
    **named: Any,
) -> None:
    """:func:`cast_master_weights_to_fp8` with positional arguments in their former order."""
    named |= {"quantizers": quantizers, "amax_reduce_group": amax_reduce_group}
    _cast(model_weights, master_weights, **named)


def _cast(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None = None,
    group: Group = None,
    fsdp_shard_model_weights: Sequence[ShardTarget] | None = None,
    manual_post_all_gather_processing: bool = False,
    *,
    quantizers: Sequence[Quantizer | None] | Quantizer | None = None,
    amax_reduce_group: Group = None,
) -> None:
    if group is None:
        group = amax_reduce_group
    elif amax_reduce_group is not None and group is not amax_reduce_group:
        raise OptionError(
            "group and amax_reduce_group are two groups",
            expected="one group of ranks",
            remedy="pass group alone",
        )
    MasterWeights(
        model_weights,
        master_weights,
        quantizers,
        group,
        start_offsets,
        fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    ).quantize()


@dataclass(eq=False, repr=False)
class MasterWeights:
    """Sharded master weights and the quantized weights that are written from them in each step.

    This checks and looks up once what :func:`cast_master_weights_to_fp8` checks and looks up in
    each call. It keeps references to its tensors, and repeats the work when one of them has moved
    to other memory.

    Arguments and errors are those of :func:`cast_master_weights_to_fp8`. Nothing is written until
    :meth:`quantize`.
    """

    model_weights: Sequence[Weight]
    master_weights: Sequence[torch.Tensor | None]
    quantizers: Sequence[Quantizer | None] | Quantizer | None = None
    amax_reduce_group: Group = None
    start_offsets: Sequence[int | None] | None = None
    fsdp_shard_model_weights: Sequence[ShardTarget] | None = None
    manual_post_all_gather_processing: bool = False

    def __post_init__(self) -> None:
        check_flag("manual_post_all_gather_processing", self.manual_post_all_gather_processing)
        self._prepare()

    def _prepare(self) -> None:
        """Check all arguments and group the shards into batches.

        The first argument that does not fit raises a typed error.
        """
        with torch.no_grad():
            weights = [_CheckedWeight(arguments) for arguments in self._arguments()]
            _check_agreement(weights)
            check_places([data for weight in weights for data in weight.job.output.data])
            self._group = _default_group(weights, self.amax_reduce_group)
            for weight in weights:
                # FSDP pads an uneven shard, so the shard is a view of the padded tensor. The view
                # may get another scale, because the padding is zero at any scale.
                weight.storage._whole = None
            self._batches = ShardBatches.of([weight.job for weight in weights])
        holders = [h for weight in weights for h in (weight.storage, weight.job.output.holder)]
        self._holders = list({id(holder): holder for holder in holders}.values())
        self._inner_tensors = [
            (holder, inner.attribute)
            for holder in self._holders
            for inner in holder.inner_tensors
            if not holder.is_derived(inner)
        ]
        self._masters = [local_tensor(m) for m in self.master_weights if m is not None]
        # The flat shard of a non-contiguous master is a copy, which each call has to repeat.
        self._reusable = all(master.is_contiguous() for master in self._masters)
        self._prepared_addresses = self._addresses()

    def _arguments(self) -> list["_Arguments"]:
        """The arguments of each weight, if the lists have one entry for each weight."""
        count = 0
        if isinstance(self.model_weights, (list, tuple)):
            count = len(self.model_weights)
        nothing = [None] * count
        quantizers = self.quantizers
        if quantizers is None or isinstance(quantizers, Quantizer):
            quantizers = [quantizers] * count
        offsets = nothing if self.start_offsets is None else self.start_offsets
        targets = self.fsdp_shard_model_weights
        if targets is None:
            targets = nothing
        lists: dict[str, Sequence[object]] = {
            "model_weights": self.model_weights,
            "master_weights": self.master_weights,
            "quantizers": quantizers,
            "start_offsets": offsets,
            "fsdp_shard_model_weights": targets,
        }
        for name, entries in lists.items():
            _check_kind(entries, (list, tuple), name, "a list, an entry for each weight")
            if len(entries) != count:
                raise ShapeError(
                    f"{len(entries)} {name} for {count} model_weights", expected=f"{count}"
                )
        return [
            _Arguments(
                name=f"weight {number}",
                weight=self.model_weights[number],
                master=self.master_weights[number],
                quantizer=quantizers[number],
                offset=offsets[number],
                has_offsets=self.start_offsets is not None,
                target=targets[number],
            )
            for number in range(count)
        ]

    def _addresses(self) -> list[int | None]:
        """The addresses of all tensors that are read or written, and the ids of the quantizers."""
        tensors: list[torch.Tensor | None] = [
            *(getattr(holder, attribute) for holder, attribute in self._inner_tensors),
            *self._masters,
        ]
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        return [*addresses, *(id(holder._quantizer) for holder in self._holders)]

    def quantize(self) -> None:
        """Write this rank's shards of the weights, and all scales, from the current values of the
        master weights.

        Raises:
            ShapeError, OptionError, DTypeError, UsageError, DeviceError: a tensor or quantizer that
                was replaced does not fit.
        """
        if not self._reusable or self._addresses() != self._prepared_addresses:
            self._prepare()
        with torch.no_grad():
            self._batches.quantize(self._group)
        for holder in self._holders:
            holder.rebuilds_derived = not self.manual_post_all_gather_processing


def post_all_gather_processing(model_weights: Sequence[Weight] | Weight) -> None:
    """Rebuild the tensors that derive from the bytes of weights (transposes), after the bytes were
    gathered.

    Tensors that are not quantized, or have no derived tensors, stay unchanged.

    Raises:
        DTypeError: an entry is not a tensor.
    """
    weights: Sequence[object] = [model_weights]
    if isinstance(model_weights, (list, tuple)):
        weights = model_weights
    for weight in weights:
        _check_kind(weight, (torch.Tensor, QuantizedTensorStorage), "a weight", "a list of tensors")
    with torch.no_grad():
        for local in map(local_tensor, weights):
            if isinstance(local, QuantizedTensorStorage):
                local.rebuild_derived(force=True)
                local.rebuilds_derived = True


def replace_raw_data(
    tensor: QuantizedTensorStorage, new_raw_data: torch.Tensor | Sequence[torch.Tensor]
) -> None:
    """Move the elements of a quantized tensor into a buffer, such as a range of one for all
    weights.

    The values, and everything else about the tensor, stay the same. Aliases of the tensor keep the
    old bytes.

    Args:
        new_raw_data: contiguous, uint8 (or the 8-bit float dtype of the elements), with as many
            elements as the tensor. A tensor with rowwise and columnwise data takes two buffers, or
            one to move its rowwise data alone.

    Raises:
        DTypeError, ShapeError, DeviceError: a buffer is not as above. All are ValueErrors, and
            nothing has been written.
        UsageError: the tensor has no elements, they are not contiguous, or it is a view.
    """
    _check_kind(
        tensor, QuantizedTensorStorage, "the tensor", "a quantized tensor, which has raw data"
    )
    buffers = list(new_raw_data) if isinstance(new_raw_data, (list, tuple)) else [new_raw_data]
    if tensor._whole is not None:
        raise UsageError(
            f"this {type(tensor).__name__} is a view of another",
            "a whole tensor",
            "give the whole one",
        )
    raw = tensor.raw_inner()
    if not 1 <= len(buffers) <= len(raw):
        raise ShapeError(
            f"{len(buffers)} buffers",
            expected=f"one for each of {', '.join(i.argument for i in raw)}",
        )
    moves: list[tuple[InnerTensor, torch.Tensor, torch.Tensor]] = []
    for inner, buffer in zip(raw, buffers, strict=False):
        data: torch.Tensor = getattr(tensor, inner.attribute)
        checked = check_bytes(
            buffer, tensor, inner, data.numel(), f"the buffer for {inner.argument!r}"
        )
        if not data.is_contiguous():
            raise UsageError(
                "the data of the tensor is not contiguous", expected="a tensor that is no view"
            )
        moves.append((inner, data, checked.detach().view(data.dtype).view(data.shape)))
    check_places([target for *_, target in moves], [data for _, data, _ in moves])
    with torch.no_grad():
        for inner, data, target in moves:
            # Writing through ``.data`` leaves the version of the buffer as it is, because the
            # transposes of other tensors in the buffer stay valid.
            target.data.copy_(data)
            tensor.replace_inner(inner, target)


def is_custom(x: Quantizer | QuantizedTensorStorage | torch.Tensor | None = None) -> bool:
    """Whether a quantizer or a quantized tensor is user-defined; False for None and plain tensors.

    Raises:
        DTypeError: ``x`` is something else.
    """
    kinds = Quantizer, QuantizedTensorStorage, torch.Tensor, type(None)
    _check_kind(x, kinds, "x", "a quantizer, a tensor or None")
    return isinstance(x, (Quantizer, QuantizedTensorStorage)) and x.custom


def _check_kind(
    value: object, kinds: type | tuple[type, ...], name: str, expected: str, remedy: str = ""
) -> None:
    if not isinstance(value, kinds):
        raise DTypeError(f"{name} is a {type(value).__name__}", expected, remedy)


class _Arguments(NamedTuple):
    """The arguments of :class:`MasterWeights` for one weight, and its name in errors."""

    name: str
    weight: Weight
    master: torch.Tensor | None
    quantizer: Quantizer | None
    offset: int | None
    has_offsets: bool
    target: ShardTarget


class _CheckedWeight:
    """One weight whose arguments fit together.

    Attributes:
        name: the weight's name in errors.
        storage: the quantized data of this rank: the whole weight, or its rows.
        group: the ranks that have the shards of a DTensor; None for other weights.
        shape: the shape of the whole weight.
        job: the shard to quantize.
    """

    def __init__(self, arguments: _Arguments) -> None:
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
        _check_kind(quantizer, Quantizer, f"the quantizer of {self.name}", "an ottava.Quantizer")
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

    def _start(self, arguments: _Arguments, shard: torch.Tensor | None, rows: range | None) -> int:
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
        own = len(rows) * row
        start = first if offset is None else offset
        fault = f"the master of {self.name} has {count} elements from {start} on"
        expected = f"{own} from {first} on, its rows here"
        if count != own:
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
        raw = ordered_bytes(self.storage, self.name)
        buffers = list(target) if isinstance(target, (list, tuple)) else [target]
        if len(buffers) != len(raw):
            expected = f"one for each of {', '.join(inner.argument for inner in raw)}"
            raise ShapeError(f"{name} has {len(buffers)} tensors of bytes", expected)
        data = [
            check_bytes(buffer, self.storage, inner, count, f"the buffer for {name}").view(-1)
            for buffer, inner in zip(buffers, raw, strict=True)
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


def _check_agreement(weights: Sequence[_CheckedWeight]) -> None:
    """Check that the weights can be a batch.

    Each weight is listed once, and its quantizer fits it. All weights agree in their device, and in
    the options that their class of quantizers names.
    """
    first_of_class: dict[type[Quantizer], _CheckedWeight] = {}
    by_storage: dict[int, _CheckedWeight] = {}
    # Whether quantizers fit their weights: one example answers for all weights with an equal key.
    fitting: dict[Hashable, bool] = {}
    for weight in weights:
        storage = weight.storage
        quantizer = weight.job.quantizer
        twin = by_storage.setdefault(id(storage), weight)
        if twin is not weight:
            raise OptionError(
                f"{weight.name} is {twin.name} again",
                "each weight once",
                "list weights that layers share once",
            )
        key = _key_of_quantizer(weight)
        if key not in fitting:
            fitting[key] = _quantizer_fits(weight)
        if not fitting[key]:
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


def _key_of_quantizer(weight: _CheckedWeight) -> Hashable:
    """Equal for weights of which all or none have a quantizer that fits."""
    storage = weight.storage
    static = tuple(getattr(storage, field.attribute) for field in type(storage).static_fields)
    usages = tuple(storage.get_usages().values())
    dimensions = len(weight.shape)
    return type(storage), static, usages, storage.dtype, dimensions, weight.job.quantizer


def _quantizer_fits(weight: _CheckedWeight) -> bool:
    """Whether the quantizer makes tensors of the kind of the weight."""
    storage = weight.storage
    quantizer = weight.job.quantizer.with_usage(**storage.get_usages())
    shape = (1,) * len(weight.shape)
    example = quantizer.make_empty(shape, dtype=storage.dtype, device=storage.device)
    return same_kind(example, storage)


def _check_options(weight: _CheckedWeight, first: _CheckedWeight) -> None:
    """Check that the quantizers of two weights of a batch, of one class, agree in its options."""
    quantizer = weight.job.quantizer
    for option in rule_of(quantizer).options:
        own = getattr(quantizer, option)
        other = getattr(first.job.quantizer, option)
        if own != other:
            raise OptionError(
                f"{option} is {own!r} for {weight.name} and {other!r} for {first.name}",
                "one value for all weights of a batch",
                "quantize them in two batches",
            )


def _default_group(weights: Sequence[_CheckedWeight], group: Group) -> "ProcessGroup | None":
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
