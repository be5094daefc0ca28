"""Quantized weights from master weights that are sharded over ranks.

Afterwards every rank's shard has the bytes, and every rank the scales, that quantizing the whole
weight at once would give. One all-reduce(MAX) serves all weights, whatever recipes they are of;
where amaxes do not say what a quantizer does, one all-gather brings the shards of all such weights
besides. All is checked before anything is written.
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
    given = (model_weights, master_weights, None, group, start_offsets, fsdp_shard_model_weights)
    MasterWeights(*given, manual_post_all_gather_processing).quantize()


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
    this with the same weights in the same order; a rank may hold nothing of some, or of all of
    them.

    Args:
        model_weights: quantized tensors or storages, or DTensors of them that are sharded along
            their rows (FSDP2): then the shard is the local tensor.
        master_weights: for each weight the shard that this rank holds, float32 (or bfloat16,
            float16), flattened as the weight is; None for nothing. A DTensor stands for its local
            tensor.
        start_offsets: index of each shard's first element in the flattened weight; None where there
            is no shard. Without the list, masters are whole, or have the rows of a DTensor.
        group: the ranks that hold the shards; None is that of the DTensors, or the default group.
            With no process group initialized, this process holds all there is.
        fsdp_shard_model_weights: where the shard is not to be written into the weight itself: a
            quantized tensor that is the shard, or its bytes (uint8), one tensor for each direction
            that has data of its own. Entries may be None, and so may both of a pair.
        manual_post_all_gather_processing: leave what derives from the bytes, a transpose, to
            :func:`post_all_gather_processing`; otherwise the next forward pass makes it.
        quantizers: for each weight, or one for all; None is the weight's own.
        amax_reduce_group: ``group`` by another name.

    The order of positional arguments was ``quantizers, amax_reduce_group`` once. Quantizers in the
    third place are taken for these, with a DeprecationWarning.

    Raises:
        ShapeError, OptionError, DTypeError, UsageError, DeviceError: an argument does not fit.
            Nothing has been written then. All but UsageError are ValueErrors.
        TypeError: an argument is unknown, or another one is given twice.
    """
    # Offsets by name beside a third argument: that one can only be quantizers.
    by_name = "start_offsets" in named
    if positional and (by_name or _are_quantizers(positional[0], master_weights)):
        if "quantizers" in named:
            what, expected = "quantizers are given twice, by position and by name", "one of them"
            raise OptionError(what, expected=expected, remedy="pass quantizers by name alone")
        what = "cast_master_weights_to_fp8(weights, masters, quantizers, …)"
        warnings.warn(
            f"{what} is deprecated: pass quantizers by name", DeprecationWarning, stacklevel=2
        )
        _cast_old(model_weights, master_weights, *positional, **named)
        return
    _cast(model_weights, master_weights, *positional, **named)


def _are_quantizers(third: Any, masters: Any) -> bool:
    """Whether a third positional argument is what it was once, and not a list of offsets."""
    if isinstance(third, Quantizer):
        return True
    if not isinstance(third, (list, tuple)) or not third:
        return False
    if any(isinstance(entry, Quantizer) for entry in third):
        return True
    # No shard has an offset of None.
    shards = isinstance(masters, (list, tuple)) and any(master is not None for master in masters)
    return shards and all(entry is None for entry in third)


def _cast_old(
    model_weights: Any,
    master_weights: Any,
    quantizers: Any,
    amax_reduce_group: Any = None,
    **named: Any,
) -> None:
    """:func:`cast_master_weights_to_fp8` with the arguments in the order that they had once."""
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
        what, expected = "group and amax_reduce_group are two groups", "one group of ranks"
        raise OptionError(what, expected=expected, remedy="pass group alone")
    group = amax_reduce_group if group is None else group
    given = (model_weights, master_weights, quantizers, group, start_offsets)
    MasterWeights(*given, fsdp_shard_model_weights, manual_post_all_gather_processing).quantize()


_LISTS = (
    "model_weights",
    "master_weights",
    "quantizers",
    "start_offsets",
    "fsdp_shard_model_weights",
)


@dataclass(eq=False, repr=False)
class MasterWeights:
    """Sharded master weights and the quantized weights that are made of them, step after step.

    What :func:`cast_master_weights_to_fp8` checks and looks up for each weight, this does once. It
    keeps the tensors that it is given, and looks again when one of them has moved to other memory.

    Args, raised errors: as of :func:`cast_master_weights_to_fp8`. Nothing is written until
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
        self._look()

    def _look(self) -> None:
        """Find everything anew, or raise a typed error for the first thing that does not fit."""
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
            ranges = self.start_offsets is not None
            weights = [
                _Weight(f"weight {n}", ranges, *of) for n, of in enumerate(zip(*lists, strict=True))
            ]
            _check_agreement(weights)
            check_places([data for weight in weights for data in weight.job.output.data])
            self._group = _default_group(weights, self.amax_reduce_group)
            for weight in weights:
                # FSDP pads an uneven shard, so that it is a view; zeros are the same at any scale.
                weight.storage._whole = None
            self._batches = ShardBatches.of([weight.job for weight in weights])
        self._holders = list(
            {id(h): h for w in weights for h in (w.storage, w.job.output.holder)}.values()
        )
        self._watched = [
            (h, inner.attribute)
            for h in self._holders
            for inner in h.inner_tensors
            if not h.is_derived(inner)
        ]
        self._masters = [local_tensor(m) for m in self.master_weights if m is not None]
        # A shard of a master that is not contiguous is a copy, which has to be made anew each time.
        self._keeps = all(master.is_contiguous() for master in self._masters)
        self._seen = self._addresses()

    def _addresses(self) -> list[Any]:
        """Where everything lies that is read or written, and what quantizes it."""
        tensors = [
            *(getattr(holder, attribute) for holder, attribute in self._watched),
            *self._masters,
        ]
        places = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        return [*places, *(id(holder._quantizer) for holder in self._holders)]

    def quantize(self) -> None:
        """Write this rank's shards of the weights, and all scales, from the master weights as they
        are now.

        Raises:
            ShapeError, OptionError, DTypeError, UsageError, DeviceError: something that was
                replaced does not fit.
        """
        if not self._keeps or self._addresses() != self._seen:
            self._look()
        with torch.no_grad():
            self._batches.quantize(self._group)
        for holder in self._holders:
            holder.rebuilds_derived = not self.manual_post_all_gather_processing


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Rebuild what derives from the bytes of weights (transposes), once these have been gathered.

    Nothing to do for tensors that are not quantized, nor where nothing derives from the bytes.

    Raises:
        DTypeError: an entry is no tensor.
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
    """Move the elements of a quantized tensor into a buffer, for example a range of a contiguous
    one for all weights.

    Values and everything else of the tensor stay as they are; what was an alias of it keeps the old
    bytes.

    Args:
        new_raw_data: contiguous, uint8 (or the 8-bit float dtype of the elements), as many elements
            as the tensor has. A tensor with data for rows and for columns takes two, or moves the
            data for rows alone.

    Raises:
        DTypeError, ShapeError, DeviceError: it is not. All are ValueErrors, and nothing has been
            written.
        UsageError: the tensor holds no elements, or they are not contiguous.
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
        held: torch.Tensor = getattr(tensor, inner.attribute)
        checked = check_bytes(
            buffer, tensor, inner, held.numel(), f"the buffer for {inner.argument!r}"
        )
        if not held.is_contiguous():
            raise UsageError(
                "the data of the tensor is not contiguous", expected="a tensor that is no view"
            )
        moved.append((inner, held, checked.detach().view(held.dtype).view(held.shape)))
    check_places([target for *_, target in moved], [held for _, held, _ in moved])
    with torch.no_grad():
        for inner, held, target in moved:
            # Not counted as a write to the buffer: other tensors in it have transposes that stay
            # valid.
            target.data.copy_(held)
            tensor.replace_inner(inner, target)


def is_custom(x: Quantizer | QuantizedTensorStorage | torch.Tensor | None = None) -> bool:
    """Whether a quantizer or a quantized tensor is user-defined; False for None and plain tensors.

    Raises:
        DTypeError: ``x`` is something else.
    """
    kinds = Quantizer, QuantizedTensorStorage, torch.Tensor, type(None)
    _check_kind(x, kinds, "x", "a quantizer, a tensor or None")
    return isinstance(x, (Quantizer, QuantizedTensorStorage)) and x.custom


def _check_kind(value: Any, kinds: Any, what: str, expected: str, remedy: str = "") -> None:
    if not isinstance(value, kinds):
        raise DTypeError(f"{what} is a {type(value).__name__}", expected, remedy)


class _Weight:
    """One weight, checked: what errors call it, the quantized data that this rank has (the whole
    weight, or its rows), the ranks that share it, if it says so itself, and the job for its
    quantizer."""

    def __init__(
        self,
        what: str,
        offsets_given: bool,
        weight: Any,
        master: Any,
        quantizer: Any,
        offset: Any,
        out: Any,
    ) -> None:
        self.what, self.storage, (rows, self.group) = (
            what,
            local_tensor(weight),
            _rows_of(weight, what),
        )
        storage = self.storage
        _check_kind(
            storage, QuantizedTensorStorage, what, "a quantized tensor", "leave it to its optimizer"
        )
        quantizer = storage._quantizer if quantizer is None else quantizer
        if quantizer is None:
            raise UsageError(
                f"{what} has no quantizer",
                remedy="pass quantizers, or set one with update_quantizer()",
            )
        _check_kind(quantizer, Quantizer, f"the quantizer of {what}", "an ottava.Quantizer")
        self.shape, held = tuple(weight.size()), None if master is None else local_tensor(master)
        if isinstance(held, QuantizedTensorStorage):
            raise DTypeError(
                f"the master of {what} is quantized",
                expected="a dense tensor, or None for no shard",
            )
        if held is not None:
            check_high_precision(held, f"the master of {what}")
            check_device(held, storage.device, f"the master of {what}")
        start = self._start(offset, offsets_given, None if held is None else held.numel(), rows)
        _check_holds(storage, what)
        if storage._whole is not None and storage is weight:
            raise UsageError(
                f"{what} is a view of another tensor, whose scale it has",
                remedy="give the whole tensor",
            )
        empty = torch.empty(0, dtype=torch.float32, device=storage.device)
        shard = empty if held is None else held.detach().reshape(-1)
        output = self._output(out, start, shard.numel())
        self.job = ShardJob(quantizer, shard, self.shape, storage.dtype, start, output)

    def _start(self, offset: Any, offsets_given: bool, held: int | None, rows: range | None) -> int:
        """Where a shard of so many elements starts; it must lie in the weight, or be the rows of it
        that are here."""
        numel, count, what = math.prod(self.shape), held or 0, f"the master of {self.what}"
        if offset is not None:
            if isinstance(offset, bool) or not hasattr(offset, "__index__"):
                raise OptionError(
                    f"the start offset of {self.what} is {offset!r}",
                    "an integer, or None for no shard",
                )
            offset = operator.index(offset)
        if rows is not None:
            row: int = math.prod(self.shape[1:])
            first, own = rows.start * row, len(rows) * row
            start = first if offset is None else offset
            if held is not None and (count != own or (count and start != first)):
                kind = OptionError if count == own else ShapeError
                raise kind(
                    f"{what} has {count} elements from {start} on",
                    f"{own} from {first} on, its rows here",
                )
            return first
        if offset is None and held is not None and (offsets_given or count != numel):
            what = f"{self.what} has a master of {count} elements and no start offset"
            expected = f"the index of its first element among the {numel} of the weight"
            raise OptionError(
                what, expected, "pass start_offsets, with None only where the master is None"
            )
        start = offset or 0
        if not 0 <= start <= numel - count:
            raise ShapeError(
                f"{what} has {count} elements from {start} on",
                f"a range in the {numel} of the weight",
            )
        return 0 if held is None else start

    def _output(self, out: Any, start: int, count: int) -> ShardOutput:
        """Where a shard goes: into the weight itself, into another tensor that is the shard, or
        into bytes."""
        what, storage = f"the shard of {self.what}", self.storage
        if isinstance(out, (list, tuple)):
            # TransformerEngine's users write a pair with None for what there is no shard of.
            out = [buffer for buffer in out if buffer is not None] or None
        out = storage if out is None else out
        if isinstance(out, QuantizedTensorStorage):
            _check_holds(out, what)
            if not same_kind(out, storage):
                raise DTypeError(
                    f"{what} is of another kind", expected=f"a {type(storage).__name__} like it"
                )
            if out.device != storage.device:
                raise DeviceError(f"{what} is on {out.device}, the weight on {storage.device}")
            return shard_output(out, self.shape, start, count, self.what)
        raw, given = (
            ordered_bytes(storage, self.what),
            list(out) if isinstance(out, (list, tuple)) else [out],
        )
        if len(given) != len(raw):
            expected = f"one for each of {', '.join(inner.argument for inner in raw)}"
            raise ShapeError(f"{what} has {len(given)} tensors of bytes", expected)
        what, rows = f"the buffer for {what}", range(self.shape[0] if self.shape else 1)
        data = [
            check_bytes(to, storage, inner, count, what).view(-1)
            for to, inner in zip(given, raw, strict=True)
        ]
        return ShardOutput(storage, tuple(to.view(torch.uint8) for to in data), rows)


def _check_holds(storage: QuantizedTensorStorage, what: str) -> None:
    if not any(storage.get_usages().values()):
        raise UsageError(f"{what} holds no data to write to", remedy="it was cleared or saved")


def _rows_of(weight: Any, what: str) -> tuple[range | None, Any]:
    """The rows of a DTensor that are here, and the group that has them all."""
    if not is_distributed(weight):
        return None, None
    sharded = [
        dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()
    ]
    if not sharded:
        return range(weight.shape[0]), None
    if len(sharded) > 1 or not weight.placements[sharded[0]].is_shard(0):
        what = f"{what} is placed as {weight.placements}"
        raise ShapeError(
            what, expected="rows sharded along one dimension of the mesh, as fully_shard does"
        )
    (box,) = weight.__create_chunk_list__()
    return range(box.offsets[0], box.offsets[0] + box.sizes[0]), weight.device_mesh.get_group(
        sharded[0]
    )


def _check_agreement(weights: Sequence[_Weight]) -> None:
    """What must be the same in a batch: the device, and the options that a class of quantizers
    names. And what each quantizer makes is of its weight's kind, which an example says for all that
    are alike."""
    seen: dict[type[Quantizer], _Weight] = {}
    places: dict[int, _Weight] = {}
    fitting: dict[Any, bool] = {}
    for weight in weights:
        what, storage, quantizer = weight.what, weight.storage, weight.job.quantizer
        twin, first = (
            places.setdefault(id(storage), weight),
            seen.setdefault(type(quantizer), weight),
        )
        if twin is not weight:
            raise OptionError(
                f"{what} is {twin.what} again",
                "each weight once",
                "list weights that layers share once",
            )
        static = tuple(getattr(storage, field.attribute) for field in type(storage).static_fields)
        usages, shape, dtype = storage.get_usages(), (1,) * len(weight.shape), storage.dtype
        key = (type(storage), static, tuple(usages.values()), dtype, shape, quantizer)
        if key not in fitting:
            example = quantizer.with_usage(**usages).make_empty(
                shape, dtype=dtype, device=storage.device
            )
            fitting[key] = same_kind(example, storage)
        if not fitting[key]:
            what = (
                f"the quantizer of {what}, {quantizer!r}, makes other tensors than this "
                f"{type(storage).__name__}"
            )
            remedy = "leave quantizers out, or make the weight with this quantizer"
            raise DTypeError(
                what, "a quantizer of its format and options, whatever the shape", remedy
            )
        if storage.device != weights[0].storage.device:
            what = (
                f"{what} is on {storage.device}, {weights[0].what} on {weights[0].storage.device}"
            )
            raise DeviceError(what, "one device for a batch")
        for name in rule_of(quantizer).options:
            own, other = getattr(quantizer, name), getattr(first.job.quantizer, name)
            if own != other:
                what = f"{name} is {own!r} for {what} and {other!r} for {first.what}"
                raise OptionError(
                    what, "one value for all weights of a batch", "quantize them in two batches"
                )


def _default_group(weights: Sequence[_Weight], group: Any) -> Any:
    """The group to reduce over: the one given, that of the sharded weights, or None for the default
    group."""
    check_group(group)
    if group is not None:
        return find_group(group)
    groups = {
        weight.group.group_name: weight.group for weight in weights if weight.group is not None
    }
    if len(groups) > 1:
        remedy = (
            "quantize the weights of each group by themselves, or pass a group that contains "
            "them all"
        )
        raise OptionError(
            f"the weights are sharded over {len(groups)} groups", "one group for a batch", remedy
        )
    return next(iter(groups.values()), None)
