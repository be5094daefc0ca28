"""The autograd function of ``Linear`` on quantized operands; gradients that go to ``main_grad``.

::

    qx, qw = quantize(x), quantize(weight)
    y = fprop(qx, qw) + bias            # x · wᵀ + b

    qdy = quantize(dy)
    dx = dgrad(qdy, qw)                 # dy · w
    dw = wgrad(qdy, qx)                 # dyᵀ · x
    db = dy.sum(0)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ottava.errors import UsageError
from ottava.gemm.operand import as_matrix
from ottava.kernels.table import sum_rows
from ottava.nn.plan import Plan
from ottava.tensors.operand import Operand
from ottava.tensors.saving import SavedSpec
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import unsafe_view

Tensor = torch.Tensor
_Quantized = Operand | QuantizedTensorStorage
#: Tensors to save, and what rebuilds an operand of them; None rebuilds a plain tensor.
_Saved = tuple[Sequence[Tensor | None], SavedSpec]
_NOTHING: _Saved = ((None,), None)
#: ``inspector(layer)`` gives what takes the place of :func:`quantized_linear` in a forward pass, or
#: None to leave the layer as it is. :func:`ottava.debug.set_inspector` puts it here.
inspector: Callable[[Any], Callable[..., Tensor] | None] | None = None


class Pass(NamedTuple):
    """What one forward pass has of its own.

    Attributes:
        plan: how calls like this one compute.
        kept: the weight as an earlier microbatch quantized it, or None.
        main_grad: the tensor that the gradient of the weight is added to, or None.
        observed: whether a compiler, a mode or a profiler observes dispatch.
    """

    plan: Plan
    kept: QuantizedTensorStorage | None
    main_grad: Tensor | None
    observed: bool


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    kept: QuantizedTensorStorage | None,
    main_grad: Tensor | None,
    observed: bool,
) -> Tensor:
    """``y = x · wᵀ + b`` as the plan says; the other arguments are those of a :class:`Pass`."""
    one_pass = Pass(plan, kept, main_grad, observed)
    if plan.amp_dtype is None:
        return _quantized_linear(x, weight, bias, one_pass)
    with torch.autocast(device_type=weight.device.type, enabled=False):
        return _quantized_linear(x, weight, bias, one_pass)


def _quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, one_pass: Pass) -> Tensor:
    if one_pass.observed:
        y: Tensor = LinearFunction.apply(x, weight, bias, one_pass)  # type: ignore[no-untyped-call]
    elif torch.is_grad_enabled():
        y = _apply(x, weight, bias, one_pass)
    else:
        # No backward pass follows, so that nothing is saved.
        y, _, _ = _forward(x, weight, bias, one_pass)
    plan = one_pass.plan
    if plan.evaluating:
        plan.state.note_evaluation(weight)
    return y


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, one_pass: Pass
) -> tuple[Tensor, _Quantized, _Quantized]:
    """The output and its quantized operands, with what the backward pass needs for the gradients of
    both."""
    plan, kept, _, observed = one_pass
    matrix = x if x.dim() == 2 else as_matrix(x)
    qx = plan.quantize_input(matrix)
    qw: _Quantized
    if isinstance(weight, QuantizedTensorStorage):
        qw = weight
    elif kept is not None:
        qw = kept
    else:
        assert plan.quantize_weight is not None
        qw = plan.quantize_weight(weight)
    if observed and bias is not None:
        # An exported program would give the bias a gradient, and nothing else one.
        bias = bias.detach()
    y = plan.fprop(qx, qw, bias)
    compiling = observed and torch.compiler.is_compiling()
    if matrix is not x or compiling or y._base is not None:
        # The output must not be a view, because an activation, say, may modify it in place.
        y = unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
    return y, qx, qw


class LinearFunction(torch.autograd.Function):
    """``y = x · wᵀ + b`` with ``dx = dy · w`` and ``dw = dyᵀ · x`` on quantized operands. Saved for
    backward are these, columnwise, as gradients need them; only a recipe that asks for it has its
    input saved in high precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, one_pass: Pass) -> Tensor:
        plan = one_pass.plan
        y, qx, qw = _forward(x, weight, bias, one_pass)
        x_tensors, ctx.x_spec = _saved_input(x, qx, plan)
        w_tensors, ctx.w_spec = _NOTHING
        primary: Tensor | None = None
        if plan.x_needs and isinstance(weight, QuantizedTensorStorage):
            # An FP8-primary weight is saved as the parameter itself, so that autograd notices a
            # write to it.
            primary = weight
        elif plan.x_needs:
            w_tensors, ctx.w_spec = _saved_weight(qw, one_pass)
        ctx.save_for_backward(*x_tensors, *w_tensors, primary)
        # Without the kept weight: the graph outlives the backward pass, and would keep it for as
        # long.
        ctx.plan = plan
        ctx.main_grad = one_pass.main_grad
        # Told of what is added to its main_grad.
        ctx.weight = None if one_pass.main_grad is None else weight
        ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[2] else None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Gradients are enabled where a second derivative may be asked for (create_graph=True).
        if torch.is_grad_enabled():
            return constant_gradients(_gradients, ctx, grads)
        return _gradients(ctx, *grads)


def _saved_input(x: Tensor, qx: _Quantized, plan: Plan) -> _Saved:
    if plan.saves_input:
        return (as_matrix(x.detach()).to(plan.dtype),), None
    return qx.flatten_columnwise() if plan.w_needs else _NOTHING


def _saved_weight(qw: _Quantized, one_pass: Pass) -> _Saved:
    if one_pass.kept is not None:
        # Its rows stay, because later microbatches read them.
        return one_pass.kept.flatten_storage()
    return qw.flatten_columnwise()


def _restored(tensors: Sequence[Tensor | None], spec: SavedSpec) -> Any:
    return tensors[0] if spec is None else spec.rebuild(tensors)


def _gradients(ctx: Any, dy: Tensor) -> Any:
    plan: Plan = ctx.plan
    compiling = torch.compiler.is_compiling()
    if plan.state.stateful and not compiling:
        plan.state.note_backward()
    tensors = ctx.saved_tensors
    end_of_x = 1 if ctx.x_spec is None else ctx.x_spec.tensor_count
    dy = dy if dy.dim() == 2 else as_matrix(dy)
    qdy: Any = None if plan.quantize_grad_output is None else plan.quantize_grad_output(dy)
    dx = dw = db = None
    if plan.x_needs:
        # The last saved tensor is the FP8-primary weight, if the layer has one.
        primary = tensors[-1]
        weight = _restored(tensors[end_of_x:-1], ctx.w_spec) if primary is None else primary
        dx = _input_gradient(qdy, weight, plan)
    if plan.w_needs:
        x = _restored(tensors[:end_of_x], ctx.x_spec)
        dw = _weight_gradient(qdy if plan.wgrad_quantized else dy.to(plan.dtype), x, ctx)
    if ctx.bias_dtype is not None:
        db = _bias_gradient(dy, ctx.bias_dtype, compiling)
    return dx, dw, db, None


def _input_gradient(dy: _Quantized, weight: _Quantized, plan: Plan) -> Tensor:
    dx = plan.dgrad(dy, weight)
    if dx.dtype is not plan.x_dtype:
        dx = dx.to(plan.x_dtype)
    return dx if len(plan.x_shape) == 2 else dx.view(plan.x_shape)


def _weight_gradient(dy: Any, x: Any, ctx: Any) -> Tensor | None:
    """None where it is added to ``main_grad``."""
    plan: Plan = ctx.plan
    if ctx.main_grad is not None:
        plan.wgrad(dy, x, None, ctx.main_grad)
        note_added(ctx.weight)
        return None
    dw = plan.wgrad(dy, x)
    return dw if dw.dtype is plan.w_dtype else dw.to(plan.w_dtype)


def _bias_gradient(dy: Tensor, dtype: torch.dtype, compiling: bool) -> Tensor:
    # A GPU sums bfloat16 in float32 and rounds once, up to 2 GiB; elsewhere the float32 sum has to
    # be asked for.
    narrow = dy.is_cuda and dy.dtype == dtype and dy.numel() * dy.element_size() < 2**31
    sum_dtype = dy.dtype if narrow else torch.float32
    db = sum_rows(dy, sum_dtype) if compiling else dy.sum(0, dtype=sum_dtype)
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
