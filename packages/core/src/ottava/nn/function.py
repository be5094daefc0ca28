"""The autograd function of ``Linear`` on quantized operands; gradients that go to ``main_grad``.

::

    qx, qw = quantize(x), quantize(weight)
    y = fprop(qx, qw) + bias            # x · wᵀ + b

    qdy = quantize(dy)
    dx = dgrad(qdy, qw)                 # dy · w
    dw = wgrad(qdy, qx)                 # dyᵀ · x
    db = dy.sum(0)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ottava.errors import UsageError
from ottava.gemm import as_matrix
from ottava.gemm import multiply as gemm
from ottava.kernels.table import rounded, sum_rows
from ottava.nn.call import Call
from ottava.recipes.mixed import MixedState
from ottava.recipes.state import RecipeState
from ottava.tensors.operand import Operand
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.saving import SavedSpec, rebuild_saved
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import is_exporting, unsafe_view

Tensor = torch.Tensor
_Quantized = Operand | QuantizedTensorStorage
#: ``inspector(layer)`` gives what takes the place of :func:`quantized_linear` in a forward pass, or
#: None to leave the layer as it is. :func:`ottava.debug.set_inspector` puts it here.
inspector: Callable[[Any], Callable[..., Tensor] | None] | None = None


class ForwardPlan(NamedTuple):
    """What one forward pass of a layer computes with.

    Attributes:
        call: the recipe's state, and whether it records or evaluates.
        dtype: the dtype of the output, and the nominal dtype of the operands.
        kept: the weight as an earlier microbatch quantized it, or None.
        main_grad: the tensor that the gradient of the weight is added to, or None.
        observed: whether a compiler, a mode or a profiler observes dispatch.
        grad_enabled: whether a backward pass may follow.
    """

    call: Call
    dtype: torch.dtype
    kept: QuantizedTensorStorage | None
    main_grad: Tensor | None
    observed: bool
    grad_enabled: bool

    def quantizer(self, tensor_type: str, columnwise: bool) -> Quantizer:
        """The quantizer of the input or of the weight: for fprop and, with ``columnwise``, for the
        product of the backward pass that reads the tensor."""
        state: Any = self.call.state
        quantizer: Quantizer
        if self.call.evaluating:
            quantizer = state.evaluation_quantizer(tensor_type, rowwise=True, columnwise=False)
        else:
            recording = self.call.recording
            quantizer = state.quantizer(
                tensor_type, rowwise=True, columnwise=columnwise, recording=recording
            )
        return quantizer


class BackwardPlan(NamedTuple):
    """What the backward pass needs besides the saved tensors.

    Attributes:
        state: the recipe's state, which has the quantizer of ``grad_output``.
        dtype: the dtype of the products.
        input_spec, weight_spec: rebuild the operands from the saved tensors.
        main_grad: the tensor that the gradient of the weight is added to, or None.
        weight: the weight that is told of that addition; None without ``main_grad``.
        x_shape, x_dtype, weight_dtype: the shape and the dtypes of the gradients.
        bias_dtype: the dtype of the gradient of the bias; None if the bias needs none.
    """

    state: RecipeState
    dtype: torch.dtype
    input_spec: SavedSpec
    weight_spec: SavedSpec
    main_grad: Tensor | None
    weight: Any
    x_shape: torch.Size
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None


def quantized_linear(
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    call: Call,
    dtype: torch.dtype,
    kept: QuantizedTensorStorage | None,
    main_grad: Tensor | None,
    observed: bool,
) -> Tensor:
    """``y = x · wᵀ + b`` in ``dtype``. The gradient of the weight is added to ``main_grad``, if
    there is one; ``kept`` is the weight if it is quantized already; ``observed`` says that a
    compiler, a mode or a profiler looks on."""
    grad_enabled = torch.is_grad_enabled() and not (observed and is_exporting())
    plan = ForwardPlan(call, dtype, kept, main_grad, observed, grad_enabled)
    state: Any = call.state
    if observed and torch.compiler.is_compiling():
        x_needs, w_needs = (grad_enabled and tensor.requires_grad for tensor in (x, weight))
        _read_numbers(state, x_needs, w_needs)
    if observed:
        y: Tensor = LinearFunction.apply(x, weight, bias, plan)  # type: ignore[no-untyped-call]
    elif grad_enabled:
        y = _apply(x, weight, bias, plan)
    else:
        # No backward pass follows, so that nothing is saved.
        y, _, _ = _forward(x, weight, bias, plan, False, False)
    if call.evaluating:
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


def _forward(
    x: Tensor, weight: Any, bias: Tensor | None, plan: ForwardPlan, x_needs: bool, w_needs: bool
) -> tuple[Tensor, _Quantized, _Quantized]:
    """The output and its quantized operands, with what the backward pass needs for the gradients of
    both."""
    state: Any = plan.call.state
    matrix = x if x.dim() == 2 else as_matrix(x)
    quantizer = plan.quantizer("input", w_needs and "input" not in state.wgrad_unquantized)
    qx = quantizer.quantize_operand(_as_stored(matrix, quantizer), plan.dtype)
    qw: _Quantized
    if isinstance(weight, QuantizedTensorStorage):
        qw = weight
    elif plan.kept is not None:
        qw = plan.kept
    else:
        qw = plan.quantizer("weight", x_needs).quantize_operand(weight, plan.dtype)
    if plan.observed and bias is not None:
        # An exported program would give the bias a gradient, and nothing else one.
        bias = bias.detach()
    y = gemm(qx, qw, "fprop", out_dtype=plan.dtype, bias=bias, use_split_accumulator=False)
    compiling = plan.observed and torch.compiler.is_compiling()
    if matrix is not x or compiling or y._base is not None:
        # The output must not be a view, because an activation, say, may modify it in place.
        y = unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
    return y, qx, qw


def _as_stored(x: Tensor, quantizer: Quantizer) -> Tensor:
    """``x`` as memory holds it: kernels read that, but a compiler may fuse a user's quantizer with
    what made ``x``, and leave out its rounding."""
    return rounded(x) if quantizer.custom else x


class LinearFunction(torch.autograd.Function):
    """``y = x · wᵀ + b`` with ``dx = dy · w`` and ``dw = dyᵀ · x`` on quantized operands. Saved for
    backward are these, columnwise, as gradients need them; only a recipe that asks for it has its
    input saved in high precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ForwardPlan
    ) -> Tensor:
        x_needs, w_needs, b_needs, _ = ctx.needs_input_grad
        x_needs, w_needs = plan.grad_enabled and x_needs, plan.grad_enabled and w_needs
        y, qx, qw = _forward(x, weight, bias, plan, x_needs, w_needs)
        state: Any = plan.call.state
        # (tensors, spec) of an operand; one absent tensor where no gradient needs it.
        of_x: Any = ([None], None)
        of_w = of_x
        primary: Any = None
        if w_needs and "input" in state.wgrad_unquantized:
            of_x = ([as_matrix(x.detach()).to(plan.dtype)], None)
        elif w_needs:
            of_x = qx.flatten_columnwise()
        if x_needs and isinstance(weight, QuantizedTensorStorage):
            # An FP8-primary weight is saved as the parameter itself, so that autograd notices a
            # write to it.
            primary = weight
        elif x_needs and plan.kept is not None:
            # Its rows stay, because later microbatches read them.
            of_w = plan.kept.flatten_storage()
        elif x_needs:
            of_w = qw.flatten_columnwise()
        ctx.save_for_backward(*of_x[0], *of_w[0], primary)
        # Without the kept weight: the graph outlives the backward pass, and would keep it for as
        # long.
        ctx.plan = BackwardPlan(
            state,
            plan.dtype,
            of_x[1],
            of_w[1],
            plan.main_grad,
            None if plan.main_grad is None else weight,
            x.shape,
            x.dtype,
            weight.dtype,
            bias.dtype if bias is not None and b_needs else None,
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Gradients are enabled where a second derivative may be asked for (create_graph=True).
        if torch.is_grad_enabled():
            return constant_gradients(_gradients, ctx, grads)
        return _gradients(ctx, *grads)


def _gradients(ctx: Any, *grads: Tensor) -> Any:
    (dy,) = grads
    plan: BackwardPlan = ctx.plan
    compiling = torch.compiler.is_compiling()
    state = plan.state
    if state.stateful and not compiling:
        state.note_backward()
    tensors = ctx.saved_tensors
    qx, qw = rebuild_saved(tensors, (plan.input_spec, plan.weight_spec))
    if qw is None:
        # The last saved tensor is the FP8-primary weight, if the layer has one.
        qw = tensors[-1]
    dy = dy if dy.dim() == 2 else as_matrix(dy)
    wgrad_quantized = qx is not None and "grad_output" not in state.wgrad_unquantized
    qdy: Any = None
    if qw is not None or wgrad_quantized:
        quantizer = state.quantizer(
            "grad_output", rowwise=qw is not None, columnwise=wgrad_quantized
        )
        qdy = quantizer.quantize_operand(_as_stored(dy, quantizer), plan.dtype)
    dx = dw = db = None
    if qw is not None:
        dx = _input_gradient(qdy, qw, plan)
    if qx is not None:
        dw = _weight_gradient(qdy if wgrad_quantized else dy.to(plan.dtype), qx, plan)
    if plan.bias_dtype is not None:
        db = _bias_gradient(dy, plan.bias_dtype, compiling)
    return dx, dw, db, None


def _input_gradient(dy: Any, weight: Any, plan: BackwardPlan) -> Tensor:
    dx = gemm(dy, weight, "dgrad", out_dtype=plan.dtype)
    if dx.dtype is not plan.x_dtype:
        dx = dx.to(plan.x_dtype)
    return dx if len(plan.x_shape) == 2 else dx.view(plan.x_shape)


def _weight_gradient(dy: Any, x: Any, plan: BackwardPlan) -> Tensor | None:
    """None where it is added to ``main_grad``."""
    if plan.main_grad is not None:
        gemm(dy, x, "wgrad", out_dtype=plan.dtype, out=plan.main_grad, accumulate=True)
        note_added(plan.weight)
        return None
    dw = gemm(dy, x, "wgrad", out_dtype=plan.dtype)
    return dw if dw.dtype is plan.weight_dtype else dw.to(plan.weight_dtype)


def _bias_gradient(dy: Tensor, dtype: torch.dtype, compiling: bool) -> Tensor:
    # A GPU sums bfloat16 in float32 and rounds once, up to 2 GiB; elsewhere the float32 sum has to
    # be asked for.
    narrow = dy.is_cuda and dy.dtype == dtype and dy.numel() * dy.element_size() < 2**31
    db = sum_rows(dy, dy.dtype if narrow else torch.float32, compiling)
    return db if db.dtype is dtype else db.to(dtype)


def constant_gradients(backward: Callable[..., Any], ctx: Any, grads: tuple[Tensor, ...]) -> Any:
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
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
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
    def forward(ctx: Any, weight: Tensor, target: tuple[Tensor]) -> Tensor:
        ctx.weight, ctx.target = weight, target
        return (
            weight.dequantize()
            if isinstance(weight, QuantizedTensorStorage)
            else weight.view_as(weight)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.target[0].add_(grads[0])
        note_added(ctx.weight)
        return None, None
