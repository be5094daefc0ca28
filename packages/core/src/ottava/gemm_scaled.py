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
from typing import Any

import torch
import torch.nn.functional as F

from ottava.kernels import transpose
from ottava.kernels.direct import unobserved
from ottava.kernels.products import capability, finish
from ottava.kernels.table import define_product
from ottava.tensors.freshness import GemmCache
from ottava.torch_private import scaled_mm

Tensor = torch.Tensor
#: FP8 elements ``[outer, reduced]``, and float32 scales still to multiply: one, one for each row, or None.
Rows = tuple[Tensor, Tensor | None]

_E4M3, _E5M2, _FLOAT32, _BFLOAT16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
# The multiple that the library wants of sizes and addresses, less one.
_UNALIGNED = 15

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


def scaled_product(
    a: Rows,
    b: Rows,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    cache: GemmCache | None = None,
    columnwise: bool = False,
) -> Tensor | None:
    """``round(a[M, K] · b[N, K]ᵀ * scales + bias)``, or None if the library has no such product.

    Args:
        bias: ``[N]``.
        cache: where what has to be made of ``b`` is kept, under ``columnwise``.
    """
    (left, scale_a), (right, scale_b) = a, b
    if (left.dtype is _E5M2 and right.dtype is _E5M2) or not multiplies_fp8(left):
        return None
    if left.shape[1] != right.shape[1] or left.get_device() != right.get_device():
        return None
    # What is not a tensor of memory (a traced or a fake one) has no address to look at: its operator has.
    plain = type(left) is Tensor and not torch.compiler.is_compiling()
    if plain:
        made = _direct(left, right, scale_a, scale_b, bias, out_dtype, fast_accumulation)
        if made is not None:
            return made
        # Who looks on is to see one product of these sizes, not what it is made of.
        if unobserved():
            return _fp8_mm(left, right, scale_a, scale_b, bias, out_dtype, fast_accumulation, cache, columnwise)
    result: Tensor = _operator(left, right, scale_a, scale_b, bias, out_dtype, fast_accumulation)
    return result


def _direct(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor | None:
    """The product, if the library takes everything as it is: what every product of a usual training step is."""
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


def _fp8_mm(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
    cache: GemmCache | None = None,
    columnwise: bool = False,
) -> Tensor:
    """Of any sizes, strides, addresses, scales and bias."""
    made = _direct(left, right, scale_a, scale_b, bias, out_dtype, fast)
    if made is not None:
        return made
    rows, columns, inner = left.shape[0], right.shape[0], left.shape[1]
    if not rows or not columns or not inner:
        return finish(left.new_zeros((rows, columns), dtype=_FLOAT32), None, None, bias, out_dtype)
    if bias is not None and (out_dtype is _FLOAT32 or bias.dtype is not out_dtype):
        plain = _fp8_mm(left, right, scale_a, scale_b, None, _FLOAT32, fast, cache, columnwise)
        return finish(plain, None, None, bias, out_dtype)
    one = torch.ones((), dtype=_FLOAT32, device=left.device) if scale_a is None or scale_b is None else None
    a_scale: Any = one if scale_a is None else scale_a
    b_scale: Any = one if scale_b is None else scale_b
    by_row = a_scale.numel() != 1 or b_scale.numel() != 1
    if by_row:
        a_scale, b_scale = a_scale.reshape(-1).expand(rows).unsqueeze(1), b_scale.reshape(-1).expand(columns)
        if out_dtype is not _BFLOAT16 or right.dtype is not _E4M3 or not _scales_rows(left):
            plain = _fp8_mm(left, right, None, None, None, _FLOAT32, fast, cache, columnwise)
            return finish(plain * (a_scale * b_scale), None, None, bias, out_dtype)
    views = not by_row and _takes_views(left)
    left, right = _fitted(left, False, views), _kept(right, views, cache, columnwise)
    padding = [0, right.shape[0] - columns]
    if by_row:
        a_scale, b_scale = a_scale.contiguous(), F.pad(b_scale, padding).unsqueeze(0)
    if bias is not None:
        bias = F.pad(bias, padding) if padding[1] else bias if _fuses(bias, out_dtype) else bias.clone()
    product = scaled_mm(left, right.t(), a_scale, b_scale, bias, None, out_dtype, fast)
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()


def _scales_rows(operand: Tensor) -> bool:
    """Whether the library applies one scale for each row."""
    return not operand.is_cuda or capability(operand) >= 90


def _takes_views(operand: Tensor) -> bool:
    """Whether the library takes transposed views of rows."""
    return 100 <= capability(operand) < 120


def _padded(data: Tensor, rows: bool) -> Tensor:
    """Contiguous data with zeros added to columns, and to ``rows``, up to multiples of 16, at such an address."""
    padding = [0, -data.shape[1] & _UNALIGNED, 0, -data.shape[0] & _UNALIGNED if rows else 0]
    if any(padding):
        padded: Tensor = F.pad(data, padding)
        return padded
    # The stride of a single row means nothing, except to the library.
    plain = data.as_strided(data.shape, (data.shape[1], 1)) if data.shape[0] == 1 else data
    return plain.clone() if plain.data_ptr() & _UNALIGNED else plain


def _fitted(rows: Tensor, outer: bool, views: bool) -> Tensor:
    """Rows as the library takes them, with ``outer`` also a multiple of 16 of them; the same memory if it can be."""
    data = rows.view(torch.uint8)
    if not data.is_contiguous() and data.t().is_contiguous():
        if views:
            return _padded(data.t(), True).t().view(rows.dtype)
        data = transpose(data.t())
    return _padded(data.contiguous(), outer).view(rows.dtype)


def _kept(rows: Tensor, views: bool, cache: GemmCache | None, columnwise: bool) -> Tensor:
    """The rows of ``b``; what has to be made is made once for each state of a weight."""
    # A graph that is replayed would never see a weight that has changed.
    if cache is None or (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _fitted(rows, True, views)
    kept: Tensor = cache.get(columnwise, (rows,), lambda: _fitted(rows, True, views), views)
    if kept.data_ptr() == rows.data_ptr():
        # The weight's own memory, which the cache would keep when the weight has other data.
        cache.entries.pop(columnwise)
    return kept


# Rows [M, K] and [N, K] as for scaled_product.
_operator = define_product(
    "fp8_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, ScalarType out_dtype,"
    " bool fast_accumulation) -> Tensor",
    _fp8_mm,
    lambda a, b, *_: (a[0], b[0], a[1]),
)
