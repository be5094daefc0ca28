"""Quantized weights from master weights that are sharded over ranks.

Every rank ends up with the bytes of its shard, and the scales, that quantizing the whole weight at
once would give. One all-reduce(MAX) serves all weights, whatever their recipes. Where amaxes do not
suffice for a quantizer, one additional all-gather brings the shards of all such weights. Everything
is checked before anything is written.
"""

import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from ottava.collectives import check_group, find_group
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
from ottava.tensors.declaration import check_flag, same_kind
from ottava.torch_private import is_distributed, local_tensor


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None,
    group: Any = None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
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
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None = None,
    group: Any = None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
    *,
    quantizers: Sequence[Quantizer | None] | Quantizer | None = None,
    amax_reduce_group: Any = None,
) -> None: ...


@overload
def cast_master_weights_to_fp8(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    quantizers: Sequence[Quantizer | None] | Quantizer | None,
    amax_reduce_group: Any = None,
    /,
    *,
    start_offsets: Sequence[int | None] | None = None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None: ...


def cast_master_weights_to_fp8(
    model_weights: Sequence[Any],
    master_weights: Sequence[Any],
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


def _are_quantizers(third: Any, masters: Any) -> bool:
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
    model_weights: Any,
    master_weights: Any,
    quantizers: Any,
    amax_reduce_group: Any = None,
    **named: Any,
) -> None:
    """:func:`cast_master_weights_to_fp8` with positional arguments in their former order."""
    named |= {"quantizers": quantizers, "amax_reduce_group": amax_reduce_group}
    _cast(model_weights, master_weights, **named)


def _cast(
    model_weights: Any,
    master_weights: Any,
    start_offsets: Any = None,
    group: Any = None,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
    *,
    quantizers: Any = None,
    amax_reduce_group: Any = None,
) -> None:
    if group is not None and amax_reduce_group is not None and group is not amax_reduce_group:
        raise OptionError(
            "group and amax_reduce_group are two groups",
            expected="one group of ranks",
            remedy="pass group alone",
        )
    MasterWeights(
        model_weights,
        master_weights,
        quantizers,
        amax_reduce_group if group is None else group,
        start_offsets,
        fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    ).quantize()


_LISTS = (
    "model_weights",
    "master_weights",
    "quantizers",
    "start_offsets",
    "fsdp_shard_model_weights",
)


@dataclass(eq=False, repr=False)
class MasterWeights:
    """Sharded master weights and the quantized weights that are written from them in each step.

    This checks and looks up once what :func:`cast_master_weights_to_fp8` checks and looks up in
    each call. It keeps references to its tensors, and repeats the work when one of them has moved
    to other memory.

    Arguments and errors are those of :func:`cast_master_weights_to_fp8`. Nothing is written until
    :meth:`quantize`.
    """

    model_weights: Sequence[Any]
    master_weights: Sequence[torch.Tensor | None]
    quantizers: Sequence[Quantizer | None] | Quantizer | None = None
    amax_reduce_group: Any = None
    start_offsets: Sequence[int | None] | None = None
    fsdp_shard_model_weights: Sequence[Any] | None = None
    manual_post_all_gather_processing: bool = False

    def __post_init__(self) -> None:
        check_flag("manual_post_all_gather_processing", self.manual_post_all_gather_processing)
        self._prepare()

    def _prepare(self) -> None:
        """Check all arguments and group the shards into batches; the first argument that does not
        fit raises a typed error."""
        count = len(self.model_weights) if isinstance(self.model_weights, (list, tuple)) else 0
        lists: list[Any] = [self.model_weights, self.master_weights]
        for entries in (self.quantizers, self.start_offsets, self.fsdp_shard_model_weights):
            lists.append([entries] * count if isinstance(entries, Quantizer | None) else entries)
        for name, entries in zip(_LISTS, lists, strict=True):
            _check_kind(entries, (list, tuple), name, "a list, an entry for each weight")
            if len(entries) != count:
                raise ShapeError(
                    f"{len(entries)} {name} for {count} model_weights", expected=f"{count}"
                )
        with torch.no_grad():
            has_offsets = self.start_offsets is not None
            weights = [
                _Weight(f"weight {n}", has_offsets, *entries)
                for n, entries in enumerate(zip(*lists, strict=True))
            ]
            _check_agreement(weights)
            check_places([data for weight in weights for data in weight.job.output.data])
            self._group = _default_group(weights, self.amax_reduce_group)
            for weight in weights:
                # FSDP pads an uneven shard, so the shard is a view of the padded tensor. The view
                # may get another scale, because the padding is zero at any scale.
                weight.storage._whole = None
            self._batches = ShardBatches.of([weight.job for weight in weights])
        holders = [h for w in weights for h in (w.storage, w.job.output.holder)]
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

    def _addresses(self) -> list[Any]:
        """The addresses of all tensors that are read or written, and the ids of the quantizers."""
        tensors = [
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


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Rebuild the tensors that derive from the bytes of weights (transposes), after the bytes were
    gathered.

    Tensors that are not quantized, or have no derived tensors, stay unchanged.

    Raises:
        DTypeError: an entry is not a tensor.
    """
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
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
    moved: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for inner, buffer in zip(raw, buffers, strict=False):
        data: torch.Tensor = getattr(tensor, inner.attribute)
        checked = check_bytes(
            buffer, tensor, inner, data.numel(), f"the buffer for {inner.argument!r}"
        )
        if not data.is_contiguous():
            raise UsageError(
                "the data of the tensor is not contiguous", expected="a tensor that is no view"
            )
        moved.append((inner, data, checked.detach().view(data.dtype).view(data.shape)))
    check_places([target for *_, target in moved], [data for _, data, _ in moved])
    with torch.no_grad():
        for inner, data, target in moved:
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


def _check_kind(value: Any, kinds: Any, name: str, expected: str, remedy: str = "") -> None:
    if not isinstance(value, kinds):
        raise DTypeError(f"{name} is a {type(value).__name__}", expected, remedy)


class _Weight:
    """One checked weight.

    Attributes:
        name: the weight's name in errors.
        storage: the quantized data of this rank: the whole weight, or its rows.
        group: the ranks that have the shards of a DTensor; None for other weights.
        shape: the shape of the whole weight.
        job: the shard to quantize.
    """

    def __init__(
        self,
        name: str,
        has_offsets: bool,
        weight: Any,
        master: Any,
        quantizer: Any,
        offset: Any,
        out: Any,
    ) -> None:
        self.name = name
        self.storage = local_tensor(weight)
        rows, self.group = _rows_of(weight, name)
        storage = self.storage
        _check_kind(
            storage, QuantizedTensorStorage, name, "a quantized tensor", "leave it to its optimizer"
        )
        quantizer = storage._quantizer if quantizer is None else quantizer
        if quantizer is None:
            raise UsageError(
                f"{name} has no quantizer",
                remedy="pass quantizers, or set one with update_quantizer()",
            )
        _check_kind(quantizer, Quantizer, f"the quantizer of {name}", "an ottava.Quantizer")
        self.shape = tuple(weight.size())
        shard = self._shard(master)
        count = None if shard is None else shard.numel()
        start = self._start(offset, has_offsets, count, rows)
        _check_has_data(storage, name)
        if storage._whole is not None and storage is weight:
            raise UsageError(
                f"{name} is a view of another tensor, whose scale it has",
                remedy="give the whole tensor",
            )
        if shard is None:
            shard = torch.empty(0, dtype=torch.float32, device=storage.device)
        output = self._output(out, start, shard.numel())
        self.job = ShardJob(quantizer, shard, self.shape, storage.dtype, start, output)

    def _shard(self, master: Any) -> torch.Tensor | None:
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
        flat: torch.Tensor = local.detach().reshape(-1)
        return flat

    def _start(self, offset: Any, has_offsets: bool, size: int | None, rows: range | None) -> int:
        """The start offset of a shard with ``size`` elements, None for no shard.

        The shard must lie in the weight, and must be the ``rows`` of a DTensor that this rank has.
        """
        numel = math.prod(self.shape)
        count = size or 0
        name = f"the master of {self.name}"
        if offset is not None:
            if isinstance(offset, bool) or not hasattr(offset, "__index__"):
                raise OptionError(
                    f"the start offset of {self.name} is {offset!r}",
                    "an integer, or None for no shard",
                )
            offset = operator.index(offset)
        if rows is not None:
            row: int = math.prod(self.shape[1:])
            first = rows.start * row
            own = len(rows) * row
            start = first if offset is None else offset
            if size is not None and (count != own or (count and start != first)):
                kind = OptionError if count == own else ShapeError
                raise kind(
                    f"{name} has {count} elements from {start} on",
                    f"{own} from {first} on, its rows here",
                )
            return first
        if offset is None and size is not None and (has_offsets or count != numel):
            raise OptionError(
                f"{self.name} has a master of {count} elements and no start offset",
                f"the index of its first element among the {numel} of the weight",
                "pass start_offsets, with None only where the master is None",
            )
        start = offset or 0
        if not 0 <= start <= numel - count:
            raise ShapeError(
                f"{name} has {count} elements from {start} on",
                f"a range in the {numel} of the weight",
            )
        return 0 if size is None else start

    def _output(self, out: Any, start: int, count: int) -> ShardOutput:
        """Where the shard goes: the weight itself, another tensor that is the shard, or buffers of
        bytes."""
        name = f"the shard of {self.name}"
        storage = self.storage
        if isinstance(out, (list, tuple)):
            # TransformerEngine's users write a pair, with None for a direction without a shard.
            out = [buffer for buffer in out if buffer is not None] or None
        out = storage if out is None else out
        if isinstance(out, QuantizedTensorStorage):
            _check_has_data(out, name)
            if not same_kind(out, storage):
                raise DTypeError(
                    f"{name} is of another kind", expected=f"a {type(storage).__name__} like it"
                )
            if out.device != storage.device:
                raise DeviceError(f"{name} is on {out.device}, the weight on {storage.device}")
            return shard_output(out, self.shape, start, count, self.name)
        raw = ordered_bytes(storage, self.name)
        buffers = list(out) if isinstance(out, (list, tuple)) else [out]
        if len(buffers) != len(raw):
            expected = f"one for each of {', '.join(inner.argument for inner in raw)}"
            raise ShapeError(f"{name} has {len(buffers)} tensors of bytes", expected)
        rows = range(self.shape[0] if self.shape else 1)
        data = [
            check_bytes(buffer, storage, inner, count, f"the buffer for {name}").view(-1)
            for buffer, inner in zip(buffers, raw, strict=True)
        ]
        return ShardOutput(storage, tuple(flat.view(torch.uint8) for flat in data), rows)


def _check_has_data(storage: QuantizedTensorStorage, name: str) -> None:
    if not any(storage.get_usages().values()):
        raise UsageError(f"{name} holds no data to write to", remedy="it was cleared or saved")


def _rows_of(weight: Any, name: str) -> tuple[range | None, Any]:
    """This rank's rows of a DTensor, and the group that has all rows; (None, None) for other
    tensors."""
    if not is_distributed(weight):
        return None, None
    sharded = [
        dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()
    ]
    if not sharded:
        return range(weight.shape[0]), None
    if len(sharded) > 1 or not weight.placements[sharded[0]].is_shard(0):
        raise ShapeError(
            f"{name} is placed as {weight.placements}",
            expected="rows sharded along one dimension of the mesh, as fully_shard does",
        )
    (box,) = weight.__create_chunk_list__()
    rows = range(box.offsets[0], box.offsets[0] + box.sizes[0])
    return rows, weight.device_mesh.get_group(sharded[0])


def _check_agreement(weights: Sequence[_Weight]) -> None:
    """Check that each weight is listed once, that its quantizer fits it, and that all weights of a
    batch agree in their device and in the options that their class of quantizers names."""
    first_of_class: dict[type[Quantizer], _Weight] = {}
    by_storage: dict[int, _Weight] = {}
    # Whether quantizers fit their weights: one example answers for all weights with an equal key.
    fitting: dict[Any, bool] = {}
    for weight in weights:
        storage = weight.storage
        quantizer = weight.job.quantizer
        twin = by_storage.setdefault(id(storage), weight)
        first = first_of_class.setdefault(type(quantizer), weight)
        if twin is not weight:
            raise OptionError(
                f"{weight.name} is {twin.name} again",
                "each weight once",
                "list weights that layers share once",
            )
        static = tuple(getattr(storage, field.attribute) for field in type(storage).static_fields)
        usages = storage.get_usages()
        shape = (1,) * len(weight.shape)
        key = (type(storage), static, tuple(usages.values()), storage.dtype, shape, quantizer)
        if key not in fitting:
            example = quantizer.with_usage(**usages).make_empty(
                shape, dtype=storage.dtype, device=storage.device
            )
            fitting[key] = same_kind(example, storage)
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
        for option in rule_of(quantizer).options:
            own = getattr(quantizer, option)
            other = getattr(first.job.quantizer, option)
            if own != other:
                raise OptionError(
                    f"{option} is {own!r} for {weight.name} and {other!r} for {first.name}",
                    "one value for all weights of a batch",
                    "quantize them in two batches",
                )


def _default_group(weights: Sequence[_Weight], group: Any) -> Any:
    """The group to reduce over: ``group``, the one of the sharded weights, or None for the default
    group."""
    check_group(group)
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
