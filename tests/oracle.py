"""The scalar oracle of quantization: the rules of the documentation with Python numbers.

Numbers are exact: a float32 or a narrower number is a Python float, and rounding uses fractions. Of
a layout only the fields of its constructor are read, and nothing that the layout derives. Formats
and rules are rows of tables, so another format or another rule is another row.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from ottava import Layout

Rows = list[list[Any]]


class Float(NamedTuple):
    """A floating-point format: bits of the mantissa, the least exponent, the largest value."""

    mantissa: int
    lowest: int
    max: float


FLOATS = {
    torch.float64: Float(52, -1022, math.ldexp(2 - 2.0**-52, 1023)),
    torch.float32: Float(23, -126, math.ldexp(2 - 2.0**-23, 127)),
    torch.bfloat16: Float(7, -126, math.ldexp(2 - 2.0**-7, 127)),
    torch.float16: Float(10, -14, 65504.0),
    torch.float8_e4m3fn: Float(3, -6, 448.0),
    torch.float8_e5m2: Float(2, -14, 57344.0),
}
FLOAT32_MAX = FLOATS[torch.float32].max


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a floating-point dtype, to even on a tie; infinite beyond its range."""
    if not math.isfinite(value) or value == 0:
        return value
    fmt = FLOATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, fmt.lowest)
    unit = Fraction(2) ** (exponent - fmt.mantissa)
    magnitude = round(Fraction(abs(value)) / unit) * unit
    return math.copysign(math.inf if magnitude > fmt.max else float(magnitude), value)


def float32(value: float) -> float:
    """The nearest float32, by the rounding of ``struct``, which is faster than fractions."""
    try:
        (result,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(result)


# -- elements --


def _encode_float(value: float, dtype: torch.dtype) -> int:
    """To nearest, ties to even, saturating; 0x7F for NaN; the sign of zero is kept."""
    if math.isnan(value):
        return 0x7F
    fmt = FLOATS[dtype]
    magnitude = nearest(min(abs(value), fmt.max), dtype)
    # The codes of magnitudes count the numbers of the format from 0 on.
    exponent = max(math.frexp(magnitude)[1] - 1, fmt.lowest) if magnitude else fmt.lowest
    steps = int(math.ldexp(magnitude, fmt.mantissa - exponent))
    code = ((exponent - fmt.lowest) << fmt.mantissa) + steps
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def _decode_float(code: int, dtype: torch.dtype) -> float:
    fmt = FLOATS[dtype]
    field, fraction = divmod(code & 0x7F, 1 << fmt.mantissa)
    one = 1 << fmt.mantissa if field else 0
    magnitude = math.ldexp(one + fraction, max(field, 1) - 1 + fmt.lowest - fmt.mantissa)
    if magnitude > fmt.max:
        infinite = dtype is torch.float8_e5m2 and fraction == 0
        magnitude = math.inf if infinite else math.nan
    return math.copysign(magnitude, -1.0 if code & 0x80 else 1.0)


def _encode_int8(value: float, dtype: torch.dtype) -> int:
    """To nearest, ties to even, from -127 to 127 in two's complement; -128 for NaN."""
    if math.isnan(value):
        return 0x80
    return round(min(max(value, -127.0), 127.0)) & 0xFF


def _decode_int8(code: int, dtype: torch.dtype) -> float:
    return math.nan if code == 0x80 else float(code - 256 if code > 0x80 else code)


class Element(NamedTuple):
    """A format of elements; ``exponent`` is that of its largest power of two."""

    dtype: torch.dtype
    max: float
    exponent: int
    encode: Callable[[float, torch.dtype], int]
    decode: Callable[[int, torch.dtype], float]


ELEMENTS = {
    "e4m3": Element(torch.float8_e4m3fn, 448.0, 8, _encode_float, _decode_float),
    "e5m2": Element(torch.float8_e5m2, 57344.0, 15, _encode_float, _decode_float),
    "int8": Element(torch.int8, 127.0, 6, _encode_int8, _decode_int8),
}
#: The names of elements by the dtype that a layout has.
NAMES = {element.dtype: name for name, element in ELEMENTS.items()}
MAX = {name: element.max for name, element in ELEMENTS.items()}


def encode(value: float, element: str) -> int:
    """The code of the nearest number of an element's format."""
    return ELEMENTS[element].encode(value, ELEMENTS[element].dtype)


def decode(code: int, element: str) -> float:
    return ELEMENTS[element].decode(code, ELEMENTS[element].dtype)


# -- scales --


def scale_from_amax(
    amax: float,
    maximum: float,
    epsilon: float = 0.0,
    pow_2: bool = False,
    infinite: float = FLOAT32_MAX,
) -> tuple[float, float]:
    """``(scale, scale_inv)``, where an infinite scale becomes ``infinite``.

    The quotient of two float32 as a Python float rounds to the same float32 as the exact quotient.
    """
    if amax < float32(epsilon):
        amax = float32(epsilon)
    scale = 1.0
    if math.isfinite(amax) and amax != 0:
        scale = float32(maximum / amax)
    if math.isinf(scale):
        scale = infinite
    if pow_2:
        scale = math.ldexp(1.0, math.frexp(scale)[1] - 1)
    return scale, float32(1.0 / scale)


def _code_up(amax: float, element: Element) -> float:
    """The exponent of the least power of two that is not below ``amax * float32(1 / max)``."""
    product = float32(amax * float32(1.0 / element.max))
    if product == 0:
        return -127
    fraction, exponent = math.frexp(product)
    return exponent - 1 if fraction == 0.5 else exponent


def _code_floor(amax: float, element: Element) -> float:
    """The exponent of the amax less that of the element's largest power of two."""
    return math.frexp(amax)[1] - 1 - element.exponent if amax else -127


#: Rules for the exponents of E8M0 scales, by their names in layouts.
E8M0_RULES = {"up": _code_up, "floor": _code_floor}


def e8m0_code(amax: float, element: str, rule: str) -> int:
    """The byte of a block's E8M0 scale: 255 for NaN, 254 for infinity, at least 0, at most 254."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    return int(min(max(E8M0_RULES[rule](amax, ELEMENTS[element]), -127), 127)) + 127


def _e8m0_scale(amax: float, layout: Layout, dtype: torch.dtype) -> tuple[float, float]:
    code = e8m0_code(amax, NAMES[layout.element], layout.rounding)
    return math.nan if code == 255 else math.ldexp(1.0, 127 - code), code


def _float_scale(amax: float, layout: Layout, dtype: torch.dtype) -> tuple[float, float]:
    infinite = FLOATS[dtype].max if layout.finite_as == "input" else FLOAT32_MAX
    maximum = MAX[NAMES[layout.element]]
    return scale_from_amax(amax, maximum, layout.epsilon, layout.rounding == "floor", infinite)


class Scale(NamedTuple):
    """A format of scales: ``(multiplier, stored scale)`` of an amax, and the value of a stored."""

    of_amax: Callable[[float, Layout, torch.dtype], tuple[float, float]]
    value: Callable[[float], float]


SCALES = {
    torch.float32: Scale(_float_scale, lambda stored: stored),
    torch.float8_e8m0fnu: Scale(
        _e8m0_scale, lambda code: math.nan if code == 255 else math.ldexp(1.0, int(code) - 127)
    ),
}


def scale(amax: float, layout: Layout, dtype: torch.dtype) -> tuple[float, float]:
    """The multiplier of elements, and the scale that is stored, for values in ``dtype``."""
    return SCALES[layout.scale].of_amax(amax, layout, dtype)


# -- matrices --


class Quantized(NamedTuple):
    """Codes and stored scales of a matrix, each as rows in the order in which they are stored."""

    rowwise_data: Rows
    rowwise_scale_inv: Rows
    columnwise_data: Rows
    columnwise_scale_inv: Rows


def quantize(rows: Rows, layout: Layout, dtype: torch.dtype) -> Quantized:
    """Quantize a matrix of numbers of ``dtype`` in both directions, each from the matrix.

    Columnwise data are the rowwise data of the transpose, held as the layout says.
    """
    data, scales = _quantize_rows(rows, layout, dtype)
    columns, column_scales = _quantize_rows(transpose(rows), layout, dtype)
    if layout.columnwise != "transposed":
        columns, column_scales = transpose(columns), transpose(column_scales)
    return Quantized(data, scales, columns, column_scales)


def transpose(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def _quantize_rows(rows: Rows, layout: Layout, dtype: torch.dtype) -> tuple[Rows, Rows]:
    area = layout.shared or layout.block
    element = NAMES[layout.element]
    amaxes: dict[tuple[int, int], float] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            place = _place(i, j, area)
            magnitude = 0.0 if math.isnan(value) else abs(value)
            amaxes[place] = max(amaxes.get(place, 0.0), magnitude)
    scales = {place: scale(amax, layout, dtype) for place, amax in amaxes.items()}
    data = [
        [
            encode(float32(value * scales[_place(i, j, area)][0]), element)
            for j, value in enumerate(row)
        ]
        for i, row in enumerate(rows)
    ]
    # The first element of each block says in which area the block is.
    stored = [
        [scales[_place(i, j, area)][1] for j in _starts(len(rows[0]), layout.block[1])]
        for i in _starts(len(rows), layout.block[0])
    ]
    return data, stored


def _place(row: int, column: int, sides: tuple[int | None, int | None]) -> tuple[int, int]:
    """The block of an element, where a side of None has all."""
    return row // sides[0] if sides[0] else 0, column // sides[1] if sides[1] else 0


def _starts(size: int, side: int | None) -> range:
    """The first row, or the first column, of each block."""
    return range(0, size, side or max(size, 1))


def dequantize(code: int, stored: float, layout: Layout, dtype: torch.dtype) -> float:
    """``float32(element) * scale``, rounded to float32, then to ``dtype``; float64 is exact."""
    # The product of an element and of a float32 or a power of two is exact as a Python float.
    product = decode(code, NAMES[layout.element]) * SCALES[layout.scale].value(stored)
    if dtype is torch.float64 and layout.scale is torch.float8_e8m0fnu:
        return product
    return nearest(float32(product), dtype)
