"""Products of operands that are made of MX blocks.

Where the hardware multiplies blocks with their scales (NVIDIA's compute capability 10 and later), torch's ``scaled_mm``
does, on rows along the reduced dimension and scales in the layout that it asks for. Elsewhere both operands are decoded
and multiplied as dense matrices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ottava.formats import E8M0, FP8, MX_BLOCK
from ottava.kernels import transpose
from ottava.kernels.products import Operand, capability
from ottava.layout import Layout
from ottava.tensors.freshness import GemmCache

# What the library's scales are padded to, rows and columns, and the rows of one of its groups.
_TILE_ROWS, _TILE_COLUMNS, _GROUP = 128, 4, 32
# The multiple that it wants of the sizes of a product.
_OUTER = 16


def multiplies_blocks(operand: torch.Tensor) -> bool:
    """Whether the hardware that ``operand`` is on multiplies blocks with their scales."""
    return capability(operand) >= 100


def _has_blocks(operand: Operand) -> bool:
    layout = Layout.of(operand.layout)
    of_mx = layout.block == (1, MX_BLOCK) and layout.scale == E8M0.torch_dtype
    return of_mx and layout.columnwise == "own" and layout.element in FP8


def block_product(
    a: Operand,
    b: Operand,
    caches: tuple[GemmCache | None, GemmCache | None],
    transposes: tuple[bool, bool],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> torch.Tensor | None:
    """The product of two operands in blocks, or None if the hardware that they are on has no such product."""
    # Blocks that lie along the reduced dimension are all that the hardware takes.
    if not (_has_blocks(a) and _has_blocks(b)):
        return None
    fits = a.columnwise == transposes[0] and b.columnwise != transposes[1]
    # The library has no product of two E5M2 operands.
    fits = fits and any(Layout.of(operand.layout).element != torch.float8_e5m2 for operand in (a, b))
    if not (fits and a.values.numel() and b.values.numel() and multiplies_blocks(a.values)):
        return None
    (left, left_scales), (right, right_scales) = _kept(a, caches[0]), _kept(b, caches[1])
    rows, columns = a.values.shape[1 if a.columnwise else 0], b.values.shape[1 if b.columnwise else 0]
    # The library adds no float32 bias to a narrower result: then the sum is rounded here.
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    options: dict[str, Any] = {"swizzle_a": order, "swizzle_b": order, "use_fast_accum": fast_accumulation}
    options["output_dtype"] = out_dtype if bias is None else torch.float32
    result = F.scaled_mm(left, right.t(), left_scales, kind, right_scales, kind, **options)
    result = result[:rows, :columns]
    if bias is not None:
        result = (result + bias.to(torch.float32)).to(out_dtype)
    return result.contiguous()


def _for_library(operand: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements ``[outer, reduced]``, padded, and their scales, swizzled."""
    data, scales = operand.values, operand.scales
    assert scales is not None
    if operand.columnwise:
        data, scales = transpose(data), scales.t()
    padding = [0, -data.shape[1] % MX_BLOCK, 0, -data.shape[0] % _OUTER]
    if any(padding):
        data = F.pad(data, padding)
    return data.contiguous().view(Layout.of(operand.layout).element), swizzle(scales).view(torch.float8_e8m0fnu)


def _kept(operand: Operand, cache: GemmCache | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the library is given, made once for each state of the operand."""
    if cache is None:
        return _for_library(operand)
    return cache.get(operand.columnwise, (operand.values, operand.scales), lambda: _for_library(operand))  # type: ignore[no-any-return, arg-type]


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Scales ``[outer, blocks]`` padded with zeros to multiples of 128 and 4, in the library's order, flat.

    Tiles of 128 by 4 follow each other row by row of tiles; in a tile, scale ``(r, c)`` is at
    ``(r % 32) * 16 + (r // 32) * 4 + c``. Source: cuBLAS documentation, layout of block scaling factors.
    """
    rows, columns = scales.shape
    padded: torch.Tensor = F.pad(scales, [0, -columns % _TILE_COLUMNS, 0, -rows % _TILE_ROWS])
    tiles = padded.unflatten(0, (-1, _TILE_ROWS // _GROUP, _GROUP)).unflatten(3, (-1, _TILE_COLUMNS))
    ordered: torch.Tensor = tiles.permute(0, 3, 2, 1, 4).reshape(-1)
    return ordered
