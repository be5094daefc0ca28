"""The autograd function of ``Linear``: quantized operands forward and backward, quantized tensors saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ottava.gemm import as_matrix, gemm
from ottava.nn.main_grad import note_added
from ottava.recipes.state import RecipeState
from ottava.tensors.saving import prepare_for_saving, restore_from_saved
from ottava.tensors.storage import QuantizedTensorStorage


@dataclass(frozen=True)
class LinearPlan:
    """What does not change between calls of one configuration.

    Attributes:
        state: the layer's quantizers.
        dtype: dtype of the output and of the gradients that are computed.
        grad_enabled: whether a backward may follow.
        recording: whether the state is to see the operands of the forward.
        main_grad: what the gradient of the weight is added to; None where it is returned.
    """

    state: RecipeState
    dtype: torch.dtype
    grad_enabled: bool
    recording: bool
    main_grad: torch.Tensor | None = None


class LinearFunction(torch.autograd.Function):
    """``y = x · wᵀ + b`` with ``dx = dy · w`` and ``dw = dyᵀ · x`` on quantized operands.

    Saved for backward: the quantized input (columnwise) if the weight needs a gradient, the quantized weight
    (columnwise) if the input does, and nothing in high precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kept_weight: QuantizedTensorStorage | None,
        plan: LinearPlan,
    ) -> torch.Tensor:
        x_needs = plan.grad_enabled and ctx.needs_input_grad[0]
        w_needs = plan.grad_enabled and ctx.needs_input_grad[1]
        x2 = as_matrix(x)
        recording = plan.recording
        quantizer = plan.state.quantizer("input", rowwise=True, columnwise=w_needs, recording=recording)
        qx = quantizer.quantize(x2, dtype=plan.dtype)
        primary = isinstance(weight, QuantizedTensorStorage)
        qw: Any = weight if primary else kept_weight
        made_here = qw is None
        if qw is None:
            quantizer = plan.state.quantizer("weight", rowwise=True, columnwise=x_needs, recording=recording)
            qw = quantizer.quantize(weight, dtype=plan.dtype)
        y = gemm(qx, qw, "fprop", out_dtype=plan.dtype, bias=bias, use_split_accumulator=False)

        if w_needs:
            qx.update_usage(rowwise_usage=False)
        if x_needs and made_here:
            qw.update_usage(rowwise_usage=False)
        tensors, objects = prepare_for_saving(qx if w_needs else None, qw if x_needs and not primary else None)
        # A weight whose only form is quantized is saved as the parameter that it is.
        ctx.save_for_backward(*tensors, weight if x_needs and primary else None)
        ctx.objects = objects
        ctx.plan = plan
        ctx.weight = weight if plan.main_grad is not None else None
        ctx.x_shape = x.shape
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        # Not a view: the output may be modified in place (by an activation, say).
        shaped: torch.Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (dy,) = grads
        plan: LinearPlan = ctx.plan
        if plan.state.stateful and not torch.compiler.is_compiling():
            plan.state.backward_ran = True
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        *tensors, given_weight = ctx.saved_tensors
        qx, qw = restore_from_saved(tensors, ctx.objects)
        qw = given_weight if qw is None else qw
        dx = dw = db = None
        dy2 = as_matrix(dy)
        if qx is not None or qw is not None:
            quantizer = plan.state.quantizer("grad_output", rowwise=qw is not None, columnwise=qx is not None)
            qdy = quantizer.quantize(dy2, dtype=plan.dtype)
            if qw is not None:
                dx = gemm(qdy, qw, "dgrad", out_dtype=plan.dtype).to(x_dtype).view(ctx.x_shape)
            if qx is not None and plan.main_grad is not None:
                gemm(qdy, qx, "wgrad", out=plan.main_grad, accumulate=True)
                note_added(ctx.weight)
            elif qx is not None:
                dw = gemm(qdy, qx, "wgrad", out_dtype=plan.dtype).to(w_dtype)
        if b_dtype is not None and ctx.needs_input_grad[2]:
            db = dy2.sum(0, dtype=torch.float32).to(b_dtype)
        return dx, dw, db, None, None
