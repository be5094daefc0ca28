"""Products of operands that are made of MX blocks.

Where the hardware multiplies blocks with their scales (NVIDIA's compute capability 10 and later), torch's ``scaled_mm``
does, on lines of codes along the reduced dimension and scales in the layout that it asks for. Elsewhere both operands
are decoded and multiplied as dense matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ottava.formats import MX_BLOCK
from ottava.kernels import transpose
from ottava.kernels.devices import capability
from ottava.kernels.products import Operand, mx_scaled_mm
from ottava.tensors.blocks import BlockOperand

Dense = tuple[torch.Tensor, torch.Tensor | None]

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
    scales = tuple(None if isinstance(operand, BlockOperand) else operand[1] for operand in (a, b))
    return mx_scaled_mm(
        (_stored(a), _stored(b)), (transpose_a, transpose_b), (scales[0], scales[1], bias), compute_dtype, out_dtype
    )


def _stored(operand: BlockOperand | Dense) -> Operand:
    """An operand as the kernels take it."""
    if isinstance(operand, BlockOperand):
        return operand.elements.view(torch.uint8), operand.scales, operand.elements.dtype, operand.columnwise
    return operand[0], None, None, False


@dataclass(frozen=True)
class _Lines:
    """An operand as the library takes it, and the state of the elements and scales that it was made from."""

    elements: torch.Tensor
    scales: torch.Tensor
    made_from: tuple[torch.Tensor, torch.Tensor]
    state: tuple[Any, ...]


def _state(operand: BlockOperand) -> tuple[Any, ...]:
    """Changes with every write: those that are counted, and a user's own to the buffers, which have versions."""
    tensors = (operand.elements, operand.scales)
    found = [(t.data_ptr(), t.shape, t.stride(), 0 if t.is_inference() else t._version) for t in tensors]
    return (*found, None if operand.cache is None else operand.cache.writes.value)


def _lines(operand: BlockOperand) -> _Lines:
    """Elements ``[outer, reduced]``, padded, and their scales, swizzled; made once for each state of the operand."""
    state = None if operand.cache is None else _state(operand)
    kept = None if operand.cache is None else operand.cache.entries.get(operand.columnwise)
    if isinstance(kept, _Lines) and kept.state == state:
        return kept
    codes, scales = operand.elements.view(torch.uint8), operand.scales
    if operand.columnwise:
        codes, scales = transpose(codes), scales.t()
    padding = [0, -codes.shape[1] % MX_BLOCK, 0, -codes.shape[0] % _OUTER]
    if any(padding):
        codes = F.pad(codes, padding)
    elements = codes.contiguous().view(operand.elements.dtype)
    made = _Lines(elements, swizzle(scales), (operand.elements, operand.scales), state or ())
    if operand.cache is not None:
        operand.cache.entries[operand.columnwise] = made
    return made


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
    left, right = _lines(a), _lines(b)
    rows = a.elements.shape[1 if a.columnwise else 0]
    columns = b.elements.shape[1 if b.columnwise else 0]
    # The library adds no float32 bias to a narrower result: then the sum is rounded here.
    product_dtype = out_dtype if bias is None else torch.float32
    result = F.scaled_mm(
        left.elements,
        right.elements.t(),
        left.scales.view(torch.float8_e8m0fnu),
        F.ScalingType.BlockWise1x32,
        right.scales.view(torch.float8_e8m0fnu),
        F.ScalingType.BlockWise1x32,
        swizzle_a=F.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=F.SwizzleType.SWIZZLE_32_4_4,
        output_dtype=product_dtype,
        use_fast_accum=fast_accumulation,
    )
    result = result[:rows, :columns]
    if bias is not None:
        result = (result + bias.to(torch.float32)).to(out_dtype)
    return result.contiguous()
