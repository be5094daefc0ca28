"""``Float8CurrentScalingQuantizer``: amax, scale and cast of one tensor, without any state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from ottava import kernels
from ottava.collectives import check_group
from ottava.contract import Contract
from ottava.distributed import GridShards, ShardRule, reduce_amax
from ottava.kernels import for_layers
from ottava.layout import Layout
from ottava.tensors import Float8QuantizerBase, QuantizedTensorStorage, as_device
from ottava.tensors.quantizer import epsilon_option, flag_option


class Float8CurrentScalingQuantizer(Float8QuantizerBase):
    """Quantizes a tensor with the scale that its own amax gives: ``scale = max / amax``.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        device: the default device of ``make_empty``.
        rowwise, columnwise: usages to produce.
        with_amax_reduction: use the largest amax of all ranks of ``amax_reduction_group``.
        amax_reduction_group: process group; None is the default group.
        force_pow_2_scales: floor scales to powers of two.
        amax_epsilon: a smaller amax is replaced by this value.

    Raises:
        DTypeError: ``fp8_dtype`` is not an FP8 element format.
        DeviceError: ``device`` names no device.
        OptionError: ``amax_epsilon`` is negative or not finite, a flag is not a bool, or the group
            is not a process group.
    """

    process_attributes: ClassVar[tuple[str, ...]] = (
        "with_amax_reduction",
        "amax_reduction_group",
        "device",
    )
    with_amax_reduction: bool = flag_option()
    force_pow_2_scales: bool = flag_option()
    amax_epsilon: float = epsilon_option()
    shards: ClassVar[ShardRule] = GridShards(options=("force_pow_2_scales", "amax_epsilon"))

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        check_group(amax_reduction_group)
        self.device = None if device is None else as_device(device)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        rounding = "floor" if self.force_pow_2_scales else "nearest"
        return Layout(
            self.fp8_dtype,
            (None, None),
            rounding=rounding,
            epsilon=self.amax_epsilon,
            columnwise="same",
        )

    @property
    def contract(self) -> Contract:
        ranks: Literal["this", "group"] = "group" if self.with_amax_reduction else "this"
        return Contract.of_layout(self.layout, ranks=ranks)

    def make_empty(
        self, shape: Any, *, device: Any = None, **kwargs: Any
    ) -> QuantizedTensorStorage:
        return super().make_empty(shape, device=device or self.device, **kwargs)

    def for_shards(self, group: Any) -> Float8CurrentScalingQuantizer:
        copy = self.copy()
        copy.with_amax_reduction = True
        copy.amax_reduction_group = group
        return copy

    def kernel(
        self, rowwise: bool, columnwise: bool
    ) -> Callable[[torch.Tensor], for_layers.SideTensors]:
        if self.with_amax_reduction:
            return partial(self._quantize_reduced, rowwise=rowwise, columnwise=columnwise)
        return partial(
            for_layers.quantize,
            fp8_dtype=self.fp8_dtype,
            epsilon=self.amax_epsilon,
            force_pow_2=self.force_pow_2_scales,
            rowwise=rowwise,
            transposed=columnwise,
        )

    def _quantize_reduced(
        self, tensor: torch.Tensor, rowwise: bool, columnwise: bool
    ) -> for_layers.SideTensors:
        """With the amax of all ranks."""
        amax = reduce_amax(kernels.amax(tensor), self.amax_reduction_group)
        scale, scale_inv = kernels.scale_from_amax(
            amax, self.fp8_dtype, self.amax_epsilon, self.force_pow_2_scales
        )
        if not columnwise:
            return kernels.cast(tensor, scale, self.fp8_dtype), scale_inv, None, None
        data, transpose = kernels.cast_transpose(tensor, scale, self.fp8_dtype)
        if not rowwise:
            return None, None, transpose, scale_inv
        return data, scale_inv, transpose, scale_inv
