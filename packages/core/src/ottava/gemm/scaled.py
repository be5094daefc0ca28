"""The product of FP8 elements as they are, on hardware that multiplies them, by torch's
``scaled_mm``: a table of which scales where.

The library multiplies rows along the reduced dimension: ``a [M, K]`` and ``b [N, K]`` give
``a · bᵀ``. This module brings operands into the form that the library takes. It pads them with
zeros to the sizes that the library wants, at addresses that are multiples of 16, and cuts the
result. It puts scales of blocks into the library's order. A bias is added in float32 before the
one rounding, unless the library can add it itself. The library has no product of two E5M2
operands, so this module has none either.

Operands with one scale for the tensor, or for each row, go to the private ``_scaled_mm``, because
the public function takes lists and costs a fifth more host time. ``_scaled_mm`` takes contiguous
rows, or (compute capability 10 and 11) a transposed view of contiguous ones. It takes scales of
rows if the result is bfloat16 and ``b`` is E4M3; otherwise the product is computed without scales,
and multiplied by them in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F

from ottava.formats import E8M0, FP8, MX_BLOCK
from ottava.gemm.operators import define
from ottava.kernels import transpose
from ottava.kernels.products import capability, finish
from ottava.layout import Block, Layout
from ottava.tensors.declaration import GemmCache
from ottava.tensors.operand import Side
from ottava.torch_private import scaled_mm

Tensor = torch.Tensor
CachedT = TypeVar("CachedT")
_FLOAT32 = torch.float32
# Sizes and addresses have to be multiples of this.
_MULTIPLE = 16
# The sides of a square block, and the length of a line.
_SIDE = 128


def fitted(rows: Tensor, outer: int, inner: int, views: bool = False) -> Tensor:
    """Elements ``[outer, reduced]`` in the form that the library takes; without a copy if they
    have it.

    The result is padded with zeros to multiples of ``outer`` and ``inner``. It begins at an address
    that is a multiple of 16. It is contiguous, or with ``views`` a transposed view of contiguous
    elements.
    """
    data = rows.view(torch.uint8)
    if not data.is_contiguous() and data.t().is_contiguous():
        if views:
            # The outer size of the view is a stride, so it needs the multiple of the inner one.
            return _padded(data.t(), inner, inner).t().view(rows.dtype)
        data = transpose(data.t())
    return _padded(data.contiguous(), outer, inner).view(rows.dtype)


def _padded(data: Tensor, rows: int, columns: int) -> Tensor:
    padding = [0, -data.shape[1] % columns, 0, -data.shape[0] % rows]
    if any(padding):
        return F.pad(data, padding)
    if data.shape[0] == 1:
        # The stride of a single row means nothing, except to the library.
        data = data.as_strided(data.shape, (data.shape[1], 1))
    if data.data_ptr() % _MULTIPLE:
        return data.clone()
    return data


def cached(weight: Side, make: Callable[[], CachedT], option: object = None) -> CachedT:
    """The result of ``make`` for a weight, from the weight's cache if it is up to date.

    ``make`` is called again when the weight was written to, or ``option`` is another.
    """
    cache: GemmCache | None = None
    if weight.source is not None:
        cache = weight.source.gemm_cache()
    # A replayed CUDA graph would not notice that the weight has changed.
    if cache is None or (weight.values.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    tensors = [tensor for tensor in (weight.values, weight.scales) if tensor is not None]
    entry = cache.get(weight.columnwise, tensors, make, option)
    if isinstance(entry, Tensor) and entry.data_ptr() == weight.values.data_ptr():
        # The result is the weight's own memory, which the cache would keep alive after the weight
        # has got other data.
        cache.entries.pop(weight.columnwise)
    return entry


def swizzle(scales: Tensor) -> Tensor:
    """E8M0 scales ``[outer, blocks]`` padded with zeros to multiples of 128 and 4, in the library's
    order, flat.

    Tiles of 128 by 4 follow each other row by row of tiles; in a tile, scale ``(r, c)`` is at
    ``(r % 32) * 16 + (r // 32) * 4 + c``. Source: cuBLAS documentation, layout of block scaling
    factors.
    """
    rows, columns = scales.shape
    padded: Tensor = F.pad(scales, [0, -columns % 4, 0, -rows % 128])
    tiles: Tensor = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


def _padded_columns(scales: Tensor, multiple: int) -> Tensor:
    """float32 scales ``[rows, columns]`` transposed, which lie with strides ``[1, L]``, where L is
    the number of columns rounded up to a multiple."""
    rows, columns = scales.shape
    # contiguous() does not do, because the library also reads the strides of sizes of 1.
    padded = scales.new_zeros((rows, columns + -columns % multiple))
    padded[:, :columns] = scales
    return padded.t()


class _Blocks(NamedTuple):
    """The form in which the library takes a kind of blocks.

    Attributes:
        recipe: the kind.
        outer, inner: the multiples of which both sizes of an operand have to be.
        order: brings scales into the library's order.
        swizzle: the name of that order.
    """

    recipe: F.ScalingType
    outer: int
    inner: int
    order: Callable[[Tensor], Tensor]
    swizzle: F.SwizzleType | None = None


_Scales = tuple[Block, torch.dtype | str]
_TENSOR, _ROW = ((None, None), _FLOAT32), ((1, None), _FLOAT32)
_LINE, _SQUARE, _MX = (
    ((1, _SIDE), _FLOAT32),
    ((_SIDE, _SIDE), _FLOAT32),
    ((1, MX_BLOCK), E8M0.torch_dtype),
)
_BLOCKS: dict[_Scales, _Blocks] = {
    _LINE: _Blocks(
        F.ScalingType.BlockWise1x128, _MULTIPLE, _SIDE, lambda s: _padded_columns(s.t(), _MULTIPLE)
    ),
    _SQUARE: _Blocks(F.ScalingType.BlockWise128x128, _SIDE, _SIDE, lambda s: _padded_columns(s, 4)),
    _MX: _Blocks(
        F.ScalingType.BlockWise1x32, _MULTIPLE, MX_BLOCK, swizzle, F.SwizzleType.SWIZZLE_32_4_4
    ),
}


def multiplies_fp8(operand: Tensor) -> bool:
    """Whether FP8 operands where ``operand`` is are multiplied as such."""
    return capability(operand) >= 89


def product_of(a: Side, b: Side) -> Callable[..., Tensor] | None:
    """The function that multiplies two sides without decoding them; None if this hardware has no
    such product."""
    if not multiplies_fp8(a.values):
        return None
    return _choice(a.layout, b.layout, capability(a.values))


def _choice(left: str, right: str, hardware: int) -> Callable[..., Tensor] | None:
    a, b = Layout.of(left), Layout.of(right)
    if not {a.element, b.element} <= FP8 or a.element is b.element is torch.float8_e5m2:
        return None
    scales = (a.block, a.scale), (b.block, b.scale)
    for row in PRODUCTS:
        if row.oldest <= hardware <= row.newest and scales in row.scales:
            return row.multiply
    return None


def product(a: Side, b: Side, bias: Tensor | None, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """``round(a[M, K] · b[N, K]ᵀ * scales + bias)`` of one scale for the tensor, or for each row;
    with ``fast`` accumulation where the hardware has it."""
    result = None
    # A traced or fake tensor has no address to look at; the operator gets one that has.
    if type(a.values) is Tensor and not torch.compiler.is_compiling():
        result = _direct(a, b, bias, out_dtype, fast)
    if result is None:
        return _fitting(a, b, bias, out_dtype, fast)
    return result


def _rows(operand: Side) -> tuple[Tensor, Tensor]:
    """FP8 elements ``[outer, reduced]``, best contiguous, and scales: one for each of these rows,
    or one."""
    values, scales = operand.values, operand.scales
    scales = (
        torch.ones(1, dtype=_FLOAT32, device=values.device)
        if scales is None
        else scales.reshape(-1)
    )
    return operand.outer_first().view(Layout.of(operand.layout).element_dtype), scales


def _direct(
    a: Side, b: Side, bias: Tensor | None, out_dtype: torch.dtype, fast: bool
) -> Tensor | None:
    """The product, if the library takes both operands as they are, which it does in most training
    steps; else None."""
    (left, scale_a), (right, scale_b) = _rows(a), _rows(b)
    (rows, inner), columns = left.shape, right.shape[0]
    if (
        inner
        and columns
        and rows > 1
        and not (inner | columns | left.data_ptr() | right.data_ptr()) & (_MULTIPLE - 1)
        and left.is_contiguous()
        and right.is_contiguous()
        and scale_a.numel() == scale_b.numel() == 1
        and (bias is None or _fuses(bias, out_dtype))
    ):
        return scaled_mm(left, right.t(), scale_a, scale_b, bias, None, out_dtype, fast)
    return None


def _fuses(bias: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the library adds the bias as it is."""
    return (
        bias.dtype is out_dtype is not _FLOAT32
        and bias.is_contiguous()
        and not bias.data_ptr() & (_MULTIPLE - 1)
    )


def _multiply(a: Side, b: Side, bias: Tensor | None, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """The product of operands of any sizes, strides, addresses and scales, with any bias."""
    (rows, inner), columns = a.outer_first().shape, b.outer_first().shape[0]
    if not (rows and columns and inner):
        return finish(
            a.values.new_zeros((rows, columns), dtype=_FLOAT32), None, None, bias, out_dtype
        )
    in_blocks = _blocks(a) is not None
    fused = bias is None or (bias.dtype is out_dtype is not _FLOAT32 and not in_blocks)
    if not fused or (in_blocks and out_dtype is torch.float16):
        # The library would round before the bias is added, or has no product with this result.
        return finish(_multiply(a, b, None, _FLOAT32, fast), None, None, bias, out_dtype)
    if in_blocks:
        result = _in_blocks(a, b, out_dtype, fast)
    else:
        result = _by_rows(a, b, bias, out_dtype, fast)
    if result.shape != (rows, columns):
        return result[:rows, :columns].contiguous()
    return result


def _by_rows(a: Side, b: Side, bias: Tensor | None, out_dtype: torch.dtype, fast: bool) -> Tensor:
    result = _direct(a, b, bias, out_dtype, fast)
    if result is not None:
        return result
    (left, scale_a), (right, scale_b) = _rows(a), _rows(b)
    rows, columns = len(left), len(right)
    by_row = scale_a.numel() != 1 or scale_b.numel() != 1
    if by_row:
        scale_a, scale_b = scale_a.expand(rows).unsqueeze(1), scale_b.expand(columns)
        # On a GPU of capability 8.9 the library has no product that is scaled by rows.
        if (
            out_dtype is not torch.bfloat16
            or right.dtype is not torch.float8_e4m3fn
            or 0 < capability(left) < 90
        ):
            bare = _multiply(a._replace(scales=None), b._replace(scales=None), None, _FLOAT32, fast)
            return finish(bare * (scale_a * scale_b), None, None, bias, out_dtype)
    # On this hardware the library takes transposed views of rows.
    views = not by_row and 100 <= capability(left) < 120
    left = fitted(left, 1, _MULTIPLE, views)
    make = partial(fitted, right, _MULTIPLE, _MULTIPLE, views)
    # Only a weight can be multiplied again unchanged, so only its form is cached. If ``a`` is
    # columnwise, this is wgrad, which has no weight.
    if a.columnwise:
        right = make()
    else:
        right = cached(b, make, views)
    padding = [0, len(right) - columns]
    if by_row:
        scale_a, scale_b = scale_a.contiguous(), F.pad(scale_b, padding).unsqueeze(0)
    if bias is not None:
        bias = _fitted_bias(bias, padding, out_dtype)
    return scaled_mm(left, right.t(), scale_a, scale_b, bias, None, out_dtype, fast)


def _fitted_bias(bias: Tensor, padding: list[int], out_dtype: torch.dtype) -> Tensor:
    if padding[1]:
        return F.pad(bias, padding)
    if _fuses(bias, out_dtype):
        return bias
    return bias.clone()


def _blocks(operand: Side) -> _Blocks | None:
    layout = Layout.of(operand.layout)
    return _BLOCKS.get((layout.block, layout.scale))


def _in_blocks(a: Side, b: Side, out_dtype: torch.dtype, fast: bool) -> Tensor:
    left, scale_a, of_a = _for_library(a)
    make = partial(_for_library, b)
    if a.columnwise:
        right, scale_b, of_b = make()
    else:
        right, scale_b, of_b = cached(b, make)
    options: dict[str, Any] = {
        "output_dtype": out_dtype,
        "use_fast_accum": fast and of_a.swizzle is not None,
    }
    options |= {"swizzle_a": of_a.swizzle, "swizzle_b": of_b.swizzle}
    return F.scaled_mm(left, right.t(), scale_a, of_a.recipe, scale_b, of_b.recipe, **options)


def _for_library(operand: Side) -> tuple[Tensor, Tensor, _Blocks]:
    """Padded elements ``[outer, reduced]``, their scales in the library's order, and its form."""
    blocks, scales = cast(_Blocks, _blocks(operand)), cast(Tensor, operand.scales)
    data = fitted(
        operand.outer_first().view(Layout.of(operand.layout).element_dtype),
        blocks.outer,
        blocks.inner,
    )
    return data, blocks.order(scales.t() if operand.is_turned() else scales), blocks


_fitting = define("fp8_mm", "bool fast_accumulation", _multiply)


class Product(NamedTuple):
    """A product of the library.

    Attributes:
        oldest, newest: the hardware that has it, by compute capability.
        scales: the pairs of scales that the operands may have.
        multiply: computes it.
    """

    oldest: int
    newest: float
    scales: list[tuple[_Scales, _Scales]]
    multiply: Callable[..., Tensor]


PRODUCTS = (
    Product(0, inf, [(_TENSOR, _TENSOR), (_TENSOR, _ROW), (_ROW, _TENSOR), (_ROW, _ROW)], product),
    Product(90, 90, [(_LINE, _LINE), (_LINE, _SQUARE), (_SQUARE, _LINE)], _fitting),
    Product(100, inf, [(_MX, _MX)], _fitting),
)
