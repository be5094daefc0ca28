"""The plan of a layer: everything that does not change between its calls, decided once. (A product
decides which kernels compute it at its first call.)

::

    Linear.forward -> resolve_call      what the call runs under: recipe, state, microbatch
                   -> plan_for          how it computes: operands checked, six functions chosen
                   -> enter_step        for states that remember: the pass is one of a step
                   -> quantized_linear  quantizes, multiplies, saves for backward

A plan serves calls of one kind: equal shapes, dtypes and devices, the same gradients, the same
settings. The layer's binding keeps its plans; a layer that gets another state, or moves, forgets
them. Compiled code makes one while it is traced, whose functions are operators.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ottava.gemm import GemmType, LayerProduct, multiply
from ottava.gemm.operand import Matrix, stored
from ottava.kernels import backends
from ottava.kernels.direct import PLAIN_TYPES
from ottava.kernels.table import rounded
from ottava.nn.call import Call, Recording
from ottava.nn.checks import autocast_dtype, check_plain_operands, checked_dtype
from ottava.nn.layer import Layer
from ottava.recipes.backward import HIGH_PRECISION, QUANTIZED, Reads
from ottava.recipes.mixed import MixedState
from ottava.recipes.state import RecipeState
from ottava.tensors.operand import Operand
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import any_autocast_enabled, is_exporting

Tensor = torch.Tensor
Quantized = Operand | QuantizedTensorStorage
Quantize = Callable[[Tensor], Quantized]
#: Returns the quantizer of one tensor of a layer.
Lookup = Callable[[], Quantizer]
#: A layer keeps at most this many plans, because batches of texts have ever new lengths.
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
        quantize_weight: ``w [N, K]``: rows for fprop; columns for dgrad, if that reads them. None
            for a weight that is quantized already.
        quantize_grad_output: ``dy [M, N]``: rows for dgrad, columns for wgrad, each if its product
            is computed and reads it. None if neither is needed.
        fprop: ``(x, w, bias) -> y [M, N]``.
        dgrad: ``(dy, w) -> dx [M, K]``.
        wgrad: ``(dy, x) -> dw [N, K]``; added to ``out`` where that is given.
        state: the recipe's state.
        may_count_clamps: whether these calls are an evaluation in which the state may count the
            elements that it clamps.
        dtype: of the products, and the nominal dtype of the operands.
        amp_dtype: of torch.autocast; None outside of it.
        x_needs_grad, w_needs_grad: whether the input, and the weight, get a gradient.
        saved_input: what is saved of the input, by a word of :mod:`ottava.recipes.backward`; None
            for nothing.
        saved_weight: the same of the weight. One that lives in FP8 is saved as itself, with the
            word of high precision.
        wgrad_reads_quantized_dy: whether wgrad reads a quantized ``dy``.
        x_shape, x_dtype, w_dtype: the shape and the dtypes of the gradients.
    """

    quantize_input: Quantize
    quantize_weight: Quantize | None
    quantize_grad_output: Quantize | None
    fprop: Product
    dgrad: Product
    wgrad: Product
    state: RecipeState
    may_count_clamps: bool
    dtype: torch.dtype
    amp_dtype: torch.dtype | None
    x_needs_grad: bool
    w_needs_grad: bool
    saved_input: str | None
    saved_weight: str | None
    wgrad_reads_quantized_dy: bool
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
    """The layer's plan for a call; the first call of a kind makes it.

    Args:
        call: which has a state.
        input: ``[*, K]``.
        weight: ``[N, K]``.
        bias: ``[N]``, or None.
        compiling: whether a compiler traces the call.

    Raises:
        ShapeError, DeviceError, DTypeError: the operands do not fit.
        UsageError: one is a DTensor.
    """
    amp_dtype = None
    if compiling or any_autocast_enabled():
        amp_dtype = autocast_dtype(weight, compiling)
    if compiling or type(input) not in PLAIN_TYPES or input.is_nested:
        # The sizes of a traced tensor need not be numbers, a nested tensor has none, and a subclass
        # may compute its own.
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
    """Everything that a plan depends on: calls for which it is equal have the same plan."""
    gradients = torch.is_grad_enabled()
    return (
        call.recording,
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
    x_needs_grad = gradients and input.requires_grad
    w_needs_grad = gradients and weight.requires_grad
    usages = _usages(state.backward_reads, x_needs_grad, w_needs_grad)
    if compiling:
        _read_numbers(state, usages)
    is_quantized = isinstance(weight, QuantizedTensorStorage)
    maker = _QuantizationMaker(weight.device, dtype, _asks_each_time(state, compiling))
    quantize_input = maker.quantization(_lookup(call, state, "input", usages))
    quantize_weight = quantize_grad_output = None
    if not is_quantized:
        quantize_weight = maker.quantization(_lookup(call, state, "weight", usages))
    rows_of_dy, columns_of_dy = usages["grad_output"]
    if rows_of_dy or columns_of_dy:
        quantize_grad_output = maker.quantization(
            partial(state.quantizer, "grad_output", rowwise=rows_of_dy, columnwise=columns_of_dy)
        )
    fprop, dgrad, wgrad = _products(dtype, layer.fuse_wgrad_accumulation, compiling)
    read_of_x = state.backward_reads["wgrad", "input"]
    read_of_w = state.backward_reads["dgrad", "weight"]
    if read_of_x != QUANTIZED:
        wgrad = _of_values(wgrad, dtype)
    if read_of_w != QUANTIZED:
        dgrad = _of_values(dgrad, dtype)
    saved_weight = HIGH_PRECISION if is_quantized else read_of_w
    return Plan(
        quantize_input=quantize_input,
        quantize_weight=quantize_weight,
        quantize_grad_output=quantize_grad_output,
        fprop=fprop,
        dgrad=dgrad,
        wgrad=wgrad,
        state=state,
        may_count_clamps=call.recording is Recording.CLAMPS,
        dtype=dtype,
        amp_dtype=amp_dtype,
        x_needs_grad=x_needs_grad,
        w_needs_grad=w_needs_grad,
        saved_input=read_of_x if w_needs_grad else None,
        saved_weight=saved_weight if x_needs_grad else None,
        wgrad_reads_quantized_dy=columns_of_dy,
        x_shape=input.shape,
        x_dtype=input.dtype,
        w_dtype=weight.dtype,
    )


def _asks_each_time(state: RecipeState, compiling: bool) -> bool:
    """Whether a plan asks the state for a quantizer at each quantization, and not only once.

    A state may give another quantizer each time. Compiled code has to read the buffers of a state
    in the graph that quantizes, which is the forward or the backward one.
    """
    return compiling or (state.stateful and not state.has_fixed_quantizers)


def _usages(reads: Reads, x_needs_grad: bool, w_needs_grad: bool) -> dict[str, tuple[bool, bool]]:
    """Tensor type -> whether a product reads its rows, and whether one reads its columns."""
    return {
        "input": (True, w_needs_grad and reads["wgrad", "input"] == QUANTIZED),
        "weight": (True, x_needs_grad and reads["dgrad", "weight"] == QUANTIZED),
        "grad_output": (
            x_needs_grad and reads["dgrad", "grad_output"] == QUANTIZED,
            w_needs_grad and reads["wgrad", "grad_output"] == QUANTIZED,
        ),
    }


def _lookup(
    call: Call, state: RecipeState, tensor_type: str, usages: Mapping[str, tuple[bool, bool]]
) -> Lookup:
    """Asks the state for the quantizer of the input or of the weight, with its usages."""
    rowwise, columnwise = usages[tensor_type]
    if call.recording is Recording.CLAMPS:
        return partial(
            state.evaluation_quantizer, tensor_type, rowwise=rowwise, columnwise=columnwise
        )
    return partial(
        state.quantizer,
        tensor_type,
        rowwise=rowwise,
        columnwise=columnwise,
        recording=call.records,
    )


class _QuantizationMaker(NamedTuple):
    """Makes the functions of a plan that quantize.

    Attributes:
        device: of the matrices.
        dtype: the nominal dtype of the results.
        asks_each_time: whether a quantizer is looked up at each quantization, or once, now.
    """

    device: torch.device
    dtype: torch.dtype
    asks_each_time: bool

    def quantization(self, lookup: Lookup) -> Quantize:
        """The function that quantizes a matrix by the quantizer that ``lookup`` returns."""
        device, dtype = self.device, self.dtype
        if not self.asks_each_time:
            return lookup().quantization(device, dtype)

        def look_up_and_quantize(matrix: Tensor) -> Quantized:
            quantizer = lookup()
            if quantizer.custom:
                # Kernels read a matrix as memory holds it, but a compiler may fuse a user's
                # quantizer with the code that computes the matrix, and leave out its rounding.
                matrix = rounded(matrix)
            return quantizer.quantization(device, dtype)(matrix)

        return look_up_and_quantize


def _products(
    dtype: torch.dtype, accumulates: bool, compiling: bool
) -> tuple[Product, Product, Product]:
    """The products of a plan: fprop, dgrad and wgrad.

    Args:
        dtype: of the results.
        accumulates: whether wgrad is called with the tensor to add to.
        compiling: whether the products are operators, which a compiler sees.
    """
    if compiling:
        return (
            _operator("fprop", dtype, use_split_accumulator=False),
            _operator("dgrad", dtype, use_split_accumulator=True),
            _operator("wgrad", dtype, use_split_accumulator=True),
        )
    return (
        LayerProduct("fprop", dtype, use_split_accumulator=False),
        LayerProduct("dgrad", dtype),
        LayerProduct("wgrad", dtype, accumulates=accumulates),
    )


def _operator(gemm_type: GemmType, dtype: torch.dtype, use_split_accumulator: bool) -> Product:
    """A product in compiled code, which adds to ``out`` wherever that is given."""

    def product(
        a: Matrix, b: Matrix, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return multiply(a, b, gemm_type, dtype, bias, out, out is not None, use_split_accumulator)

    return product


def _of_values(product: Product, dtype: torch.dtype) -> Product:
    """A product of the values of its second operand, quantized or not, in ``dtype``."""

    def product_of_values(
        a: Matrix, b: Matrix, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        matrix = stored(b)
        if isinstance(matrix, QuantizedTensorStorage):
            return product(a, matrix.dequantize(dtype), bias, out)
        return product(a, matrix.to(dtype), bias, out)

    return product_of_values


def _read_numbers(state: RecipeState, usages: Mapping[str, tuple[bool, bool]]) -> None:
    """Read the floats of the quantizers that a layer is about to use.

    Under ``torch.compile(dynamic=True)`` a float is an input of the graph. The compiler keeps a
    float that is first read inside an autograd function as a part of that function's graph, and
    fails when the next call reads it.

    Args:
        usages: tensor type -> whether rows, and whether columns are quantized.
    """
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
            # Dynamo records the read only if the value is used.
            value + 0.0
