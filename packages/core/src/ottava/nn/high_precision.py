"""The product of a ``Linear`` in high precision, where it computes on unquantized operands."""

from typing import Any

import torch
import torch.nn.functional as F

from ottava.gemm import as_matrix
from ottava.kernels import HIGH_PRECISION
from ottava.kernels.direct import PLAIN_TYPES
from ottava.kernels.products import mm, product_dtype
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import forward_ad, tracing, transforms

# Up to this number of rows torch's own bfloat16 loops are faster (measured with AVX2 and weights of
# 1024 rows).
_FEW_ROWS = 4


def high_precision_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    autocast_dtype: torch.dtype | None,
) -> torch.Tensor:
    """``torch.nn.functional.linear``, which multiplies in float32 where that is faster and rounds
    the result once.

    Args:
        x: ``[*, in_features]``.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
        autocast_dtype: the dtype of ``torch.autocast``; None outside of it.

    Returns:
        ``[*, out_features]``.
    """
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
    x = x.to(dtype)
    weight = weight.to(dtype)
    bias = _bias_in(dtype, bias)
    if autocast_dtype is None:
        return _linear(x, weight, bias, wide)
    with torch.autocast(weight.device.type, enabled=False):
        return _linear(x, weight, bias, wide)


def _bias_in(dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias, if there is one, in another dtype."""
    if bias is None:
        return None
    return bias.to(dtype)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype
) -> torch.Tensor:
    """The product of operands of one dtype, which is narrower than ``wide``."""
    if not torch.compiler.is_compiling():
        grad_enabled = torch.is_grad_enabled()
        if not grad_enabled and x.dim() and x.numel() <= _FEW_ROWS * x.shape[-1]:
            # Converting the whole weight costs more than a product of a few rows, which reads it
            # once.
            return F.linear(x, weight, bias)
        if not grad_enabled or _is_taken_apart(x, weight):
            return _wide_product(x, weight, bias, wide)
    y: torch.Tensor
    y = HighPrecisionFunction.apply(x, weight, bias, wide)  # type: ignore[no-untyped-call]
    return y


def _is_taken_apart(*operands: torch.Tensor) -> bool:
    """Whether a transform, a trace or a subclass of tensors needs separate operations, which an
    autograd function would hide."""
    if transforms() is not None or tracing() is not None or forward_ad._current_level >= 0:
        return True
    return not all(type(operand) in PLAIN_TYPES for operand in operands)


def _wide_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype
) -> torch.Tensor:
    """``x · weightᵀ + bias``, computed in ``wide`` and rounded once to the dtype of ``x``."""
    if torch.compiler.is_compiling():
        product = _mm(as_matrix(x), weight.t(), x.dtype, wide, bias)
        return product.view(*x.shape[:-1], weight.shape[0])
    return F.linear(x.to(wide), weight.to(wide), _bias_in(wide, bias)).to(x.dtype)


def _mm(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    wide: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of two matrices in ``wide``, rounded to ``dtype``; only compiled code gives a
    bias."""
    if not torch.compiler.is_compiling():
        return mm(a.to(wide), b.to(wide)).to(dtype)
    # One operator widens inside: a compiler would save the results of separate conversions for the
    # backward pass.
    return torch.ops.ottava.scaled_mm(a, b, None, None, bias, dtype)  # type: ignore[no-any-return]


class HighPrecisionFunction(torch.autograd.Function):
    """``y = x · wᵀ + b`` in ``wide``; operands are saved in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wide: torch.dtype,
    ) -> torch.Tensor:
        x_needs, w_needs = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if w_needs else None, weight if x_needs else None)
        ctx.wide = wide
        return _wide_product(x, weight, bias, wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Only differentiable operations are used, so that second derivatives exist.
        (dy,) = grads
        x, weight = ctx.saved_tensors
        wide = ctx.wide
        rows = as_matrix(dy)
        if not torch.compiler.is_compiling():
            # In compiled code the operator of _mm widens.
            rows = rows.to(wide)
        dx = dw = db = None
        if weight is not None:
            dx = _mm(rows, weight, dy.dtype, wide).view(*dy.shape[:-1], weight.shape[1])
        if x is not None:
            dw = _mm(rows.t(), as_matrix(x), dy.dtype, wide)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0, dtype=wide).to(dy.dtype)
        return dx, dw, db, None
