"""The autograd functions of ``Linear``: products on quantized operands and in high precision,
``main_grad``."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ottava.errors import UsageError
from ottava.gemm import as_matrix
from ottava.gemm import multiply as gemm
from ottava.kernels import HIGH_PRECISION
from ottava.kernels.products import mm, product_dtype
from ottava.kernels.table import rounded, sum_rows
from ottava.nn.call import Call
from ottava.recipes.mixed import MixedState
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.saving import rebuild_saved
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import forward_ad, is_exporting, tracing, transforms, unsafe_view

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
# Up to this number of rows torch's own bfloat16 loops are faster (measured with AVX2 and weights of
# 1024 rows).
_FEW_ROWS = 4
#: ``inspector(layer)`` gives what takes the place of :func:`quantized_linear` in a forward pass, or
#: None to leave the layer as it is. :func:`ottava.debug.set_inspector` puts it here.
inspector: Callable[[Any], Callable[..., torch.Tensor] | None] | None = None


def quantized_linear(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    call: Call,
    dtype: torch.dtype,
    kept: Any,
    main_grad: Any,
    observed: bool,
) -> torch.Tensor:
    """``y = x · wᵀ + b`` in ``dtype``. The gradient of the weight is added to ``main_grad``, if
    there is one; ``kept`` is the weight if it is quantized already; ``observed`` says that a
    compiler, a mode or a profiler looks on."""
    grad_enabled = torch.is_grad_enabled() and not (observed and is_exporting())
    rest = call, dtype, kept, main_grad, observed, grad_enabled
    if observed and torch.compiler.is_compiling():
        x_needs, w_needs = (grad_enabled and tensor.requires_grad for tensor in (x, weight))
        _read_numbers(call.state, x_needs, w_needs)
    if observed or grad_enabled:
        y: torch.Tensor = (LinearFunction.apply if observed else _apply)(x, weight, bias, rest)
    else:
        # No backward pass follows, so that nothing is saved.
        y = _product(x, weight, bias, rest, False, False)[0]
    if call.evaluating:
        state: Any = call.state
        state.note_evaluation(weight)
    return y


def _read_numbers(state: Any, x_needs: bool, w_needs: bool) -> None:
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


def _product(
    x: torch.Tensor, weight: Any, bias: Any, rest: Any, x_needs: bool, w_needs: bool
) -> tuple[torch.Tensor, Any, Any]:
    """The output and its quantized operands, with what the backward pass needs for the gradients of
    both."""
    call, dtype, kept, _, observed, _ = rest
    state = call.state
    matrix = x if x.dim() == 2 else as_matrix(x)
    columnwise = w_needs and "input" not in state.wgrad_unquantized
    given = weight if isinstance(weight, QuantizedTensorStorage) else kept
    if call.evaluating:
        quantizer = state.evaluation_quantizer("input", rowwise=True, columnwise=False)
        if given is None:
            of_weight = state.evaluation_quantizer("weight", rowwise=True, columnwise=False)
    elif given is None:
        quantizer, of_weight = state.forward_quantizers(columnwise, x_needs, call.recording)
    else:
        quantizer = state.quantizer(
            "input", rowwise=True, columnwise=columnwise, recording=call.recording
        )
    # Kernels are given what is stored; a quantizer of somebody else's may become part of what made
    # the matrix.
    qx = quantizer.quantize_operand(rounded(matrix) if quantizer.custom else matrix, dtype)
    qw = of_weight.quantize_operand(weight, dtype) if given is None else given
    # An exported program would give the bias a gradient, and nothing else one.
    bias = bias.detach() if observed and bias is not None else bias
    y = gemm(qx, qw, "fprop", out_dtype=dtype, bias=bias, use_split_accumulator=False)
    if matrix is not x or (observed and torch.compiler.is_compiling()) or y._base is not None:
        # The output must not be a view, because an activation, say, may modify it in place.
        y = unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
    return y, qx, qw


class LinearFunction(torch.autograd.Function):
    """``y = x · wᵀ + b`` with ``dx = dy · w`` and ``dw = dyᵀ · x`` on quantized operands. Saved for
    backward are these, columnwise, as gradients need them; only a recipe that asks for it has its
    input saved in high precision."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rest: Any
    ) -> torch.Tensor:
        call, dtype, kept, main_grad, _, grad_enabled = rest
        x_needs, w_needs, b_needs, _ = ctx.needs_input_grad
        x_needs, w_needs = grad_enabled and x_needs, grad_enabled and w_needs
        y, qx, qw = _product(x, weight, bias, rest, x_needs, w_needs)
        primary = isinstance(weight, QuantizedTensorStorage)
        # Tensors and what they are of: nothing, for an operand that no gradient needs.
        of_x: Any = ([None], None)
        of_w = of_x
        if w_needs:
            high = "input" in call.state.wgrad_unquantized
            of_x = ([as_matrix(x.detach()).to(dtype)], None) if high else qx.flatten_columnwise()
        if x_needs and not primary:
            of_w = qw.flatten_columnwise() if kept is None else qw.flatten_storage()
        # An FP8-primary weight is saved as the parameter itself, so that autograd notices a write
        # to it.
        ctx.save_for_backward(*of_x[0], *of_w[0], weight if x_needs and primary else None)
        ctx.rest = (
            (of_x[1], of_w[1]),
            # Not the kept weight: the graph outlives the backward pass, and would keep it for as
            # long.
            (call.state, dtype, main_grad, weight if main_grad is not None else None),
            (x.shape, x.dtype, weight.dtype, bias.dtype if bias is not None and b_needs else None),
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Gradients are enabled where a second derivative may be asked for (create_graph=True).
        if torch.is_grad_enabled():
            return constant_gradients(_gradients, ctx, grads)
        return _gradients(ctx, *grads)


def _gradients(ctx: Any, *grads: torch.Tensor) -> Any:
    (dy,) = grads
    specs, (state, dtype, main_grad, weight), (x_shape, x_dtype, w_dtype, b_dtype) = ctx.rest
    compiling = torch.compiler.is_compiling()
    if state.stateful and not compiling:
        state.note_backward()
    tensors = ctx.saved_tensors
    qx, qw = rebuild_saved(tensors, specs)
    # The last saved tensor is the FP8-primary weight, if the layer has one.
    qw = tensors[-1] if qw is None else qw
    dx = dw = db = None
    dy2 = dy if dy.dim() == 2 else as_matrix(dy)
    if qx is not None or qw is not None:
        quantized = qx is not None and "grad_output" not in state.wgrad_unquantized
        qdy: Any = None
        if quantized or qw is not None:
            quantizer = state.quantizer("grad_output", rowwise=qw is not None, columnwise=quantized)
            qdy = quantizer.quantize_operand(rounded(dy2) if quantizer.custom else dy2, dtype)
        if qw is not None:
            dx = gemm(qdy, qw, "dgrad", out_dtype=dtype)
            dx = dx if dtype is x_dtype else dx.to(x_dtype)
            dx = dx if len(x_shape) == 2 else dx.view(x_shape)
        if qx is not None:
            dy_columns = qdy if quantized else dy2.to(dtype)
            if main_grad is None:
                dw = gemm(dy_columns, qx, "wgrad", out_dtype=dtype)
                dw = dw if dtype is w_dtype else dw.to(w_dtype)
            else:
                gemm(dy_columns, qx, "wgrad", out_dtype=dtype, out=main_grad, accumulate=True)
                note_added(weight)
    if b_dtype is not None:
        # A GPU sums bfloat16 in float32 and rounds once, up to 2 GiB; elsewhere the float32 sum has
        # to be asked for.
        narrow = dy2.is_cuda and dy2.dtype == b_dtype and dy2.numel() * dy2.element_size() < 2**31
        db = sum_rows(dy2, dy2.dtype if narrow else torch.float32, compiling)
        db = db if db.dtype is b_dtype else db.to(b_dtype)
    return dx, dw, db, None


def constant_gradients(
    backward: Callable[..., Any], ctx: Any, grads: tuple[torch.Tensor, ...]
) -> Any:
    """The gradients that ``backward(ctx, *grads)`` gives, which refuse to be differentiated.

    They depend on the operands even where the incoming gradient is a constant. torch's
    ``once_differentiable`` takes them for constants then, and the gradient of a penalty on them
    would be lost.
    """
    with torch.no_grad():
        gradients = backward(ctx, *grads)
    anchor = torch.empty(0, requires_grad=True)
    refuse: Any = NoSecondDerivative.apply
    sources = (anchor, *grads)
    return tuple(None if gradient is None else refuse(gradient, *sources) for gradient in gradients)


class NoSecondDerivative(torch.autograd.Function):
    """A gradient, unchanged; its own backward pass is a UsageError. ``sources`` make it part of
    their graph."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        what = "the gradients of a quantized layer were differentiated again"
        expected = "first derivatives, because quantized operands have no others"
        remedy = "compute what is differentiated twice in ottava.autocast(enabled=False)"
        raise UsageError(what, expected=expected, remedy=remedy)


# Function.apply takes two microseconds to find that no transform is active; this is what it calls
# then.
_apply: Any = super(torch.autograd.Function, LinearFunction).apply


def note_added(weight: Any) -> None:
    """Tell those who ask the weight that its gradient is in ``main_grad`` already."""
    # A weight that is stored transposed comes as a view of the parameter.
    for parameter in (weight, weight._base):
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True


class IntoMainGrad(torch.autograd.Function):
    """The values of a weight, unchanged; in the backward pass its gradient goes to
    ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, target: tuple[torch.Tensor]) -> torch.Tensor:
        ctx.weight, ctx.target = weight, target
        return (
            weight.dequantize()
            if isinstance(weight, QuantizedTensorStorage)
            else weight.view_as(weight)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.target[0].add_(grads[0])
        note_added(ctx.weight)
        return None, None


def high_precision_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    autocast_dtype: torch.dtype | None,
) -> torch.Tensor:
    """``torch.nn.functional.linear``, which multiplies in float32 where that is faster and rounds
    the result once."""
    dtype = weight.dtype if autocast_dtype is None else autocast_dtype
    wide = product_dtype(dtype, weight.device)
    if wide is dtype or not isinstance(x, torch.Tensor) or x.device != weight.device or x.is_nested:
        return F.linear(x, weight, bias)
    if isinstance(x, QuantizedTensorStorage):
        x = x.dequantize()
    allowed = (dtype,) if autocast_dtype is None else HIGH_PRECISION
    if not all(tensor.dtype in allowed for tensor in (x, weight, bias) if tensor is not None):
        # torch.autocast leaves other dtypes as they are, and F.linear raises the error that users
        # of torch know.
        return F.linear(x, weight, bias)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with (
        nullcontext()
        if autocast_dtype is None
        else torch.autocast(weight.device.type, enabled=False)
    ):
        if not torch.compiler.is_compiling():
            grad_enabled = torch.is_grad_enabled()
            if not grad_enabled and x.dim() and x.numel() <= _FEW_ROWS * x.shape[-1]:
                # Converting the whole weight costs more than a product of a few rows, which reads
                # it once.
                return F.linear(x, weight, bias)
            # Transforms, tracing and subclasses need operations that they can take apart, not an
            # autograd function.
            apart = (
                transforms() is not None or tracing() is not None or forward_ad._current_level >= 0
            )
            if not grad_enabled or apart or not {type(x), type(weight)} <= _PLAIN_TYPES:
                return _wide_product(x, weight, bias, wide)
        return HighPrecisionFunction.apply(x, weight, bias, wide)  # type: ignore[no-any-return, no-untyped-call]


def _wide_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _mm(as_matrix(x), weight.t(), x.dtype, wide, bias).view(
            *x.shape[:-1], weight.shape[0]
        )
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(
        x.dtype
    )


def _mm(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, wide: torch.dtype, bias: Any = None
) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return mm(a.to(wide), b.to(wide)).to(dtype)
    # One operator widens inside: a compiler would save the results of separate conversions for the
    # backward pass.
    return torch.ops.ottava.scaled_mm(a, b, None, None, bias, dtype)  # type: ignore[no-any-return]


class HighPrecisionFunction(torch.autograd.Function):
    """``y = x · wᵀ + b`` in ``wide``; operands are saved in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: torch.Tensor | None, wide: torch.dtype
    ) -> torch.Tensor:
        x_needs, w_needs = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if w_needs else None, weight if x_needs else None)
        ctx.wide = wide
        return _wide_product(x, weight, bias, wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Only differentiable operations are used, so that second derivatives exist.
        (dy,), (x, weight), wide = grads, ctx.saved_tensors, ctx.wide
        rows = as_matrix(dy if torch.compiler.is_compiling() else dy.to(wide))
        dx = (
            None
            if weight is None
            else _mm(rows, weight, dy.dtype, wide).view(*dy.shape[:-1], weight.shape[1])
        )
        dw = None if x is None else _mm(rows.t(), as_matrix(x), dy.dtype, wide)
        db = rows.sum(0, dtype=wide).to(dy.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None
