"""``Linear``: ``torch.nn.Linear`` whose GEMMs run on quantized operands."""

import os
from typing import Self

import torch

from ottava.errors import DTypeError, UsageError
from ottava.kernels.direct import in_dual_level, is_direct
from ottava.kernels.products import without_autocast
from ottava.nn import function
from ottava.nn.binding import Binding
from ottava.nn.call import Call, resolve_call
from ottava.nn.checks import (
    autocast_dtype,
    check_not_parallel,
    check_use,
    main_grad_of,
)
from ottava.nn.entry import enter_step
from ottava.nn.function import InspectedForward, IntoMainGrad, quantized_linear
from ottava.nn.high_precision import high_precision_linear
from ottava.nn.layer import label_of, owned_state
from ottava.nn.loading import fill_in_states
from ottava.nn.plan import plan_for
from ottava.nn.weight import TensorFunction, apply_to_layer, gather_as, quantize_new_weight
from ottava.recipes.base import Recipe, as_recipe, asked_once
from ottava.recipes.state import RecipeState
from ottava.tensors.declaration import check_flag
from ottava.tensors.dequantized_view import DequantizedView
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor
from ottava.torch_private import local_tensor


class Linear(torch.nn.Linear):
    """``y = x · weightᵀ + bias`` with the GEMMs of forward and backward on quantized operands.

    Without a bound recipe, outside any :class:`~ottava.autocast` region, it computes in high
    precision as ``torch.nn.Linear`` does.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        name: given to quantizer factories in their role.
        recipe: a recipe to bind, or the name of one.
        fuse_wgrad_accumulation: the gradient of the weight is added to ``weight.main_grad``, a
            tensor of the weight's shape (float32, say) that its owner makes and clears;
            ``weight.grad`` stays as it is. Under a recipe the sum is rounded once; in high
            precision what torch computes is added. An attribute of the same name can be set later.
            Where the weight has ``grad_added_to_main_grad``, that becomes True.

    Shapes: input ``[*, in_features]``, output ``[*, out_features]``; any leading dimensions, empty
    ones too.
    """

    name: str
    _binding: Binding
    #: Whether each gather of a sharded weight brings data of rows and of columns, because
    #: activation checkpointing runs forward passes inside of the backward pass.
    recomputes: bool = False
    fuse_wgrad_accumulation: bool = False
    #: Whether the weight is stored ``[in_features, out_features]``; its gradient and ``main_grad``
    #: are then, too.
    weight_is_transposed: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "",
        recipe: Recipe | str | os.PathLike[str] | None = None,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        check_flag("fuse_wgrad_accumulation", fuse_wgrad_accumulation)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.__dict__.update(name=name, _binding=Binding())
        with asked_once():
            quantize_new_weight(self)
            self.bind(recipe)

    @classmethod
    def from_linear(cls, linear: torch.nn.Module, name: str = "") -> "Linear":
        """This class around an existing layer: same parameters (not copies), hooks, mode and
        attributes."""
        if not isinstance(linear, torch.nn.Module):
            raise DTypeError(
                f"the layer is a {type(linear).__name__}", expected="a torch.nn.Module"
            )
        layer = cls.__new__(cls)
        layer.__dict__ = linear.__dict__ | {"name": name, "_binding": Binding()}
        return layer

    @property
    def recipe(self) -> Recipe | None:
        """The bound recipe."""
        return self._binding.recipe

    def bind(self, recipe: Recipe | str | os.PathLike[str] | None) -> None:
        """Bind a recipe (an object, or a name for :func:`~ottava.get_recipe`), or None for high
        precision."""
        if recipe is None:
            self._binding.bind(self, None, None)
            return
        bound = as_recipe(recipe)
        self._binding.bind(self, bound, self._binding.prepare(self, bound))

    def forward(self, input: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Apply the layer.

        Args:
            input: ``[*, in_features]``, on the device of the weight.
            is_first_microbatch: True quantizes the weight and keeps it, False uses what was kept,
                None quantizes it for this call, or as a :class:`~ottava.microbatch` block around it
                says.

        Raises:
            ShapeError, DTypeError, DeviceError: the input does not fit the layer.
            UsageError: the input or the weight is a DTensor, as of a tensor parallel plan, and is
                to be quantized.
            OptionError: ``is_first_microbatch`` is something else.
        """
        # Whether a compiler, a mode, a profiler or a transform observes what is called.
        observed = not is_direct() or in_dual_level()
        compiling = observed and torch.compiler.is_compiling()
        call = resolve_call(self, input, is_first_microbatch, observed, compiling)
        inspection = main_grad = None
        if function.inspector is not None:
            inspection = function.inspector(self)
        if self.fuse_wgrad_accumulation:
            main_grad = main_grad_of(self, torch.is_grad_enabled())
        if call.state is None:
            return self._high_precision(input, call, inspection, main_grad)
        weight, bias = self._operands()
        # Also for a pass in high precision, because the plan's making checks the operands.
        plan = plan_for(self, call, input, weight, bias, compiling)
        in_high_precision = call.calibrating or _is_in_high_precision(weight, call)
        if observed and not in_high_precision:
            check_use(self, input, weight, bias)
        if call.state.stateful:
            # After the checks, so that a call that is refused leaves all scales as they were.
            enter_step(self, call, compiling)
            in_high_precision = in_high_precision or call.state.is_high_precision_step()
            if not compiling:
                _take_quantizer(weight, call.state)
        if call.calibrating:
            self._calibrate(input, call.state)
        if in_high_precision:
            return self._high_precision(input, call, inspection, main_grad)
        if isinstance(input, (QuantizedTensorStorage, DequantizedView)):
            input = input.dequantize()
        microbatch_weight = None
        if isinstance(weight, QuantizedTensor):
            self._prepare_primary(weight, call, plan.state, compiling)
        elif call.first is not None:
            microbatch_weight = self._binding.weight_for_microbatch(call, weight, plan.dtype)
        if inspection is not None:
            with without_autocast(weight.device.type):
                return inspection(
                    input, weight, bias, call, plan.dtype, microbatch_weight, main_grad, observed
                )
        return quantized_linear(input, weight, bias, plan, microbatch_weight, main_grad, observed)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight as ``[out_features, in_features]``, and the bias."""
        # A module searches several places for an attribute. (Parametrizations put these elsewhere.)
        own = self._parameters
        weight: torch.Tensor | None = own.get("weight")
        if weight is None:
            weight = self.weight
        if self.weight_is_transposed:
            weight = weight.t()
        if "bias" in own:
            return weight, own["bias"]
        return weight, self.bias

    def _calibrate(self, input: torch.Tensor, state: RecipeState) -> None:
        """Have the state observe the operands of a pass in high precision."""
        for name, tensor in (("input", input), ("weight", self._plain_weight())):
            quantizer = state.quantizer(name, rowwise=True, columnwise=True)
            quantizer.calibrate(tensor.detach())

    def _prepare_primary(
        self, weight: QuantizedTensor, call: Call, state: RecipeState, compiling: bool
    ) -> None:
        """Tell the state that this pass uses a weight, and rebuild what the weight derives from its
        bytes, such as a transpose."""
        state.use_gathered(weight, recording=call.records)
        if torch.is_grad_enabled() and not compiling and weight.rebuilds_derived:
            with torch.no_grad():
                weight.rebuild_derived()

    def _matrix(self) -> torch.Tensor:
        """The weight as ``[out_features, in_features]``."""
        if self.weight_is_transposed:
            return self.weight.t()
        return self.weight

    def _plain_weight(self) -> torch.Tensor:
        weight = self._matrix()
        if isinstance(weight, QuantizedTensorStorage):
            return weight.dequantize()
        return weight

    def _high_precision(
        self,
        input: torch.Tensor,
        call: Call,
        inspection: InspectedForward | None,
        main_grad: torch.Tensor | None,
    ) -> torch.Tensor:
        if inspection is not None:
            call = call._replace(state=None)
            dtype = autocast_dtype(self.weight, False) or input.dtype
            return inspection(input, self._matrix(), self.bias, call, dtype, None, main_grad, True)
        if main_grad is None:
            weight = self._plain_weight()
        else:
            # The tuple hides main_grad from autograd.
            matrix = self._matrix()
            weight = IntoMainGrad.apply(matrix, (main_grad,))  # type: ignore[no-untyped-call]
        return high_precision_linear(
            input, weight, self.bias, autocast_dtype(weight, torch.compiler.is_compiling())
        )

    def _apply(self, fn: TensorFunction, recurse: bool = True) -> Self:
        self._binding.microbatch_weight = None
        self._binding.plans.clear()
        apply = super()._apply
        apply_to_layer(self, fn, lambda fn: apply(fn, recurse))  # type: ignore[no-untyped-call]
        return self

    def _replicate_for_data_parallel(self) -> Self:
        if "recipe_state" in self._modules:
            what = (
                f"torch.nn.DataParallel copies {label_of(self)} in each pass, and what its "
                f"copies record is lost"
            )
            raise UsageError(
                what, "one process for each device", "use torch.nn.parallel.DistributedDataParallel"
            )
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return replica

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if "_binding" in self.__dict__ and self.recipe is not None:
            check_not_parallel(self, name, param)
        super().register_parameter(name, param)
        if "_binding" in self.__dict__:
            # The quantized weight for microbatches is of the former parameter.
            self._binding.microbatch_weight = None
            self._binding.warn_of_mismatch(self, None, self._binding.state, 4)
            if name == "weight":
                self._binding.introduce_weight(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # In a copy the quantizer of the weight still knows the state of the original.
        self._binding.introduce_weight(self)

    def reset_parameters(self) -> None:
        """Initialize the weight and the bias again, and whatever a stateful recipe has learnt of
        them."""
        super().reset_parameters()
        state = owned_state(self)
        if state is not None:
            state.reset()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        metadata: dict[str, object],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        before = local_tensor(self.weight)
        fill_in_states(self, state_dict, prefix, metadata)
        state = owned_state(self)
        if state is not None and isinstance(before, QuantizedTensorStorage):
            state.expect_weight(state_dict, f"{prefix}recipe_state.")
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )
        gather_as(self, before)
        self._binding.microbatch_weight = None
        self._binding.load(self, state_dict, f"{prefix}recipe_state.", unexpected)

    def _save_to_state_dict(
        self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in (self._binding.loaded or {}).items():
            destination[f"{prefix}recipe_state.{name}"] = value

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.recipe is None:
            return text
        return f"{text}, recipe={self.recipe._label}"


def _take_quantizer(weight: torch.Tensor, state: RecipeState) -> None:
    """Give an FP8-primary weight the quantizer that its state has for it."""
    if not isinstance(weight, QuantizedTensor):
        return
    quantizer = state.weight_quantizer(weight)
    if quantizer is not None:
        weight.update_quantizer(quantizer)


def _is_in_high_precision(weight: torch.Tensor, call: Call) -> bool:
    """Whether a pass computes in high precision, because none of its quantizers quantizes.

    False for a weight that is a storage all the same: that of microbatches, or an FP8-primary one.
    """
    if call.state is None or not call.state.in_high_precision or call.first is not None:
        return False
    return not isinstance(weight, QuantizedTensor)
