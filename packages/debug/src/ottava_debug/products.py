"""The three products of a layer, computed one by one, so that inspections can observe and modify
their tensors.

A watched layer gives the same results as other layers, bit for bit, unless an inspection changes
something.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ottava import debug, prepare_for_saving, restore_from_saved
from ottava.gemm import as_matrix, gemm
from ottava.kernels.products import without_autocast
from ottava.nn.call import Call
from ottava.nn.checks import autocast_dtype
from ottava.nn.function import (
    IntoMainGrad,
    note_added,
    quantized_linear,
    refusing_second_derivatives,
)
from ottava.nn.high_precision import high_precision_linear
from ottava.nn.plan import plan_for
from ottava.tensors import QuantizedTensorStorage
from ottava.torch_private import unsafe_view
from ottava_debug.operands import BY_COLUMN, OPERANDS, ROLES, TENSORS


class Inspection:
    """Observes one layer during one forward pass and its backward pass.

    Each method may be overridden. Methods that are called again when activations are recomputed get
    the same tensors.
    """

    #: The call of the pass, with its recipe, and whether activations are recomputed; set before the
    #: first product.
    call: Call = Call()
    #: The operands that products of the pass take quantized if nothing is modified; set with
    #: ``call``.
    quantized: frozenset[tuple[str, str]] = frozenset()

    def quantizes(self, gemm: str, tensor: str) -> bool:
        """Whether a product takes an operand quantized where the recipe does; otherwise the operand
        stays in high precision.

        Called once, before the forward pass.
        """
        return True

    def modifies(self, gemm: str, tensor: str) -> bool:
        """Whether :meth:`modify` may change this tensor.

        A layer with no quantized and no modified tensor is computed as a high-precision layer.
        Called once, before the forward pass.
        """
        return type(self).modify is not Inspection.modify

    def modify(
        self, gemm: str, tensor: str, values: torch.Tensor
    ) -> torch.Tensor | QuantizedTensorStorage:
        """The values that replace an operand or result of a product: ``values`` themselves, or
        others of the same shape and dtype.

        An operand may be replaced by a quantized tensor, with data for the product's usage.
        ``values`` must not be changed in place, because they may be the parameter.
        """
        return values

    def failed(self, gemm: str, tensor: str, values: torch.Tensor, error: Exception) -> None:
        """Called when the quantizer of an operand raises, once for each product that would take the
        operand; the error is raised afterwards."""

    def observe(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        """Called with each operand and result of a product, after :meth:`modify`, but not when the
        product is recomputed.

        Args:
            gemm: the product, a key of :data:`ottava_debug.operands.TENSORS`.
            tensor: the operand or result.
            values: a matrix in high precision: ``[*, K]`` for operands, ``[out, in]`` for a weight
                and its gradient.
            quantized: the quantized operand that the product takes; None for an operand in high
                precision, and for a result.
        """


#: ``watcher(layer)`` returns an inspection for the layer's forward pass that begins, or None.
Watcher = Callable[[Any], Inspection | None]
#: Whether the watcher may ever inspect layers with a name; compiled code of other layers stays in
#: one graph.
Selects = Callable[[str], bool]
_watches: "list[Watch]" = []
# Compiled code reads this, so torch compiles again when other layers are watched.
_generation = "0"


class Watch:
    """Watches layers from its creation until :meth:`close` or the end of a ``with`` block.

    Args:
        watcher: returns an inspection for a layer, or None.
        selects: whether layers with a name may ever be inspected; by default all may.
    """

    def __init__(self, watcher: Watcher, selects: Selects = lambda name: True) -> None:
        self.watcher = watcher
        self.selects = selects
        _watches.append(self)
        _changed()

    def close(self) -> None:
        """Stop watching; further calls do nothing."""
        _watches[:] = [watch for watch in _watches if watch is not self]
        _changed()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _changed() -> None:
    global _generation
    _generation = str(int(_generation) + 1)
    debug.set_inspector(_inspector if _watches else None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_be_inspected(name: str, generation: str) -> bool:
    return any(watch.selects(name) for watch in _watches)


def _inspector(layer: Any) -> Callable[..., torch.Tensor] | None:
    if torch.compiler.is_compiling():
        # A watcher's answer may change in the next step, so the watcher is called when the compiled
        # code runs.
        if _may_be_inspected(layer.name, _generation):
            return partial(_inspected_when_run, layer)
        return None
    inspections = _inspections(layer)
    return partial(_inspected_linear, layer, inspections) if inspections else None


def _inspections(layer: Any) -> list[Inspection]:
    inspections = []
    # This is a plain loop, because every layer comes here in each of its forward passes, watched or
    # not.
    for watch in _watches:
        inspection = watch.watcher(layer)
        if inspection is not None:
            inspections.append(inspection)
    return inspections


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _inspected_when_run(layer: Any, *arguments: Any) -> torch.Tensor:
    return _inspected_linear(layer, _inspections(layer), *arguments)


def _inspected_linear(
    layer: Any,
    inspections: list[Inspection],
    x: Any,
    weight: Any,
    bias: torch.Tensor | None,
    call: Any,
    dtype: torch.dtype,
    microbatch_weight: Any,
    main_grad: torch.Tensor | None,
    observed: bool,
) -> torch.Tensor:
    products = _Products(inspections, call, dtype, main_grad)
    if not products.modified and not any(products.quantized_operands.values()):
        return _in_high_precision(products, x, weight, bias)
    if not inspections:
        plan = plan_for(layer, call, x, weight, bias, compiling=False)
        return quantized_linear(x, weight, bias, plan, microbatch_weight, main_grad, observed)
    with without_autocast(x.device.type):
        arguments = dense(x), weight, bias, products, microbatch_weight, torch.is_grad_enabled()
        return _InspectedLinear.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def dense(values: Any) -> Any:
    """``values``, dequantized if they are quantized."""
    return values.dequantize() if isinstance(values, QuantizedTensorStorage) else values


def quantizer_of(state: Any, gemm_type: str, tensor: str) -> Any:
    """The quantizer of an operand for one product alone; it reads the state of the recipe and does
    not change it."""
    by_column = (gemm_type, tensor) in BY_COLUMN
    return state.quantizer(
        ROLES[tensor], rowwise=not by_column, columnwise=by_column, recording=False
    )


class _Products:
    """Computes the products of one pass, with the inspections."""

    def __init__(
        self,
        inspections: Sequence[Inspection],
        call: Any,
        dtype: torch.dtype,
        main_grad: torch.Tensor | None,
    ) -> None:
        self.inspections = inspections
        self.call = call
        self.state = call.state
        self.dtype = dtype
        self.main_grad = main_grad
        for inspection in inspections:
            inspection.call = call
        # This is decided once, because the tensors saved for the backward pass depend on it.
        self.quantized_operands = {pair: self._quantizes(*pair) for pair in OPERANDS}
        quantized = frozenset(pair for pair, wanted in self.quantized_operands.items() if wanted)
        for inspection in inspections:
            inspection.quantized = quantized
        self.modified = {
            (gemm_type, tensor)
            for gemm_type, tensors in TENSORS.items()
            for tensor in tensors
            if any(inspection.modifies(gemm_type, tensor) for inspection in inspections)
        }

    def _quantizes(self, gemm_type: str, tensor: str) -> bool:
        if self.state is None or (
            gemm_type == "wgrad" and ROLES[tensor] in self.state.wgrad_unquantized
        ):
            return False
        return all(inspection.quantizes(gemm_type, tensor) for inspection in self.inspections)

    def quantized(
        self, tensor: str, values: Any, rows_of: str, columns_of: str, needed: bool = True
    ) -> Any:
        """The operand, quantized by rows for one product and, if ``needed``, by columns for another
        one; None where both take it in high precision."""
        rowwise = self.quantized_operands.get((rows_of, tensor), False)
        columnwise = needed and self.quantized_operands.get((columns_of, tensor), False)
        if isinstance(values, QuantizedTensorStorage) or not (rowwise or columnwise):
            return values if rowwise or columnwise else None
        options: dict[str, Any] = {} if tensor == "gradient" else {"recording": self.call.records}
        quantizer = self.state.quantizer(
            ROLES[tensor], rowwise=rowwise, columnwise=columnwise, **options
        )
        try:
            return quantizer.quantize_impl(values, self.dtype)
        except Exception as error:
            for inspection in self.inspections:
                for gemm_type in [rows_of] * rowwise + [columns_of] * columnwise:
                    inspection.failed(gemm_type, tensor, values, error)
            raise

    def operand(
        self, gemm_type: str, tensor: str, values: Any, quantized: Any, observed: bool = True
    ) -> Any:
        """The operand that a product takes, after modification."""
        operand = plain = dense(values)
        if (gemm_type, tensor) in self.modified:
            operand = self._modified(gemm_type, tensor, plain)
        if not self.quantized_operands[gemm_type, tensor]:
            quantized = None
            operand = dense(operand)
        elif isinstance(operand, QuantizedTensorStorage):
            quantized = operand
            operand = plain
        elif operand is not plain:
            quantizer = quantizer_of(self.state, gemm_type, tensor)
            quantized = quantizer.quantize_impl(operand, self.dtype)
        if observed:
            self.observe(gemm_type, tensor, operand, quantized)
        return operand.to(self.dtype) if quantized is None else quantized

    def multiply(
        self, gemm_type: Any, left: Any, right: Any, observed: bool = True, **options: Any
    ) -> torch.Tensor:
        """The product of two operands, after modification."""
        product = gemm(left, right, gemm_type, out_dtype=self.dtype, **options)
        result = TENSORS[gemm_type][2]
        if (gemm_type, result) in self.modified:
            product = self._modified(gemm_type, result, product)
        if observed:
            self.observe(gemm_type, result, product)
        return product

    def _modified(self, gemm_type: str, tensor: str, values: torch.Tensor) -> Any:
        current: Any = values
        for inspection in self.inspections:
            plain = dense(current)
            changed = inspection.modify(gemm_type, tensor, plain)
            if changed is not plain:
                current = changed
        return current

    def observe(
        self, gemm_type: str, tensor: str, values: torch.Tensor, quantized: Any = None
    ) -> None:
        """Have the inspections observe an operand or a result."""
        for inspection in self.inspections:
            inspection.observe(gemm_type, tensor, values, quantized)


def _in_high_precision(
    products: _Products, x: Any, weight: Any, bias: torch.Tensor | None
) -> torch.Tensor:
    """The output of a layer with no quantized and no modified tensor, by core's own functions."""
    amp_dtype = autocast_dtype(weight, False)
    main_grad = products.main_grad
    region: AbstractContextManager[object] = nullcontext()
    if products.state is not None and {x.dtype, weight.dtype} != {products.dtype}:
        # torch.autocast was switched off for a product of quantized operands.
        amp_dtype = products.dtype
        region = torch.autocast(weight.device.type, dtype=products.dtype)
    if main_grad is not None:
        weight = IntoMainGrad.apply(weight, (main_grad,))  # type: ignore[no-untyped-call]
    else:
        weight = dense(weight)
    x = dense(x)

    def observe(gemm_type: str, tensor: str, values: torch.Tensor) -> None:
        products.observe(gemm_type, tensor, as_matrix(values.detach()).to(products.dtype))

    def tapped(gemm_type: str, result: str, values: torch.Tensor) -> Any:
        if not values.requires_grad:
            return values
        observe_gradient = partial(observe, gemm_type, result)
        return _Tap.apply(values, observe_gradient)  # type: ignore[no-untyped-call]

    def take_gradient(dy: torch.Tensor) -> None:
        for gemm_type, operand, needed in (
            ("dgrad", weight, x.requires_grad),
            ("wgrad", x, weight.requires_grad),
        ):
            if needed:
                observe(gemm_type, "gradient", dy)
                observe(gemm_type, TENSORS[gemm_type][1], operand)

    with region:
        y = high_precision_linear(
            tapped("dgrad", "dgrad", x), tapped("wgrad", "wgrad", weight), bias, amp_dtype
        )
    if not products.call.recomputed:
        for tensor, values in zip(TENSORS["fprop"], (x, weight, y), strict=True):
            observe("fprop", tensor, values)
    if y.requires_grad and products.inspections:
        y.register_hook(take_gradient)
    return y


class _Tap(torch.autograd.Function):
    """Returns values unchanged, and calls a function with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, observe: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.observe = observe
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.observe(grads[0])
        return grads[0], None


class _InspectedLinear(torch.autograd.Function):
    """``y = x · wᵀ + b``, ``dx = dy · w`` and ``dw = dyᵀ · x``, each of modified operands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: torch.Tensor | None,
        products: _Products,
        microbatch_weight: Any,
        grad_enabled: bool,
    ) -> torch.Tensor:
        x_needs, w_needs, b_needs = (needed and grad_enabled for needed in ctx.needs_input_grad[:3])
        observed = not products.call.recomputed
        matrix = as_matrix(x.detach())
        plain_weight = weight.detach()
        qx = products.quantized("activation", matrix, "fprop", "wgrad", w_needs)
        qw = microbatch_weight
        if qw is None:
            qw = products.quantized("weight", plain_weight, "fprop", "dgrad", x_needs)
        left = products.operand("fprop", "activation", matrix, qx, observed)
        right = products.operand("fprop", "weight", plain_weight, qw, observed)
        added = None if bias is None else bias.detach()
        y = products.multiply(
            "fprop", left, right, observed, bias=added, use_split_accumulator=False
        )
        saved = [x if w_needs else None, qx if w_needs else None, weight if x_needs else None]
        saved.append(qw if x_needs and qw is not plain_weight else None)
        tensors, ctx.specs = prepare_for_saving(*saved)
        ctx.save_for_backward(*tensors)
        bias_dtype = bias.dtype if bias is not None and b_needs else None
        ctx.rest = products, (x.shape, x.dtype, weight.dtype, bias_dtype), weight
        # The output must not be a view, because an activation function may modify it in place.
        if x.dim() != 2 or y._base is not None:
            return unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return refusing_second_derivatives(_gradients, ctx, grads)
        return _gradients(ctx, *grads)


def _gradients(ctx: Any, *grads: torch.Tensor) -> Any:
    """The gradients of a layer's input, weight and bias, and None for its other arguments."""
    products, (x_shape, x_dtype, w_dtype, bias_dtype), parameter = ctx.rest
    state = products.state
    dy = as_matrix(grads[0])
    if state is not None and state.stateful:
        state.note_backward()
    x, qx, weight, qw = restore_from_saved(ctx.saved_tensors, ctx.specs)
    rows_of = "" if weight is None else "dgrad"
    columns_of = "" if x is None else "wgrad"
    qdy = products.quantized("gradient", dy, rows_of, columns_of)
    dx = dw = db = None
    if weight is not None:
        left = products.operand("dgrad", "gradient", dy, qdy)
        right = products.operand("dgrad", "weight", weight, weight if qw is None else qw)
        dx = products.multiply("dgrad", left, right).to(x_dtype).view(x_shape)
    if x is not None:
        left = products.operand("wgrad", "gradient", dy, qdy)
        right = products.operand("wgrad", "activation", as_matrix(x), qx)
        dw = products.multiply("wgrad", left, right)
        if products.main_grad is not None:
            _add_to_main_grad(products, left, right, dw, parameter)
        dw = dw.to(w_dtype) if products.main_grad is None else None
    if bias_dtype is not None:
        narrow = dy.is_cuda and dy.dtype == bias_dtype and dy.numel() * dy.element_size() < 2**31
        db = dy.sum(0, dtype=dy.dtype if narrow else torch.float32).to(bias_dtype)
    return dx, dw, db, None, None, None


def _add_to_main_grad(
    products: _Products, left: Any, right: Any, dw: torch.Tensor, parameter: Any
) -> None:
    """Add the gradient of the weight to ``main_grad``.

    A gradient that is not modified is rounded only once, in the sum.
    """
    main_grad: Any = products.main_grad
    if ("wgrad", "wgrad") in products.modified:
        main_grad.add_(dw)
    else:
        gemm(left, right, "wgrad", out_dtype=products.dtype, out=main_grad, accumulate=True)
    note_added(parameter)
