"""One function for the three GEMMs of a linear layer: operands in, high precision out.

How an operand becomes a matrix is its own affair (``grid_operand`` for elements with scales, else ``gemm_operand``); a
user-defined quantizer's ``qgemm`` takes over where there is one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from ottava.errors import DeviceError, OptionError, ShapeError
from ottava.formats import FP8
from ottava.gemm_blocks import block_product
from ottava.gemm_scaled import may_multiply_fp8, scaled_product
from ottava.kernels import HIGH_PRECISION, backend_for, check_high_precision, products
from ottava.kernels.checks import check_bias, check_device, check_dtype
from ottava.kernels.products import decoded_mm, returns_float32, without_autocast
from ottava.kernels.table import rounded
from ottava.layout import Layout
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage

GemmType = Literal["fprop", "dgrad", "wgrad"]
Operand = torch.Tensor | QuantizedTensorStorage

# One scale for the tensor, or for each row.
_SCALED_BLOCKS = ((None, None), (1, None))
# GEMM -> (columnwise usage of a, of b), (transpose a, transpose b) as matrices [rows, columns].
_GEMMS: dict[str, tuple[tuple[bool, bool], tuple[bool, bool]]] = {
    "fprop": ((False, False), (False, True)),
    "dgrad": ((False, True), (False, False)),
    "wgrad": ((True, True), (True, False)),
}


def gemm(
    a: Operand,
    b: Operand,
    gemm_type: GemmType = "fprop",
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
) -> torch.Tensor:
    """The product for ``gemm_type``, in ``out_dtype``.

    ``fprop``: ``a = input [*, K]``, ``b = weight [N, K]`` gives ``[M, N]``. ``dgrad``: ``a = grad_output [*, N]``,
    ``b = weight`` gives ``[M, K]``. ``wgrad``: ``a = grad_output``, ``b = input`` gives ``[N, K]``. Accumulation is in
    float32; the product of the scales is applied in float32 before the rounding to ``out_dtype``. On CPUs with a fast
    product of bfloat16 a bfloat16 result with a float32 bias is rounded before both, too (see the numerics page). The
    scales of MX blocks are part of the operands' values. Hardware that multiplies FP8 is given the data; elsewhere it
    is decoded, exactly in float32's normal range; products of what lies beyond follow IEEE float32.

    Args:
        bias: ``[N]``, added in float32.
        out: write the result here (any high-precision dtype); with ``accumulate`` add to what it holds.
        use_split_accumulator: False allows fast accumulation where the hardware has it.

    Raises:
        OptionError: unknown ``gemm_type``, or ``accumulate`` without ``out``.
        ShapeError, DTypeError, DeviceError: operands that do not fit together.
    """
    if not isinstance(gemm_type, str) or gemm_type not in _GEMMS:
        raise OptionError(f"gemm_type is {gemm_type!r}", expected="fprop, dgrad or wgrad")
    if out is not None:
        check_high_precision(out, "out")
    if accumulate and out is None:
        raise OptionError("accumulate=True without out", expected="the tensor to add to", remedy="pass out=main_grad")
    result_dtype = out_dtype if out is None else out.dtype
    if result_dtype not in HIGH_PRECISION:
        check_dtype(result_dtype, "result dtype")
    # Adding into out must round once: the product stays float32 until the sum.
    sum_dtype = torch.float32 if accumulate else result_dtype
    fast = not use_split_accumulator
    result = _scaled(a, b, gemm_type, bias, out, sum_dtype, fast)
    if result is not None:
        return _into(out, result, accumulate)

    bias = bias.detach() if isinstance(bias, torch.Tensor) else bias
    _check_operands(a, b, gemm_type, bias, out)
    owner = _custom_owner(a, b)
    if owner is not None:
        scales = getattr(a, "_scale_inv", None), getattr(b, "_scale_inv", None)
        with without_autocast(a.device.type):
            made = owner.qgemm(a, b, None, result_dtype, *scales, bias, out, accumulate, gemm_type, a, b)
        return rounded(made) if out is None else made

    (a_columnwise, b_columnwise), transposes = _GEMMS[gemm_type]
    compute = _compute_dtype(a, b, sum_dtype)
    left, right = _operand(a, a_columnwise, compute), _operand(b, b_columnwise, compute)
    if left.layout and right.layout:
        caches = a.gemm_cache(), b.gemm_cache()  # type: ignore[union-attr]
        result = block_product(left, right, caches, transposes, bias, sum_dtype, fast)
    if result is None:
        result = decoded_mm(left, right, transposes, bias, compute, sum_dtype)
    return _into(out, result, accumulate)


def _into(out: torch.Tensor | None, result: torch.Tensor, accumulate: bool) -> torch.Tensor:
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _scaled(
    a: Operand,
    b: Operand,
    gemm_type: GemmType,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> torch.Tensor | None:
    """The product on hardware that multiplies FP8, or None: then it is decoded operands', or an error.

    Every training step comes here three times for each layer: nothing is looked at twice.
    """
    if not (may_multiply_fp8() and isinstance(a, QuantizedTensorStorage) and isinstance(b, QuantizedTensorStorage)):
        return None
    if _custom_owner(a, b) is not None:
        return None
    a_columnwise, b_columnwise = _GEMMS[gemm_type][0]
    left, right = _rows(a, a_columnwise), _rows(b, b_columnwise)
    if left is None or right is None:
        return None
    if out is not None and (out.shape != (left[0].shape[0], right[0].shape[0]) or out.device != left[0].device):
        return None
    if bias is not None:
        check_bias(bias, right[0].shape[0], right[0].device)
        if bias.requires_grad and torch.is_grad_enabled():
            bias = bias.detach()
    # Only a weight is met again as it was, and compiled code keeps nothing.
    cache = None if gemm_type == "wgrad" or torch.compiler.is_compiling() else b.gemm_cache()
    return scaled_product(left, right, bias, dtype, fast_accumulation, cache, b_columnwise)


def _compute_dtype(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.dtype:
    """bfloat16 where it holds the operands, is fast, and the result loses nothing to it or is wanted in it."""
    wide = returns_float32(a.device)
    wanted = out_dtype == torch.bfloat16 and backend_for(a.device.type) != "reference"
    fast = wide or (wanted and products.product_dtype(torch.bfloat16, a.device) == torch.bfloat16)
    exact = all(isinstance(x, QuantizedTensorStorage) or x.dtype == torch.bfloat16 for x in (a, b))
    return torch.bfloat16 if fast and exact else torch.float32


def _operand(x: Operand, columnwise: bool, dtype: torch.dtype) -> products.Operand:
    """A matrix that is still to be decoded, if the storage says how, or its values."""
    if not isinstance(x, QuantizedTensorStorage):
        # No gradient flows through a product: layers have backward passes of their own.
        return products.Operand(as_matrix(x.detach()).to(dtype))
    on_grid = x.grid_operand(columnwise=columnwise)
    if on_grid is None:
        return products.Operand(*x.gemm_operand(columnwise=columnwise, dtype=dtype))
    return products.Operand(*on_grid, _layout_text(x, columnwise), columnwise)


def _layout_text(x: QuantizedTensorStorage, columnwise: bool) -> str:
    return x.column_layout_text if columnwise else x.layout_text


def _rows(x: QuantizedTensorStorage, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """FP8 elements for hardware that multiplies them, ``[outer, reduced]``, best contiguous, and float32 scales: one
    for each of these rows, or one; None for what has other scales."""
    text = _layout_text(x, columnwise)
    layout = Layout.of(text) if text else None
    fits = layout is not None and layout.block in _SCALED_BLOCKS and layout.scale is torch.float32
    on_grid = x.grid_operand(columnwise=columnwise) if fits else None
    if layout is None or on_grid is None or layout.element not in FP8:
        return None
    elements = on_grid[0].view(layout.element)
    return elements.t() if columnwise and not layout.transposed else elements, on_grid[1].reshape(-1)


def _custom_owner(a: Operand, b: Operand) -> Quantizer | None:
    for x in (a, b):
        quantizer: Quantizer | None = getattr(x, "_quantizer", None)
        if quantizer is not None and quantizer.custom:
            return quantizer
    return None


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``[*leading, K]`` as ``[rows, K]``; K may be 0, for which ``reshape(-1, K)`` has no answer."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _check_operands(
    a: Operand, b: Operand, gemm_type: GemmType, bias: torch.Tensor | None, out: torch.Tensor | None
) -> None:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, QuantizedTensorStorage):
            check_high_precision(x, f"operand {name}")
        if len(x.size()) == 0:
            raise ShapeError(f"operand {name} has no dimensions", expected="at least one")
    if a.device != b.device:
        raise DeviceError(f"operands on {a.device} and {b.device}", expected="one device")
    a_shape, b_shape = a.size(), b.size()
    transpose_a, transpose_b = _GEMMS[gemm_type][1]
    rows, inner = (math.prod(a_shape[:-1]), a_shape[-1])[:: -1 if transpose_a else 1]
    reduced, columns = (math.prod(b_shape[:-1]), b_shape[-1])[:: -1 if transpose_b else 1]
    if inner != reduced:
        raise ShapeError(
            f"{gemm_type} of {tuple(a_shape)} and {tuple(b_shape)}: reduced dimensions {inner} and {reduced}",
            expected="equal ones",
        )
    if bias is not None:
        check_bias(bias, columns, a.device)
    if out is not None:
        if tuple(out.shape) != (rows, columns):
            raise ShapeError(f"out has shape {tuple(out.shape)}", expected=str((rows, columns)))
        check_device(out, a.device, "out")
