"""Scalar oracle of scales on a grid, written from the documented rules with Python numbers, numpy
and ml_dtypes.

A layout is only read here: its fields, and nothing that it works out of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

Array = np.ndarray[Any, Any]
LIMIT = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
NUMPY: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.int8: np.int8,
}
LARGEST = {
    dtype: np.float32(float(ml_dtypes.finfo(NUMPY[dtype]).max))
    for dtype in (torch.bfloat16, torch.float16)
}
LARGEST[torch.float32] = np.finfo(np.float32).max
ONE, INFINITE, NAN = np.float32(1), 254, 255


def elements(values: Array, element: torch.dtype) -> Array:
    """The bytes of float32 values: to nearest even, saturating; NaN is 0x7F, or the integer
    -128."""
    nan, limit = np.isnan(values), LIMIT[element]
    clipped = np.clip(np.where(nan, np.float32(0), values), -limit, limit)
    if element == torch.int8:
        return np.where(nan, np.uint8(0x80), np.rint(clipped).astype(np.int8).view(np.uint8))
    return np.where(nan, np.uint8(0x7F), clipped.astype(NUMPY[element]).view(np.uint8))


def amax(values: Array) -> Any:
    """The largest magnitude; NaN does not count, nothing has 0."""
    return np.abs(values[~np.isnan(values)]).max(initial=0)


def float_scale(largest: float, layout: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """What elements are multiplied by, and its inverse: the rules in their order."""
    seen = np.float32(largest)
    if seen < np.float32(layout.epsilon):
        seen = np.float32(layout.epsilon)
    with np.errstate(over="ignore"):
        usable = np.isfinite(seen) and seen != 0
        scale = np.float32(LIMIT[layout.element]) / seen if usable else ONE
    if np.isinf(scale):
        scale = LARGEST[dtype if layout.finite_as == "input" else torch.float32]
    if layout.rounding == "floor":
        scale = np.float32(math.ldexp(1.0, math.frexp(scale)[1] - 1))
    return scale, ONE / scale


def power_of_two(largest: float, layout: Any) -> int:
    """The byte of an E8M0 scale."""
    if math.isnan(largest):
        return NAN
    if math.isinf(largest):
        return INFINITE
    limit = LIMIT[layout.element]
    if layout.rounding == "floor":
        exponent = math.frexp(largest)[1] - math.frexp(limit)[1] if largest else -127
    else:
        product = float(np.float32(largest) * np.float32(1.0 / limit))
        fraction, exponent = math.frexp(product)  # fraction in [1/2, 1)
        exponent = exponent - 1 if fraction == 0.5 else exponent
        exponent = exponent if product else -127
    return min(max(exponent, -127), 127) + 127


def multiplier(code: int) -> Any:
    return np.float32(math.nan if code == NAN else math.ldexp(1.0, 127 - code))


def scales(largest: float, layout: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """What elements are multiplied by, and what is stored."""
    if layout.scale == torch.float32:
        return float_scale(largest, layout, dtype)
    code = power_of_two(largest, layout)
    return multiplier(code), np.uint8(code)


def stored_dtype(layout: Any) -> Any:
    return np.float32 if layout.scale == torch.float32 else np.uint8


def cuts(size: int, side: int | None) -> list[slice]:
    """The blocks of a dimension, of which the last may be smaller; one where a block has all, of
    nothing too."""
    if side is None:
        return [slice(0, size)]
    return [slice(start, min(start + side, size)) for start in range(0, size, side)]


def blocks(shape: tuple[int, ...], block: Any) -> Iterator[tuple[int, int, slice, slice]]:
    """The place of each block in the grid, and its rows and columns."""
    for i, rows in enumerate(cuts(shape[0], block[0])):
        for j, columns in enumerate(cuts(shape[1], block[1])):
            yield i, j, rows, columns


def grid(shape: tuple[int, ...], block: Any) -> tuple[int, int]:
    return len(cuts(shape[0], block[0])), len(cuts(shape[1], block[1]))


def amaxes(x: Array, layout: Any, columnwise: bool = False) -> Array:
    """Of what has a scale in common, on its grid over the matrix."""
    if columnwise:
        return amaxes(x.T, layout).T
    block = layout.shared or layout.block
    found = np.zeros(grid(x.shape, block), np.float32)
    for i, j, rows, columns in blocks(x.shape, block):
        found[i, j] = amax(x[rows, columns])
    return found


def same_for_both(layout: Any) -> bool:
    rows, columns = layout.shared or layout.block
    return bool(rows == columns)


def quantize_rows(x: Array, layout: Any, dtype: torch.dtype) -> tuple[Array, Array]:
    """Data and stored scales of a matrix of float32 values that were of ``dtype``."""
    common, block = layout.shared or layout.block, layout.block
    factors, stored = (
        np.zeros(x.shape, np.float32),
        np.zeros(grid(x.shape, block), stored_dtype(layout)),
    )
    for (_, _, rows, columns), largest in zip(
        blocks(x.shape, common), amaxes(x, layout).ravel(), strict=True
    ):
        factors[rows, columns], kept = scales(float(largest), layout, dtype)
        down = slice(rows.start // block[0], -(-rows.stop // block[0])) if block[0] else slice(None)
        across = (
            slice(columns.start // block[1], -(-columns.stop // block[1]))
            if block[1]
            else slice(None)
        )
        stored[down, across] = kept
    return multiplied(x, factors, layout.element), stored


def multiplied(x: Array, factors: Array, element: torch.dtype) -> Array:
    """The bytes of products, each of which a float32 holds."""
    with np.errstate(all="ignore"):
        return elements(x * factors, element)


def quantize(x: Array, layout: Any, dtype: torch.dtype) -> tuple[Array, Array, Array, Array]:
    """Data and scales of rows and of columns, in their shapes. Those of columns are those of the
    transpose's rows."""
    shape = x.shape
    matrix = x.reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
    data, stored = quantize_rows(matrix, layout, dtype)
    turned, turned_stored = quantize_rows(matrix.T, layout, dtype)
    if layout.columnwise == "transposed":
        return (
            data.reshape(shape),
            stored,
            turned.reshape((*shape[-1:], *shape[:-1])),
            turned_stored,
        )
    return data.reshape(shape), stored, turned.T.reshape(shape), turned_stored.T


def cast(x: Array, factors: Array, layout: Any, columnwise: bool) -> Array:
    """A matrix with one scale for each block, on the grid over it: float32 multipliers, or bytes of
    E8M0."""
    if columnwise:
        return cast(x.T, factors.T, layout, False).T
    own = np.zeros(x.shape, np.float32)
    for i, j, rows, columns in blocks(x.shape, layout.block):
        own[rows, columns] = (
            factors[i, j] if layout.scale == torch.float32 else multiplier(int(factors[i, j]))
        )
    return multiplied(x, own, layout.element)


def for_blocks(values: Array, layout: Any, shape: tuple[int, ...], columnwise: bool) -> Array:
    """For each block of a matrix what those that have a scale in common were given, on the grid
    over it."""
    if columnwise:
        return for_blocks(values.T, layout, shape[::-1], False).T
    if layout.shared is None:
        return values
    high, wide = (common // own for common, own in zip(layout.shared, layout.block, strict=True))
    rows, columns = grid(shape, layout.block)
    return values.repeat(high, 0).repeat(wide, 1)[:rows, :columns]


def decode(data: Array, stored: Array, layout: Any, columnwise: bool, dtype: torch.dtype) -> Array:
    """``float32(element) * scale_inv``, a float32, or ``element * 2^(code - 127)``, exact; rounded
    to ``dtype``."""
    shape = data.shape
    if columnwise and layout.columnwise == "transposed":
        matrix = data.reshape((shape[0] if shape else 1), math.prod(shape[1:]))
        return _decode_rows(matrix, stored, layout, dtype).reshape(shape)
    matrix = data.reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
    if columnwise:
        return _decode_rows(matrix.T, stored.T, layout, dtype).T.reshape(shape)
    return _decode_rows(matrix, stored, layout, dtype).reshape(shape)


def _decode_rows(data: Array, stored: Array, layout: Any, dtype: torch.dtype) -> Array:
    of_floats = layout.scale == torch.float32
    values = (
        np.ascontiguousarray(data)
        .view(NUMPY[layout.element])
        .astype(np.float32 if of_floats else np.float64)
    )
    if layout.element == torch.int8:
        values = np.where(data == 0x80, values.dtype.type(math.nan), values)
    found = np.zeros(data.shape, values.dtype)
    for i, j, rows, columns in blocks(data.shape, layout.block):
        code = stored[i, j]
        inverse = (
            code if of_floats else math.nan if code == NAN else math.ldexp(1.0, int(code) - 127)
        )
        with np.errstate(all="ignore"):
            found[rows, columns] = values[rows, columns] * inverse
    with np.errstate(all="ignore"):
        # Where a product does not fit float32 it is infinite in every narrower dtype as well.
        return (
            found.astype(NUMPY[dtype])
            if dtype == torch.float64
            else found.astype(np.float32).astype(NUMPY[dtype])
        )
