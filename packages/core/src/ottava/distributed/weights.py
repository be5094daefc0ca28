"""Quantized weights from master weights that are sharded over ranks.

Afterwards every rank's shard has the bytes, and every rank the scales, that quantizing the whole weight at once would
give. One all-reduce(MAX) serves all weights, whatever recipes they are of; where amaxes do not say what a quantizer
does, one all-gather brings the shards of all such weights besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ottava.distributed.arguments import checked_weights, default_group
from ottava.distributed.rules import ShardBatches
from ottava.distributed.shards import check_bytes, check_places
from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava.tensors.declaration import check_flag
from ottava.torch_private import local_tensor


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None] | None,
    group: Any = None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """:func:`cast_master_weights_to_fp8` with each weight's own quantizer."""
    cast_master_weights_to_fp8(
        model_weights,
        master_weights,
        amax_reduce_group=group,
        start_offsets=start_offsets,
        fsdp_shard_model_weights=fsdp_shard_model_weights,
        manual_post_all_gather_processing=manual_post_all_gather_processing,
    )


def cast_master_weights_to_fp8(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    quantizers: Sequence[Quantizer | None] | Quantizer | None = None,
    amax_reduce_group: Any = None,
    *,
    start_offsets: Sequence[int | None] | None = None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write this rank's shards of quantized weights from its shards of their master weights.

    A master weight is first rounded to the nominal dtype of its weight. All ranks of the group call this with the same
    weights in the same order; a rank may hold nothing of some, or of all of them.

    Args:
        model_weights: quantized tensors or storages, or DTensors of them that are sharded along their rows (FSDP2):
            then the shard is the local tensor.
        master_weights: for each weight the shard that this rank holds, float32 (or bfloat16, float16), flattened as the
            weight is; None for nothing. A DTensor stands for its local tensor.
        quantizers: for each weight, or one for all; None is the weight's own.
        amax_reduce_group: the ranks that hold the shards; None is that of the DTensors, or the default group. With
            no process group initialized, this process holds all there is.
        start_offsets: index of each shard's first element in the flattened weight; None where there is no shard.
            Without the list, masters are whole, or have the rows of a DTensor.
        fsdp_shard_model_weights: where the shard is not to be written into the weight itself: a quantized tensor that
            is the shard, or its bytes (uint8), one tensor for each direction that has data of its own. Entries may be
            None, and so may both of a pair.
        manual_post_all_gather_processing: leave what derives from the bytes, a transpose, to
            :func:`post_all_gather_processing`; otherwise the next forward pass makes it.

    Raises:
        ShapeError, OptionError, DTypeError, UsageError, DeviceError: an argument does not fit. Nothing has been
            written then. All but UsageError are ValueErrors.
    """
    MasterWeights(
        model_weights,
        master_weights,
        quantizers,
        amax_reduce_group,
        start_offsets=start_offsets,
        fsdp_shard_model_weights=fsdp_shard_model_weights,
        manual_post_all_gather_processing=manual_post_all_gather_processing,
    ).quantize()


class MasterWeights:
    """Sharded master weights and the quantized weights that are made of them, step after step.

    What :func:`cast_master_weights_to_fp8` checks and looks up for each weight, this does once. It keeps the tensors
    that it is given, and looks again when one of them has moved to other memory.

    Args, raised errors: as of :func:`cast_master_weights_to_fp8`. Nothing is written until :meth:`quantize`.
    """

    def __init__(
        self,
        model_weights: Sequence[Any],
        master_weights: Sequence[torch.Tensor | None],
        quantizers: Sequence[Quantizer | None] | Quantizer | None = None,
        amax_reduce_group: Any = None,
        *,
        start_offsets: Sequence[int | None] | None = None,
        fsdp_shard_model_weights: Sequence[Any] | None = None,
        manual_post_all_gather_processing: bool = False,
    ) -> None:
        check_flag("manual_post_all_gather_processing", manual_post_all_gather_processing)
        self._given = (model_weights, master_weights, quantizers, start_offsets, fsdp_shard_model_weights)
        self._group_given = amax_reduce_group
        self._automatic = not manual_post_all_gather_processing
        self._look()

    def _look(self) -> None:
        with torch.no_grad():
            weights = checked_weights(*self._given)
            self._group = default_group(weights, self._group_given)
            for weight in weights:
                # FSDP pads an uneven shard, so that it is a view; zeros are the same at any scale.
                weight.storage._whole = None
            self._batches = ShardBatches.of([weight.job for weight in weights])
        self._holders = list({id(h): h for w in weights for h in (w.storage, w.job.output.holder)}.values())
        self._watched = [
            (h, inner.attribute) for h in self._holders for inner in h.inner_tensors if not h.is_derived(inner)
        ]
        self._masters = [local_tensor(m) for m in self._given[1] if m is not None]
        # A shard of a master that is not contiguous is a copy, which has to be made anew each time.
        self._keeps = all(master.is_contiguous() for master in self._masters)
        self._seen = self._addresses()

    def _addresses(self) -> list[Any]:
        """Where everything lies that is read or written, and what quantizes it."""
        tensors = [*(getattr(holder, attribute) for holder, attribute in self._watched), *self._masters]
        places = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        return [*places, *(id(holder._quantizer) for holder in self._holders)]

    def quantize(self) -> None:
        """Write this rank's shards of the weights, and all scales, from the master weights as they are now.

        Raises:
            ShapeError, OptionError, DTypeError, UsageError, DeviceError: something that was replaced does not fit.
        """
        if not self._keeps or self._addresses() != self._seen:
            self._look()
        with torch.no_grad():
            self._batches.quantize(self._group)
        for holder in self._holders:
            holder.rebuilds_derived = self._automatic


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Rebuild what derives from the bytes of weights (transposes), once these have been gathered.

    Nothing to do for tensors that are not quantized, nor where nothing derives from the bytes.

    Raises:
        DTypeError: an entry is no tensor.
    """
    tensors = (torch.Tensor, QuantizedTensorStorage)
    if isinstance(model_weights, tensors):
        model_weights = [model_weights]
    if not isinstance(model_weights, (list, tuple)):
        raise DTypeError(f"model_weights is a {type(model_weights).__name__}", expected="a list of weights")
    for weight in model_weights:
        if not isinstance(weight, tensors):
            raise DTypeError(f"a weight is a {type(weight).__name__}", expected="a tensor")
    with torch.no_grad():
        for local in map(local_tensor, model_weights):
            if isinstance(local, QuantizedTensorStorage):
                local.rebuild_derived(force=True)
                local.rebuilds_derived = True


def replace_raw_data(tensor: QuantizedTensorStorage, new_raw_data: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Move the elements of a quantized tensor into a buffer, for example a range of a contiguous one for all weights.

    Values and everything else of the tensor stay as they are; what was an alias of it keeps the old bytes.

    Args:
        new_raw_data: contiguous, uint8 (or the 8-bit float dtype of the elements), as many elements as the tensor has.
            A tensor with data for rows and for columns takes two, or moves the data for rows alone.

    Raises:
        DTypeError, ShapeError, DeviceError: it is not. All are ValueErrors, and nothing has been written.
        UsageError: the tensor holds no elements, or they are not contiguous.
    """
    if not isinstance(tensor, QuantizedTensorStorage):
        raise DTypeError(f"a {type(tensor).__name__} has no raw data", expected="a quantized tensor")
    buffers = list(new_raw_data) if isinstance(new_raw_data, (list, tuple)) else [new_raw_data]
    if tensor._whole is not None:
        what = f"this {type(tensor).__name__} is a view of another, whose data it shares"
        raise UsageError(what, expected="a whole tensor", remedy="replace the data of the whole")
    raw = tensor.raw_inner()
    if not 1 <= len(buffers) <= len(raw):
        raise ShapeError(f"{len(buffers)} buffers", expected=f"one for each of {', '.join(i.argument for i in raw)}")
    moved: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for inner, buffer in zip(raw, buffers, strict=False):
        held: torch.Tensor = getattr(tensor, inner.attribute)
        checked = check_bytes(buffer, tensor, inner, held.numel(), f"the buffer for {inner.argument!r}")
        if not held.is_contiguous():
            raise UsageError("the data of the tensor is not contiguous", expected="a tensor that is no view")
        moved.append((inner, held, checked.detach().view(held.dtype).view(held.shape)))
    check_places([target for *_, target in moved], [held for _, held, _ in moved])
    with torch.no_grad():
        for inner, held, target in moved:
            # Not counted as a write to the buffer: other tensors in it have transposes that stay valid.
            target.data.copy_(held)
            tensor.replace_inner(inner, target)


def is_custom(x: Quantizer | QuantizedTensorStorage | torch.Tensor | None = None) -> bool:
    """Whether a quantizer or a quantized tensor is user-defined; False for None and plain tensors.

    Raises:
        DTypeError: ``x`` is something else.
    """
    if x is not None and not isinstance(x, (Quantizer, QuantizedTensorStorage, torch.Tensor)):
        what = f"{type(x).__name__} is neither quantizer nor tensor"
        raise DTypeError(what, expected="a quantizer, a tensor or None")
    return isinstance(x, (Quantizer, QuantizedTensorStorage)) and x.custom
