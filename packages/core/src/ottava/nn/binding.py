"""The binding of a layer: its recipe, the states and plans of its calls, and its quantized weight
for microbatches."""

import warnings
from collections.abc import Hashable
from typing import NamedTuple

import torch

from ottava.collectives import Group
from ottava.errors import CheckpointError
from ottava.kernels.backends import backend_for
from ottava.nn.call import Call, Recording
from ottava.nn.checks import check_not_parallel
from ottava.nn.converted import begin_at_gather
from ottava.nn.entry import enter_step_of_region
from ottava.nn.layer import Layer, label_of, owned_state
from ottava.nn.plan import Plan
from ottava.recipes.backward import HIGH_PRECISION, QUANTIZED
from ottava.recipes.base import Recipe, asked_once
from ottava.recipes.execution import NO_BACKWARD, backward_task
from ottava.recipes.of_layer import layer_state
from ottava.recipes.region import current_region
from ottava.recipes.role import OF_LINEAR, QuantizerRole
from ottava.recipes.state import Phase, RecipeState
from ottava.recipes.step import Step
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import (
    is_distributed,
    local_tensor,
)


class MicrobatchWeight(NamedTuple):
    """The weight as the first microbatch of a step quantized it, for the others.

    Attributes:
        storage: the quantized weight.
        state: gave the quantizer. Under another state the weight is quantized again.
    """

    storage: QuantizedTensorStorage
    state: RecipeState


class Binding:
    """A layer's recipe, states and last call.

    A stateful state is the submodule ``recipe_state`` of the layer, so that checkpoints and
    ``.to()`` see it.

    Attributes:
        recipe: the bound recipe; None for high precision.
        state: the state in use. Another takes its place when a region asks for another recipe or
            group.
        step: of the converted model that the layer is in, if it is in any.
        loaded: the state that a checkpoint held, by name, until a region brings its recipe.
        microbatch_weight: the quantized weight for microbatches; None before the first one, and
            when the weight or the recipe has changed.
        last: the last forward pass of a step, which activation checkpointing repeats.
        plans: the plans for calls under the state, by the kind of call.
    """

    recipe: Recipe | None = None
    state: RecipeState | None = None
    step: Step | None = None
    loaded: dict[str, torch.Tensor] | None = None
    microbatch_weight: MicrobatchWeight | None = None
    # The subjects of the warnings that were given: "weight", "recipe".
    _warned_of: frozenset[str] = frozenset()
    last: Call | None = None

    def __init__(self) -> None:
        self.plans: dict[Hashable, Plan] = {}

    def __getstate__(self) -> dict[str, object]:
        # A process group cannot be pickled, and everything else here can be computed again.
        return self.__dict__ | {"last": None, "microbatch_weight": None, "plans": {}}

    # -- recipes and states --

    def prepare(self, layer: Layer, recipe: Recipe, group: Group = None) -> RecipeState:
        """A new state for a recipe, which may refuse its options. Nothing is changed.

        Raises:
            UsageError: a parameter of the layer is sharded by a tensor parallel plan.
        """
        for name, parameter in layer._parameters.items():
            check_not_parallel(layer, name, parameter)
        roles = [QuantizerRole("linear", tensor_type, layer.name) for tensor_type in OF_LINEAR]
        with asked_once():
            state = layer_state(recipe, roles, group)
        # Chosen now, so that code compiled later finds it chosen.
        backend_for(layer.weight.device.type)
        # The state's buffers follow the weight's device, because the kernels read both in one call.
        return state.to(layer.weight.device) if isinstance(state, torch.nn.Module) else state

    def bind(self, layer: Layer, recipe: Recipe | None, prepared: RecipeState | None) -> None:
        """Bind a recipe, with the state that was prepared for it."""
        self.recipe = recipe
        self.microbatch_weight = None
        owned = owned_state(layer)
        if owned is not None and recipe is not None and owned.serves(recipe, None):
            prepared = owned
        elif owned is not None and prepared is not None and not prepared.stateful:
            # The layer has another recipe for good, and the old state goes. (Bound to none, it
            # keeps the state for a region that brings its recipe.)
            del layer._modules["recipe_state"]
            owned._set_phase(Phase.SETTLED)
        self.warn_of_mismatch(layer, None, prepared, 5)
        self._use(layer, prepared)

    def state_for(self, layer: Layer, recipe: Recipe, group: Group = None) -> RecipeState:
        """The state in use, the stateful one that was in use before, or a new one."""
        state = self.state
        if state is not None and state.serves(recipe, group):
            return state
        owned = owned_state(layer)
        if owned is not None and owned.serves(recipe, group):
            state = owned
        else:
            state = self.prepare(layer, recipe, group)
            if owned is not None and state.stateful:
                text = (
                    f"the scaling state of {label_of(layer)} is discarded: the recipe changed from "
                    f"{owned.recipe!r} to {recipe!r}, and the new one starts afresh"
                )
                warnings.warn(text, UserWarning, stacklevel=7)
        self.warn_of_mismatch(layer, self.state, state, 8)
        self._use(layer, state)
        return state

    def _use(self, layer: Layer, state: RecipeState | None) -> None:
        """Put a state into use; a stateful one becomes the layer's."""
        self.state = state
        self.plans.clear()
        if not isinstance(state, torch.nn.Module):
            return
        if self.loaded is not None:
            _load_state(layer, state, self.loaded)
            self.loaded = None
            state._set_phase(Phase.RAN)
        owned = owned_state(layer)
        if owned is not None and owned is not state:
            owned._set_phase(Phase.SETTLED)
        layer._modules["recipe_state"] = state
        self.introduce_weight(layer)

    def introduce_weight(self, layer: Layer) -> None:
        """Give an FP8-primary weight the quantizer that the state in use has for it before the
        first pass."""
        weight = layer._parameters.get("weight")
        if weight is None or self.state is None or torch.compiler.is_compiling():
            return
        local = local_tensor(weight)
        if isinstance(local, QuantizedTensor):
            quantizer = self.state.first_quantizer(local)
            if quantizer is not None:
                local.update_quantizer(quantizer)

    def load(
        self, layer: Layer, state_dict: dict[str, torch.Tensor], prefix: str, unexpected: list[str]
    ) -> None:
        """Take note of a layer's state in a state dict, which torch loads where the layer has a
        state.

        Args:
            prefix: of the names of the layer's state.
            unexpected: names that torch is to complain of; those of the state are taken out.
        """
        of_state = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        if not of_state:
            return
        owned = owned_state(layer)
        if owned is not None:
            owned.await_next_step(layer)
        elif self.recipe is None:
            # The layer has no recipe yet; the region that brings one finds the loaded state here.
            # Copied, because the caller's tensors may belong to a model that goes on training.
            self.loaded = {name: value.clone() for name, value in of_state.items()}
            unexpected[:] = [name for name in unexpected if not name.startswith(prefix)]

    # -- warnings --

    def warn_of_mismatch(
        self, layer: Layer, before: RecipeState | None, state: RecipeState | None, level: int
    ) -> None:
        """Warn, once, of a weight that another recipe than that of ``state`` keeps quantized, or of
        a change from ``before`` to another kind of recipe.

        Args:
            level: the stack level of the warning.
        """
        if state is None or torch.compiler.is_compiling():
            return
        subject, text = "weight", _weight_mismatch(layer, state)
        if text is None and before is not None:
            subject, text = "recipe", _change_of_recipe(layer, before, state)
        if text is not None and subject not in self._warned_of:
            self._warned_of |= {subject}
            warnings.warn(text, UserWarning, stacklevel=level)

    # -- weights that are quantized before a forward pass uses them --

    def weight_for_microbatch(
        self, call: Call, weight: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensorStorage:
        """The quantized weight of a microbatch.

        The first microbatch quantizes it, and so does one that finds none of its state. The others
        use it again.

        Args:
            call: of the forward pass, which has a state.
            weight: ``[out_features, in_features]``, in high precision.
            dtype: that the layer computes in.
        """
        state = call.state
        assert state is not None
        present = self.microbatch_weight
        quantizes_again = call.first and not call.recomputed
        if present is not None and present.state is state and not quantizes_again:
            return present.storage
        storage = _quantized_for_microbatches(call, state, weight, dtype)
        self.microbatch_weight = MicrobatchWeight(storage, state)
        return storage

    def gather_quantizer(self, layer: Layer) -> Quantizer | None:
        """The quantizer of a weight that is kept in high precision, for a gather of its shards;
        None without a bound recipe."""
        if self.recipe is None:
            return None
        state = self.state_for(layer, self.recipe)
        if state.stateful:
            self._enter_step_of_gather(layer, state)
        return state.gather_quantizer()

    def read_by_dgrad(self, layer: Layer) -> str:
        """What dgrad reads of the weight under the bound recipe."""
        if self.recipe is None:
            return QUANTIZED
        return self.state_for(layer, self.recipe).backward_reads["dgrad", "weight"]

    def gathers_values(self, layer: Layer) -> bool:
        """Whether a gather of a weight in high precision brings its values, because dgrad or some
        steps of training read them. It is so in all steps, because FSDP allocates memory once."""
        if self.read_by_dgrad(layer) == HIGH_PRECISION:
            return True
        return self.recipe is not None and self.state_for(layer, self.recipe).has_schedule

    def _enter_step_of_gather(self, layer: Layer, state: RecipeState) -> None:
        """Have the state take part in the step of the forward pass that follows a gather."""
        if is_distributed(layer.weight):
            begin_at_gather(self.step)
        region = current_region()
        if region is None or not region.enabled:
            return
        if region.recipe is None or state.is_of(region.recipe):
            training = region.began and backward_task() == NO_BACKWARD
            compiling = torch.compiler.is_compiling()
            enter_step_of_region(layer, state, region, training, compiling)

    def give_shard_quantizer(self, layer: Layer, shard: QuantizedTensor) -> None:
        """Give this rank's shard of a quantized weight the quantizer that the forward pass would
        give the whole."""
        if self.recipe is None:
            return
        quantizer = self.state_for(layer, self.recipe).weight_quantizer(shard)
        if quantizer is not None:
            shard.update_quantizer(quantizer)
            shard._shard_group = None


def _load_state(layer: Layer, state: torch.nn.Module, loaded: dict[str, torch.Tensor]) -> None:
    """Load the state of a layer, which a checkpoint held, into a new one.

    Raises:
        CheckpointError: the loaded state is that of another recipe.
    """
    try:
        state.load_state_dict(loaded)
    except RuntimeError as error:
        raise CheckpointError(
            f"the scaling state that was loaded for {label_of(layer)} is not one of "
            f"{state.recipe!r}",
            expected=", ".join(state.state_dict()),
            remedy="load the checkpoint into a model of the recipe that it was saved with",
        ) from error


def _weight_mismatch(layer: Layer, state: RecipeState) -> str | None:
    """The warning about a weight that another recipe quantized; None if there is nothing to warn
    of."""
    present: Quantizer | None = getattr(local_tensor(layer.weight), "_quantizer", None)
    if present is None:
        return None
    own = state.quantizer("weight", rowwise=True, columnwise=True, recording=False)
    # The quantizer of a state may be a special one of its kind.
    if isinstance(own, type(present)):
        return None
    name = state.recipe._label
    return (
        f"the weight of {label_of(layer)} stays as a {type(present).__name__} quantized it, and "
        f"the layer runs under {name!r}: make the model inside quantized_model_init({name!r}), or "
        f"give the layer torch.nn.Parameter(weight.dequantize()) and convert it with primary=True"
    )


def _change_of_recipe(layer: Layer, before: RecipeState, state: RecipeState) -> str | None:
    """The warning about a change to another kind of recipe; None if both are of one kind.

    Between two stateful recipes there is another warning, which names the state that is lost.
    """
    same_kind = type(before.recipe) is type(state.recipe)
    if same_kind or (before.stateful and state.stateful):
        return None
    return (
        f"{label_of(layer)} changes from recipe {before.recipe._label!r} to {state.recipe._label!r}"
    )


def _quantized_for_microbatches(
    call: Call, state: RecipeState, weight: torch.Tensor, dtype: torch.dtype
) -> QuantizedTensorStorage:
    """The weight, quantized for all microbatches of a step: by rows, and by columns where dgrad
    reads them."""
    usages = {"rowwise": True, "columnwise": state.backward_reads["dgrad", "weight"] == QUANTIZED}
    if call.recording is Recording.CLAMPS:
        quantizer = state.evaluation_quantizer("weight", **usages)
    else:
        # In a reentrant checkpoint the other operands are recorded when they are recomputed. This
        # one is not quantized again then.
        recording = call.records or call.recording is Recording.LATER
        quantizer = state.quantizer("weight", **usages, recording=recording)
    values = weight.detach()
    with torch.no_grad():
        if quantizer.aliases_operands:
            values = values.clone()
        storage: QuantizedTensorStorage = quantizer.quantize(values, dtype=dtype)
    if state.stateful:
        # It is never quantized again, and its quantizer may hold memory of the state.
        storage.update_quantizer(None)
    return storage
