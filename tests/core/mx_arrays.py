"""Matrices for MX blocks, and what they are to give: by the scalar oracle, and by the same rules
for whole arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import mx_oracle
import numpy as np
import oracle
import torch
from comparing import assert_same

from ottava import Layout

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ROUNDINGS = ["up", "floor"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Every size from 1 to 97 once as a number of rows and once as a number of columns: 37 is coprime to
# 97.
PAIRS = [(rows, rows * 37 % 97 + 1) for rows in range(1, 98)]
SPECIAL = [
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-45,
    -1e-45,
    2.0**-149 * 0x400000,
    -3.4e38,
    448.0,
    -57344.0,
]

#: dtype, format, rule for scales, squares.
Options = tuple[str, str, str, bool]
ALL_OPTIONS: list[Options] = list(itertools.product(DTYPES, FP8, ROUNDINGS, (False, True)))
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def mx(fp8_dtype: torch.dtype, square: bool = False, rounding: str = "up") -> Layout:
    """The layout of MX blocks."""
    return Layout(
        fp8_dtype, (1, 32), torch.float8_e8m0fnu, rounding, shared=(32, 32) if square else None
    )


def scale_shapes(shape: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the scales along rows and along columns."""
    layout = mx(torch.float8_e4m3fn)
    return layout.scale_shape(shape, False), layout.scale_shape(shape, True)


@cache
def sample(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Tiles of very different magnitudes with values of many; some tiles hold zeros, NaN,
    infinities and the like."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    random = np.random.default_rng([seed, rows, columns])
    low, high = (-20, 10) if dtype == "float16" else (-140, 115)

    def tiles(values: np.ndarray) -> np.ndarray:
        return np.repeat(np.repeat(values, 32, 0), 32, 1)[:rows, :columns]

    grid = (-(-rows // 32), -(-columns // 32))
    exponents = (
        tiles(random.integers(low, high, grid)) + random.normal(0, 4, (rows, columns)).round()
    )
    x = np.clip(
        np.ldexp(random.standard_normal((rows, columns)), exponents.astype(int)), -3e38, 3e38
    )
    specials = random.random((rows, columns)) < tiles(random.choice([0, 0, 0.003, 0.1], grid))
    x[specials] = random.choice(SPECIAL, int(specials.sum()))
    x[tiles(random.random(grid) < 0.02)] = 0.0
    return torch.from_numpy(x.astype(np.float32)).to(DTYPES[dtype]).reshape(shape)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def by_scalars(
    x: torch.Tensor, fmt: str, scale_rounding: str, two_dimensional: bool = False
) -> Four:
    """What the scalar oracle says, in the shapes of the kernels."""
    columns = x.shape[-1] if x.dim() else 1
    found = mx_oracle.quantize(
        as_matrix(x).to(torch.float32).tolist(), columns, fmt, scale_rounding, two_dimensional
    )
    shapes = [x.shape, scale_shapes(x.shape)[0], x.shape, scale_shapes(x.shape)[1]]
    a, b, c, d = (
        torch.tensor(f, dtype=torch.uint8).reshape(s) for f, s in zip(found, shapes, strict=True)
    )
    return a, b, c, d


def array_scales(amax: np.ndarray, fmt: str, scale_rounding: str) -> np.ndarray:
    """The rules on bits of float32, as they are stated."""
    amax = amax.astype(np.float32)
    if scale_rounding == "up":
        with np.errstate(under="ignore", invalid="ignore"):  # signalling NaN
            amax = amax * np.float32(1.0 / oracle.MAX[fmt])
        bits = amax.view(np.uint32)
        exponent, mantissa = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
        data = exponent + ((mantissa != 0) & ~((exponent == 0) & (mantissa <= 0x400000)))
        data = np.minimum(data, 0xFE)
    else:
        bits = amax.view(np.uint32)
        data = np.clip((bits >> 23).astype(np.int64) - mx_oracle.LARGEST_EXPONENT[fmt], 0, 0xFE)
    data = np.where(np.isinf(amax), 0xFE, data)
    return np.where(np.isnan(amax), 0xFF, data).astype(np.uint8)


def array_data(x: np.ndarray, scales: np.ndarray, fmt: str) -> np.ndarray:
    """A product with a power of two is exact in float64; saturation and NaN are added to ml_dtypes'
    cast."""
    numbers = np.where(np.isnan(x), np.float32(0), x).astype(np.float64)
    product = (numbers * np.exp2(127.0 - scales)).clip(-oracle.MAX[fmt], oracle.MAX[fmt])
    data = product.astype(np.float32).astype(ML_DTYPES[fmt]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), data)


def by_arrays(
    x: torch.Tensor, fmt: str, scale_rounding: str, two_dimensional: bool = False
) -> Four:
    """The rules for whole matrices; for sizes that the scalar oracle is too slow for."""
    values = as_matrix(x).to(torch.float32).numpy()
    rows, columns = values.shape
    across, down = -(-columns // 32), -(-rows // 32)
    magnitudes = np.zeros((down * 32, across * 32), np.float32)
    magnitudes[:rows, :columns] = np.where(np.isnan(values), 0, np.abs(values))
    if two_dimensional:
        squares = array_scales(
            magnitudes.reshape(down, 32, across, 32).max((1, 3)), fmt, scale_rounding
        )
        row_scales, column_scales = squares.repeat(32, 0)[:rows], squares.repeat(32, 1)[:, :columns]
    else:
        row_scales = array_scales(
            magnitudes.reshape(down * 32, across, 32).max(2), fmt, scale_rounding
        )[:rows]
        column_scales = array_scales(
            magnitudes.reshape(down, 32, across * 32).max(1), fmt, scale_rounding
        )[:, :columns]
    row_data = array_data(values, row_scales.repeat(32, 1)[:, :columns], fmt)
    column_data = array_data(values, column_scales.repeat(32, 0)[:rows], fmt)
    a, c = (torch.from_numpy(data).reshape(x.shape) for data in (row_data, column_data))
    b, d = (torch.from_numpy(scales.copy()) for scales in (row_scales, column_scales))
    return a, b, c, d


@cache
def array_expected(shape: tuple[int, ...], options: Options) -> Four:
    dtype, fmt, scale_rounding, two_dimensional = options
    return by_arrays(sample(shape, dtype), fmt, scale_rounding, two_dimensional)


def check_four(got: Any, expected: Any, note: Any = "", x: torch.Tensor | None = None) -> None:
    names = ("rowwise data", "rowwise scales", "columnwise data", "columnwise scales")
    for i, (name, mine, theirs) in enumerate(zip(names, got, expected, strict=True)):
        assert mine.is_contiguous(), (name, note)
        assert_same(mine, theirs, x if i % 2 == 0 else None, f"{name}, {note}")


# Decoding


def random_blocks(
    shape: tuple[int, ...], columnwise: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of every kind with scales of every kind, those around 1 more often."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scales = torch.randint(
        0, 256, scale_shapes(shape)[int(columnwise)], dtype=torch.uint8, generator=generator
    )
    ordinary = torch.randint(0, 2, scales.shape, generator=generator).bool()
    return data, torch.where(ordinary, scales % 32 + 111, scales)


@cache
def decoded_patterns(fmt: str, dtype: str) -> np.ndarray:
    """The bits of every result, [scale, code], as signed integers; -1 for NaN."""
    table = [mx_oracle.decode(code, scale, fmt) for scale in range(256) for code in range(256)]
    patterns = [
        2**64 - 1 if math.isnan(value) else mx_oracle.wide_pattern(value, dtype) for value in table
    ]
    size = torch.finfo(getattr(torch, dtype)).bits
    return np.array(patterns, np.uint64).astype(f"uint{size}").view(f"int{size}").reshape(256, 256)


def check_decoded(
    got: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: str,
    dtype: str,
    columnwise: bool,
) -> None:
    matrix = as_matrix(data).numpy()
    rows, columns = matrix.shape
    each = (
        scales.numpy().repeat(32, 0)[:rows]
        if columnwise
        else scales.numpy().repeat(32, 1)[:, :columns]
    )
    assert got.dtype == getattr(torch, dtype)
    assert got.is_contiguous()
    patterns = got.view(getattr(torch, f"int{8 * got.element_size()}")).clone()
    patterns[got.isnan()] = -1
    note = f"decoded {fmt} as {dtype} (the bits of its values; -1 is NaN), columnwise {columnwise}"
    assert_same(
        patterns, decoded_patterns(fmt, dtype)[each, matrix].reshape(data.shape), data, note
    )
