"""What a layer runs under: the recipe that is bound to it, the states that it keeps, and the call
that is asked for; and what a layer refuses."""

import warnings
from collections.abc import Callable
from functools import partial
from sys import modules
from typing import Any, NamedTuple

import torch

from ottava import torch_private
from ottava.errors import CheckpointError, DeviceError, DTypeError, ShapeError, UsageError
from ottava.kernels.backends import backend_for
from ottava.kernels.checks import HIGH_PRECISION, check_dense, check_fits, check_high_precision
from ottava.kernels.direct import has_tangent, transform
from ottava.nn.converted import begin_ahead
from ottava.recipes.base import Recipe, asked_once
from ottava.recipes.mixed import layer_state
from ottava.recipes.region import Region, current_region, regions
from ottava.recipes.role import OF_LINEAR, QuantizerRole
from ottava.recipes.state import RecipeState
from ottava.recipes.step import Step, backward_task, begin_alone, is_taken_apart, repeats_forward
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.slots import above
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import (
    KNOWS_BACKWARD,
    PIPELINES,
    any_autocast_enabled,
    dispatch_modes,
    graph_task_id,
    is_distributed,
    local_tensor,
)

_STRIDED = torch.strided
# Types that are asked nothing else.
_NO_DTENSOR = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
_NO_PLAN = (
    "leave the layer out of the plan of parallelize_module, or exclude it from "
    "ottava.convert; use fully_shard"
)


def label_of(layer: Any) -> str:
    """What errors call a layer."""
    return f"{type(layer).__name__} {layer.name!r}" if layer.name else type(layer).__name__


class Call(NamedTuple):
    """What one forward pass of a layer, its backward pass and its recomputation run under."""

    recipe: Recipe | None = None  # None computes in high precision
    state: RecipeState | None = None  # the layer's quantizers; None without a recipe
    group: Any = None  # over which amaxes are reduced
    # whether the state sees the operands: not those of an evaluation, and those of a step once
    recording: bool = True
    # whether the state observes them while the layer computes in high precision
    calibrating: bool = False
    # the weight is quantized and kept (True), was kept (False), is quantized for this call
    first: bool | None = None
    recomputed: bool = False  # whether activation checkpointing runs this forward pass again
    of_block: bool | None = None  # what a microbatch block said of first, and the call did not
    # whether a forward pass of a step begins, in a reentrant checkpoint without gradients
    training: bool = False
    # whether a stateful state may count what it clamps, because no step sees this pass
    evaluating: bool = False


class KeptWeight(NamedTuple):
    """The weight as it was quantized in the first microbatch."""

    storage: QuantizedTensorStorage
    by: RecipeState


# A call of a tuple of all its fields; the constructor is a function of Python.
_call_of: Callable[[tuple[Any, ...]], Call] = partial(tuple.__new__, Call)


class Binding:
    """A layer's recipe, states and last call. A stateful state is the submodule ``recipe_state`` of
    the layer, so that checkpoints and ``.to()`` see it."""

    recipe: Recipe | None = None
    # in use; it is made again when a region asks for another recipe or group
    state: RecipeState | None = None
    step: Step | None = None  # of the converted model that the layer is in, if it is in any
    #: The state that a checkpoint held, until a region brings the recipe that it belongs to.
    loaded: dict[str, Any] | None = None
    kept: KeptWeight | None = None  # for microbatches; None when the weight or the recipe changes
    # of what it has warned: the weight's recipe, another kind of recipe
    _told: frozenset[str] = frozenset()
    # of the last forward pass of a step, which activation checkpointing repeats
    _last: Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled, and a file has no need of a weight that can be
        # quantized again.
        return self.__dict__ | {"_last": None, "kept": None}

    # -- recipes and states --

    def prepare(self, layer: Any, recipe: Recipe, group: Any = None) -> RecipeState:
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

    def bind(self, layer: Any, recipe: Recipe | None, prepared: RecipeState | None) -> None:
        """Bind a recipe, with the state that was prepared for it."""
        self.recipe, self.kept = recipe, None
        kept: Any = layer._modules.get("recipe_state")
        if kept is not None and recipe is not None and kept.serves(recipe, None):
            prepared = kept
        elif kept is not None and prepared is not None and not prepared.stateful:
            # The layer has another recipe for good, and the old state goes. (Bound to none, it
            # keeps the state for a region that brings its recipe.)
            layer._modules.pop("recipe_state")._pending = False
        self.warn_of_mismatch(layer, None, prepared, 5)
        self._use(layer, prepared)

    def _use(self, layer: Any, state: RecipeState | None) -> None:
        self.state = state
        if not isinstance(state, torch.nn.Module):
            return
        if self.loaded is not None:
            try:
                state.load_state_dict(self.loaded)
            except RuntimeError as error:
                what = (
                    f"the scaling state that was loaded for {label_of(layer)} is not one of "
                    f"{state.recipe!r}"
                )
                remedy = "load the checkpoint into a model of the recipe that it was saved with"
                raise CheckpointError(
                    what, expected=", ".join(state.state_dict()), remedy=remedy
                ) from error
            self.loaded, state._pending = None, True
        kept = layer._modules.get("recipe_state")
        if kept is not None and kept is not state:
            kept._pending = False
        layer._modules["recipe_state"] = state

    def load(
        self, layer: Any, state_dict: dict[str, Any], prefix: str, unexpected: list[str]
    ) -> None:
        """Take note of a layer's state in a state dict, which torch loads where the layer has a
        state."""
        found = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        kept: Any = layer._modules.get("recipe_state")
        if kept is not None and found:
            kept.begin_next(layer)
        elif found and self.recipe is None:
            # The layer has no recipe yet; the region that brings one finds the loaded state here.
            # Copied, because the caller's tensors may belong to a model that goes on training.
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
                what = (
                    f"the scaling state of {label_of(layer)} is discarded: the recipe changed from"
                )
                what = f"{what} {kept.recipe!r} to {recipe!r}, and the new one starts afresh"
                warnings.warn(what, UserWarning, stacklevel=5)
        self.warn_of_mismatch(layer, self.state, state, 6)
        self._use(layer, state)
        return state

    def warn_of_mismatch(
        self, layer: Any, before: RecipeState | None, state: RecipeState | None, level: int
    ) -> None:
        """Warn, once, of a weight that another recipe than that of ``state`` keeps quantized, or of
        a change from ``before`` to another kind of recipe."""
        if state is None or torch.compiler.is_compiling():
            return
        name, label, about = state.recipe._label, label_of(layer), "weight"
        kept: Any = getattr(local_tensor(layer.weight), "_quantizer", None)
        own = (
            None
            if kept is None
            else state.quantizer("weight", rowwise=True, columnwise=True, recording=False)
        )
        # The quantizer of a state may be a special one of its kind.
        if not isinstance(own, type(kept)):
            what = (
                f"the weight of {label} stays as a {type(kept).__name__} quantized it, and the "
                f"layer runs under"
            )
            what = (
                f"{what} {name!r}: make the model inside quantized_model_init({name!r}), or "
                f"give the layer"
            )
            what = (
                f"{what} torch.nn.Parameter(weight.dequantize()) and convert it with primary=True"
            )
        elif (
            before is None
            or type(before.recipe) is type(state.recipe)
            or (before.stateful and state.stateful)
        ):
            return
        else:
            what, about = (
                f"{label} changes from recipe {before.recipe._label!r} to {name!r}",
                "recipe",
            )
        if about not in self._told:
            self._told |= {about}
            warnings.warn(what, UserWarning, stacklevel=level)

    # -- calls --

    def call(
        self, layer: Any, input: torch.Tensor, first: bool | None, observed: bool, compiling: bool
    ) -> Call:
        """What a forward pass of the layer runs under, which takes part in the step of its region.

        Args:
            observed, compiling: whether somebody looks at what is called, and whether that is a
                compiler.
        """
        task = -1 if compiling else graph_task_id()
        region = regions.stack[-1] if regions.stack else None
        of_block = None
        if first is None:
            blocks = regions.microbatches
            said = blocks[-1].first if blocks else None
            first = of_block = said if task == -1 else self._last and self._last.of_block
        recipe, group, calibrating = self.recipe, None, False
        if task != -1 and (
            region is None
            or region.graph_task != task
            or (region.recipe is None and region.enabled)
        ):
            # What is recomputed runs under the recipe of the forward pass, whatever region
            # surrounds the backward pass.
            if region is not None:
                region.served = True
            if self._last is not None:
                recipe, group = self._last.recipe, self._last.group
        elif region is not None:
            region.served = True
            group, calibrating = region.group, region.calibrating
            recipe = recipe if region.recipe is None else region.recipe
            recipe = recipe if region.enabled or calibrating else None
        state = None if recipe is None else self.state_for(layer, recipe, group)
        # Compiled code must not ask which modules are imported: it would be compiled again with
        # each new one.
        if (
            not compiling
            and PIPELINES in modules
            and state is not None
            and state.stateful
            and _infers_shapes()
        ):
            recipe = state = None
        evaluating = False
        if task != -1:
            # The forward pass of a reentrant checkpoint ran without gradients, and the state sees
            # the operands now.
            recording = (
                torch.is_grad_enabled()
                and state is not None
                and state.stateful
                and not repeats_forward()
            )
            return Call(recipe, state, group, recording, calibrating, first, True)
        # An exported program has no backward pass.
        training = grad_enabled = torch.is_grad_enabled() and not (
            compiling and torch_private.is_exporting()
        )
        if state is not None and state.stateful:
            if not (compiling or training):
                # Reentrant checkpointing runs the forward pass of a step without gradients, on
                # inputs that need them.
                training = layer.training and (
                    input.requires_grad or (region is not None and region.began)
                )
            training = training and not (observed and is_taken_apart(compiling))
            if region is not None:
                self._take_part(layer, state, region, training, compiling)
            else:
                # Outside of any region a layer begins a step of its own with each call, in as few
                # steps as can be.
                in_pipeline = training and not compiling and PIPELINES in modules
                if in_pipeline:
                    begin_alone(state)
                for part in state.parts() if training and not in_pipeline else ():
                    part.recipe.update_states([part], None)
                if not compiling:
                    state.__dict__.update(
                        step=None, _pending=True, _backward_ran=state._backward_ran and not training
                    )
            again = (
                training and grad_enabled and state._backward_ran and not (compiling or calibrating)
            )
            if (
                again
                and KNOWS_BACKWARD
                and not (state.step is not None and state.step.pipeline_ranks)
            ):
                state._backward_ran = False
                what = (
                    f"{label_of(layer)} runs another forward pass after a backward pass, in "
                    f"one region"
                )
                what = (
                    f"{what}: scales are updated at the entry of a region only; enter it anew "
                    f"for every step"
                )
                warnings.warn(what, UserWarning, stacklevel=4)
            if not (grad_enabled or training or compiling):
                # Modes may trace, and what they trace is to change nothing.
                evaluating = not (observed and dispatch_modes())
        passes = False, of_block, training, evaluating
        call = _call_of((recipe, state, group, grad_enabled, calibrating, first, *passes))
        if not compiling and (grad_enabled or layer.training):
            self._last = call._replace(recipe=None) if calibrating else call
        return call

    def _take_part(
        self, layer: Any, state: Any, region: Region, training: bool, compiling: bool
    ) -> None:
        """See that a stateful state begins its steps with the region."""
        if compiling and region.model is not None:
            # The model begins a step with all its layers, and compiled code had better change
            # nothing.
            return
        if training and not region.began and region.enabled and not region.calibrating:
            region.step.begin(region.group, region.model)
            region.began = True
        if training or region.calibrating:
            region.step.join(layer, state, region.group, region.calibrating, compiling)
        elif not (compiling or state._pending):
            state.step = region.step

    # -- weights that are quantized before a forward pass uses them --

    def kept_weight(
        self, call: Call, weight: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensorStorage:
        """The weight as it was quantized in the first microbatch, or as it is kept from now on."""
        state: Any = call.state
        kept = self.kept
        if kept is None or kept.by is not state or (call.first and not call.recomputed):
            # In a reentrant checkpoint the other operands are seen when they are recomputed, and
            # this one is kept.
            recording = call.recording or call.training
            usages = {"rowwise": True, "columnwise": True}
            if call.evaluating:
                quantizer = state.evaluation_quantizer("weight", **usages)
            else:
                quantizer = state.quantizer("weight", **usages, recording=recording)
            weight = weight.detach()
            with torch.no_grad():
                storage = quantizer.quantize(
                    weight.clone() if quantizer.keeps_operands else weight, dtype=dtype
                )
            if state.stateful:
                # It is never quantized again, and its quantizer may hold memory of the state.
                storage.update_quantizer(None)
            kept = self.kept = KeptWeight(storage, state)
        return kept.storage

    def gather_quantizer(self, layer: Any) -> Quantizer | None:
        """What quantizes a weight that is kept in high precision when it is gathered: of the bound
        recipe, if any."""
        if self.recipe is None:
            return None
        state = self.state_for(layer, self.recipe)
        if state.stateful:
            if is_distributed(layer.weight):
                begin_ahead(self.step)
            region = current_region()
            if (
                region is not None
                and region.enabled
                and (region.recipe is None or state.is_of(region.recipe))
            ):
                # The gather comes before the forward pass, so that a step may begin with it.
                training = region.began and backward_task() == -1
                self._take_part(layer, state, region, training, torch.compiler.is_compiling())
        return state.gather_quantizer()

    def own_shard(self, layer: Any, shard: QuantizedTensor) -> None:
        """Give this rank's shard of a quantized weight the quantizer that the forward pass would
        give the whole."""
        quantizer = (
            None
            if self.recipe is None
            else self.state_for(layer, self.recipe).weight_quantizer(shard)
        )
        if quantizer is not None:
            shard.update_quantizer(quantizer)
            shard._shard_group = None


def check_not_parallel(layer: Any, name: str, parameter: Any) -> None:
    """Refuse a DTensor that FSDP2 did not make, or did not make alone: a shard of a tensor parallel
    plan."""
    if type(parameter) is torch.nn.Parameter or not is_distributed(parameter):
        return
    sharded = [placement for placement in parameter.placements if not placement.is_replicate()]
    if len(sharded) > 1 or not above("fsdp2").shards(layer):
        what = (
            f"{name} of {label_of(layer)} is a DTensor, {parameter.placements}, as of a tensor "
            f"parallel plan"
        )
        raise UsageError(
            what, "a plain parameter, or a shard of FSDP2: such plans are not supported", _NO_PLAN
        )


def check_plain_operands(layer: Any, *operands: tuple[str, Any]) -> None:
    """Refuse DTensors in a forward pass that quantizes: FSDP2 gives layers their whole weights."""
    for name, tensor in operands:
        if type(tensor) not in _NO_DTENSOR and is_distributed(tensor):
            what = f"{name} of {label_of(layer)} is a DTensor, {tensor.placements}"
            raise UsageError(
                what, "a plain tensor: tensor parallel plans are not supported", _NO_PLAN
            )


def _infers_shapes() -> bool:
    """Whether a stage of a pipeline runs to find out shapes, on values that no state is to see."""
    passing = torch_private.pipeline_pass()
    return passing is not None and passing.infers


def autocast_dtype(tensor: torch.Tensor, compiling: bool) -> torch.dtype | None:
    """What torch.autocast computes in where ``tensor`` is; None outside of it."""
    # In eager mode this one cheap question answers for every device; compiled code cannot ask it.
    if not compiling and not any_autocast_enabled():
        return None
    device_type = tensor.device.type
    enabled = device_type in torch_private.WITH_AUTOCAST and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def checked_dtype(
    layer: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any, amp_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype that a layer computes in; a ShapeError, DTypeError or DeviceError where its
    operands do not fit."""
    if not isinstance(input, torch.Tensor):
        check_high_precision(input, f"input of {label_of(layer)}")
    if input.is_nested or input.layout is not _STRIDED:
        check_dense(input, f"input of {label_of(layer)}")
    shape = input.shape
    rows, columns = weight.shape if weight.dim() == 2 else (-1, -1)
    if not shape or shape[-1] != columns or (bias is not None and bias.shape != (rows,)):
        raise _misfit(layer, shape, weight.shape, bias)
    device = weight.device
    if input.device != device or (bias is not None and bias.device != device):
        name, other = ("input", input) if input.device != device else ("bias", bias)
        what = f"{name} of {label_of(layer)} is on {other.device}, its weight on {device}"
        raise DeviceError(
            what, "one device", f"move one of them, for example {name}.to({str(device)!r})"
        )
    dtype = input.dtype
    same = dtype == weight.dtype
    if dtype not in HIGH_PRECISION or not (same or weight.dtype in HIGH_PRECISION):
        check_high_precision(input, f"input of {label_of(layer)}")
        check_high_precision(weight, f"weight of {label_of(layer)}")
    if bias is not None and (bias.dtype not in HIGH_PRECISION or bias.layout is not _STRIDED):
        check_high_precision(bias, f"bias of {label_of(layer)}")
    if amp_dtype is None and not same:
        what = f"input of {label_of(layer)} has dtype {dtype}, its weight {weight.dtype}"
        raise DTypeError(
            what, expected="one dtype", remedy="convert one of them, or run inside torch.autocast"
        )
    return dtype if amp_dtype is None else amp_dtype


def _misfit(layer: Any, shape: torch.Size, of_weight: torch.Size, bias: Any) -> ShapeError:
    has, features, other = (
        f"of {label_of(layer)} has shape",
        layer.in_features,
        "give the layer another one",
    )
    if len(of_weight) != 2 or (of_weight[1] != features and shape[-1:] == (features,)):
        return ShapeError(f"weight {has} {tuple(of_weight)}", f"[*, {features}]", other)
    if shape[-1:] != of_weight[1:]:
        expected = f"a last dimension of {of_weight[1]}"
        return ShapeError(
            f"input {has} {tuple(shape)}", expected, "check the layer before this one"
        )
    return ShapeError(f"bias {has} {tuple(bias.shape)}", f"({of_weight[0]},), as the weight", other)


def check_use(layer: Any, *tensors: torch.Tensor | None) -> None:
    """Refuse what takes functions apart to differentiate or to record them, which quantization does
    not survive: a transform of torch.func, ``torch.jit.trace``, forward-mode derivatives; and to
    export a layer that makes steps."""
    compiling = torch.compiler.is_compiling()
    if (
        compiling
        and torch_private.is_exporting()
        and layer.training
        and layer._binding.state.stateful
    ):
        what = (
            f"{label_of(layer)} is in training mode, and torch.export writes no steps for its "
            f"recipe's state"
        )
        torch_private.refuse_export(
            what, "a model in evaluation", "call model.eval() before torch.export"
        )
    name, remedy = (
        transform(),
        "use it inside ottava.autocast(enabled=False), or backward() for gradients",
    )
    found = f"{name}, a transform of torch.func," if name else None
    if name == "trace":
        found, remedy = (
            "torch.jit.trace",
            "use torch.export, or trace inside ottava.autocast(enabled=False)",
        )
    elif not compiling and has_tangent(*tensors):
        found = found or "forward-mode derivatives"
    if found is not None:
        what = f"{label_of(layer)} computes on quantized operands, which {found} cannot take"
        raise UsageError(what, "a plain call, or high precision", remedy)


def main_grad_of(layer: Any, grad_enabled: bool) -> torch.Tensor | None:
    """What the gradient of the layer's weight is added to, as a matrix ``[out, in]``; None where
    nothing is added. Refused where it is missing, or is not of the weight's kind."""
    weight = layer.weight
    if not layer.fuse_wgrad_accumulation or not grad_enabled or not weight.requires_grad:
        return None
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    what = f"main_grad of the weight of {label_of(layer)}"
    if main_grad is None:
        remedy = (
            "set weight.main_grad = torch.zeros(weight.shape), or fuse_wgrad_accumulation to False"
        )
        raise UsageError(f"there is no {what}", expected="a tensor to add to", remedy=remedy)
    check_fits(main_grad, tuple(weight.shape), weight.device, what)
    return main_grad.t() if layer.weight_is_transposed else main_grad
