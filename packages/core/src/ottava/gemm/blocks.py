"""Products of blocks with scales, on hardware that multiplies them: torch's public ``scaled_mm``.

It takes rows along the reduced dimension, and for each kind of blocks scales in an order of its own. What it has no
product for (two E5M2 operands, 128 × 128 blocks on both sides) is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ottava.formats import E8M0, FP8, MX_BLOCK
from ottava.gemm.operand import Operand, define, fitted, kept
from ottava.kernels.products import capability
from ottava.layout import Block, Layout

Tensor = torch.Tensor


def swizzle(scales: Tensor) -> Tensor:
    """E8M0 scales ``[outer, blocks]`` padded with zeros to multiples of 128 and 4, in the library's order, flat.

    Tiles of 128 by 4 follow each other row by row of tiles; in a tile, scale ``(r, c)`` is at
    ``(r % 32) * 16 + (r // 32) * 4 + c``. Source: cuBLAS documentation, layout of block scaling factors.
    """
    rows, columns = scales.shape
    padded: Tensor = F.pad(scales, [0, -columns % 4, 0, -rows % 128])
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))
    ordered: Tensor = tiles.permute(0, 3, 2, 1, 4).reshape(-1)
    return ordered.view(torch.float8_e8m0fnu)


def _by_row(scales: Tensor) -> Tensor:
    """float32 scales ``[outer, blocks]`` padded to a multiple of 16 rows, which lie next to each other."""
    rows, columns = scales.shape
    made = scales.new_zeros((columns, rows + -rows % _ROWS))
    made[:, :rows] = scales.t()
    return made.t()


def _by_square(scales: Tensor) -> Tensor:
    """float32 scales ``[outer blocks, blocks]`` as ``[L4, outer blocks]`` with strides ``[1, L4]``, where L4 is the
    number of blocks rounded up to a multiple of 4."""
    rows, columns = scales.shape
    made = scales.new_zeros((rows, columns + -columns % 4))
    made[:, :columns] = scales
    return made.t()


class _Kind(NamedTuple):
    """What the library asks for of a kind of blocks: multiples of both sizes, and the order of scales."""

    recipe: Any
    outer: int
    inner: int
    order: Callable[[Tensor], Tensor]
    swizzle: Any = None


_ROWS, _SIDE = 16, 128
_SQUARES = _Kind(F.ScalingType.BlockWise128x128, _SIDE, _SIDE, _by_square)
_MX = _Kind(F.ScalingType.BlockWise1x32, _ROWS, MX_BLOCK, swizzle, F.SwizzleType.SWIZZLE_32_4_4)
_KINDS: dict[tuple[Block, torch.dtype], _Kind] = {
    ((1, MX_BLOCK), E8M0.torch_dtype): _MX,
    ((1, _SIDE), torch.float32): _Kind(F.ScalingType.BlockWise1x128, _ROWS, _SIDE, _by_row),
    ((_SIDE, _SIDE), torch.float32): _SQUARES,
}


def _kind(operand: Operand) -> _Kind | None:
    layout = Layout.of(operand.layout)
    return _KINDS.get((layout.block, layout.scale)) if layout.element in FP8 else None


def takes(a: Operand, b: Operand) -> bool:
    """Whether the hardware that two operands, which fit together, are on multiplies their blocks."""
    hardware = capability(a.values)
    # Compute capability 9.0 has float32 scales of 128 elements; 10 and later have E8M0 ones of 32.
    if hardware != 90 and hardware < 100:
        return False
    kinds = _kind(a), _kind(b)
    fits = kinds == (_MX, _MX) if hardware >= 100 else _MX not in kinds and kinds != (_SQUARES, _SQUARES)
    narrow = all(Layout.of(operand.layout).element is torch.float8_e5m2 for operand in (a, b))
    return fits and None not in kinds and not narrow and bool(a.values.numel() and b.values.numel())


def _multiply(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    left, left_scales, kind_a = _for_library(a)
    # Only a weight, which is no operand of a product with columnwise data of both, is met again as it was.
    right, right_scales, kind_b = _for_library(b) if a.columnwise else _kept(b)
    # The library adds no float32 bias to a narrower result: then the sum is rounded here.
    options: dict[str, Any] = {"swizzle_a": kind_a.swizzle, "swizzle_b": kind_b.swizzle}
    options["output_dtype"] = out_dtype if bias is None and out_dtype is not torch.float16 else torch.float32
    options["use_fast_accum"] = fast_accumulation and kind_a is _MX
    result = F.scaled_mm(left, right.t(), left_scales, kind_a.recipe, right_scales, kind_b.recipe, **options)
    result = result[: a.rows().shape[0], : b.rows().shape[0]]
    if bias is not None:
        result = result + bias.to(torch.float32)
    return result.to(out_dtype).contiguous()


def _for_library(operand: Operand) -> tuple[Tensor, Tensor, _Kind]:
    """Elements ``[outer, reduced]``, padded, and their scales, in order."""
    kind, scales = _kind(operand), operand.scales
    assert kind is not None
    assert scales is not None
    data = fitted(operand.rows(), kind.outer, kind.inner)
    ordered = kind.order(scales.t() if operand.is_turned() else scales)
    return data.view(Layout.of(operand.layout).element), ordered, kind


def _kept(operand: Operand) -> tuple[Tensor, Tensor, _Kind]:
    return kept(operand, lambda: _for_library(operand))  # type: ignore[no-any-return]


#: ``round(a[M, K] · b[N, K]ᵀ + bias)`` of ``(a, b, bias, out_dtype, fast_accumulation)``.
product = define("block_mm", "bool fast_accumulation", _multiply)
