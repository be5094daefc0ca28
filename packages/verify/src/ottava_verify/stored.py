"""What an implementation stored of a matrix: tensors whose dtypes say nothing but bytes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.contract.interpretation import Interpretation, Levels
from ottava.contract.steps import Grid, Size, Steps
from ottava.errors import DTypeError

_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
_CODES = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Stored:
    """Data and scales of one usage of a matrix, as an implementation gives them.

    Attributes:
        data: uint8.
        scales: uint8 codes, or float32 numbers.
        level: the amax of the second level, or a global scale, float32; None without one.
        level_is: what ``level`` may be, of :data:`LEVELS`, or :data:`MISSING`; empty for
            anything there.
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
        if data.dtype not in _BYTES:
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

    def matrix(self) -> Tensor:
        """The data as a matrix."""
        width = self.data.shape[-1] if self.data.dim() else 1
        return self.data.reshape(math.prod(self.data.shape[:-1]), width)


def of_parts(parts: Mapping[str, Tensor]) -> Stored:
    """What Ottava stored, from :func:`~ottava.gemm.stored_tensors`."""
    return Stored.of(parts["data"], parts["scales"], parts.get("amax"), ("amax",))


# Second levels.

#: What a second level may be stored as.
LEVELS: dict[str, Callable[[Interpretation], Tensor]] = {
    "amax": lambda made: made.level_amax,
    "whole/amax": lambda made: made.level_scale,
    "amax/whole": lambda made: made.level_amax / made.top,
    "1/(whole/amax)": lambda made: made.level_inverse,
}
#: No second level is stored, though there is one.
MISSING = "missing"
#: What is multiplied to decode: with float32 as a quotient, or as the inverse of one.
INVERSE = ("amax/whole", "1/(whole/amax)")


def levels_of(stored: Stored, made: Interpretation) -> Levels | None:
    """The second level that was stored; None if there is none of this size."""
    if stored.level is None or stored.level.numel() != math.prod(made.level_grid.counts):
        return None
    number = stored.level.reshape(made.level_grid.counts)
    form = stored.level_is[0] if stored.level_is else "amax"
    if form == "amax":
        scale = (made.top / number).clamp(max=torch.finfo().max)
        return Levels(number, scale, made.one / scale)
    if form == "whole/amax":
        return Levels(made.top / number, number, made.one / number)
    return Levels(number * made.top, made.one / number, number)


# Shapes.


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
    data, scales = stored.matrix(), stored.scales
    if tuple(data.shape) != shapes.data or scales.numel() != math.prod(shapes.scales):
        return None
    sides = [size for size in scales.shape if size != 1]
    if scales.dim() > 1 and sides != [size for size in shapes.scales if size != 1]:
        return None
    return replace(stored, data=data, scales=scales.reshape(shapes.scales))
