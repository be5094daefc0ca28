"""What a layer runs under: the recipe that is bound to it, the states that it keeps, and the call that is asked for."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from ottava.errors import CheckpointError
from ottava.kernels.backends import backend_for
from ottava.recipes.base import Recipe
from ottava.recipes.mixed import layer_state
from ottava.recipes.region import Region, backward_task, begin_ahead, current_region, regions
from ottava.recipes.role import OF_LINEAR, QuantizerRole
from ottava.recipes.state import RecipeState
from ottava.recipes.step import Step, begin, is_taken_apart
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import KNOWS_BACKWARD, graph_task_id, is_distributed, local_tensor


def label_of(layer: Any) -> str:
    """What errors call a layer."""
    return f"{type(layer).__name__} {layer.name!r}" if layer.name else type(layer).__name__


def _name(recipe: Any) -> str:
    return str(recipe.name or type(recipe).__name__)


class Call(NamedTuple):
    """What one forward pass of a layer, its backward pass and its recomputation run under.

    Attributes:
        recipe: None computes in high precision.
        state: the layer's quantizers; None without a recipe.
        group: over which amaxes are reduced.
        recording: whether the state is to see the operands: not those of an evaluation, and those of a step once.
        calibrating: whether the state is to observe them while the layer computes in high precision.
        first: whether the weight is quantized and kept (True), was kept (False), or is quantized for this call (None).
        recomputed: whether this is a forward pass that activation checkpointing runs again.
    """

    recipe: Recipe | None = None
    state: RecipeState | None = None
    group: Any = None
    recording: bool = True
    calibrating: bool = False
    first: bool | None = None
    recomputed: bool = False


class Binding:
    """A layer's recipe, states and last call.

    A stateful state is the submodule ``recipe_state`` of the layer, so that checkpoints and ``.to()`` see it.
    """

    recipe: Recipe | None = None
    # The state in use; it is made again when a region asks for another recipe or group.
    state: RecipeState | None = None
    #: The step of the converted model that the layer is in, if it is in any.
    step: Step | None = None
    #: The state that a checkpoint held, until a region brings the recipe that it belongs to.
    loaded: dict[str, Any] | None = None
    _mismatch_told: bool = False
    # Of the last forward pass of a step, which activation checkpointing repeats.
    _last: Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled.
        return self.__dict__ | {"_last": None}

    # -- recipes and states --

    def prepare(self, layer: Any, recipe: Recipe, group: Any = None) -> RecipeState:
        """A new state for a recipe, which may refuse its options. Nothing is changed."""
        roles = [QuantizerRole("linear", tensor_type, layer.name) for tensor_type in OF_LINEAR]
        state = layer_state(recipe, roles, amax_reduction_group=group)
        for part in (state, *state.parts()):
            part._layer_name = layer.name
        # Chosen now, so that code compiled later finds it chosen.
        backend_for(layer.weight.device.type)
        # The state's buffers follow the weight's device, because the kernels read both in one call.
        return state.to(layer.weight.device) if isinstance(state, torch.nn.Module) else state

    def bind(self, layer: Any, recipe: Recipe | None, prepared: RecipeState | None) -> None:
        """Bind a recipe, with the state that was prepared for it."""
        self.recipe = recipe
        kept: Any = layer._modules.get("recipe_state")
        if kept is not None and recipe is not None and kept.serves(recipe, None):
            prepared = kept
        elif prepared is not None and not prepared.stateful:
            # The layer has another recipe for good, and the old state goes. (Bound to none, it keeps the state for
            # a region that brings its recipe.)
            gone: Any = layer._modules.pop("recipe_state", None)
            if gone is not None:
                gone._pending = False
        self._warn_of_mismatch(layer, None, prepared)
        self._use(layer, prepared)

    def _use(self, layer: Any, state: RecipeState | None) -> None:
        self.state = state
        if not isinstance(state, torch.nn.Module):
            return
        if self.loaded is not None:
            try:
                state.load_state_dict(self.loaded)
            except RuntimeError as error:
                what = f"the scaling state that was loaded for {label_of(layer)} is not one of {state.recipe!r}"
                remedy = "load the checkpoint into a model of the recipe that it was saved with"
                raise CheckpointError(what, expected=", ".join(state.state_dict()), remedy=remedy) from error
            self.loaded, state._pending = None, True
        kept = layer._modules.get("recipe_state")
        if kept is not None and kept is not state:
            kept._pending = False
        layer._modules["recipe_state"] = state

    def load(self, layer: Any, state_dict: dict[str, Any], prefix: str, unexpected: list[str]) -> None:
        """Take note of a layer's state in a state dict, which torch loads where the layer has a state."""
        found = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        kept: Any = layer._modules.get("recipe_state")
        if kept is not None and found and not kept._pending:
            # It begins the next step with those that it ran with.
            if kept.step is None:
                kept._pending = True
            else:
                kept.step.take(layer, kept)
        elif kept is None and found and self.recipe is None:
            # The layer has no recipe yet; the region that brings one finds the loaded state here. Copied, because the
            # caller's tensors may belong to a model that goes on training.
            self.loaded = {name: value.clone() for name, value in found.items()}
            unexpected[:] = [key for key in unexpected if not key.startswith(prefix)]

    def state_for(self, layer: Any, recipe: Recipe, group: Any = None) -> RecipeState:
        """The state in use, the stateful one that was in use before, or a new one."""
        state = self.state
        if state is not None:
            # Most calls are answered by a look at three fields.
            same = state.recipe is recipe and state.factory is recipe._factory
            if (same and state.amax_reduction_group is group) or state.serves(recipe, group):
                return state
        kept: Any = layer._modules.get("recipe_state")
        if kept is not None and kept.serves(recipe, group):
            state = kept
        else:
            state = self.prepare(layer, recipe, group)
            if kept is not None and state.stateful:
                warnings.warn(
                    f"the scaling state of {label_of(layer)} is discarded: the recipe changed from {kept.recipe!r} to "
                    f"{recipe!r}, and the new one starts afresh",
                    UserWarning,
                    stacklevel=5,
                )
        self._warn_of_mismatch(layer, self.state, state)
        self._use(layer, state)
        return state

    def _warn_of_mismatch(self, layer: Any, before: RecipeState | None, state: RecipeState | None) -> None:
        """Warn, once, of a weight that another recipe keeps quantized, or of a change to another kind of recipe.

        Args:
            before: the state that the layer ran under; None where that is no matter.
            state: the one that it runs under from now on.
        """
        if state is None or self._mismatch_told or torch.compiler.is_compiling():
            return
        name, label = _name(state.recipe), label_of(layer)
        kept: Any = getattr(local_tensor(layer.weight), "_quantizer", None)
        own = None if kept is None else state.quantizer("weight", rowwise=True, columnwise=True, recording=False)
        if type(kept) is not type(own):
            what = f"the weight of {label} stays as a {type(kept).__name__} quantized it, and the layer runs under"
            what = f"{what} {name!r}: make the model inside quantized_model_init({name!r})"
        elif (
            before is not None
            and type(before.recipe) is not type(state.recipe)
            and not (before.stateful and state.stateful)
        ):
            what = f"{label} changes from recipe {_name(before.recipe)!r} to {name!r}"
        else:
            return
        self._mismatch_told = True
        warnings.warn(what, UserWarning, stacklevel=6)

    # -- calls --

    def call(self, layer: Any, input: torch.Tensor, first: bool | None = None) -> Call:
        """What a forward pass of the layer runs under, which takes part in the step of its region."""
        compiling = torch.compiler.is_compiling()
        task = -1 if compiling else graph_task_id()
        region = current_region() if regions.stack else None
        if first is None:
            first = regions.first
        if task != -1 and (region is None or region.graph_task != task or region.owner is None):
            return self._again(layer, first)
        # An exported program has no backward pass.
        grad_enabled = torch.is_grad_enabled() and not (compiling and torch.compiler.is_exporting())
        recipe, group, calibrating = self.recipe, None, False
        if region is not None:
            group, calibrating = region.group, region.calibrating
            recipe = recipe if region.recipe is None else region.recipe
            recipe = recipe if region.enabled or calibrating else None
        state = None if recipe is None else self.state_for(layer, recipe, group)
        if state is not None and state.stateful:
            training = task == -1 and grad_enabled
            if not (compiling or training or task != -1):
                # Reentrant checkpointing runs the forward pass of a step without gradients, on inputs that need them.
                training = layer.training and (input.requires_grad or (region is not None and region.began))
            training = training and (compiling or not is_taken_apart())
            self._take_part(layer, state, region, group, training, grad_enabled)
        if task != -1:
            return Call(recipe, state, group, self._last is None or not self._last.recording, calibrating, first, True)
        call = Call(recipe, state, group, grad_enabled, calibrating, first)
        if not compiling and (grad_enabled or layer.training):
            self._last = call._replace(recipe=None) if calibrating else call
        return call

    def _again(self, layer: Any, first: bool | None) -> Call:
        """What activation checkpointing recomputes under, in the backward pass: whatever region surrounds that now, the
        recipe is that of the forward pass."""
        last = self._last or Call(self.recipe, recording=False, first=first)
        state = None if last.recipe is None else self.state_for(layer, last.recipe, last.group)
        kept = None if last.first is first is None else False
        return last._replace(state=state, recording=not last.recording, calibrating=False, first=kept, recomputed=True)

    def _take_part(
        self, layer: Any, state: RecipeState, region: Region | None, group: Any, training: bool, grad_enabled: bool
    ) -> None:
        """See that a stateful state begins its steps with the region; outside any, the layer is its own."""
        compiling = torch.compiler.is_compiling()
        if region is None:
            if training:
                begin([state], group)
            if not compiling and (state.step is not None or not state._pending):
                state.step, state._pending = None, True
            return
        if compiling and region.model is not None:
            # The model begins a step with all its layers, and compiled code had better change nothing.
            return
        if training and not region.began and region.enabled and not region.calibrating:
            region.step.begin(group, region.model)
            region.began = True
        if training or region.calibrating:
            region.step.join(layer, state, group, calibrating=region.calibrating)
        elif not (compiling or state._pending):
            state.step = region.step
        if state._backward_ran and KNOWS_BACKWARD and not compiling and training and grad_enabled:
            state._backward_ran = False
            warnings.warn(
                f"{label_of(layer)} runs another forward pass after a backward pass, in one region: scales are updated "
                "at the entry of a region only; enter it anew for every step",
                UserWarning,
                stacklevel=5,
            )

    # -- weights that are gathered, and quantized before a forward pass uses them --

    def gather_quantizer(self, layer: Any) -> Quantizer | None:
        """What quantizes a weight that is kept in high precision when it is gathered: of the bound recipe, if any."""
        if self.recipe is None:
            return None
        state = self.state_for(layer, self.recipe)
        if state.stateful:
            if is_distributed(layer.weight):
                begin_ahead(self.step)
            region = current_region()
            if region is not None and region.enabled and (region.recipe is None or state.is_of(region.recipe)):
                # The gather comes before the forward pass, so that a step may begin with it.
                self._take_part(layer, state, region, region.group, region.began and backward_task() == -1, False)
        return state.gather_quantizer()

    def own_shard(self, layer: Any, shard: QuantizedTensor) -> None:
        """Give this rank's shard of a quantized weight the quantizer that the forward pass would give the whole."""
        quantizer = None if self.recipe is None else self.state_for(layer, self.recipe).weight_quantizer(shard)
        if quantizer is not None:
            shard.update_quantizer(quantizer)
            shard._shard_group = None
