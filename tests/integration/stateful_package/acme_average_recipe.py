"""Per-tensor FP8 whose scales follow an exponential moving average of the amaxes, on core's public
names alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ottava import Format, QuantizedTensorStorage, Quantizer, QuantizerRole, Recipe, kernels
from ottava.distributed import reduce_amax
from ottava.recipes import RecipeState
from ottava.tensors import Float8QuantizerBase


class AverageQuantizer(Float8QuantizerBase):
    """Quantizes with a scale that is known; raises ``amax``, unless that is None.

    One that has initialized a weight that is kept quantized clamps nothing from then on.
    """

    stateful: ClassVar[bool] = True
    process_attributes: ClassVar[tuple[str, ...]] = ("shard_group", "state")
    #: The state of the layer whose weight this quantizer updates.
    state: AverageState | None = None

    def __init__(
        self, scale: torch.Tensor, amax: torch.Tensor | None, fp8_dtype: torch.dtype, **usages: bool
    ) -> None:
        super().__init__(fp8_dtype, **usages)
        self.scale, self.amax = scale, amax
        self.fits, self.shard_group = False, None

    def __getstate__(self) -> dict[str, object]:
        # The layer of a copy gives it another state.
        return super().__getstate__() | {"state": None}

    def own_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """The scale that the tensor's own amax gives, of all shards where there are several."""
        amax = kernels.amax(tensor)
        if self.shard_group is not None:
            amax = reduce_amax(amax, self.shard_group)
        return kernels.scale_from_amax(amax, self.fp8_dtype)[0].reshape(self.scale.shape)

    def initialize(self, tensor: torch.Tensor) -> None:
        self.scale.copy_(self.own_scale(tensor))
        self.fits = True

    def for_shards(self, group: Any) -> AverageQuantizer:
        made = self.copy()
        made.shard_group = group
        return made

    def calibrate(self, tensor: torch.Tensor) -> None:
        if self.amax is not None:
            self.amax.copy_(kernels.amax(tensor).reshape(self.amax.shape))

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensorStorage:
        before = None if noop_flag is None or self.amax is None else self.amax.clone()
        super().update_quantized(src, dst, noop_flag=noop_flag)
        if before is not None:
            self.amax.copy_(torch.where(noop_flag.reshape(()) == 1, before, self.amax))
        return dst

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        if self.state is not None:
            self.state.serve(self)
        with_data, with_transpose = self.needs(tensor.device, tensor.dim())
        amax = torch.zeros_like(self.scale) if self.amax is None else self.amax
        scale = torch.minimum(self.scale, self.own_scale(tensor)) if self.fits else self.scale
        data, transpose, scale_inv = kernels.cast_amax(
            tensor, scale, amax, self.fp8_dtype, transposed=with_transpose
        )
        return self.wrap(
            data if with_data else None, transpose if with_transpose else None, scale_inv, dtype
        )


class AverageState(torch.nn.Module, RecipeState):
    """Of each tensor the scale, the average, and the amax that the step has seen so far: buffers
    ``[slots]``."""

    stateful: ClassVar[bool] = True
    reduced_by_max: ClassVar[tuple[str, ...]] = ("amax",)

    scale: torch.Tensor
    average: torch.Tensor
    amax: torch.Tensor
    used: torch.Tensor | None

    def __init__(self, recipe: MovingAverage, roles: Sequence[QuantizerRole]) -> None:
        torch.nn.Module.__init__(self)
        RecipeState.__init__(self, recipe, roles)
        self.slots = {role.tensor_type: slot for slot, role in enumerate(roles)}
        self.formats = [recipe.fp8_dtype(role) for role in roles]
        for name, value in (("scale", 1.0), ("average", 0.0), ("amax", 0.0)):
            self.register_buffer(name, torch.full((len(roles),), value, dtype=torch.float32))
        # Whether compiled code has used the weight, if that is kept quantized.
        self.register_buffer("used", None, persistent=False)

    def serves(self, recipe: Any, amax_reduction_group: Any) -> bool:
        # Only the update reduces, over whichever group the region has.
        return self.is_of(recipe)

    def quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True
    ) -> Quantizer:
        slot = self.slots[tensor_type]
        amax = self.amax[slot] if recording else None
        made = AverageQuantizer(
            self.scale[slot], amax, self.formats[slot], rowwise=rowwise, columnwise=columnwise
        )
        made.internal = True
        return made

    def weight_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        """The weight goes on with the scale that it was made with, which becomes this state's."""
        present: Any = getattr(weight, "_quantizer", None)
        if not isinstance(present, AverageQuantizer) or self.has_slot(present):
            return None
        made = present.copy()
        made.shard_group = None
        self.give_slot(made)
        return made

    def first_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        """It takes the slot when it first quantizes after a pass of compiled code."""
        present: Any = getattr(weight, "_quantizer", None)
        if not isinstance(present, AverageQuantizer) or present.state is self:
            return None
        if self.used is None:
            self.used = torch.zeros(1, dtype=torch.bool, device=self.scale.device)
        made = present.copy()
        made.scale, made.state = present.scale.clone(), self
        return made

    def use_gathered(self, weight: torch.Tensor, *, recording: bool) -> None:
        if recording and self.used is not None and torch.compiler.is_compiling():
            self.used.fill_(True)

    def serve(self, quantizer: AverageQuantizer) -> None:
        """Give the slot to the quantizer of a weight that compiled code has used."""
        if self.used is not None and not self.has_slot(quantizer) and bool(self.used):
            self.give_slot(quantizer)

    def has_slot(self, quantizer: AverageQuantizer) -> bool:
        return quantizer.scale.data_ptr() == self.scale[self.slots["weight"]].data_ptr()

    def give_slot(self, quantizer: AverageQuantizer) -> None:
        slot = self.slots["weight"]
        if not self.average[slot].any():
            self.scale[slot].copy_(quantizer.scale.reshape(()))
        quantizer.scale, quantizer.amax = self.scale[slot], self.amax[slot]

    def gather_quantizer(self) -> Quantizer:
        made = self.quantizer("weight", rowwise=True, columnwise=True)
        made.internal = False
        return made

    def reset(self) -> None:
        self.scale.fill_(1.0)
        self.average.zero_()
        self.amax.zero_()
        if self.used is not None:
            self.used.zero_()


@dataclass(frozen=True)
class MovingAverage(Recipe):
    """``average = decay * average + (1 - decay) * amax`` when a step begins; the first amax is
    taken whole."""

    name: ClassVar[str] = "acme-average"
    stateful: ClassVar[bool] = True

    decay: float = 0.5
    reduces: bool = True

    def fp8_dtype(self, role: QuantizerRole) -> torch.dtype:
        element = Format.HYBRID.backward if role.is_gradient else Format.HYBRID.forward
        return element.torch_dtype

    def make_quantizer(self, role: QuantizerRole, *, amax_reduction_group: Any = None) -> Quantizer:
        return AverageQuantizer(torch.ones(1), torch.zeros(1), self.fp8_dtype(role))

    def make_state(
        self, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any = None
    ) -> AverageState:
        return AverageState(self, roles)

    @torch.no_grad()
    def update_states(self, states: Sequence[Any], amax_reduction_group: Any) -> None:
        if not states:
            return
        amax = torch.cat([state.amax for state in states])
        if self.reduces and dist.is_initialized() and dist.get_world_size(amax_reduction_group) > 1:
            amax = reduce_amax(amax, amax_reduction_group)
        for state, seen in zip(
            states, amax.split([state.amax.numel() for state in states]), strict=True
        ):
            mixed = torch.where(
                state.average > 0, self.decay * state.average + (1 - self.decay) * seen, seen
            )
            state.average.copy_(torch.where(seen > 0, mixed, state.average))
            for slot, fp8_dtype in enumerate(state.formats):
                state.scale[slot] = kernels.scale_from_amax(state.average[slot], fp8_dtype)[0]
            state.amax.zero_()
