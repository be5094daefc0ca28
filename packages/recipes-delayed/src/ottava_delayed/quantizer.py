"""``Float8Quantizer``: quantizes with a known scale, and records the amax for the next scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch

from ottava import kernels
from ottava.contract import Contract
from ottava.distributed import GridShards, ShardJob, ShardRule, reduce_amax
from ottava.errors import OptionError
from ottava.formats import fp8_format
from ottava.kernels import for_layers
from ottava.kernels.checks import check_device, check_scalar
from ottava.tensors import Float8QuantizerBase, QuantizedTensorStorage
from ottava.torch_private import foreach_maximum_


def _scales(jobs: Sequence[ShardJob], amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantizers' known scales, and their reciprocals, ``[jobs]`` each.

    The reduced ``amaxes`` are recorded, and each rank counts the elements that it clamps in its own
    shard. The scale of a quantizer that ``fits`` is at most the one that its amax gives.
    """
    quantizers: list[Any] = [job.quantizer for job in jobs]
    for quantizer in quantizers:
        quantizer.take_slot()
    scale = torch.stack([quantizer.scale.reshape(()) for quantizer in quantizers])
    if any(quantizer.fits for quantizer in quantizers):
        own, _ = kernels.scale_from_amax(amaxes, quantizers[0].fp8_dtype)
        for place in [place for place, quantizer in enumerate(quantizers) if quantizer.unset]:
            quantizers[place].scale.copy_(own[place].reshape(quantizers[place].scale.shape))
            quantizers[place].unset = False
            scale[place] = own[place]
        fits = torch.tensor([quantizer.fits for quantizer in quantizers], device=scale.device)
        scale = torch.where(fits, torch.minimum(scale, own), scale)
    recording = [place for place, quantizer in enumerate(quantizers) if quantizer.amax is not None]
    if recording:
        recorded = [quantizers[place].amax for place in recording]
        foreach_maximum_(
            recorded, [amaxes[place].reshape(quantizers[place].amax.shape) for place in recording]
        )
    maxima = torch.tensor(
        [fp8_format(quantizer.fp8_dtype).max for quantizer in quantizers], device=scale.device
    )
    for place in torch.nonzero(amaxes * scale > maxima).flatten().tolist():
        quantizer, job = quantizers[place], jobs[place]
        if quantizer.saturated is not None:
            beyond = (job.rounded().to(torch.float32) * scale[place]).abs() > maxima[place]
            quantizer.saturated.add_(beyond.sum())
    return scale, torch.div(torch.ones_like(scale), scale)


def _as_scale(value: Any, amax: Any) -> Any:
    """A number becomes a float32 tensor ``[1]``; any other value is returned unchanged.

    The tensor is on the device of ``amax``, or on torch's default device if ``amax`` is no tensor.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if not 2.0**-149 <= value <= torch.finfo(torch.float32).max:
        raise OptionError(
            f"scale is {value}", expected="a number that float32 holds, greater than 0, or a tensor"
        )
    device = amax.device if isinstance(amax, torch.Tensor) else torch.get_default_device()
    return torch.tensor([value], dtype=torch.float32, device=device)


class StateOfWeight(Protocol):
    """The state of a layer whose weight is kept quantized."""

    def serve(self, quantizer: Float8Quantizer) -> None: ...


class Float8Quantizer(Float8QuantizerBase):
    """Quantizes with ``scale`` and records the largest magnitude, in one pass over the tensor.

    Args:
        scale: float32 with one element. It is read at every quantization, so its owner may update
            it. A number becomes such a tensor.
        amax: float32 with one element, raised in place: ``amax = max(amax, max|x|)``; None records
            nothing.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        saturated: int64 with one element, raised by the number of elements that were clamped; None
            counts nothing.

    Quantizers compare by identity, because they have state. A quantizer that has initialized a
    weight which is kept quantized never clamps from then on, because new values may be loaded or
    initialized into such a weight. Where values do not fit the scale, the quantizer uses the
    smaller scale that their own amax gives, at the price of reading the tensor twice.

    Raises:
        DTypeError, ShapeError, DeviceError: ``scale``, ``amax`` or ``saturated`` is not as above,
            they are on different devices, or ``fp8_dtype`` is not an FP8 element format.
        OptionError: a scale that is a number is not greater than 0, or float32 cannot hold it.
    """

    stateful: ClassVar[bool] = True
    # ``saturated`` is None until the quantizer has a slot, which compiled code does not depend on.
    process_attributes: ClassVar[tuple[str, ...]] = (
        "shard_group",
        "gathers",
        "unset",
        "state",
        "saturated",
    )
    shards: ClassVar[ShardRule] = GridShards(_scales)
    #: The state of the layer whose weight this quantizer updates, if there is one.
    state: StateOfWeight | None = None

    def __init__(
        self,
        scale: torch.Tensor | float,
        amax: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        saturated: torch.Tensor | None = None,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        own_scale: torch.Tensor = _as_scale(scale, amax)
        check_scalar(own_scale, own_scale, "scale")
        if amax is not None:
            check_scalar(amax, own_scale, "amax")
        if saturated is not None:
            check_scalar(saturated, own_scale, "saturated", torch.int64)
        self.scale = own_scale
        self.amax = amax
        self.saturated = saturated
        # Whether the scale is lowered where values do not fit it, so that nothing is clamped.
        self.fits = False
        # Whether the first quantized values set the scale, as for a weight that was created on the
        # meta device.
        self.unset = False
        # Whether this quantizer serves gathered weights, whose amaxes are recorded in a separate
        # buffer.
        self.gathers = False
        # The name of the group whose ranks have the other shards of the tensor.
        self.shard_group: str | None = None

    def __getstate__(self) -> dict[str, object]:
        # The layer that is unpickled with its weight gives the quantizer its own state.
        return super().__getstate__() | {"state": None}

    @property
    def contract(self) -> Contract:
        """The scale comes from outside. Of a weight that is kept quantized it may be lowered."""
        ranks: Literal["this", "group"] = "this" if self.shard_group is None else "group"
        stated = Contract.of_layout(self.layout, ranks=ranks)
        rule = "given-fitting" if self.fits else "given"
        return stated.with_rule(rule)

    def take_slot(self) -> None:
        """Read and write the slot of the layer's state from now on, if a compiled pass has used the
        weight."""
        if self.state is not None:
            self.state.serve(self)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set ``amax`` to that of the tensor, whatever its value was before."""
        if self.amax is not None:
            self.amax.copy_(kernels.amax(tensor).reshape(self.amax.shape))

    def initialize(self, tensor: torch.Tensor) -> None:
        """Set the scale from the tensor's own amax.

        A weight that is kept quantized starts with this scale.
        """
        self._start_with(kernels.scale_from_amax(kernels.amax(tensor), self.fp8_dtype)[0])
        self.fits = True

    def _start_with(self, scale: torch.Tensor) -> None:
        """Set the scale, on the weight's device.

        A weight on the meta device has no scale; the first values quantized later set it.
        """
        if self.scale.device != scale.device:
            # New tensors are allowed here, because no layer's state shares the scale yet.
            self.scale = torch.empty_like(self.scale, device=scale.device)
            if self.amax is not None:
                self.amax = torch.zeros_like(self.amax, device=scale.device)
        self.scale.copy_(scale.reshape(self.scale.shape))
        self.unset = scale.is_meta

    def for_shards(self, group: Any) -> Float8Quantizer:
        """A copy that fits its scale to the largest amax of all shards.

        The scale itself is common to all shards already.
        """
        copy = self.copy()
        copy.shard_group = group
        return copy

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensorStorage:
        if noop_flag is None:
            return super().update_quantized(src, dst)
        self.take_slot()
        state = [t for t in (self.amax, self.saturated) if t is not None]
        before = [t.clone() for t in state]
        super().update_quantized(src, dst, noop_flag=noop_flag)
        # A no-op must leave the state unchanged, too.
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(torch.where(noop_flag.reshape(()) == 1, old, tensor))
        return dst

    def kernel(
        self, rowwise: bool, columnwise: bool
    ) -> Callable[[torch.Tensor], for_layers.SideTensors]:
        return partial(self._cast, rowwise=rowwise, columnwise=columnwise)

    def _cast(
        self, tensor: torch.Tensor, rowwise: bool, columnwise: bool
    ) -> for_layers.SideTensors:
        self.take_slot()
        scale = self.scale
        if self.fits:
            scale = self._fitting_scale(tensor)
        return for_layers.cast(
            tensor, scale, self.amax, self.saturated, self.fp8_dtype, rowwise, columnwise
        )

    def _fitting_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """The scale, or the one that the tensor's own amax gives, if that is smaller."""
        amax = kernels.amax(tensor)
        if self.shard_group is not None:
            amax = reduce_amax(amax, self.shard_group)
        own = kernels.scale_from_amax(amax, self.fp8_dtype)[0]
        if self.unset and not tensor.is_meta:
            self._start_with(own)
        return torch.minimum(self.scale, own.reshape(self.scale.shape))


class SlotQuantizer(Float8Quantizer):
    """The quantizer of one slot of a layer's state.

    It looks up the tensors in ``buffers`` at every quantization, because moving a module replaces
    its buffers.
    """

    process_attributes: ClassVar[tuple[str, ...]] = (*Float8Quantizer.process_attributes, "buffers")

    def __init__(
        self,
        buffers: Any,
        slot: int,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        recording: bool,
    ) -> None:
        Float8QuantizerBase.__init__(self, fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.buffers = buffers
        self.slot = slot
        self.recording = recording
        self.internal = True
        self.fits = False
        self.unset = False
        self.gathers = False
        self.shard_group = None

    @property
    def scale(self) -> torch.Tensor:  # type: ignore[override]
        return self.buffers["scale"][self.slot]  # type: ignore[no-any-return]

    @property
    def amax(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.buffers["amax_history"][0, self.slot] if self.recording else None

    @property
    def saturated(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.buffers["saturated"][self.slot] if self.recording else None

    def _start_with(self, scale: torch.Tensor) -> None:
        check_device(scale, self.scale.device, "the weight")
        super()._start_with(scale)

    def kernel(
        self, rowwise: bool, columnwise: bool
    ) -> Callable[[torch.Tensor], for_layers.SideTensors]:
        if self.fits:
            return super().kernel(rowwise, columnwise)
        return partial(
            for_layers.cast_slot,
            buffers=self.buffers,
            slot=self.slot,
            recording=self.recording,
            fp8_dtype=self.fp8_dtype,
            rowwise=rowwise,
            transposed=columnwise,
        )


def largest(fp8_dtype: torch.dtype, margin: float) -> float:
    """The value that an amax is scaled to: the format's maximum divided by 2^margin."""
    return fp8_format(fp8_dtype).max * math.pow(2.0, -margin)
