"""Products of FP8 operands on hardware that multiplies them (NVIDIA's compute capability 8.9 and later).

torch's ``_scaled_mm`` is called on rows along the reduced dimension: ``a [M, K]`` and ``b [N, K]`` give
``a · bᵀ``. (Its public form ``torch.nn.functional.scaled_mm`` takes lists and costs a fifth more host time.) What that
function asks for is made here:

- K and N are multiples of 16, and every address too; zeros are added, and the result is cut. M is free.
- Rows are contiguous, or (compute capability 10 and 11) a transposed view of contiguous ones, whose outer size is then
  a multiple of 16; anything else is transposed by a kernel.
- A bias is fused if it has the dtype of the result, bfloat16 or float16; else it is added in float32 before the one
  rounding.
- One scale for each row goes to the library for a bfloat16 result and ``b`` in E4M3; else the bare product is scaled
  in float32 before the one rounding.
- It has no product of two E5M2 operands: there is none here either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ottava.formats import FP8
from ottava.gemm.operand import Operand, define, fitted, kept
from ottava.kernels.products import capability, finish
from ottava.layout import Layout
from ottava.torch_private import scaled_mm

Tensor = torch.Tensor

_E4M3, _E5M2, _FLOAT32, _BFLOAT16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
# The multiple that the library wants of sizes and addresses.
_MULTIPLE = 16
_UNALIGNED = _MULTIPLE - 1
# One scale for the tensor, or for each row.
_BLOCKS = ((None, None), (1, None))

_forced: bool | None = None


def multiplies_fp8(operand: Tensor) -> bool:
    """Whether FP8 operands where ``operand`` is are multiplied as such."""
    return capability(operand) >= 89 if _forced is None else _forced


def may_multiply_fp8() -> bool:
    """Whether there can be such a device at all: a cheaper question."""
    return torch.version.cuda is not None if _forced is None else _forced


@contextmanager
def scaled_products(wanted: bool = True) -> Iterator[None]:
    """Inside a ``with`` block FP8 operands are multiplied as such, or decoded, whatever the device.

    torch's CPU library has the function too, slowly: what a GPU does can be tested with it.
    """
    global _forced
    previous, _forced = _forced, wanted
    try:
        yield
    finally:
        _forced = previous


def takes(a: Operand, b: Operand) -> bool:
    """Whether the library has the product, of operands that fit together."""
    if not (may_multiply_fp8() and multiplies_fp8(a.values)):
        return False
    layouts = Layout.of(a.layout), Layout.of(b.layout)
    return all(
        layout.block in _BLOCKS and layout.scale is _FLOAT32 and layout.element in FP8 for layout in layouts
    ) and not all(layout.element is _E5M2 for layout in layouts)


def product(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """``round(a[M, K] · b[N, K]ᵀ * scales + bias)``."""
    # What is not a tensor of memory (a traced or a fake one) has no address to look at: its operator has.
    plain = type(a.values) is Tensor and not torch.compiler.is_compiling()
    made = _direct(a, b, bias, out_dtype, fast_accumulation) if plain else None
    return _fitting(a, b, bias, out_dtype, fast_accumulation) if made is None else made


def _rows(operand: Operand) -> tuple[Tensor, Tensor | None]:
    """FP8 elements ``[outer, reduced]``, best contiguous, and scales: one for each of these rows, one, or None."""
    scales = None if operand.scales is None else operand.scales.reshape(-1)
    return operand.rows().view(Layout.of(operand.layout).element), scales


def _direct(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast: bool) -> Tensor | None:
    """The product, if the library takes everything as it is: what every product of a usual training step is."""
    (left, scale_a), (right, scale_b) = _rows(a), _rows(b)
    rows, inner = left.shape
    columns = right.shape[0]
    if (
        inner
        and columns
        and rows > 1
        and not (inner | columns | left.data_ptr() | right.data_ptr()) & _UNALIGNED
        and left.is_contiguous()
        and right.is_contiguous()
        and scale_a is not None
        and scale_b is not None
        and scale_a.numel() == scale_b.numel() == 1
        and (bias is None or _fuses(bias, out_dtype))
    ):
        return scaled_mm(left, right.t(), scale_a, scale_b, bias, None, out_dtype, fast)
    return None


def _fuses(bias: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the library adds the bias as it is."""
    return bias.dtype is out_dtype is not _FLOAT32 and bias.is_contiguous() and not bias.data_ptr() & _UNALIGNED


def _multiply(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Of any sizes, strides, addresses, scales and bias."""
    made = _direct(a, b, bias, out_dtype, fast)
    if made is not None:
        return made
    (left, scale_a), (right, scale_b) = _rows(a), _rows(b)
    (rows, inner), columns = left.shape, right.shape[0]
    if not rows or not columns or not inner:
        return finish(left.new_zeros((rows, columns), dtype=_FLOAT32), None, None, bias, out_dtype)
    if bias is not None and (out_dtype is _FLOAT32 or bias.dtype is not out_dtype):
        return finish(_multiply(a, b, None, _FLOAT32, fast), None, None, bias, out_dtype)
    one = torch.ones((), dtype=_FLOAT32, device=left.device) if scale_a is None or scale_b is None else None
    a_scale: Any = one if scale_a is None else scale_a
    b_scale: Any = one if scale_b is None else scale_b
    by_row = a_scale.numel() != 1 or b_scale.numel() != 1
    if by_row:
        a_scale, b_scale = a_scale.reshape(-1).expand(rows).unsqueeze(1), b_scale.reshape(-1).expand(columns)
        if out_dtype is not _BFLOAT16 or right.dtype is not _E4M3 or not _scales_rows(left):
            bare = _multiply(a._replace(scales=None), b._replace(scales=None), None, _FLOAT32, fast)
            return finish(bare * (a_scale * b_scale), None, None, bias, out_dtype)
    views = not by_row and _takes_views(left)
    left = fitted(left, 1, _MULTIPLE, views)
    make = partial(fitted, right, _MULTIPLE, _MULTIPLE, views)
    # Only a weight, which is no operand of a product with columnwise data of both, is met again as it was.
    right = make() if a.columnwise else kept(b, make, views)
    padding = [0, right.shape[0] - columns]
    if by_row:
        a_scale, b_scale = a_scale.contiguous(), F.pad(b_scale, padding).unsqueeze(0)
    if bias is not None:
        bias = F.pad(bias, padding) if padding[1] else bias if _fuses(bias, out_dtype) else bias.clone()
    result = scaled_mm(left, right.t(), a_scale, b_scale, bias, None, out_dtype, fast)
    return result if result.shape == (rows, columns) else result[:rows, :columns].contiguous()


def _scales_rows(operand: Tensor) -> bool:
    """Whether the library applies one scale for each row."""
    return not operand.is_cuda or capability(operand) >= 90


def _takes_views(operand: Tensor) -> bool:
    """Whether the library takes transposed views of rows."""
    return 100 <= capability(operand) < 120


_fitting = define("fp8_mm", "bool fast_accumulation", _multiply)
