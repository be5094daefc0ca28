"""Products of operands that are made of MX blocks.

Where the hardware multiplies blocks with their scales (NVIDIA's compute capability 10 and later), torch's ``scaled_mm``
does, on rows along the reduced dimension and scales in the layout that it asks for. Elsewhere both operands are decoded
and multiplied as dense matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ottava.formats import MX_BLOCK
from ottava.kernels import transpose
from ottava.kernels.products import Operand, capability, mx_scaled_mm
from ottava.tensors.freshness import GemmCache

Dense = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class BlockOperand:
    """A matrix in MX blocks.

    Attributes:
        elements: of an FP8 dtype, ``[rows, columns]``.
        scales: uint8 bytes of E8M0, unpadded: ``[rows, ceil(columns / 32)]``, or ``[ceil(rows / 32), columns]``.
        columnwise: whether blocks lie along the columns.
        cache: where what is made of the operand is kept.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    columnwise: bool
    cache: GemmCache | None = None


# What the library's scales are padded to, rows and columns, and the rows of one of its groups.
_TILE_ROWS, _TILE_COLUMNS, _GROUP = 128, 4, 32
# The multiple that it wants of the sizes of a product.
_OUTER = 16


def multiplies_blocks(operand: torch.Tensor) -> bool:
    """Whether the hardware that ``operand`` is on multiplies blocks with their scales."""
    return capability(operand) >= 100


def block_product(
    a: BlockOperand | Dense,
    b: BlockOperand | Dense,
    transpose_a: bool,
    transpose_b: bool,
    bias: torch.Tensor | None,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> torch.Tensor:
    """The product of two operands, one of them at least in blocks; a dense one is of ``compute_dtype``."""
    if isinstance(a, BlockOperand) and isinstance(b, BlockOperand):
        # Blocks that lie along the reduced dimension are all that the hardware takes.
        fits = a.columnwise == transpose_a and b.columnwise != transpose_b
        sizes = [size for operand in (a, b) for size in operand.elements.shape]
        # The library has no product of two E5M2 operands.
        fits = fits and not a.elements.dtype == b.elements.dtype == torch.float8_e5m2
        if fits and all(sizes) and multiplies_blocks(a.elements):
            return _native_product(a, b, bias, out_dtype, fast_accumulation)
    return mx_scaled_mm(_stored(a), _stored(b), (transpose_a, transpose_b), bias, compute_dtype, out_dtype)


def _stored(operand: BlockOperand | Dense) -> Operand:
    """An operand as the kernels take it."""
    if isinstance(operand, BlockOperand):
        return operand.elements.view(torch.uint8), operand.scales, operand.elements.dtype, operand.columnwise, None
    return operand[0], None, None, False, operand[1]


def _for_library(operand: BlockOperand) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements ``[outer, reduced]``, padded, and their scales, swizzled."""
    data, scales = operand.elements.view(torch.uint8), operand.scales
    if operand.columnwise:
        data, scales = transpose(data), scales.t()
    padding = [0, -data.shape[1] % MX_BLOCK, 0, -data.shape[0] % _OUTER]
    if any(padding):
        data = F.pad(data, padding)
    return data.contiguous().view(operand.elements.dtype), swizzle(scales).view(torch.float8_e8m0fnu)


def _kept(operand: BlockOperand) -> tuple[torch.Tensor, torch.Tensor]:
    """What the library is given, made once for each state of the operand."""
    if operand.cache is None:
        return _for_library(operand)
    tensors = operand.elements, operand.scales
    return operand.cache.get(operand.columnwise, tensors, lambda: _for_library(operand))  # type: ignore[no-any-return]


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


def _native_product(
    a: BlockOperand, b: BlockOperand, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool
) -> torch.Tensor:
    (left, left_scales), (right, right_scales) = _kept(a), _kept(b)
    rows = a.elements.shape[1 if a.columnwise else 0]
    columns = b.elements.shape[1 if b.columnwise else 0]
    # The library adds no float32 bias to a narrower result: then the sum is rounded here.
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    options: dict[str, Any] = {"swizzle_a": order, "swizzle_b": order, "use_fast_accum": fast_accumulation}
    options["output_dtype"] = out_dtype if bias is None else torch.float32
    result = F.scaled_mm(left, right.t(), left_scales, kind, right_scales, kind, **options)
    result = result[:rows, :columns]
    if bias is not None:
        result = (result + bias.to(torch.float32)).to(out_dtype)
    return result.contiguous()
