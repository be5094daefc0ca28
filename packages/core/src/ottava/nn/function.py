"""The autograd function of ``Linear`` on quantized operands; gradients that go to ``main_grad``.

::

    qx, qw = quantize(x), quantize(weight)
    y = fprop(qx, qw, bias)             # x · wᵀ + b

    qdy = quantize(dy)
    dx = dgrad(qdy, qw)                 # dy · w
    dw = wgrad(qdy, qx)                 # dyᵀ · x
    db = dy.sum(0)
"""

from collections.abc import Callable, Sequence
from typing import Concatenate, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from ottava.errors import UsageError
from ottava.kernels.table import sum_rows
from ottava.nn.call import Call
from ottava.nn.plan import Plan, Quantized
from ottava.recipes.backward import DEQUANTIZED, HIGH_PRECISION, QUANTIZED
from ottava.tensors.operand import Operand, as_matrix
from ottava.tensors.saving import SavedSpec
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import unsafe_view

Tensor = torch.Tensor
#: Tensors to save, and the spec that rebuilds an operand of them; None for one plain tensor.
_Saved = tuple[Sequence[Tensor | None], SavedSpec | None]
#: Gradients of the input, the weight and the bias; None for ``one_pass``.
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class InspectedForward(Protocol):
    """Computes a forward pass of a watched layer, in the place of :func:`quantized_linear`.

    Args, by position:
        x, weight, bias: the operands.
        call: the settings of the pass; its state is None in high precision.
        dtype: the layer computes in it.
        microbatch_weight, main_grad, observed: those of a :class:`Pass`.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        dtype: torch.dtype,
        microbatch_weight: QuantizedTensorStorage | None,
        main_grad: Tensor | None,
        observed: bool,
        /,
    ) -> Tensor: ...


#: ``inspector(layer)`` returns the function that computes a forward pass of the layer, or None to
#: leave the layer as it is. :func:`ottava.debug.set_inspector` sets it.
inspector: Callable[..., InspectedForward | None] | None = None


class Pass(NamedTuple):
    """The arguments of one forward pass that are not its operands.

    Attributes:
        plan: how calls like this one compute.
        microbatch_weight: the weight as an earlier microbatch of the step quantized it, or None.
        main_grad: the tensor that the gradient of the weight is added to, or None.
        observed: whether a compiler, a mode or a profiler observes dispatch.
    """

    plan: Plan
    microbatch_weight: QuantizedTensorStorage | None
    main_grad: Tensor | None
    observed: bool


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    microbatch_weight: QuantizedTensorStorage | None,
    main_grad: Tensor | None,
    observed: bool,
) -> Tensor:
    """``y = x · wᵀ + b`` as the plan says; the other arguments are those of a :class:`Pass`."""
    one_pass = Pass(plan, microbatch_weight, main_grad, observed)
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
    if plan.may_count_clamps:
        plan.state.note_evaluation(weight)
    return y


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, one_pass: Pass
) -> tuple[Tensor, Quantized, Quantized]:
    """The output, and the quantized input and weight, with the columns that the backward pass
    reads."""
    plan = one_pass.plan
    microbatch_weight = one_pass.microbatch_weight
    matrix = x if x.dim() == 2 else as_matrix(x)
    qx = plan.quantize_input(matrix)
    qw: Quantized
    if isinstance(weight, QuantizedTensorStorage):
        qw = weight
    elif microbatch_weight is not None:
        qw = microbatch_weight
    else:
        assert plan.quantize_weight is not None
        qw = plan.quantize_weight(weight)
    if one_pass.observed and bias is not None:
        # torch.export would record a gradient of the bias alone, because the products are opaque.
        bias = bias.detach()
    y = plan.fprop(qx, qw, bias)
    compiling = one_pass.observed and torch.compiler.is_compiling()
    if matrix is not x or compiling or y._base is not None:
        # The output must not be a view, because an activation, say, may modify it in place.
        y = unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
    return y, qx, qw


class Context(Protocol):
    """What the forward pass leaves to the backward pass.

    Attributes:
        plan: how both compute.
        x_spec, w_spec: rebuild the operands of the saved tensors.
        main_grad: the tensor that the gradient of the weight is added to, or None.
        weight: the weight that is told of that addition; None without ``main_grad``.
        bias_dtype: the dtype of the gradient of the bias; None if the bias needs none.
        needs_input_grad, saved_tensors: as torch has them.
    """

    plan: Plan
    x_spec: SavedSpec | None
    w_spec: SavedSpec | None
    main_grad: Tensor | None
    weight: Tensor | None
    bias_dtype: torch.dtype | None
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class LinearFunction(torch.autograd.Function):
    """``y = x · wᵀ + b`` with ``dx = dy · w`` and ``dw = dyᵀ · x`` on quantized operands.

    Saved for backward is what gradients need of the operands: their columns, or what
    :attr:`ottava.recipes.Recipe.backward` says.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, one_pass: Pass
    ) -> Tensor:
        plan = one_pass.plan
        y, qx, qw = _forward(x, weight, bias, one_pass)
        is_kept = one_pass.microbatch_weight is not None
        x_tensors, ctx.x_spec = _SAVES[plan.saved_input](x, qx, plan.dtype, False)
        w_tensors, ctx.w_spec = _SAVES[plan.saved_weight](weight, qw, weight.dtype, is_kept)
        ctx.save_for_backward(*x_tensors, *w_tensors)
        # The Pass itself is not saved: its quantized weight would live as long as the graph does.
        ctx.plan = plan
        ctx.main_grad = one_pass.main_grad
        ctx.weight = None
        if one_pass.main_grad is not None:
            ctx.weight = weight
        ctx.bias_dtype = None
        if bias is not None and ctx.needs_input_grad[2]:
            ctx.bias_dtype = bias.dtype
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> _Gradients:
        # Gradients are enabled where a second derivative may be asked for (create_graph=True).
        if torch.is_grad_enabled():
            return refusing_second_derivatives(_gradients, ctx, grads)  # type: ignore[return-value]
        return _gradients(ctx, *grads)


def _nothing(operand: Tensor, quantized: Quantized, dtype: torch.dtype, is_kept: bool) -> _Saved:
    return (None,), None


def _columns(operand: Tensor, quantized: Quantized, dtype: torch.dtype, is_kept: bool) -> _Saved:
    if is_kept and not isinstance(quantized, Operand):
        return quantized.flatten_storage()
    return quantized.flatten_columnwise()


def _rows(operand: Tensor, quantized: Quantized, dtype: torch.dtype, is_kept: bool) -> _Saved:
    storage = quantized.stored() if isinstance(quantized, Operand) else quantized
    # A user's quantizer may make columns that nobody asked for.
    storage.update_usage(rowwise_usage=True, columnwise_usage=False)
    return storage.flatten_storage()


def _itself(operand: Tensor, quantized: Quantized, dtype: torch.dtype, is_kept: bool) -> _Saved:
    # Where nothing is cast, autograd notices a write to the operand.
    if operand.dtype is not dtype:
        operand = operand.detach().to(dtype)
    return (operand,), None


#: What a plan says of an operand -> what is saved of it, and of its quantized form. Later
#: microbatches read the rows of a weight that is kept.
_SAVES: dict[str | None, Callable[[Tensor, Quantized, torch.dtype, bool], _Saved]] = {
    None: _nothing,
    QUANTIZED: _columns,
    HIGH_PRECISION: _itself,
    DEQUANTIZED: _rows,
}


def _gradients(ctx: Context, dy: Tensor) -> _Gradients:
    plan = ctx.plan
    compiling = torch.compiler.is_compiling()
    if plan.state.stateful and not compiling:
        plan.state.note_backward()
    x_tensors, w_tensors = _saved_tensors(ctx)
    if dy.dim() != 2:
        dy = as_matrix(dy)
    dy_for_dx: Tensor | Quantized = dy
    dy_for_dw: Tensor | Quantized = dy
    if plan.quantize_grad_output is not None:
        dy_for_dx = plan.quantize_grad_output(dy)
        if plan.wgrad_reads_quantized_dy:
            dy_for_dw = dy_for_dx
    dx = dw = db = None
    if plan.x_needs_grad:
        dx = _input_gradient(dy_for_dx, _restored(w_tensors, ctx.w_spec), plan)
    if plan.w_needs_grad:
        dw = _weight_gradient(dy_for_dw, _restored(x_tensors, ctx.x_spec), ctx)
    if ctx.bias_dtype is not None:
        db = _bias_gradient(dy, ctx.bias_dtype, compiling)
    return dx, dw, db, None


def _saved_tensors(ctx: Context) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The tensors of the input, and those of the weight, as the forward pass saved them."""
    # Read once, because activation checkpointing frees saved tensors at the first read.
    tensors = ctx.saved_tensors
    # Without a spec one tensor was saved, or None.
    end = 1 if ctx.x_spec is None else ctx.x_spec.tensor_count
    return tensors[:end], tensors[end:]


def _restored(tensors: Sequence[Tensor], spec: SavedSpec | None) -> Tensor | Quantized:
    if spec is None:
        return tensors[0]
    operand: Quantized = spec.rebuild(tensors)
    return operand


def _input_gradient(dy: Tensor | Quantized, weight: Tensor | Quantized, plan: Plan) -> Tensor:
    dx = plan.dgrad(dy, weight)
    if dx.dtype is not plan.x_dtype:
        dx = dx.to(plan.x_dtype)
    if len(plan.x_shape) != 2:
        dx = dx.view(plan.x_shape)
    return dx


def _weight_gradient(dy: Tensor | Quantized, x: Tensor | Quantized, ctx: Context) -> Tensor | None:
    """The gradient of the weight; None if it was added to ``main_grad``."""
    if ctx.main_grad is not None:
        ctx.plan.wgrad(dy, x, None, ctx.main_grad)
        note_added(ctx.weight)
        return None
    dw = ctx.plan.wgrad(dy, x)
    if dw.dtype is not ctx.plan.w_dtype:
        dw = dw.to(ctx.plan.w_dtype)
    return dw


def _bias_gradient(dy: Tensor, dtype: torch.dtype, compiling: bool) -> Tensor:
    sum_dtype = torch.float32
    if dy.is_cuda and dy.dtype == dtype and dy.numel() * dy.element_size() < 2**31:
        # A GPU sums bfloat16 in float32 and rounds once, up to 2 GiB; elsewhere the float32 sum
        # has to be asked for.
        sum_dtype = dy.dtype
    if compiling:
        db = sum_rows(dy, sum_dtype)
    else:
        db = dy.sum(0, dtype=sum_dtype)
    if db.dtype is not dtype:
        db = db.to(dtype)
    return db


ContextT = TypeVar("ContextT")


def refusing_second_derivatives(
    backward: Callable[Concatenate[ContextT, ...], Sequence[Tensor | None]],
    ctx: ContextT,
    grads: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients that ``backward(ctx, *grads)`` returns, which refuse to be differentiated.

    torch's ``once_differentiable`` refuses only if the incoming gradient requires a gradient. If it
    does not, a penalty on these gradients would silently contribute nothing, although they depend
    on the operands. Here differentiating them is always an error.
    """
    with torch.no_grad():
        gradients = backward(ctx, *grads)
    # The empty tensor makes the results require gradients even if no incoming gradient does.
    sources = torch.empty(0, requires_grad=True), *grads
    constants: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            gradient = NoSecondDerivative.apply(gradient, *sources)  # type: ignore[no-untyped-call]
        constants.append(gradient)
    return tuple(constants)


class NoSecondDerivative(torch.autograd.Function):
    """A gradient, unchanged, whose own backward pass raises a UsageError.

    ``sources`` make the gradient part of their graph.
    """

    @staticmethod
    def forward(ctx: object, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> NoReturn:
        raise UsageError(
            "the gradients of a quantized layer were differentiated again",
            expected="first derivatives, because quantized operands have no others",
            remedy="compute what is differentiated twice in ottava.autocast(enabled=False)",
        )


# LinearFunction.apply without torch's search for active transforms, which takes two microseconds.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, LinearFunction).apply


def note_added(weight: Tensor | None) -> None:
    """Set ``grad_added_to_main_grad`` of a weight that has this attribute."""
    while weight is not None:
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
        # A weight that is stored transposed comes as a view of the parameter.
        weight = weight._base


class AddingContext(Protocol):
    """What the forward pass of :class:`IntoMainGrad` leaves to its backward pass.

    Attributes:
        weight: is told of the addition.
        target: its ``main_grad``.
    """

    weight: Tensor
    target: Tensor


class IntoMainGrad(torch.autograd.Function):
    """The values of a weight, unchanged. The backward pass adds its gradient to ``main_grad``."""

    @staticmethod
    def forward(ctx: AddingContext, weight: Tensor, target: tuple[Tensor]) -> Tensor:
        ctx.weight, (ctx.target,) = weight, target
        if isinstance(weight, QuantizedTensorStorage):
            return weight.dequantize()
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: AddingContext, *grads: Tensor) -> tuple[None, None]:
        with torch.no_grad():
            ctx.target.add_(grads[0])
        note_added(ctx.weight)
        return None, None
