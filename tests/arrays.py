"""The array twin of :mod:`tests.oracle`: the same rules for whole tensors, with numpy.

It has layouts with one level of scales and one byte for each element, rounded to nearest.
``tests/core/kernels/test_oracles.py`` compares the two, so other tests may use either.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from ottava import Layout
from tests import oracle
from tests.numbers import FLT_MAX

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
Sides = tuple[int | None, int | None]
_FLOATS = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
}
#: The step, the least multiple of it, and the code of NaN.
_INTEGERS = {
    torch.int8: (1.0, -127, 0x80),
    "INT4": (1.0, -7, 0x8),
    "MXINT8": (2.0**-6, -128, 0x7F),
    "MXINT8S": (2.0**-6, -127, 0x7F),
}


class Bytes(NamedTuple):
    """What the four inner tensors of a quantized tensor hold."""

    rowwise_data: Tensor
    rowwise_scale_inv: Tensor
    columnwise_data: Tensor
    columnwise_scale_inv: Tensor


# -- elements --


def encode(values: Array, element: torch.dtype | str) -> Array:
    """The codes of float32 values: to nearest even, saturating, with the element's code of NaN."""
    limit, nan = oracle.MAX[oracle.NAMES[element]], np.isnan(values)
    numbers = np.where(nan, np.float32(0), values)
    if element in _INTEGERS:
        step, least, nan_code = _INTEGERS[element]
        bits = oracle.ELEMENTS[oracle.NAMES[element]].bits
        codes = np.rint(np.clip(numbers, least * step, limit) / step).astype(np.int8)
        return np.where(nan, np.uint8(nan_code), codes.view(np.uint8) & ((1 << bits) - 1))
    codes = np.clip(numbers, -limit, limit).astype(_FLOATS[element])
    nan_code = oracle.ELEMENTS[oracle.NAMES[element]].nan
    return np.where(nan, np.uint8(nan_code), codes.view(np.uint8))


def decode_elements(data: Array, element: torch.dtype | str) -> Array:
    """The float64 values of codes; bits above those of a code do not count."""
    values = np.array(oracle.ELEMENTS[oracle.NAMES[element]].values)
    return values[data & (len(values) - 1)]


# -- scales --


def _float_scales(amaxes: Array, layout: Layout, dtype: torch.dtype) -> tuple[Array, Array]:
    raised = np.maximum(amaxes, np.float32(layout.epsilon))
    usable = np.isfinite(raised) & (raised != 0)
    maximum = np.float32(oracle.MAX[oracle.NAMES[layout.element]])
    scale = np.divide(maximum, raised, out=np.ones_like(raised), where=usable)
    infinite = torch.finfo(dtype if layout.finite_as == "input" else torch.float32).max
    scale = np.where(np.isinf(scale), np.float32(infinite), scale)
    if layout.rounding == "floor":
        scale = (scale.view(np.int32) & 0x7F800000).view(np.float32)
    return scale, np.float32(1) / scale


def _codes_up(amaxes: Array, element: oracle.Element) -> Array:
    products = amaxes * np.float32(1.0 / element.max)
    fraction, exponent = np.frexp(products)
    return np.where(products == 0, -127, exponent - (fraction == 0.5))


def _codes_floor(amaxes: Array, element: oracle.Element) -> Array:
    return np.frexp(amaxes)[1] - 1 - element.exponent


def _codes_even(amaxes: Array, element: oracle.Element) -> Array:
    half = 1 << 22 - element.mantissa
    return ((amaxes.view(np.int32) + half) >> 23) - 127 - element.exponent


def _codes_nearest(amaxes: Array, element: oracle.Element) -> Array:
    products = amaxes * np.float32(1.0 / element.max)
    # float64 tells the logarithms of float32 from those halfway between two integers.
    exponents = np.rint(np.log2(products.astype(np.float64)))
    return np.where(products == 0, -127, exponents)


_E8M0_RULES = {
    "up": _codes_up,
    "floor": _codes_floor,
    "even": _codes_even,
    "nearest": _codes_nearest,
}


def _e8m0_scales(amaxes: Array, layout: Layout, dtype: torch.dtype) -> tuple[Array, Array]:
    element = oracle.ELEMENTS[oracle.NAMES[layout.element]]
    exponents = np.clip(_E8M0_RULES[layout.rounding](amaxes, element), -127, 127)
    exponents = np.where(amaxes == 0, -127, np.where(np.isinf(amaxes), 127, exponents))
    codes = np.where(np.isnan(amaxes), 255, exponents + 127).astype(np.uint8)
    return np.float32(1) / _e8m0_values(codes).astype(np.float32), codes


def _e8m0_values(codes: Array) -> Array:
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(int) - 127))


def _narrow_scales(amaxes: Array, layout: Layout, dtype: torch.dtype) -> tuple[Array, Array]:
    fmt = oracle.SCALES[layout.scale]
    factor = np.float32(1.0 / oracle.MAX[oracle.NAMES[layout.element]])
    products = np.minimum(amaxes, np.float32(FLT_MAX)) * factor
    # Unsigned numbers of three bits after the leading one, from the least exponent on.
    lowest = round(math.log2(fmt.positive[1])) + 3
    exponents = np.where(products == 0, lowest, np.frexp(products)[1] - 1).clip(lowest)
    steps = np.rint(np.ldexp(np.minimum(products, np.float32(fmt.max)), 3 - exponents))
    codes = ((exponents - lowest) * 8 + steps).clip(0, len(fmt.positive) - 1)
    codes = np.where(np.isnan(products), fmt.nan, codes).astype(np.uint8)
    values = scale_values(codes, layout).astype(np.float32)
    return np.minimum(np.float32(1) / values, np.float32(FLT_MAX)), codes


_SCALES = {
    torch.float32: _float_scales,
    torch.float8_e8m0fnu: _e8m0_scales,
    torch.float8_e4m3fn: _narrow_scales,
    "UE5M3": _narrow_scales,
}


def scales(amaxes: Array, layout: Layout, dtype: torch.dtype) -> tuple[Array, Array]:
    """The multipliers of elements, and the scales that are stored, for values in ``dtype``."""
    with np.errstate(all="ignore"):
        return _SCALES[layout.scale](amaxes, layout, dtype)


def scale_values(stored: Array, layout: Layout) -> Array:
    """The numbers that stored scales are."""
    if layout.scale is torch.float32:
        return stored
    if layout.scale is torch.float8_e8m0fnu:
        return _e8m0_values(stored)
    return np.array(oracle.SCALES[layout.scale].values)[stored]


# -- grids --


def numbers(x: Tensor) -> Array:
    """The matrix that a tensor ``[*leading, K]`` is seen as, in float32."""
    columns = x.shape[-1] if x.dim() else 1
    return x.detach().float().reshape(math.prod(x.shape[:-1]), columns).numpy()


def amaxes(matrix: Array, sides: Sides) -> Array:
    """The largest magnitude in each block; NaN does not count, and nothing has 0."""
    magnitudes = np.where(np.isnan(matrix), np.float32(0), np.abs(matrix))
    for axis, side in enumerate(sides):
        size = magnitudes.shape[axis]
        side = min(side or max(size, 1), max(size, 1))
        # A side of None has one block of nothing, too.
        count = 1 if sides[axis] is None else -(-size // side)
        missing = [(0, 0), (0, 0)]
        missing[axis] = (0, count * side - size)
        padded = np.pad(magnitudes, missing)
        blocks = (count, side, padded.shape[1]) if axis == 0 else (padded.shape[0], count, side)
        magnitudes = padded.reshape(blocks).max(axis + 1, initial=0)
    return magnitudes


def spread(per_block: Array, sides: Sides, shape: tuple[int, ...]) -> Array:
    """The entry of its block for each element of a matrix of ``shape``."""
    for axis, (side, size) in enumerate(zip(sides, shape, strict=True)):
        per_block = per_block.repeat(min(side or size, size), axis)
        per_block = per_block[:size] if axis == 0 else per_block[:, :size]
    return per_block


def _of_blocks(per_area: Array, layout: Layout, shape: tuple[int, ...]) -> Array:
    """The entry of its shared area for each block of a matrix of ``shape``."""
    if layout.shared is None:
        return per_area
    (high, wide), (rows, columns) = layout.shared, layout.block
    assert rows is not None
    assert columns is not None
    grid = -(-shape[0] // rows), -(-shape[1] // columns)
    return spread(per_area, (high // rows, wide // columns), grid)


def cast(matrix: Array, multipliers: Array, layout: Layout) -> Array:
    """Rowwise data of a matrix with a multiplier for each block."""
    with np.errstate(all="ignore"):
        products = matrix * spread(multipliers, layout.block, matrix.shape)
    return encode(products, layout.element)


def _quantize_rows(matrix: Array, layout: Layout, dtype: torch.dtype) -> tuple[Array, Array]:
    largest = amaxes(matrix, layout.shared or layout.block)
    multipliers, stored = scales(_of_blocks(largest, layout, matrix.shape), layout, dtype)
    return cast(matrix, multipliers, layout), stored


def quantize(x: Tensor, layout: Layout) -> Bytes:
    """What :func:`tests.oracle.quantize` gives for a tensor, in the shapes that a tensor holds."""
    matrix, shape = numbers(x), tuple(x.shape)
    data, stored = _quantize_rows(matrix, layout, x.dtype)
    columns, column_stored = _quantize_rows(matrix.T, layout, x.dtype)
    if layout.columnwise == "transposed":
        shape = (*x.shape[-1:], *x.shape[:-1])
    else:
        columns, column_stored = columns.T, column_stored.T
    parts = data.reshape(tuple(x.shape)), stored, columns.reshape(shape), column_stored
    return Bytes(*(torch.from_numpy(np.array(part, order="C")) for part in parts))


def decode(
    data: Tensor, scale_inv: Tensor, layout: Layout, *, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    """The values of stored data of one direction, in the shape of the data."""
    shape, stored = tuple(data.shape), scale_inv.numpy()
    if columnwise and layout.columnwise == "transposed":
        matrix = data.numpy().reshape(shape[0] if shape else 1, math.prod(shape[1:]))
        values = _decode_rows(matrix, stored, layout, dtype)
        return values.reshape(shape)
    matrix = data.numpy().reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
    if columnwise:
        return _decode_rows(matrix.T, stored.T, layout, dtype).T.reshape(shape).contiguous()
    return _decode_rows(matrix, stored, layout, dtype).reshape(shape)


def _decode_rows(matrix: Array, stored: Array, layout: Layout, dtype: torch.dtype) -> Tensor:
    factors = spread(scale_values(stored, layout), layout.block, matrix.shape)
    with np.errstate(all="ignore"):
        # float64 holds the products exactly.
        products = decode_elements(matrix, layout.element) * factors.astype(np.float64)
        if dtype is not torch.float64 or layout.scale is not torch.float8_e8m0fnu:
            products = products.astype(np.float32)
    return torch.from_numpy(np.array(products)).to(dtype)
