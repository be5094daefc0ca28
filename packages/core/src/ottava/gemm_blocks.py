"""Products of operands that are made of MX blocks.

Where the hardware multiplies blocks with their scales (NVIDIA's compute capability 10 and later), torch's ``scaled_mm``
does, on lines of codes along the reduced dimension and scales in the layout that it asks for. Elsewhere both operands
are decoded and multiplied as dense matrices; values that the decoded dtype does not hold are seen to there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ottava.formats import MX_BLOCK
from ottava.kernels import transpose
from ottava.tensors.blocks import BlockOperand

Dense = tuple[torch.Tensor, torch.Tensor | None]

# What the library's scales are padded to, rows and columns, and the rows of one of its groups.
_TILE_ROWS, _TILE_COLUMNS, _GROUP = 128, 4, 32
# The multiple that it wants of the sizes of a product.
_OUTER = 16


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def multiplies_blocks(device: torch.device) -> bool:
    """Whether the hardware multiplies blocks with their scales."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _capability(torch.cuda.current_device() if device.index is None else device.index) >= (10, 0)


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
        sizes = [size for operand in (a, b) for size in operand.codes.shape]
        if fits and all(sizes) and multiplies_blocks(a.codes.device):
            return _native_product(a, b, bias, out_dtype, fast_accumulation)
    arguments: dict[str, Any] = {}
    for name, operand in (("a", a), ("b", b)):
        in_blocks = isinstance(operand, BlockOperand)
        arguments[name] = operand.codes if isinstance(operand, BlockOperand) else operand[0]
        arguments[f"blocks_{name}"] = operand.scales if isinstance(operand, BlockOperand) else None
        arguments[f"fp8_{name}"] = operand.fp8_dtype if isinstance(operand, BlockOperand) else None
        arguments[f"columnwise_{name}"] = isinstance(operand, BlockOperand) and operand.columnwise
        arguments[f"scale_{name}"] = None if in_blocks else operand[1]  # type: ignore[index]
    result: torch.Tensor = torch.ops.ottava.mx_scaled_mm(
        **arguments,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        bias=bias,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
    )
    return result


@dataclass(frozen=True)
class _Lines:
    """An operand as the library takes it, and the state of the codes and scales that it was made from."""

    codes: torch.Tensor
    scales: torch.Tensor
    made_from: tuple[torch.Tensor, torch.Tensor]
    versions: tuple[int, int]

    def fresh(self, operand: BlockOperand) -> bool:
        made_codes, made_scales = self.made_from
        return made_codes is operand.codes and made_scales is operand.scales and self.versions == _versions(operand)


def _versions(operand: BlockOperand) -> tuple[int, int]:
    tensors = (operand.codes, operand.scales)
    versions = tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)
    return versions[0], versions[1]


def _lines(operand: BlockOperand) -> _Lines:
    """Codes ``[outer, reduced]``, padded, and their scales, swizzled; made once for each state of the operand."""
    compiling = torch.compiler.is_compiling()
    kept = None if compiling else operand.cache.get(operand.columnwise)
    if isinstance(kept, _Lines) and kept.fresh(operand):
        return kept
    codes = transpose(operand.codes) if operand.columnwise else operand.codes
    scales = operand.scales.t() if operand.columnwise else operand.scales
    padding = [0, -codes.shape[1] % MX_BLOCK, 0, -codes.shape[0] % _OUTER]
    if any(padding):
        codes = F.pad(codes, padding)
    versions = (0, 0) if compiling else _versions(operand)
    made = _Lines(codes.contiguous(), swizzle(scales), (operand.codes, operand.scales), versions)
    if not compiling:
        operand.cache[operand.columnwise] = made
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
    rows = a.codes.shape[1 if a.columnwise else 0]
    columns = b.codes.shape[1 if b.columnwise else 0]
    # The library adds no float32 bias to a narrower result: then the sum is rounded here.
    product_dtype = out_dtype if bias is None else torch.float32
    result = F.scaled_mm(
        left.codes.view(a.fp8_dtype),
        right.codes.view(b.fp8_dtype).t(),
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
