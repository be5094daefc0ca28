"""``DelayedScalingState``: scales, histories and counters of one layer, as buffers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from ottava.recipes.role import QuantizerRole
from ottava.recipes.state import RecipeState
from ottava.tensors import Quantizer
from ottava_delayed.evaluation import Evaluations
from ottava_delayed.quantizer import Float8Quantizer, SlotQuantizer, largest

_is_compiling = torch.compiler.is_dynamo_compiling


class Settings(Protocol):
    """The members of :class:`~ottava_delayed.DelayedScaling` that the state and its update read."""

    _factory: Any

    @property
    def margin(self) -> float: ...
    @property
    def amax_history_len(self) -> int: ...
    @property
    def amax_compute_algo(self) -> Any: ...
    @property
    def scaling_factor_compute_algo(self) -> Any: ...
    @property
    def reduce_amax(self) -> bool: ...

    by_functions: bool

    def fp8_dtype(self, role: QuantizerRole) -> torch.dtype: ...
    def factory_answer(self, role: QuantizerRole) -> Any: ...
    def quantizer(self, role: QuantizerRole) -> Quantizer: ...


class DelayedScalingState(torch.nn.Module, RecipeState):
    """The state of delayed scaling for one layer: a slot for each tensor that the layer quantizes.

    Attributes:
        scale: buffer, float32 ``[slots]``: the scales of the next quantizations; 1 at first.
        amax_history: buffer, float32 ``[amax_history_len, slots]``. Row 0 collects the amax of the
            current step, the last row is that of the step before, row 1 the oldest.
        saturated: buffer, int64 ``[slots]``: the number of elements clamped since the layer was
            created or reset.
        slots: tensor type -> slot.
        maxima: the value that the amax of each slot is scaled to: its format's maximum divided by
            2^margin.
        evaluations: counts of the elements that evaluation clamps; they are not part of the state.
    """

    stateful: ClassVar[bool] = True
    reduced_by_max: ClassVar[tuple[str, ...]] = ("amax_history",)
    shared_by_copies: ClassVar[tuple[str, ...]] = ("recipe", "factory", "factory_quantizers")

    recipe: Settings
    scale: torch.Tensor
    amax_history: torch.Tensor
    saturated: torch.Tensor
    gathered_amax: torch.Tensor
    gathered_saturated: torch.Tensor
    weight_used: torch.Tensor | None

    def __init__(
        self, recipe: Settings, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any = None
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.factory = recipe._factory
        self.amax_reduction_group = None
        self.slots = {role.tensor_type: slot for slot, role in enumerate(roles)}
        self.formats = tuple(recipe.fp8_dtype(role) for role in roles)
        # Quantizers that a factory supplied instead of the recipe's.
        self.factory_quantizers = {
            role.tensor_type: recipe.quantizer(role)
            for role in roles
            if recipe.factory_answer(role) is not None
        }
        # Whoever supplied one may change it between calls.
        self.has_fixed_quantizers = not self.factory_quantizers
        self.maxima = tuple(largest(dtype, recipe.margin) for dtype in self.formats)
        # A model may be built under another default dtype or device, so both are set explicitly.
        exact: Any = {"dtype": torch.float32, "device": "cpu"}
        self.register_buffer("scale", torch.ones(len(roles), **exact))
        self.register_buffer(
            "amax_history", torch.zeros(recipe.amax_history_len, len(roles), **exact)
        )
        self.register_buffer("saturated", torch.zeros(len(roles), dtype=torch.int64, device="cpu"))
        # The amax and the count that the last gather of a high-precision weight recorded.
        self.register_buffer("gathered_amax", None, persistent=False)
        self.register_buffer("gathered_saturated", None, persistent=False)
        # Whether a compiled pass of a step has used the weight, if that is kept quantized.
        self.register_buffer("weight_used", None, persistent=False)
        # Quantizers, and pairs of them, by the arguments that they were requested with.
        self._cache: dict[Any, Any] = {}
        self.evaluations = Evaluations(self.slots, self.formats)

    def serves(self, recipe: Any, amax_reduction_group: Any) -> bool:
        """Whether this state belongs to ``recipe``; the group is ignored, because only the update
        reduces."""
        return self.is_of(recipe)

    def scale_and_history(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers ``scale`` and ``amax_history``.

        This reads ``_buffers``, because attribute access on a module searches several places.
        """
        buffers: dict[str, Any] = self._buffers
        return buffers["scale"], buffers["amax_history"]

    def quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True
    ) -> Quantizer:
        if tensor_type in self.factory_quantizers:
            quantizer = self.factory_quantizers[tensor_type]
            copy = quantizer.with_usage(rowwise, columnwise).copy()
            copy.internal = True
            return copy
        if _is_compiling():
            quantizer = self._own(tensor_type, recording, rowwise, columnwise)
            quantizer.internal = True
            return quantizer
        cache: dict[Any, SlotQuantizer] = self.__dict__["_cache"]
        key = (tensor_type, rowwise, columnwise, recording)
        if key not in cache:
            cache[key] = self._slot_quantizer(self._buffers, *key)
        return cache[key]

    def _slot_quantizer(
        self, buffers: Any, tensor_type: str, rowwise: bool, columnwise: bool, recording: bool
    ) -> SlotQuantizer:
        slot = self.slots[tensor_type]
        return SlotQuantizer(
            buffers,
            slot,
            self.formats[slot],
            rowwise=rowwise,
            columnwise=columnwise,
            recording=recording,
        )

    def opens_evaluation(self) -> bool:
        # Each evaluating pass comes here, so this reads ``__dict__`` as a forward pass does.
        evaluations: Evaluations = self.__dict__["evaluations"]
        scale: Any = self._buffers["scale"]
        return evaluations.opens(scale)

    def evaluation_quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool
    ) -> Quantizer:
        if tensor_type in self.factory_quantizers or not self.opens_evaluation():
            return self.quantizer(
                tensor_type, rowwise=rowwise, columnwise=columnwise, recording=False
            )
        cache: dict[Any, SlotQuantizer] = self.__dict__["_cache"]
        key = ("evaluation", tensor_type, rowwise, columnwise)
        if key not in cache:
            cache[key] = self._slot_quantizer(
                self.evaluations.buffers, tensor_type, rowwise, columnwise, recording=True
            )
        return cache[key]

    def note_evaluation(self, weight: Any) -> None:
        evaluations: Evaluations = self.__dict__["evaluations"]
        quantizer: Any = getattr(weight, "_quantizer", None)
        if _gathers(quantizer) and "weight" in self.slots and evaluations.opens(self.scale):
            evaluations.take("weight", quantizer.amax, quantizer.saturated)
        name = self._roles[0].name if self._roles else ""
        evaluations.close(f"layer {name!r}" if name else "a layer")

    def _own(
        self, tensor_type: str, recording: bool, rowwise: bool, columnwise: bool
    ) -> Float8Quantizer:
        # This quantizer reads and writes the buffers that the state has at this moment.
        slot = self.slots[tensor_type]
        return Float8Quantizer(
            self.scale[slot],
            self.amax_history[0, slot] if recording else None,
            self.formats[slot],
            rowwise=rowwise,
            columnwise=columnwise,
            saturated=self.saturated[slot] if recording else None,
        )

    def weight_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        """The slot's quantizer, or None where the weight keeps its own quantizer.

        At the first call the slot takes over the scale that the weight was quantized with.
        """
        present = self._quantizer_of(weight)
        if present is None or self._has_slot(present):
            return None
        quantizer = self._linked(present)
        quantizer.shard_group = None
        self._give_slot(quantizer)
        return quantizer

    def first_quantizer(self, weight: torch.Tensor) -> Quantizer | None:
        present = self._quantizer_of(weight)
        if present is None or present.state is self:
            return None
        return self._linked(present)

    def _quantizer_of(self, weight: torch.Tensor) -> Float8Quantizer | None:
        """The quantizer of a weight, if the state has a slot for it."""
        present: Any = getattr(weight, "_quantizer", None)
        if "weight" in self.factory_quantizers or not isinstance(present, Float8Quantizer):
            return None
        return None if present.gathers else present

    def _linked(self, quantizer: Float8Quantizer) -> Float8Quantizer:
        """A copy of a weight's quantizer, which can take the slot of this state later."""
        if self.weight_used is None:
            used = torch.zeros(1, dtype=torch.bool, device=self.scale.device)
            self.register_buffer("weight_used", used, persistent=False)
        linked = quantizer.copy()
        if quantizer.state not in (None, self):
            # The other state may go on, as that of a model does whose copy this is.
            linked.scale = quantizer.scale.clone()
            linked.amax = torch.zeros_like(linked.scale)
            linked.saturated = None
        linked.state = self
        return linked

    def serve(self, quantizer: Float8Quantizer) -> None:
        """Give the slot of the weight to its quantizer, which is about to quantize, if a compiled
        pass has used the weight. The pass itself cannot do so."""
        used = self.weight_used
        if used is None or used.is_meta or torch.compiler.is_compiling():
            return
        if not self._has_slot(quantizer) and bool(used):
            self._give_slot(quantizer)

    def _has_slot(self, quantizer: Float8Quantizer) -> bool:
        return quantizer.scale.data_ptr() == self.scale[self.slots["weight"]].data_ptr()

    def _give_slot(self, quantizer: Float8Quantizer) -> None:
        """Have a weight's quantizer read and write the weight's slot.

        A slot that has seen no weight takes over the scale of the quantizer.
        """
        slot = self.slots["weight"]
        scale = self.scale[slot]
        has_scale = quantizer.scale.device == scale.device and not quantizer.unset
        if has_scale and bool(scale == 1) and not self.amax_history[:, slot].any():
            scale.copy_(quantizer.scale.reshape(()))
        quantizer.unset = quantizer.unset or (quantizer.scale.is_meta and not scale.is_meta)
        quantizer.scale = scale
        quantizer.amax = self.amax_history[0, slot]
        quantizer.saturated = self.saturated[slot]

    def expect_weight(self, state_dict: Any, prefix: str) -> None:
        """Take the scale of the weight that is about to be loaded.

        A saved state that has seen no step leaves the scale unchanged.
        """
        if "weight" in self.factory_quantizers:
            return
        slot = self.slots["weight"]
        scale = state_dict.get(f"{prefix}scale")
        history = state_dict.get(f"{prefix}amax_history")
        for buffer in (scale, history):
            if not isinstance(buffer, torch.Tensor) or buffer.is_meta:
                return
        # Other shapes are refused later, when the state itself is loaded.
        same_slots = scale.shape == self.scale.shape == history.shape[-1:]
        if same_slots and bool(history[..., slot].any()):
            self.scale[slot].copy_(scale[slot])

    def gather_quantizer(self) -> Quantizer:
        """The slot's quantizer for gathered weights, which records into separate buffers.

        The buffers are separate, because a gather may serve a forward pass, or no step at all.
        """
        if "weight" in self.factory_quantizers:
            copy = self.factory_quantizers["weight"].with_usage(True, True).copy()
            copy.internal = False
            return copy
        if self.gathered_amax is None:
            self.register_buffer(
                "gathered_amax", torch.zeros_like(self.scale[:1]), persistent=False
            )
            self.register_buffer(
                "gathered_saturated", torch.zeros_like(self.saturated[:1]), persistent=False
            )
        self.gathered_amax.zero_()
        self.gathered_saturated.zero_()
        slot = self.slots["weight"]
        quantizer = Float8Quantizer(
            self.scale[slot],
            self.gathered_amax,
            self.formats[slot],
            saturated=self.gathered_saturated,
        )
        quantizer.gathers = True
        return quantizer

    def use_gathered(self, weight: Any, *, recording: bool) -> None:
        amax: torch.Tensor | None = self.gathered_amax
        saturated: torch.Tensor | None = self.gathered_saturated
        if torch.compiler.is_compiling():
            if recording and self.weight_used is not None:
                self.weight_used.fill_(True)
        else:
            # Layers that share a weight share its gather, which recorded into the state of only one
            # of them. The weight's quantizer has the buffers of that state.
            quantizer: Any = getattr(weight, "_quantizer", None)
            if not _gathers(quantizer):
                return
            amax = quantizer.amax
            saturated = quantizer.saturated
        if amax is None or saturated is None or not recording:
            return
        slot = self.slots["weight"]
        recorded = self.amax_history[0, slot]
        recorded.copy_(torch.maximum(recorded, amax[0]))
        self.saturated[slot].add_(saturated[0])

    def reset(self) -> None:
        """Forget all steps."""
        self.scale.fill_(1.0)
        self.amax_history.zero_()
        self.saturated.zero_()
        if self.weight_used is not None:
            self.weight_used.zero_()
        self.evaluations.reset()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key = f"{prefix}amax_history"
        loaded = state_dict.get(key)
        if (
            loaded is not None
            and loaded.dim() == 2
            and loaded.shape[1] == self.amax_history.shape[1]
        ):
            length = self.amax_history.shape[0]
            if loaded.shape[0] != length:
                shorter = loaded.shape[0] > length
                outcome = "the newest are kept" if shorter else "older ones are taken as 0"
                warnings.warn(
                    f"{key} was saved with {loaded.shape[0]} steps and is loaded into {length}: "
                    f"{outcome}",
                    UserWarning,
                    stacklevel=2,
                )
                state_dict = {**state_dict, key: resized(loaded, length)}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_cache": {}, "evaluations": Evaluations(self.slots, self.formats)}
        return RecipeState.__getstate__(self) | fresh

    def extra_repr(self) -> str:
        return f"slots={list(self.slots)}, amax_history_len={self.amax_history.shape[0]}"


def _gathers(quantizer: Any) -> bool:
    return isinstance(quantizer, Float8Quantizer) and quantizer.gathers


def resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """``history`` ``[steps, slots]`` with ``length`` steps: the current step, then the newest ones.

    A longer history has zeros for the steps that were not saved.
    """
    current, past = history[:1], history[1:]
    if length - 1 <= len(past):
        return torch.cat([current, past[len(past) - (length - 1) :]])
    missing = torch.zeros(
        length - 1 - len(past), history.shape[1], dtype=history.dtype, device=history.device
    )
    return torch.cat([current, missing, past])
