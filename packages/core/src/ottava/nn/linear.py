"""``Linear``: ``torch.nn.Linear`` whose GEMMs run on quantized operands."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ottava.errors import CheckpointError, OptionError
from ottava.kernels import HIGH_PRECISION
from ottava.nn.checks import (
    autocast_dtype,
    check_derivatives,
    check_export,
    checked_dtype,
    main_grad_of,
    warn_of_mismatch,
)
from ottava.nn.function import IntoMainGrad, LinearPlan, high_precision_linear, quantized_linear
from ottava.nn.loading import fill_in_states
from ottava.nn.model_init import quantize_new_weight
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.mixed import layer_state
from ottava.recipes.region import (
    backward_task,
    begin_ahead,
    begin_step,
    current_region,
    differentiates,
    enters_first,
    may_begin,
)
from ottava.recipes.role import OF_LINEAR, QuantizerRole
from ottava.recipes.state import RecipeState
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import KNOWS_BACKWARD, graph_task_id, local_tensor, set_local_tensor


def _moved(weight: QuantizedTensor, fn: Any) -> Any:
    """What ``fn``, of ``Module._apply``, makes of a quantized weight, which keeps its data where that dequantizes."""
    with torch.no_grad():
        moved = fn(weight)
        if isinstance(moved, QuantizedTensor) or moved.dtype not in HIGH_PRECISION:
            return moved
        return weight.to(moved.device).to_dtype(moved.dtype)  # type: ignore[attr-defined]


class Linear(torch.nn.Linear):
    """``y = x · weightᵀ + bias`` with the GEMMs of forward and backward on quantized operands.

    Without a bound recipe, outside any :class:`~ottava.autocast` region, it computes in high precision as
    ``torch.nn.Linear`` does.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        name: given to quantizer factories in their role.
        recipe: a recipe to bind, or the name of one.
        fuse_wgrad_accumulation: the gradient of the weight is added to ``weight.main_grad``, a tensor of the weight's
            shape (float32, say) that its owner makes and clears; ``weight.grad`` stays as it is. Under a recipe the sum
            is rounded once; in high precision what torch computes is added. An attribute of the same name can be set
            later. Where the weight has ``grad_added_to_main_grad``, that becomes True.

    Shapes: input ``[*, in_features]``, output ``[*, out_features]``; any leading dimensions, empty ones too.
    """

    name: str
    # The state in use; it is made again when a region asks for another recipe or group.
    _state: RecipeState | None = None
    _recipe: Recipe | None = None
    _quantized_weight: QuantizedTensorStorage | None = None
    #: Whether each gather of a sharded weight brings what serves rows and columns, for passes that are recomputed.
    recomputes: bool = False
    # Recipe and group of the last forward of a step, and whether the state has seen its operands: activation
    # checkpointing recomputes under them.
    _last: tuple[Recipe | None, Any, bool] | None = None
    # The state that a checkpoint held, until a region brings the recipe that it belongs to.
    _loaded_state: dict[str, Any] | None = None
    # Whether a warning has said that the layer's recipe, or its weight's, is another one.
    _mismatch_told: bool = False
    #: Whether the gradient of the weight goes to ``weight.main_grad``.
    fuse_wgrad_accumulation: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "",
        recipe: Recipe | str | os.PathLike[str] | None = None,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.name = name
        if not isinstance(fuse_wgrad_accumulation, bool):
            raise OptionError(f"fuse_wgrad_accumulation is {fuse_wgrad_accumulation!r}", expected="True or False")
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        quantize_new_weight(self)
        self.bind(recipe)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, name: str = "") -> Linear:
        """This class around an existing layer: same parameters (not copies), hooks, mode and attributes."""
        made = cls.__new__(cls)
        made.__dict__ = linear.__dict__ | {"name": name}
        return made

    @property
    def recipe(self) -> Recipe | None:
        """The bound recipe."""
        return self._recipe

    def bind(self, recipe: Recipe | str | os.PathLike[str] | None) -> None:
        """Bind a recipe (an object, or the name of an installed one), or None for high precision.

        Raises:
            DTypeError, RecipeNotFoundError: as in :func:`~ottava.get_recipe`.
        """
        bound = None if recipe is None else as_recipe(recipe)
        self._bind_prepared(bound, None if bound is None else self._make_state(bound, None))

    def _bind_prepared(self, recipe: Recipe | None, state: RecipeState | None) -> None:
        self._recipe, self._quantized_weight = recipe, None
        kept: Any = self._modules.get("recipe_state")
        if kept is not None and recipe is not None and kept.serves(recipe, None):
            state = kept
        elif state is not None and not state.stateful:
            # The layer has another recipe for good, and the old state goes. (Bound to none, it keeps the state for
            # a region that brings its recipe.)
            self._modules.pop("recipe_state", None)
        warn_of_mismatch(self, None, state)
        self._set_state(state)

    def _make_state(self, recipe: Recipe, group: Any) -> RecipeState:
        roles = [QuantizerRole("linear", tensor_type, self.name) for tensor_type in OF_LINEAR]
        state = layer_state(recipe, roles, amax_reduction_group=group)
        # The state's buffers follow the weight's device, because the kernels read both in one call.
        return state.to(self.weight.device) if isinstance(state, torch.nn.Module) else state

    def _set_state(self, state: RecipeState | None) -> None:
        """Use ``state`` from now on. A stateful one becomes the submodule that checkpoints and ``.to()`` see."""
        if not isinstance(state, torch.nn.Module):
            self._state = state
            return
        if self._loaded_state is not None:
            try:
                state.load_state_dict(self._loaded_state)
            except RuntimeError as error:
                what = f"the scaling state that was loaded for {self._label()} is not one of {state.recipe!r}"
                remedy = "load the checkpoint into a model of the recipe that it was saved with"
                raise CheckpointError(what, expected=", ".join(state.state_dict()), remedy=remedy) from error
            self._loaded_state = None
        self.__dict__["_state"] = self._modules["recipe_state"] = state

    def _state_for(self, recipe: Recipe, group: Any) -> RecipeState:
        """The state in use, the stateful one that was in use before, or a new one."""
        state = self._state
        if state is not None and state.serves(recipe, group):
            return state
        kept: Any = self._modules.get("recipe_state")
        if kept is not None and kept.serves(recipe, group):
            state = kept
        else:
            state = self._make_state(recipe, group)
            if kept is not None and state.stateful:
                warnings.warn(
                    f"the scaling state of {self._label()} is discarded: the recipe changed from {kept.recipe!r} to "
                    f"{recipe!r}, and the new one starts afresh",
                    UserWarning,
                    stacklevel=4,
                )
        warn_of_mismatch(self, self._state, state)
        self._set_state(state)
        self._quantized_weight = None
        return state

    def _resolve(self) -> tuple[Recipe | None, Any, bool, bool]:
        """Recipe (None for high precision), reduction group, whether to calibrate, and whether the state is to see the
        operands: not those of an evaluation, and those of a step once.

        Reentrant checkpointing runs the forward without gradients: there the recomputation is what is seen.
        """
        region, task, recording = current_region(), backward_task(), differentiates()
        recipe, group, calibrating = self._recipe, None, False
        if task != -1:
            last_recipe, last_group, recorded = self._last or (recipe, None, False)
            recording = not recorded
            if region is None or region.module is not None or region.graph_task != task:
                # Activation checkpointing recomputes in the backward pass: whatever region surrounds backward() now,
                # the recipe is that of the forward pass.
                return last_recipe, last_group, False, recording
        if region is not None:
            group, calibrating = region.amax_reduction_group, region.calibrating
            recipe = recipe if region.recipe is None else region.recipe
            recipe = recipe if region.enabled or calibrating else None
        if not torch.compiler.is_compiling() and task == -1 and (recording or self.training):
            # Not by an assignment, which nn.Module makes slow.
            self.__dict__["_last"] = None if calibrating else recipe, group, recording
        return recipe, group, calibrating, recording

    def forward(self, input: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Apply the layer.

        Args:
            input: ``[*, in_features]``, on the device of the weight.
            is_first_microbatch: True quantizes the weight and keeps it, False uses what was kept, None quantizes
                it for this call.

        Raises:
            ShapeError, DTypeError, DeviceError: the input does not fit the layer.
            OptionError: ``is_first_microbatch`` is something else.
        """
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            raise OptionError(f"is_first_microbatch is {is_first_microbatch!r}", expected="True, False or None")
        recipe, group, calibrating, recording = self._resolve()
        if recipe is None:
            return self._high_precision(input)
        # Looked up once, because nn.Module searches several places for a parameter.
        weight = self.weight
        amp_dtype = autocast_dtype(weight)
        dtype = checked_dtype(self, input, weight, amp_dtype)
        state = self._state_for(recipe, group)
        if not torch.compiler.is_compiling() and not state.keeps_values:
            check_derivatives(self, input, weight, self.bias)
        if state.stateful:
            check_export(self)
            self._take_part(state, group, weight)
        if calibrating:
            state.quantizer("input", rowwise=True, columnwise=True).calibrate(input.detach())
            state.quantizer("weight", rowwise=True, columnwise=True).calibrate(self._plain_weight().detach())
            return self._high_precision(input)
        if state.keeps_values and is_first_microbatch is None and not isinstance(weight, QuantizedTensorStorage):
            return self._high_precision(input)
        if isinstance(input, QuantizedTensorStorage):
            input = input.dequantize()
        grad_enabled = differentiates()
        kept_weight = None
        if isinstance(weight, QuantizedTensorStorage):
            state.use_gathered(weight, recording=recording)
            if grad_enabled and not torch.compiler.is_compiling() and weight.rebuilds_derived:
                with torch.no_grad():
                    weight.rebuild_derived()
        elif is_first_microbatch is not None:
            kept_weight = self._kept_weight(state, dtype, is_first_microbatch, recording)
        main_grad = main_grad_of(self, grad_enabled) if self.fuse_wgrad_accumulation else None
        plan = LinearPlan(state, dtype, grad_enabled, recording, kept_weight, main_grad)
        if amp_dtype is None:
            return quantized_linear(input, weight, self.bias, plan)
        with torch.autocast(device_type=weight.device.type, enabled=False):
            return quantized_linear(input, weight, self.bias, plan)

    # -- weights that FSDP2 shards --

    def gather_quantizer(self) -> Quantizer | None:
        """What quantizes a weight that is kept in high precision when it is gathered: of the bound recipe, if any."""
        if self._recipe is None:
            return None
        state = self._state_for(self._recipe, None)
        if state.stateful:
            begin_ahead(self)
            region = current_region()
            if region is not None and region.enabled and (region.recipe is None or state.is_of(region.recipe)):
                # The gather comes before the forward pass, so that a step may begin with it.
                self._take_part(state, region.amax_reduction_group, self.weight)
        return state.gather_quantizer()

    def own_shard(self, shard: QuantizedTensor) -> None:
        """Give this rank's shard of a weight the quantizer that :meth:`forward` would give the whole."""
        if self._recipe is None:
            return
        quantizer = self._state_for(self._recipe, None).weight_quantizer(shard)
        if quantizer is not None:
            shard.update_quantizer(quantizer)
            shard._shard_group = None

    def _share_shards(self) -> None:
        """See that the first values of a quantized weight that was on meta are quantized as those of the whole."""
        weight: Any = self.weight
        local = local_tensor(weight)
        if not isinstance(local, QuantizedTensor):
            return
        self.own_shard(local)
        sharded = [] if local is weight else [d for d, p in enumerate(weight.placements) if not p.is_replicate()]
        if len(sharded) == 1 and local._quantizer is not None:
            group = weight.device_mesh.get_group(sharded[0])
            local.update_quantizer(local._quantizer.for_shards(group.group_name))

    def _take_part(self, state: RecipeState, group: Any, weight: torch.Tensor) -> None:
        """See that a stateful state begins its steps with the region; outside any, the layer is its own."""
        region = current_region()
        if region is None:
            if may_begin():
                begin_step([state], group)
        elif region.step is not None and (region.calibrating or self._is_training()) and region.step.join(state):
            if state.has_run and not region.calibrating:
                # The state joined after the others had begun this step, and still holds amaxes of an earlier one.
                begin_step([state], group)
        elif state.backward_ran and KNOWS_BACKWARD and not torch.compiler.is_compiling() and may_begin():
            state.backward_ran = False
            warnings.warn(
                f"{self._label()} runs another forward pass after a backward pass, in one region: scales are updated "
                "at the entry of a region only; enter it anew for every step",
                UserWarning,
                stacklevel=4,
            )
        if not state.has_run and not torch.compiler.is_compiling():
            state.has_run = True
        if isinstance(weight, QuantizedTensor) and not torch.compiler.is_compiling():
            quantizer = state.weight_quantizer(weight)
            if quantizer is not None:
                weight.update_quantizer(quantizer)

    def _is_training(self) -> bool:
        """Whether this is the forward pass of a step, which reentrant checkpointing runs without gradients.

        An evaluation moves no state, because one rank may evaluate alone.
        """
        return may_begin() or (self.training and not torch.compiler.is_compiling() and graph_task_id() == -1)

    def _plain_weight(self) -> torch.Tensor:
        weight = self.weight
        return weight.dequantize() if isinstance(weight, QuantizedTensorStorage) else weight

    def _high_precision(self, input: torch.Tensor) -> torch.Tensor:
        main_grad = main_grad_of(self, torch.is_grad_enabled())
        # In a tuple, main_grad is none of the tensors that autograd sees among the arguments.
        weight: Any = self._plain_weight() if main_grad is None else IntoMainGrad.apply(self.weight, (main_grad,))  # type: ignore[no-untyped-call]
        return high_precision_linear(input, weight, self.bias, autocast_dtype(weight))

    def _kept_weight(
        self, state: RecipeState, dtype: torch.dtype, is_first_microbatch: bool, recording: bool
    ) -> QuantizedTensorStorage:
        """The weight as it was quantized in the first microbatch of the step."""
        if self._quantized_weight is None or (is_first_microbatch and backward_task() == -1):
            quantizer = state.quantizer("weight", rowwise=True, columnwise=True, recording=recording)
            weight = self.weight.detach()
            with torch.no_grad():
                kept = quantizer.quantize(weight.clone() if quantizer.keeps_operands else weight, dtype=dtype)
            if state.stateful:
                # It is never quantized again, and the quantizer holds the state as it is now.
                kept.update_quantizer(None)
            self._quantized_weight = kept
        return self._quantized_weight

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._quantized_weight = None
        weight: Any = self._parameters.get("weight")
        without_values = self.weight.is_meta
        kept = _moved(weight, fn) if isinstance(weight, QuantizedTensor) else None
        if kept is None or kept.is_meta is not without_values:
            super()._apply(fn if kept is None else lambda t: kept if t is weight else fn(t), recurse)  # type: ignore[no-untyped-call]
        else:
            # torch swaps a parameter of a subclass for another one, which has neither its attributes nor its hooks.
            # A plain parameter is given new data, and so is this one.
            if kept is not weight:
                weight.data = kept
            if weight.grad is not None:
                weight.grad.data = fn(weight.grad)
            self._parameters["weight"] = None
            try:
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            finally:
                self._parameters["weight"] = weight
        if without_values and not self.weight.is_meta:
            self._share_shards()
        return self

    def reset_parameters(self) -> None:
        """Initialize the weight and the bias again, and whatever a stateful recipe has learnt of them."""
        super().reset_parameters()
        state: Any = self._modules.get("recipe_state")
        if state is not None:
            state.reset()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        before = local_tensor(self.weight)
        fill_in_states(self, state_dict, prefix, metadata)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._gather_as(before)
        enters_first(self)
        self._quantized_weight = None
        if self._recipe is not None or "recipe_state" in self._modules:
            return
        # The layer has no recipe yet; the region that brings one finds the loaded state here.
        own = f"{prefix}recipe_state."
        # Copied, because the caller's tensors may belong to a model that goes on training.
        loaded = {key.removeprefix(own): value.clone() for key, value in state_dict.items() if key.startswith(own)}
        if loaded:
            self._loaded_state = loaded
            unexpected[:] = [key for key in unexpected if not key.startswith(own)]

    def _gather_as(self, before: Any) -> None:
        """Have a weight that was put in the place of another one (``assign=True``) be gathered as that was."""
        weight: Any = self.weight
        local = local_tensor(weight)
        plain = not isinstance(local, QuantizedTensorStorage) and not hasattr(local, "high_precision")
        if not hasattr(before, "high_precision") or not plain:
            return
        made = type(before)(local.detach())
        if local is weight:
            self._parameters["weight"] = torch.nn.Parameter(made, requires_grad=weight.requires_grad)
        else:
            set_local_tensor(weight, made)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in (self._loaded_state or {}).items():
            destination[f"{prefix}recipe_state.{name}"] = value

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled.
        return self.__dict__ | {"_last": None}

    def _label(self) -> str:
        return f"Linear {self.name!r}" if self.name else "Linear"

    def extra_repr(self) -> str:
        recipe = "" if self._recipe is None else f", recipe={self._recipe.name or type(self._recipe).__name__}"
        return super().extra_repr() + recipe
