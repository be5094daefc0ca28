"""The plan of a layer: what does not change between its calls, decided once.

::

    Linear.forward -> resolve_call      what the call runs under: recipe, state, microbatch
                   -> plan_for          how it computes: operands checked, six functions chosen
                   -> enter_step        for states that remember: the pass is one of a step
                   -> quantized_linear  quantizes, multiplies, saves for backward

A plan serves calls of one kind: equal shapes, dtypes and devices, the same gradients, the same
settings. The layer's binding keeps its plans; a layer that gets another state, or moves, forgets
them. Compiled code makes one while it is traced, whose functions are operators.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ottava.gemm import GemmType, LayerProduct, multiply
from ottava.gemm.operand import Matrix
from ottava.kernels import backends
from ottava.kernels.table import rounded
from ottava.nn.call import Call, Observation
from ottava.nn.checks import autocast_dtype, check_plain_operands, checked_dtype
from ottava.nn.layer import Layer
from ottava.recipes.mixed import MixedState
from ottava.recipes.state import RecipeState
from ottava.tensors.operand import Operand
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import any_autocast_enabled, is_exporting

Tensor = torch.Tensor
Quantize = Callable[[Tensor], Operand | QuantizedTensorStorage]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
#: Sizes that never repeat, as those of texts, would otherwise make more and more plans.
LIMIT = 64


class Product(Protocol):
    """One of the three products, of operands in the order of :func:`ottava.gemm.gemm`."""

    def __call__(
        self, a: Matrix, b: Matrix, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...


class Plan(NamedTuple):
    """How a layer computes calls of one kind, forward and backward.

    Attributes:
        quantize_input: ``x [M, K]``: rows for fprop; columns for wgrad, if that reads them.
        quantize_weight: ``w [N, K]``: rows for fprop; columns for dgrad, if there is one. None for
            a weight that is quantized already.
        quantize_grad_output: ``dy [M, N]``: rows for dgrad, columns for wgrad, of these what the
            wanted gradients need. None if they need neither.
        fprop: ``(x, w, bias) -> y [M, N]``.
        dgrad: ``(dy, w) -> dx [M, K]``.
        wgrad: ``(dy, x) -> dw [N, K]``; added to ``out`` where that is given.
        state: the recipe's state.
        evaluating: whether the state counts what these calls clamp.
        dtype: of the products, and the nominal dtype of the operands.
        amp_dtype: of torch.autocast; None outside of it.
        x_needs, w_needs: whether the input, and the weight, get a gradient.
        saves_input: whether wgrad reads the input in high precision.
        wgrad_quantized: whether wgrad reads a quantized ``dy``.
        x_shape, x_dtype, w_dtype: the shape and the dtypes of the gradients.
    """

    quantize_input: Quantize
    quantize_weight: Quantize | None
    quantize_grad_output: Quantize | None
    fprop: Product
    dgrad: Product
    wgrad: Product
    state: RecipeState
    evaluating: bool
    dtype: torch.dtype
    amp_dtype: torch.dtype | None
    x_needs: bool
    w_needs: bool
    saves_input: bool
    wgrad_quantized: bool
    x_shape: torch.Size
    x_dtype: torch.dtype
    w_dtype: torch.dtype


def plan_for(
    layer: Layer,
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    compiling: bool,
) -> Plan:
    """The layer's plan for a call, made if this is the first of its kind.

    Args:
        call: which has a state.
        input: ``[*, K]``.
        weight: ``[N, K]``.
        bias: ``[N]``, or None.
        compiling: whether the call is traced by a compiler.

    Raises:
        ShapeError, DeviceError, DTypeError: the operands do not fit.
        UsageError: one is a DTensor.
    """
    amp_dtype = None
    if compiling or any_autocast_enabled():
        amp_dtype = autocast_dtype(weight, compiling)
    if compiling or type(input) not in _PLAIN or input.is_nested:
        # The sizes of a traced tensor need not be numbers, and those of a nested one are none.
        return _make_plan(layer, call, input, weight, bias, amp_dtype, compiling)
    kind = _kind_of(layer, call, input, weight, bias, amp_dtype)
    plans: dict[Hashable, Plan] = layer._binding.plans
    plan = plans.get(kind)
    if plan is None:
        plan = _make_plan(layer, call, input, weight, bias, amp_dtype, compiling)
        if len(plans) >= LIMIT:
            plans.clear()
        plans[kind] = plan
    return plan


def _kind_of(
    layer: Layer,
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    amp_dtype: torch.dtype | None,
) -> Hashable:
    """What calls have in common that one plan serves: all that a plan is decided by."""
    gradients = torch.is_grad_enabled()
    return (
        call.observation,
        input.shape,
        input.dtype,
        input.device,
        input.layout,
        gradients and input.requires_grad,
        type(weight),
        weight.shape,
        weight.dtype,
        weight.device,
        gradients and weight.requires_grad,
        None if bias is None else (bias.shape, bias.dtype, bias.device, bias.layout),
        amp_dtype,
        layer.fuse_wgrad_accumulation,
        backends.changes,
    )


def _make_plan(
    layer: Layer,
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    amp_dtype: torch.dtype | None,
    compiling: bool,
) -> Plan:
    """Check the operands of a call, and decide how calls like it compute."""
    check_plain_operands(layer, ("input", input), ("weight", weight))
    dtype = checked_dtype(layer, input, weight, bias, amp_dtype)
    state = call.state
    assert state is not None
    # An exported program has no backward pass.
    gradients = torch.is_grad_enabled() and not (compiling and is_exporting())
    x_needs, w_needs = gradients and input.requires_grad, gradients and weight.requires_grad
    if compiling:
        _read_numbers(state, x_needs, w_needs)
    saves_input = w_needs and "input" in state.wgrad_unquantized
    wgrad_quantized = w_needs and "grad_output" not in state.wgrad_unquantized
    looks_up_later = compiling or (state.stateful and not state.keeps_quantizers)
    quantize_by = partial(
        _looking_up_later if looks_up_later else _looking_up_now, weight.device, dtype
    )
    columns_of_x = w_needs and not saves_input
    quantize_weight = quantize_grad_output = None
    if not isinstance(weight, QuantizedTensorStorage):
        quantize_weight = quantize_by(partial(_quantizer, call, state, "weight", x_needs))
    if x_needs or wgrad_quantized:
        quantize_grad_output = quantize_by(
            partial(state.quantizer, "grad_output", rowwise=x_needs, columnwise=wgrad_quantized)
        )
    product = _operator if compiling else LayerProduct
    return Plan(
        quantize_input=quantize_by(partial(_quantizer, call, state, "input", columns_of_x)),
        quantize_weight=quantize_weight,
        quantize_grad_output=quantize_grad_output,
        fprop=product("fprop", dtype, use_split_accumulator=False),
        dgrad=product("dgrad", dtype),
        wgrad=product("wgrad", dtype, accumulates=layer.fuse_wgrad_accumulation),
        state=state,
        evaluating=call.observation is Observation.COUNTED,
        dtype=dtype,
        amp_dtype=amp_dtype,
        x_needs=x_needs,
        w_needs=w_needs,
        saves_input=saves_input,
        wgrad_quantized=wgrad_quantized,
        x_shape=input.shape,
        x_dtype=input.dtype,
        w_dtype=weight.dtype,
    )


def _quantizer(call: Call, state: RecipeState, tensor_type: str, columnwise: bool) -> Quantizer:
    """The quantizer of the input or of the weight: rows for fprop and, with ``columnwise``, columns
    for the product of the backward pass that reads the tensor."""
    if call.observation is Observation.COUNTED:
        return state.evaluation_quantizer(tensor_type, rowwise=True, columnwise=columnwise)
    return state.quantizer(
        tensor_type, rowwise=True, columnwise=columnwise, recording=call.recording
    )


def _looking_up_now(
    device: torch.device, dtype: torch.dtype, quantizer: Callable[[], Quantizer]
) -> Quantize:
    """Looks up the quantizer now."""
    return quantizer().quantization(device, dtype)


def _looking_up_later(
    device: torch.device, dtype: torch.dtype, quantizer: Callable[[], Quantizer]
) -> Quantize:
    """Looks up the quantizer at every call, because the state may give a new one, and because
    compiled code has to take the buffers of a state in the graph that quantizes: the forward or the
    backward one."""
    return partial(_look_up_and_quantize, device, dtype, quantizer)


def _look_up_and_quantize(
    device: torch.device, dtype: torch.dtype, quantizer: Callable[[], Quantizer], matrix: Tensor
) -> Operand | QuantizedTensorStorage:
    own = quantizer()
    if own.custom:
        # Kernels read a matrix as memory holds it, but a compiler may fuse a user's quantizer with
        # what made the matrix, and leave out its rounding.
        matrix = rounded(matrix)
    return own.quantization(device, dtype)(matrix)


def _operator(
    gemm_type: GemmType,
    dtype: torch.dtype,
    *,
    accumulates: bool = False,
    use_split_accumulator: bool = True,
) -> Product:
    """A product as compiled code has it. :func:`multiply` adds wherever ``out`` is given, so that
    ``accumulates`` says nothing new."""

    def product(
        a: Matrix, b: Matrix, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return multiply(a, b, gemm_type, dtype, bias, out, out is not None, use_split_accumulator)

    return product


def _read_numbers(state: RecipeState, x_needs: bool, w_needs: bool) -> None:
    """Read the floats of the quantizers that a layer is about to use.

    Under ``torch.compile(dynamic=True)`` a float is an input of the graph. The compiler keeps a
    float that is first read inside an autograd function as a part of that function's graph, and
    fails when the next call reads it.
    """
    usages = {
        "input": (True, w_needs),
        "weight": (True, x_needs),
        "grad_output": (x_needs, w_needs),
    }
    for name, (rowwise, columnwise) in usages.items():
        part = state.serving[name] if isinstance(state, MixedState) else state
        if not part.stateful and (rowwise or columnwise):
            _read_floats(
                part.quantizer(name, rowwise=rowwise, columnwise=columnwise, recording=False)
            )


def _read_floats(quantizer: Quantizer) -> None:
    for name in vars(quantizer):
        value = getattr(quantizer, name)
        if isinstance(value, Quantizer):
            _read_floats(value)
        elif isinstance(value, float):
            # An attribute is read when something is done with it.
            value + 0.0
