"""What an implementation stored of a matrix: tensors whose dtypes say nothing but bytes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from ottava.errors import DTypeError
from ottava_verify.arrays import Level
from ottava_verify.numbers import format_of
from ottava_verify.steps import Grid, Steps

Tensor = torch.Tensor
Size = tuple[int, int]
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_CODES = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Stored:
    """Data and scales of one usage of a matrix, as an implementation gives them.

    Attributes:
        data: uint8.
        scales: uint8 codes, or float32 numbers.
        level: the amax of the second level, or a global scale, float32; None without one.
        level_is: what ``level`` may be, of :data:`LEVELS`; empty for anything there.
    """

    data: Tensor
    scales: Tensor
    level: Tensor | None = None
    level_is: tuple[str, ...] = ()

    @staticmethod
    def of(
        data: Tensor,
        scales: Tensor,
        level: Tensor | None = None,
        level_is: tuple[str, ...] = (),
    ) -> "Stored":
        """The tensors of an implementation, whatever dtypes their bytes have.

        Raises:
            DTypeError: data are values, not bytes; scales are neither numbers nor bytes; the second
                level is no number.
        """
        data, scales = data.detach().cpu(), scales.detach().cpu()
        packed = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
        if data.dtype not in (*_BYTES, packed):
            raise DTypeError(
                f"data are {data.dtype}", expected="bytes: uint8, int8, or a dtype of eight bits"
            )
        if scales.dtype in _CODES:
            scales = scales.contiguous().view(torch.uint8)
        elif scales.dtype in _NUMBERS:
            scales = scales.float()
        else:
            raise DTypeError(
                f"scales are {scales.dtype}", expected="float32, or a byte for each scale"
            )
        if level is not None and level.dtype not in _NUMBERS:
            raise DTypeError(f"the second level is {level.dtype}", expected="float32")
        bits = data.contiguous().view(torch.uint8)
        number = None if level is None else level.detach().cpu().float()
        return Stored(bits, scales, number, level_is)

    def matrix(self) -> "Stored":
        """With data as a matrix."""
        width = self.data.shape[-1] if self.data.dim() else 1
        rows = math.prod(self.data.shape[:-1])
        return replace(self, data=self.data.reshape(rows, width))


#: What a second level may be stored as: of the level, and of bound times the largest element.
LEVELS: dict[str, Callable[[Level, Tensor], Tensor | None]] = {
    "amax": lambda level, whole: level.amax,
    "whole/amax": lambda level, whole: level.scale,
    "amax/whole": lambda level, whole: None if level.amax is None else level.amax / whole,
    "1/(whole/amax)": lambda level, whole: level.inverse,
}


class Shapes(NamedTuple):
    """The shapes of what is stored of a matrix: of data, in bytes, and of scales."""

    data: Size
    scales: Size


def shapes_of(choices: Steps, usage: str, shape: Size) -> Shapes:
    """The shapes that a contract gives the stored tensors of a matrix."""
    rows, columns = shape
    if choices.transform is not None:
        size = choices.transform.size
        if usage == "columnwise":
            rows += -rows % size
        else:
            columns += -columns % size
    down, across = Grid(choices.amax.block, (rows, columns)).counts
    if choices.storage.held == "transpose":
        rows, columns, down, across = columns, rows, across, down
    return Shapes((rows, -(-columns // choices.storage.per_byte)), (down, across))


def fitted(stored: Stored, shapes: Shapes) -> Stored | None:
    """Stored tensors as matrices of these shapes; None where they have others."""
    data = stored.matrix().data
    scales = stored.scales
    if tuple(data.shape) != shapes.data or scales.numel() != math.prod(shapes.scales):
        return None
    kept = [size for size in scales.shape if size != 1]
    if kept != [size for size in shapes.scales if size != 1] and scales.dim() > 1:
        return None
    return replace(stored, data=data, scales=scales.reshape(shapes.scales))


def power_of_two(exponents: Tensor) -> Tensor:
    """float32 powers of two; NaN for 128, the exponent of the code 255."""
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents).float()
    return powers.masked_fill(exponents == 128, math.nan)


@cache
def numbers_of(name: str) -> Tensor:
    """The number of each code of a format, float64."""
    fmt = format_of(name)
    return torch.tensor([fmt.number(code) for code in range(1 << fmt.bits)], dtype=torch.float64)


def spread(numbers: Tensor, grid: Grid) -> Tensor:
    """The number of each element's block."""
    for dim, (side, size) in enumerate(zip(grid.block, grid.shape, strict=True)):
        numbers = numbers.index_select(
            dim, torch.arange(size) // (size or 1 if side is None else side)
        )
    return numbers
