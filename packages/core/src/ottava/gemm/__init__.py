"""One function for the three GEMMs of a linear layer: operands in, high precision out.

How a quantized tensor becomes a matrix is its own affair (``grid_operand`` for elements with scales, else
``gemm_operand``); a user-defined quantizer's ``qgemm`` takes over where there is one.
"""

from __future__ import annotations

import math

import torch

from ottava.errors import DeviceError, OptionError, ShapeError
from ottava.gemm.operand import Operand
from ottava.gemm.products import GEMMS, GemmType, Matrix, as_matrix, multiply
from ottava.kernels import check_high_precision
from ottava.kernels.checks import check_bias, check_device, check_dtype
from ottava.tensors.storage import QuantizedTensorStorage

__all__ = ["GemmType", "Operand", "as_matrix", "gemm", "multiply"]


def gemm(
    a: Matrix,
    b: Matrix,
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
    if not isinstance(gemm_type, str) or gemm_type not in GEMMS:
        raise OptionError(f"gemm_type is {gemm_type!r}", expected="fprop, dgrad or wgrad")
    if accumulate and out is None:
        raise OptionError("accumulate=True without out", expected="the tensor to add to", remedy="pass out=main_grad")
    sizes: list[int] = []
    for name, x, summed in zip("ab", (a, b), GEMMS[gemm_type], strict=True):
        if not isinstance(x, QuantizedTensorStorage):
            check_high_precision(x, f"operand {name}")
        if not (size := tuple(x.size())):
            raise ShapeError(f"operand {name} has no dimensions", expected="at least one")
        outer, reduced = math.prod(size[:-1]), size[-1]
        sizes += (reduced, outer) if summed else (outer, reduced)
    rows, inner, columns, reduced = sizes
    if a.device != b.device:
        raise DeviceError(f"operands on {a.device} and {b.device}", expected="one device")
    if inner != reduced:
        what = f"{gemm_type} of {tuple(a.size())} and {tuple(b.size())}: reduced dimensions {inner} and {reduced}"
        raise ShapeError(what, expected="equal ones")
    if bias is not None:
        check_bias(bias, columns, a.device)
        bias = bias.detach()
    if out is not None:
        check_high_precision(out, "out")
        if tuple(out.shape) != (rows, columns):
            raise ShapeError(f"out has shape {tuple(out.shape)}", expected=str((rows, columns)))
        check_device(out, a.device, "out")
    check_dtype(out_dtype if out is None else out.dtype, "result dtype")
    return multiply(a, b, gemm_type, out_dtype, bias, out, accumulate, use_split_accumulator)
