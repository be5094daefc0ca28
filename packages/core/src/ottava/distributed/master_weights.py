"""Quantized weights from master weights that are sharded over ranks.

Every rank ends up with the bytes of its shard, and the scales, that quantizing the whole weight at
once would give::

    this rank's master shards ──> amaxes ── one all-reduce(MAX) ──> scales ──> cast ──┐
    quantized weights: the rank's ranges of data, and all scales  <───────────────────┘

The all-reduce serves all weights, whatever their recipes. Where amaxes do not suffice for a
quantizer, one additional all-gather brings the shards of all such weights. Everything is checked
before anything is written.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from ottava.collectives import Group
from ottava.distributed.batches import ShardBatches
from ottava.distributed.checked_weights import (
    CheckedWeight,
    ShardTarget,
    Weight,
    WeightArguments,
    check_batch,
    default_group,
)
from ottava.distributed.shards import check_kind, check_places
from ottava.errors import OptionError, ShapeError
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava.tensors.declaration import check_flag
from ottava.torch_private import local_tensor


def quantize_master_weights(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None,
    group: Group = None,
    fsdp_shard_model_weights: Sequence[ShardTarget] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """:func:`cast_master_weights_to_fp8` with each weight's own quantizer."""
    _quantize(
        model_weights,
        master_weights,
        start_offsets,
        group,
        fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    )


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
    **keywords: Any,
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
    if not positional or not _are_quantizers(positional[0], master_weights, keywords):
        _quantize(model_weights, master_weights, *positional, **keywords)
        return
    if "quantizers" in keywords:
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
    _quantize_in_former_order(model_weights, master_weights, *positional, **keywords)


def _are_quantizers(third: object, masters: object, keywords: Collection[str]) -> bool:
    """Whether the third positional argument is quantizers, as it used to be, and not offsets.

    Args:
        third: the third positional argument.
        masters: the second one.
        keywords: the names of the arguments that are passed by name.
    """
    if "start_offsets" in keywords or isinstance(third, Quantizer):
        return True
    if not isinstance(third, (list, tuple)) or not third:
        return False
    if any(isinstance(entry, Quantizer) for entry in third):
        return True
    # A list of None cannot be the offsets of shards, because each shard has an offset.
    has_shard = isinstance(masters, (list, tuple)) and any(m is not None for m in masters)
    return has_shard and all(entry is None for entry in third)


def _quantize_in_former_order(
    model_weights: Sequence[Weight],
    master_weights: Sequence[torch.Tensor | None],
    quantizers: Sequence[Quantizer | None] | Quantizer | None,
    amax_reduce_group: Group = None,
    **keywords: Any,
) -> None:
    """:func:`_quantize` with positional arguments in their former order."""
    keywords |= {"quantizers": quantizers, "amax_reduce_group": amax_reduce_group}
    _quantize(model_weights, master_weights, **keywords)


def _quantize(
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
    """:func:`cast_master_weights_to_fp8` with positional arguments in their present order."""
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
    to other memory, or another one has taken its place.

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
            weights = [CheckedWeight(arguments) for arguments in self._arguments()]
            check_batch(weights)
            check_places([data for weight in weights for data in weight.job.output.data])
            self._group = default_group(weights, self.amax_reduce_group)
            for weight in weights:
                # The padded shard of FSDP is a view of a larger tensor. It is treated as a whole,
                # because zeros are zeros at any scale.
                weight.storage._whole = None
            self._batches = ShardBatches.of([weight.job for weight in weights])
        holders: dict[int, QuantizedTensorStorage] = {}
        for weight in weights:
            for holder in (weight.storage, weight.job.output.holder):
                holders[id(holder)] = holder
        self._holders = list(holders.values())
        self._inner_tensors = [
            (holder, inner.attribute)
            for holder in self._holders
            for inner in holder.inner_tensors
            if not holder.is_derived(inner)
        ]
        # The flat shard of a non-contiguous master is a copy, which each call has to repeat.
        self._reusable = all(master.is_contiguous() for master in self._masters())
        self._prepared_addresses = self._addresses()

    def _arguments(self) -> list[WeightArguments]:
        """The arguments of each weight, if the lists have one entry for each weight."""
        count = 0
        if isinstance(self.model_weights, (list, tuple)):
            count = len(self.model_weights)
        quantizers = self.quantizers
        if quantizers is None or isinstance(quantizers, Quantizer):
            quantizers = [quantizers] * count
        offsets = self.start_offsets
        if offsets is None:
            offsets = [None] * count
        targets = self.fsdp_shard_model_weights
        if targets is None:
            targets = [None] * count
        lists: dict[str, Sequence[object]] = {
            "model_weights": self.model_weights,
            "master_weights": self.master_weights,
            "quantizers": quantizers,
            "start_offsets": offsets,
            "fsdp_shard_model_weights": targets,
        }
        for name, entries in lists.items():
            check_kind(entries, (list, tuple), name, "a list, an entry for each weight")
            if len(entries) != count:
                raise ShapeError(
                    f"{len(entries)} {name} for {count} model_weights", expected=f"{count}"
                )
        return [
            WeightArguments(
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

    def _masters(self) -> list[torch.Tensor]:
        """The master weights of this rank, whose local tensors FSDP2 may have replaced."""
        return [local_tensor(master) for master in self.master_weights if master is not None]

    def _addresses(self) -> list[int | None]:
        """The addresses of all tensors that are read or written, and the ids of the weights and of
        the quantizers."""
        tensors: list[torch.Tensor | None] = [
            *(getattr(holder, attribute) for holder, attribute in self._inner_tensors),
            *self._masters(),
        ]
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        weights = [id(local_tensor(weight)) for weight in self.model_weights]
        return [*addresses, *weights, *(id(holder._quantizer) for holder in self._holders)]

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


def is_custom(x: Quantizer | QuantizedTensorStorage | torch.Tensor | None = None) -> bool:
    """Whether a quantizer or a quantized tensor is user-defined; False for None and plain tensors.

    Raises:
        DTypeError: ``x`` is something else.
    """
    kinds = Quantizer, QuantizedTensorStorage, torch.Tensor, type(None)
    check_kind(x, kinds, "x", "a quantizer, a tensor or None")
    return isinstance(x, (Quantizer, QuantizedTensorStorage)) and x.custom
