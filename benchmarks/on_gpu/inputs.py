"""What kernels are checked on: random values, random bits, every 16-bit pattern, awkward shapes and addresses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from typing import Any

import torch

Tensor = torch.Tensor
Tensors = list[torch.Tensor]
Shape = tuple[int, ...]
#: What a case is made of: tensors by name, and whatever goes with them.
Args = dict[str, Any]
Make = Callable[[Shape], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

SMALL_SHAPES: list[Shape] = [(), (0,), (1,), (0, 5), (3, 0), (3, 5), (16, 16), (33, 65), (129, 127), (2, 3, 41)]
SHAPES: list[Shape] = [
    *SMALL_SHAPES,
    *((7,), (4097,), (1, 1), (1, 31), (8, 8), (15, 17), (31, 33), (32, 32), (63, 65), (64, 64)),
    *((127, 129), (128, 128), (128, 136), (136, 128), (255, 256), (1, 4097), (4097, 1), (257, 1023), (512, 384)),
    *((2, 0, 3), (3, 40, 32), (1000, 1000), (4097, 129), (2048, 2056)),
]
#: The first three suit the float64 oracle: as it is, much clamped, much lost below the smallest number.
SCALES = [1.0, 701.3, 2.0**-16, -2.0, 0.0, 1e-30, 3e38, 2.0**-127, math.inf, math.nan]
# A frame around results, which nobody may touch, and what it is filled with.
_FRAME, _FILL = 67, 0xA5


class Draw:
    """Fresh random inputs on the CPU; ``plain``: what a float64 oracle takes."""

    plain = False

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """From ``low`` to ``high - 1``."""
        return torch.randint(low, high, tuple(shape), generator=self.generator).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator).to(dtype)

    def values(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Normal ones, some of them far larger or smaller."""
        return (self.normal(shape, torch.float32) * torch.exp2(self.integers(-6, 7, shape).float())).to(dtype)

    def bits(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Any bits: all exponents, NaN, infinities and subnormal numbers among them."""
        width = 8 * dtype.itemsize
        # Views need a dimension.
        flat = self.integers(0, 1 << width, (math.prod(shape),)).to(getattr(torch, f"uint{width}"))
        return flat.view(dtype).view(shape)

    def floats(self, shape: Shape, dtype: torch.dtype, kind: int) -> Tensor:
        return self.bits(shape, dtype) if kind and not self.plain else self.values(shape, dtype)

    def scale(self) -> Tensor:
        return torch.tensor(SCALES[int(self.integers(0, 3 if self.plain else len(SCALES), ()))], dtype=torch.float32)

    def result(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8, shift: int = 0) -> Tensor:
        """Room for a result in the middle of other memory, ``shift`` elements off a round address."""
        count = math.prod(shape)
        around = torch.full(((2 * _FRAME + count + shift) * dtype.itemsize,), _FILL, dtype=torch.uint8).view(dtype)
        # 64 elements, and so a round address where the memory begins at one.
        return around[(start := _FRAME - 3 + shift) : start + count].view(tuple(shape))


#: Name -> the dimensions that it needs, and what makes a tensor of a shape lie so.
VIEWS: dict[str, tuple[int, Callable[[Make, Shape], Tensor]]] = {
    "contiguous": (0, lambda make, s: make(s)),
    "unaligned": (0, lambda make, s: make((math.prod(s) + 1,))[1:].view(s)),
    "transposed": (2, lambda make, s: make((*s[:-2], s[-1], s[-2])).transpose(-1, -2)),
    "strided": (1, lambda make, s: make((*s[:-1], 2 * s[-1]))[..., ::2]),
    "cut": (1, lambda make, s: make((*s[:-1], s[-1] + 3))[..., : s[-1]]),
    "expanded": (2, lambda make, s: make((*(1 for _ in s[:-1]), s[-1])).expand(s)),
}


def _hardest(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit dtype; of float32 every leading pattern of bits, and both neighbours of each.

    Among the latter are all FP8 values, the ties between them, and what lies next to a tie.
    """
    if dtype != torch.float32:
        return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    leading = torch.arange(1 << 15, dtype=torch.int64) << 17
    return torch.cat([leading, leading + 1, (leading - 1).clamp(min=0)]).to(torch.uint32).view(dtype)


#: Label, number of dimensions, and what draws the input.
Source = tuple[str, int, Callable[[Draw], Tensor]]


def _viewed(name: str, shape: Shape, dtype: torch.dtype, kind: Callable[..., Tensor]) -> Source:
    label, place = f"{str(dtype)[6:]} {shape} {name} {kind.__name__}", VIEWS[name][1]
    return label, len(shape), lambda draw: place(lambda size: kind(draw, size, dtype), shape)


def _numbers(shapes: Sequence[Shape], plain: bool) -> Iterator[Source]:
    """For each dtype and shape contiguous values, and bits in one of the other views; and the special values."""
    for dtype in FLOATS:
        views = cycle(name for name in VIEWS if name != "contiguous")
        yield from (_viewed("contiguous", shape, dtype, Draw.values) for shape in shapes)
        for shape in () if plain else shapes:
            yield _viewed(next(v for v in views if VIEWS[v][0] <= len(shape)), shape, dtype, Draw.bits)
        # Divisible by 256, and so both a line and a matrix.
        x = _hardest(dtype)
        for made in () if plain else (x, x.view(256, -1), x[: len(x) // 255 * 255].view(-1, 255)):
            yield f"{str(dtype)[6:]} special {tuple(made.shape)}", made.dim(), lambda _, made=made: made


def _codes(shapes: Sequence[Shape], plain: bool) -> Iterator[Source]:
    for shape, (name, (least, _)) in product(shapes, VIEWS.items()):
        if least <= len(shape):
            yield _viewed(name, shape, torch.uint8, Draw.bits)


def _amaxes(shapes: Sequence[Shape], plain: bool) -> Iterator[Source]:
    for shape in ((), (0,), (1,), (127,), (129,), (3, 1000)):
        yield f"{shape}", len(shape), lambda draw, shape=shape: draw.bits(shape, torch.float32).abs()


#: The name of a kernel's first argument -> where it comes from.
SOURCES = {"x": _numbers, "data": _codes, "amax": _amaxes}


def storage_of(tensor: Tensor) -> Tensor:
    """All the memory behind a tensor, in one dimension of its dtype."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides at the same offset into memory of its own."""
    return storage_of(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
