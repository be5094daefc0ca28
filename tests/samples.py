"""Matrices for tests of numbers: wide magnitudes, special values, and views in any order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from tests import oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Values that are not ordinary: some are only zero or infinite in a narrower dtype.
SPECIAL = [
    0.0,
    -0.0,
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    2.0**-149,
    -1e-40,
    2.0**-127,
    6e-8,
    448.0,
    -57344.0,
    65520.0,
    -3.4028e38,
]


def wide(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, sigma: float = 3.0
) -> torch.Tensor:
    """Magnitudes so far apart that blocks, rows and columns get different scales."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    return (values * torch.exp(sigma * torch.randn(shape, generator=random))).to(dtype)


def special(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, matrix)`` of 3 × 260 (blocks of 128, 128 and 4) with unusual values."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = {
        "NaN": math.nan,
        "infinity": math.inf,
        "minus infinity": -math.inf,
        "minus zero": -0.0,
        "largest": largest,
        "tiny": tiny,
        "subnormal": tiny / 8,
    }
    for name, value in values.items():
        x = wide(3, 260, dtype=dtype, sigma=1.0)
        x[0, 5] = x[1, 200] = x[2, 259] = value
        yield name, x
        yield f"all {name}", torch.full((3, 260), value, dtype=dtype)
    x = wide(3, 260, dtype=dtype, sigma=1.0)
    x[:, 128:256] = 0
    yield "a block of zeros", x
    # 448 / amax is infinite for an amax below 448 / the largest value of the dtype.
    yield "an infinite scale", (wide(3, 260, sigma=0.1) * tiny / 4).to(dtype)
    yield "ties", (torch.arange(3 * 260).reshape(3, 260) / 64 - 6).to(dtype)


def strided(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, view)`` of a matrix: the same values in another order in memory."""
    rows, columns = x.shape
    yield "contiguous", x.clone(memory_format=torch.contiguous_format)
    yield "the columns contiguous", x.t().contiguous().t()
    yield "every second column", x.repeat_interleave(2, 1)[:, ::2]
    yield "every third row", x.repeat_interleave(3, 0)[::3]
    yield "a part", torch.nn.functional.pad(x, (3, 2, 1, 4))[1 : 1 + rows, 3 : 3 + columns]
    yield "an odd address", torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(rows, columns)


def tiles(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Tiles of 32 × 32 of very different magnitudes, some with special values, some with zeros."""
    matrix = math.prod(shape[:-1]), shape[-1] if shape else 1
    random = np.random.default_rng([seed, *matrix])
    grid = -(-matrix[0] // 32), -(-matrix[1] // 32)

    def tiled(values: np.ndarray) -> np.ndarray:
        return values.repeat(32, 0).repeat(32, 1)[: matrix[0], : matrix[1]]

    low, high = (-20, 10) if dtype is torch.float16 else (-140, 115)
    exponents = tiled(random.integers(low, high, grid)) + random.normal(0, 4, matrix).round()
    x = np.ldexp(random.standard_normal(matrix), exponents.astype(int)).clip(-3e38, 3e38)
    unusual = random.random(matrix) < tiled(random.choice([0, 0, 0.003, 0.1], grid))
    x[unusual] = random.choice(SPECIAL, int(unusual.sum()))
    x[tiled(random.random(grid) < 0.02)] = 0.0
    return torch.from_numpy(x.astype(np.float32)).to(dtype).reshape(shape)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """256 × 256: every value of a 16-bit dtype; every upper half of float32, and any lower one."""
    if dtype is not torch.float32:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(256, 256)
    high = torch.arange(1 << 16) << 16
    low = torch.randint(0, 1 << 16, (1 << 16,), generator=torch.Generator().manual_seed(1))
    return (high | low).to(torch.int32).view(torch.float32).view(256, 256)


def amaxes() -> torch.Tensor:
    """Every exponent with extreme mantissas, and neighbours of what gives a power of two."""
    exponents = np.arange(256)[:, None] << 23
    mantissas = np.array([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF])
    patterns = [(exponents | mantissas).ravel()]
    for limit in oracle.MAX.values():
        edges = np.float32(limit) * np.exp2(np.float32([-128, -127, -126, -100, 0]))
        edges = np.append(edges, np.float32(limit / 65504))
        patterns.append((edges.view(np.uint32).astype(int)[:, None] + np.arange(-2, 3)).ravel())
    return torch.from_numpy(np.concatenate(patterns).astype(np.uint32).view(np.float32))
