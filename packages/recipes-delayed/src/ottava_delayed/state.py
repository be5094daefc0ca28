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
    """What the state and its update read of their recipe, a
    :class:`~ottava_delayed.DelayedScaling`."""

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
    def given(self, role: QuantizerRole) -> Any: ...
    def quantizer(self, role: QuantizerRole) -> Quantizer: ...


class DelayedScalingState(torch.nn.Module, RecipeState):
    """What delayed scaling keeps for a layer: a slot for each tensor that it quantizes.

    Attributes:
        scale: buffer, float32 ``[slots]``: what multiplies in the next quantizations; 1 at first.
        amax_history: buffer, float32 ``[amax_history_len, slots]``; row 0 collects the amax of the
            current step, the last row is that of the step before, row 1 the oldest.
        saturated: buffer, int64 ``[slots]``: how many elements were clamped since the layer was
            made or reset.
        slots: which slot is which tensor's.
        maxima: what the amax of a slot is scaled to: its format's maximum, 2^margin times smaller.
        evaluations: what was clamped in evaluation, which is no part of the state.
    """

    stateful: ClassVar[bool] = True
    reduced_by_max: ClassVar[tuple[str, ...]] = ("amax_history",)
    shared_by_copies: ClassVar[tuple[str, ...]] = ("recipe", "factory", "given")

    recipe: Settings
    scale: torch.Tensor
    amax_history: torch.Tensor
    saturated: torch.Tensor
    gathered_amax: torch.Tensor
    gathered_saturated: torch.Tensor

    def __init__(
        self, recipe: Settings, roles: Sequence[QuantizerRole], *, amax_reduction_group: Any = None
    ) -> None:
        super().__init__()
        self.recipe, self.factory = recipe, recipe._factory
        self.amax_reduction_group = None
        self.slots = {role.tensor_type: slot for slot, role in enumerate(roles)}
        self.formats = tuple(recipe.fp8_dtype(role) for role in roles)
        # Quantizers that a factory put in the place of the recipe's.
        self.given = {
            role.tensor_type: recipe.quantizer(role)
            for role in roles
            if recipe.given(role) is not None
        }
        self.maxima = tuple(largest(dtype, recipe.margin) for dtype in self.formats)
        # Neither torch's default dtype nor its default device: a model may be built under any.
        exact: Any = {"dtype": torch.float32, "device": "cpu"}
        self.register_buffer("scale", torch.ones(len(roles), **exact))
        self.register_buffer(
            "amax_history", torch.zeros(recipe.amax_history_len, len(roles), **exact)
        )
        self.register_buffer("saturated", torch.zeros(len(roles), dtype=torch.int64, device="cpu"))
        # The amax that the last gather of a high-precision weight observed.
        self.register_buffer("gathered_amax", None, persistent=False)
        self.register_buffer("gathered_saturated", None, persistent=False)
        # Quantizers by what they are asked for.
        self._kept: dict[Any, Any] = {}
        self.evaluations = Evaluations(self.slots, self.formats)

    def serves(self, recipe: Any, amax_reduction_group: Any) -> bool:
        """The group does not matter here, because only the update reduces."""
        return self.is_of(recipe)

    def scale_and_history(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both buffers; a module searches several places for an attribute."""
        buffers: dict[str, Any] = self._buffers
        return buffers["scale"], buffers["amax_history"]

    def quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True
    ) -> Quantizer:
        given = self.given.get(tensor_type)
        if given is not None:
            copied = given.with_usage(rowwise, columnwise).copy()
            copied.internal = True
            return copied
        if _is_compiling():
            made = self._own(tensor_type, recording, rowwise, columnwise)
            made.internal = True
            return made
        kept, key = self.__dict__["_kept"], (tensor_type, rowwise, columnwise, recording)
        if key not in kept:
            slot, usages = self.slots[tensor_type], {"rowwise": rowwise, "columnwise": columnwise}
            kept[key] = SlotQuantizer(
                self._buffers, slot, self.formats[slot], **usages, recording=recording
            )
        return kept[key]  # type: ignore[no-any-return]

    def evaluation_quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool
    ) -> Quantizer:
        # In few steps, as the quantizers of a forward pass.
        own: dict[str, Any] = self.__dict__
        evaluations: Evaluations = own["evaluations"]
        given = tensor_type in self.given
        if given or not evaluations.opens(self._buffers["scale"]):  # type: ignore[arg-type]
            return self.quantizer(
                tensor_type, rowwise=rowwise, columnwise=columnwise, recording=False
            )
        kept, key = own["_kept"], ("evaluation", tensor_type, rowwise, columnwise)
        if key not in kept:
            slot, usages = self.slots[tensor_type], {"rowwise": rowwise, "columnwise": columnwise}
            kept[key] = SlotQuantizer(
                evaluations.buffers, slot, self.formats[slot], **usages, recording=True
            )
        return kept[key]  # type: ignore[no-any-return]

    def note_evaluation(self, weight: Any) -> None:
        evaluations: Evaluations = self.__dict__["evaluations"]
        gathered: Any = getattr(weight, "_quantizer", None)
        if _gathers(gathered) and "weight" in self.slots and evaluations.opens(self.scale):
            evaluations.take("weight", gathered.amax, gathered.saturated)
        name = self._roles[0].name if self._roles else ""
        evaluations.close(f"layer {name!r}" if name else "a layer")

    def _own(
        self, tensor_type: str, recording: bool, rowwise: bool, columnwise: bool
    ) -> Float8Quantizer:
        # They read and write the buffers that the state has now.
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
        """The slot's quantizer; at the first call the slot takes over the scale that the weight was
        made with."""
        present: Any = getattr(weight, "_quantizer", None)
        if "weight" in self.given or not isinstance(present, Float8Quantizer) or present.gathers:
            return None
        slot = self.scale[self.slots["weight"]]
        if present.scale.data_ptr() == slot.data_ptr():
            return None
        known = present.scale.device == slot.device and not present.unset
        if known and bool(slot == 1) and not self.amax_history.any():
            slot.copy_(present.scale.reshape(()))
        made = self._own("weight", True, present.rowwise_usage, present.columnwise_usage)
        made.fits = present.fits
        made.unset = present.unset or (present.scale.is_meta and not slot.is_meta)
        return made

    def expect_weight(self, state_dict: Any, prefix: str) -> None:
        """Take the scale of the weight that is to be loaded; a state without steps has none to
        give."""
        if "weight" in self.given:
            return
        slot = self.slots["weight"]
        scale, history = (state_dict.get(f"{prefix}{name}") for name in ("scale", "amax_history"))
        if not all(
            isinstance(buffer, torch.Tensor) and not buffer.is_meta for buffer in (scale, history)
        ):
            return
        # What has other shapes is refused afterwards, where the state itself is loaded.
        alike = scale.shape == self.scale.shape == history.shape[-1:]
        if alike and bool(history[..., slot].any()):
            self.scale[slot].copy_(scale[slot])

    def gather_quantizer(self) -> Quantizer:
        """The slot's quantizer, which records apart: a gather may serve a forward pass, or no step
        at all."""
        given = self.given.get("weight")
        if given is not None:
            made = given.with_usage(True, True).copy()
            made.internal = False
            return made
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
        made = Float8Quantizer(
            self.scale[slot],
            self.gathered_amax,
            self.formats[slot],
            saturated=self.gathered_saturated,
        )
        made.gathers = True
        return made

    def use_gathered(self, weight: Any, *, recording: bool) -> None:
        amax: torch.Tensor | None = self.gathered_amax
        saturated: torch.Tensor | None = self.gathered_saturated
        if not torch.compiler.is_compiling():
            # Layers that share a weight share its gather, which recorded into the state of one of
            # them.
            present: Any = getattr(weight, "_quantizer", None)
            amax, saturated = (
                (present.amax, present.saturated) if _gathers(present) else (None, None)
            )
        if amax is None or saturated is None or not recording:
            return
        slot = self.slots["weight"]
        seen = self.amax_history[0, slot]
        seen.copy_(torch.maximum(seen, amax[0]))
        self.saturated[slot].add_(saturated[0])

    def reset(self) -> None:
        """Forget all steps."""
        self.scale.fill_(1.0)
        self.amax_history.zero_()
        self.saturated.zero_()
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
                warnings.warn(
                    f"{key} was saved with {loaded.shape[0]} steps and is loaded into {length}: "
                    + (
                        "the newest are kept"
                        if loaded.shape[0] > length
                        else "older ones are taken as 0"
                    ),
                    UserWarning,
                    stacklevel=2,
                )
                state_dict = {**state_dict, key: resized(loaded, length)}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_kept": {}, "evaluations": Evaluations(self.slots, self.formats)}
        return RecipeState.__getstate__(self) | own

    def extra_repr(self) -> str:
        return f"slots={list(self.slots)}, amax_history_len={self.amax_history.shape[0]}"


def _gathers(quantizer: Any) -> bool:
    return isinstance(quantizer, Float8Quantizer) and quantizer.gathers


def resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """A history of another length: the current step, then the newest, with zeros for steps that it
    never saw."""
    current, past = history[:1], history[1:]
    if length - 1 <= len(past):
        return torch.cat([current, past[len(past) - (length - 1) :]])
    missing = torch.zeros(
        length - 1 - len(past), history.shape[1], dtype=history.dtype, device=history.device
    )
    return torch.cat([current, missing, past])
