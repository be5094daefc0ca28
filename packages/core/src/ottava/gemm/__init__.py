"""One function for the three GEMMs of a linear layer: operands in, high precision out.

How a quantized tensor becomes a matrix is its own affair (``grid_operand`` for elements with scales, else
``gemm_operand``); a user-defined quantizer's ``qgemm`` takes over where there is one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from ottava.errors import DeviceError, OptionError, ShapeError
from ottava.gemm.decoded import decoded_mm, planned_mm
from ottava.gemm.operand import Operand, operand_of
from ottava.gemm.scaled import product_of
from ottava.kernels import check_high_precision
from ottava.kernels.checks import check_bias, check_device, check_dtype
from ottava.kernels.products import compute_dtype, without_autocast
from ottava.kernels.table import rounded
from ottava.tensors.storage import QuantizedTensorStorage

__all__ = ["GemmType", "Operand", "as_matrix", "gemm", "multiply"]

Tensor = torch.Tensor
GemmType = Literal["fprop", "dgrad", "wgrad"]
# A tensor in high precision, or a quantized one.
_Matrix = Tensor | QuantizedTensorStorage

# GEMM -> whether the rows of a are what is summed over, and whether those of b are: their columnwise usage.
_GEMMS: dict[str, tuple[bool, bool]] = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def gemm(
    a: _Matrix,
    b: _Matrix,
    gemm_type: GemmType = "fprop",
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
) -> Tensor:
    """The product for ``gemm_type``, in ``out_dtype``.

    ``fprop``: ``a = input [*, K]``, ``b = weight [N, K]`` gives ``[M, N]``. ``dgrad``: ``a = grad_output [*, N]``,
    ``b = weight`` gives ``[M, K]``. ``wgrad``: ``a = grad_output``, ``b = input`` gives ``[N, K]``. Accumulation is in
    float32; the product of the scales is applied in float32 before the rounding to ``out_dtype``: one for the tensor or
    for each row to the sums, one for each block to the block's partial sums. On CPUs with a fast product of bfloat16 a
    bfloat16 result with a float32 bias is rounded before both, too (see the numerics page). Scales that are powers of
    two are part of the operands' values. Hardware that multiplies FP8 is given the data; elsewhere it is decoded,
    exactly in float32's normal range; products of what lies beyond follow IEEE float32.

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
    if accumulate and out is None:
        raise OptionError("accumulate=True without out", expected="the tensor to add to", remedy="pass out=main_grad")
    _check_operands(a, b, gemm_type, bias, out)
    check_dtype(out_dtype if out is None else out.dtype, "result dtype")
    bias = None if bias is None else bias.detach()
    return multiply(a, b, gemm_type, out_dtype, bias, out, accumulate, use_split_accumulator)


def multiply(
    a: _Matrix,
    b: _Matrix,
    gemm_type: GemmType,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
) -> Tensor:
    """:func:`gemm` for those whose operands fit together: nothing is checked, and ``bias`` needs no gradient."""
    by_column = _GEMMS[gemm_type]
    result_dtype = out_dtype if out is None else out.dtype
    for x in (a, b):
        owner = getattr(x, "_quantizer", None)
        if owner is not None and owner.custom:
            scales = getattr(a, "_scale_inv", None), getattr(b, "_scale_inv", None)
            with without_autocast(a.device.type):
                made = owner.qgemm(a, b, None, result_dtype, *scales, bias, out, accumulate, gemm_type, a, b)
            return rounded(made) if out is None else made
    # Adding into out must round once: the product stays float32 until the sum.
    dtype = torch.float32 if accumulate else result_dtype
    left, right, result = _on_grid(a, by_column[0]), _on_grid(b, by_column[1]), None
    if left is not None and right is not None:
        result = planned_mm(left, right, bias, dtype)
        if result is None and (of_elements := product_of(left, right)) is not None:
            result = of_elements(left, right, bias, dtype, not use_split_accumulator)
    if result is None:
        exact = all(isinstance(x, QuantizedTensorStorage) or x.dtype == torch.bfloat16 for x in (a, b))
        compute = compute_dtype(a.device, dtype, exact)
        left, right = left or _dense(a, by_column[0], compute), right or _dense(b, by_column[1], compute)
        result = decoded_mm(left, right, bias, dtype, compute)
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _on_grid(x: _Matrix, columnwise: bool) -> Operand | None:
    """Elements with scales, if it is a storage that has such."""
    if not isinstance(x, QuantizedTensorStorage) or (found := x.grid_operand(columnwise=columnwise)) is None:
        return None
    return operand_of((*found, x.column_layout_text if columnwise else x.layout_text, columnwise, x))


def _dense(x: _Matrix, columnwise: bool, dtype: torch.dtype) -> Operand:
    """Values in ``dtype``."""
    if not isinstance(x, QuantizedTensorStorage):
        return Operand(as_matrix(x.detach()).to(dtype), columnwise=columnwise)
    values, scale = x.gemm_operand(columnwise=columnwise, dtype=dtype)
    return Operand(values, None if scale is None else scale.to(torch.float32), columnwise=columnwise)


def as_matrix(x: Tensor) -> Tensor:
    """``[*leading, K]`` as ``[rows, K]``; K may be 0, for which ``reshape(-1, K)`` has no answer."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _check_operands(a: _Matrix, b: _Matrix, gemm_type: str, bias: Tensor | None, out: Tensor | None) -> None:
    sizes = []
    for name, x, summed in zip("ab", (a, b), _GEMMS[gemm_type], strict=True):
        if not isinstance(x, QuantizedTensorStorage):
            check_high_precision(x, f"operand {name}")
        size = tuple(x.size())
        if not size:
            raise ShapeError(f"operand {name} has no dimensions", expected="at least one")
        kept, reduced = math.prod(size[:-1]), size[-1]
        sizes += [reduced, kept] if summed else [kept, reduced]
    rows, inner, columns, reduced = sizes
    if a.device != b.device:
        raise DeviceError(f"operands on {a.device} and {b.device}", expected="one device")
    if inner != reduced:
        what = f"{gemm_type} of {tuple(a.size())} and {tuple(b.size())}: reduced dimensions {inner} and {reduced}"
        raise ShapeError(what, expected="equal ones")
    if bias is not None:
        check_bias(bias, columns, a.device)
    if out is not None:
        check_high_precision(out, "out")
        if tuple(out.shape) != (rows, columns):
            raise ShapeError(f"out has shape {tuple(out.shape)}", expected=str((rows, columns)))
        check_device(out, a.device, "out")
