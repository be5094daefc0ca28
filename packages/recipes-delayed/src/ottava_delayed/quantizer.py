"""``Float8Quantizer``: quantizes with a scale that is known, and records the amax for the next
one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.distributed import GridShards, ShardJob, ShardRule, reduce_amax
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.formats import fp8_format
from ottava.kernels import for_layers
from ottava.kernels.checks import check_device
from ottava.tensors import Float8QuantizerBase, QuantizedTensorStorage
from ottava.torch_private import foreach_maximum_


def _scales(jobs: Sequence[ShardJob], amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales that are known; the amaxes are recorded, and each rank counts what it clamps of
    its own shard."""
    quantizers: list[Any] = [job.quantizer for job in jobs]
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
    """A number as float32 with one element, on the device of ``amax`` if that is a tensor; anything
    else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if not 2.0**-149 <= value <= torch.finfo(torch.float32).max:
        raise OptionError(
            f"scale is {value}", expected="a number that float32 holds, greater than 0, or a tensor"
        )
    device = amax.device if isinstance(amax, torch.Tensor) else torch.get_default_device()
    return torch.tensor([value], dtype=torch.float32, device=device)


class Float8Quantizer(Float8QuantizerBase):
    """Quantizes with ``scale`` and raises ``amax`` to the largest magnitude that it saw, in one
    pass over the tensor.

    Args:
        scale: float32 with one element; read at every quantization, so that whoever owns it may
            update it. A number becomes such a tensor.
        amax: float32 with one element, raised in place: ``amax = max(amax, max|x|)``; None records
            nothing.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        saturated: int64 with one element, raised by the number of elements that were clamped; None
            counts nothing.

    Quantizers with such state compare by identity. One that has initialized a weight that is kept
    quantized clamps nothing from then on: a weight is also loaded and initialized, and where its
    values do not fit the scale, it takes the smaller scale that its own amax gives, at the price of
    reading it twice.

    Raises:
        DTypeError, ShapeError, DeviceError: the state is not of this kind, or ``fp8_dtype`` no FP8
            element format.
        OptionError: a scale that is a number is not greater than 0, or float32 cannot hold it.
    """

    stateful: ClassVar[bool] = True
    process_attributes: ClassVar[tuple[str, ...]] = ("shard_group", "gathers", "unset")
    shards: ClassVar[ShardRule] = GridShards(_scales)

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
        for value, dtype, what in (
            (own_scale, torch.float32, "scale"),
            (amax, torch.float32, "amax"),
        ):
            _check_state(value, dtype, what, optional=what == "amax")
        _check_state(saturated, torch.int64, "saturated", optional=True)
        for value, what in ((amax, "amax"), (saturated, "saturated")):
            if value is not None and value.device != own_scale.device:
                raise DeviceError(
                    f"{what} is on {value.device}, scale on {own_scale.device}",
                    expected="one device",
                )
        self.scale, self.amax, self.saturated = own_scale, amax, saturated
        self.fits = False
        # Whether the first values that it quantizes set the scale, as for a weight that was made on
        # the meta device.
        self.unset = False
        # Whether it quantizes gathered weights, whose amaxes are recorded in a buffer of their own.
        self.gathers = False
        # The name of the group whose ranks have the other shards of the tensor.
        self.shard_group: str | None = None

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set ``amax`` to that of the tensor, whatever it was."""
        if self.amax is not None:
            self.amax.copy_(kernels.amax(tensor).reshape(self.amax.shape))

    def initialize(self, tensor: torch.Tensor) -> None:
        """Take the scale that the tensor's own amax gives: a weight that is kept quantized starts
        with it."""
        self._start_with(kernels.scale_from_amax(kernels.amax(tensor), self.fp8_dtype)[0])
        self.fits = True

    def _start_with(self, scale: torch.Tensor) -> None:
        """Set the scale, where the weight is; one on the meta device has none, and its first values
        set it."""
        if self.scale.device != scale.device:
            # It is in no layer's state yet.
            self.scale = torch.empty_like(self.scale, device=scale.device)
            self.amax = (
                None if self.amax is None else torch.zeros_like(self.amax, device=scale.device)
            )
        self.scale.copy_(scale.reshape(self.scale.shape))
        self.unset = scale.is_meta

    def for_shards(self, group: Any) -> Float8Quantizer:
        """All shards have one scale as it is; what has to fit is the largest magnitude of all of
        them."""
        copied = self.copy()
        copied.shard_group = group
        return copied

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensorStorage:
        held = [t for t in (self.amax, self.saturated) if t is not None]
        before = [t.clone() for t in held] if noop_flag is not None else []
        super().update_quantized(src, dst, noop_flag=noop_flag)
        if noop_flag is not None:
            # A no-op leaves the state as it is, too.
            for tensor, old in zip(held, before, strict=True):
                tensor.copy_(torch.where(noop_flag.reshape(()) == 1, old, tensor))
        return dst

    def quantize_tensors(self, tensor: torch.Tensor) -> for_layers.Quantized:
        scale = self.scale
        if self.fits and self.amax is not None:
            amax = kernels.amax(tensor)
            if self.shard_group is not None:
                amax = reduce_amax(amax, self.shard_group)
            own = kernels.scale_from_amax(amax, self.fp8_dtype)[0]
            if self.unset and not tensor.is_meta:
                self._start_with(own)
            scale = torch.minimum(self.scale, own.reshape(scale.shape))
        wanted = self.wanted(tensor)
        return for_layers.cast(tensor, scale, self.amax, self.saturated, self.fp8_dtype, *wanted)


class SlotQuantizer(Float8Quantizer):
    """The quantizer of one slot of a layer's state, which reads and writes the ``buffers`` that
    there are by then."""

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
        self.buffers, self.slot, self.recording, self.internal = buffers, slot, recording, True
        self.fits = self.unset = self.gathers = False
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

    def quantize_tensors(self, tensor: torch.Tensor) -> for_layers.Quantized:
        if self.fits:
            return super().quantize_tensors(tensor)
        buffers, amax, saturated = self.buffers, None, None
        if self.recording:
            amax, saturated = buffers["amax_history"], buffers["saturated"]
        return for_layers.cast(
            tensor,
            buffers["scale"],
            amax,
            saturated,
            self.fp8_dtype,
            *self.wanted(tensor),
            self.slot,
        )


def _check_state(value: Any, dtype: torch.dtype, what: str, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, torch.Tensor) or value.dtype != dtype:
        found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise DTypeError(f"{what} is of {found}", expected=f"a {dtype} tensor with one element")
    if value.numel() != 1:
        raise ShapeError(f"{what} has shape {tuple(value.shape)}", expected="one element")


def largest(fp8_dtype: torch.dtype, margin: float) -> float:
    """What an amax is scaled to: the format's maximum, 2^margin times smaller."""
    return fp8_format(fp8_dtype).max * math.pow(2.0, -margin)
