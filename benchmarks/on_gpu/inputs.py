"""What the kernels are checked on: random values, random bits, every 16-bit pattern, awkward shapes and addresses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
Shape = tuple[int, ...]

SMALL_SHAPES: list[Shape] = [(), (0,), (1,), (0, 5), (3, 0), (3, 5), (16, 16), (33, 65), (129, 127), (2, 3, 41)]
SHAPES: list[Shape] = [
    *SMALL_SHAPES,
    *((7,), (4097,), (1, 1), (1, 31), (8, 8), (15, 17), (31, 33), (32, 32), (63, 65), (64, 64)),
    *((127, 129), (128, 128), (128, 136), (136, 128), (255, 256), (1, 4097), (4097, 1), (257, 1023), (512, 384)),
    *((2, 0, 3), (3, 40, 32), (1000, 1000), (4097, 129), (2048, 2056)),
]
SCALES = [1.0, 13.7, 2.0**-20, -2.0, 0.0, 1e-30, 3e38, 2.0**-127, math.inf, math.nan]
# A frame around results, which nobody may touch, and what it is filled with.
_FRAME, _FILL = 67, 0xA5


def every_16_bit(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of bfloat16 or float16."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)


def hard_float32() -> torch.Tensor:
    """Every sign and exponent with the leading mantissa bits in all patterns, and both neighbours of each.

    Among them are all FP8 values, the ties between them, and what lies next to a tie.
    """
    leading = torch.arange(1 << 15, dtype=torch.int64) << 17
    patterns = torch.cat([leading, leading + 1, (leading - 1).clamp(min=0)])
    return patterns.to(torch.uint32).view(torch.float32)


def hardest(dtype: torch.dtype) -> torch.Tensor:
    """The special values of a dtype, in one dimension."""
    return hard_float32() if dtype == torch.float32 else every_16_bit(dtype)


class Draw:
    """Fresh random inputs on the CPU."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, shape: Shape, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """From ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def values(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Normal ones, some of them far larger or smaller."""
        spread = torch.exp2(self.integers(-6, 7, shape).float())
        return (torch.randn(shape, generator=self.generator) * spread).to(dtype)

    def bits(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Any bits: all exponents, NaN, infinities and subnormal numbers among them."""
        if dtype == torch.uint8:
            return self.integers(0, 256, shape, torch.uint8)
        width = 8 * dtype.itemsize
        # Views need a dimension.
        flat = self.integers(0, 1 << width, (math.prod(shape),)).to(getattr(torch, f"uint{width}"))
        return flat.view(dtype).view(shape)

    def scalar(self, value: float) -> torch.Tensor:
        """A float32 tensor with one element."""
        return torch.tensor(value, dtype=torch.float32)

    def result(self, shape: Shape, dtype: torch.dtype = torch.uint8, shift: int = 0) -> torch.Tensor:
        """Room for a result in the middle of other memory, ``shift`` elements off a round address."""
        count = math.prod(shape)
        around = torch.full(((2 * _FRAME + count + shift) * dtype.itemsize,), _FILL, dtype=torch.uint8).view(dtype)
        # 64 elements, and so a round address where the memory begins at one.
        start = _FRAME - 3 + shift
        return around[start : start + count].view(shape)


Make = Callable[[Shape], torch.Tensor]


def _offset(make: Make, shape: Shape) -> torch.Tensor:
    return make((math.prod(shape) + 1,))[1:].view(shape)


def _transposed(make: Make, shape: Shape) -> torch.Tensor:
    return make((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)


def _strided(make: Make, shape: Shape) -> torch.Tensor:
    return make((*shape[:-1], 2 * shape[-1]))[..., ::2]


def _cut(make: Make, shape: Shape) -> torch.Tensor:
    return make((*shape[:-1], shape[-1] + 3))[..., : shape[-1]]


def _expanded(make: Make, shape: Shape) -> torch.Tensor:
    return make((*(1 for _ in shape[:-1]), shape[-1])).expand(shape)


#: Name -> the dimensions that it needs, and what makes a tensor of a shape lie so.
VIEWS: dict[str, tuple[int, Callable[[Make, Shape], torch.Tensor]]] = {
    "contiguous": (0, lambda make, shape: make(shape)),
    "unaligned": (0, _offset),
    "transposed": (2, _transposed),
    "strided": (1, _strided),
    "cut": (1, _cut),
    "expanded": (2, _expanded),
}


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory behind a tensor, in one dimension of its dtype."""
    whole: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides at the same offset into memory of its own."""
    return storage_of(tensor).to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
