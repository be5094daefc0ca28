"""Tensors of any values at any address, and whether what surrounds them is left alone."""

from __future__ import annotations

import math

import numpy as np
import torch

Tensor = torch.Tensor
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SPECIAL = [
    0.0,
    -0.0,
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    1e-45,
    -1e-40,
    6e-8,
    65520.0,
    -3.4028e38,
]


def sample(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Stretches of very different magnitudes, some with special values."""
    random = np.random.default_rng([seed, *shape])
    low, high = (-20, 8) if dtype is torch.float16 else (-130, 110)
    exponents = random.integers(low, high, (shape[0], -(-shape[1] // 32))).repeat(32, 1)[
        :, : shape[1]
    ]
    x = np.ldexp(random.standard_normal(shape), exponents).astype(np.float32)
    odd = random.random(shape) < 0.1 * (random.random((shape[0], 1)) < 0.4)
    x[odd] = random.choice(np.array(SPECIAL, np.float32), int(odd.sum()))
    return torch.from_numpy(x).to(dtype)


def at(x: Tensor, offset: int) -> Tensor:
    """The same values, ``offset`` elements beyond a boundary of 64 bytes, in a buffer of bytes
    0xA5."""
    size = x.element_size()
    room = torch.full((x.numel() * size + 256,), 0xA5, dtype=torch.uint8)
    first = -room.data_ptr() % 64 + offset * size
    part = room[first : first + x.numel() * size].view(x.dtype).view(x.shape)
    part.copy_(x)
    return part


def surroundings_kept(part: Tensor) -> bool:
    room = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
    first = part.storage_offset() * part.element_size()
    rest = torch.cat([room[:first], room[first + part.numel() * part.element_size() :]])
    return bool((rest == 0xA5).all())


def junk(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    return at(
        torch.full((math.prod(shape) * dtype.itemsize,), 0x5A, dtype=torch.uint8)
        .view(dtype)
        .view(shape),
        offset,
    )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    bits = BITS.get(a.dtype, a.dtype)
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def one_nan(values: Tensor, data: Tensor) -> Tensor:
    """Decoded values whose NaN have one pattern, and the sign of their code."""
    sign = torch.where(data >= 128, -1.0, 1.0).to(values.dtype)
    return torch.where(
        values.isnan(), torch.copysign(torch.full_like(values, math.nan), sign), values
    )
