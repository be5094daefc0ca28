"""One function for the three GEMMs of a linear layer: operands in, high precision out.

How a quantized tensor becomes a matrix is its own affair (``grid_operand`` for elements with scales, else
``gemm_operand``); a user-defined quantizer's ``qgemm`` takes over where there is one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from ottava.errors import DeviceError, OptionError, ShapeError
from ottava.gemm.decoded import decoded_mm
from ottava.gemm.operand import Operand
from ottava.gemm.scaled import product_of
from ottava.kernels import HIGH_PRECISION, backend_for, check_high_precision
from ottava.kernels.checks import check_bias, check_device, check_dtype
from ottava.kernels.products import product_dtype, returns_float32, without_autocast
from ottava.kernels.table import rounded
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage

__all__ = ["GemmType", "Operand", "as_matrix", "gemm"]

GemmType = Literal["fprop", "dgrad", "wgrad"]
# A tensor in high precision, or a quantized one.
_Matrix = torch.Tensor | QuantizedTensorStorage

# GEMM -> whether the rows of a are what is summed over, and whether those of b are: their columnwise usage.
_GEMMS: dict[str, tuple[bool, bool]] = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def gemm(
    a: _Matrix,
    b: _Matrix,
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
    if out is not None:
        check_high_precision(out, "out")
    if accumulate and out is None:
        raise OptionError("accumulate=True without out", expected="the tensor to add to", remedy="pass out=main_grad")
    result_dtype = out_dtype if out is None else out.dtype
    if result_dtype not in HIGH_PRECISION:
        check_dtype(result_dtype, "result dtype")
    # Adding into out must round once: the product stays float32 until the sum.
    dtype = torch.float32 if accumulate else result_dtype
    columnwise = _GEMMS[gemm_type]
    owner = _custom_owner(a, b)
    left = right = multiply = None
    if owner is None and isinstance(a, QuantizedTensorStorage) and isinstance(b, QuantizedTensorStorage):
        left, right = _on_grid(a, columnwise[0]), _on_grid(b, columnwise[1])
    bias = bias.detach() if isinstance(bias, torch.Tensor) else bias
    _check_operands(a, b, gemm_type, bias, out)
    if left is not None and right is not None:
        multiply = product_of(left, right)
    if multiply is not None:
        result = multiply(left, right, bias, dtype, not use_split_accumulator)
    elif owner is not None:
        scales = getattr(a, "_scale_inv", None), getattr(b, "_scale_inv", None)
        with without_autocast(a.device.type):
            made = owner.qgemm(a, b, None, result_dtype, *scales, bias, out, accumulate, gemm_type, a, b)
        return rounded(made) if out is None else made
    else:
        compute = _compute_dtype(a, b, dtype)
        left = _operand(a, columnwise[0], compute) if left is None else left
        right = _operand(b, columnwise[1], compute) if right is None else right
        result = decoded_mm(left, right, bias, dtype, compute)
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _compute_dtype(a: _Matrix, b: _Matrix, out_dtype: torch.dtype) -> torch.dtype:
    """bfloat16 where it holds the operands, is fast, and the result loses nothing to it or is wanted in it."""
    wide = returns_float32(a.device)
    wanted = out_dtype == torch.bfloat16 and backend_for(a.device.type) != "reference"
    fast = wide or (wanted and product_dtype(torch.bfloat16, a.device) == torch.bfloat16)
    exact = all(isinstance(x, QuantizedTensorStorage) or x.dtype == torch.bfloat16 for x in (a, b))
    return torch.bfloat16 if fast and exact else torch.float32


def _on_grid(x: QuantizedTensorStorage, columnwise: bool) -> Operand | None:
    """Elements with scales, if the storage has such."""
    found = x.grid_operand(columnwise=columnwise)
    if found is None:
        return None
    return Operand(*found, x.column_layout_text if columnwise else x.layout_text, columnwise, x)


def _operand(x: _Matrix, columnwise: bool, dtype: torch.dtype) -> Operand:
    """Elements with scales, or values in ``dtype``."""
    if not isinstance(x, QuantizedTensorStorage):
        # No gradient flows through a product: layers have backward passes of their own.
        return Operand(as_matrix(x.detach()).to(dtype), columnwise=columnwise)
    made = _on_grid(x, columnwise)
    return made or Operand(*x.gemm_operand(columnwise=columnwise, dtype=dtype), columnwise=columnwise)


def _custom_owner(a: _Matrix, b: _Matrix) -> Quantizer | None:
    for x in (a, b):
        quantizer: Quantizer | None = getattr(x, "_quantizer", None)
        if quantizer is not None and quantizer.custom:
            return quantizer
    return None


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``[*leading, K]`` as ``[rows, K]``; K may be 0, for which ``reshape(-1, K)`` has no answer."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _check_operands(
    a: _Matrix, b: _Matrix, gemm_type: GemmType, bias: torch.Tensor | None, out: torch.Tensor | None
) -> None:
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
    device = a.device
    if device != b.device:
        raise DeviceError(f"operands on {device} and {b.device}", expected="one device")
    if inner != reduced:
        raise ShapeError(
            f"{gemm_type} of {tuple(a.size())} and {tuple(b.size())}: reduced dimensions {inner} and {reduced}",
            expected="equal ones",
        )
    if bias is not None:
        check_bias(bias, columns, device)
    if out is not None:
        if tuple(out.shape) != (rows, columns):
            raise ShapeError(f"out has shape {tuple(out.shape)}", expected=str((rows, columns)))
        check_device(out, device, "out")
