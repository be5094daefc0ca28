"""Scalar oracle of MX blocks, written from the documented rules with Python numbers only: no bit
tricks, no arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import oracle

BLOCK = 32
LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}
BIAS = 127
INFINITE, NAN = 0xFE, 0xFF

#: Explicit mantissa bits, smallest and largest exponent of the dtypes that blocks are decoded to.
WIDE = {
    "float64": (52, -1022, 1023),
    "float32": (23, -126, 127),
    "bfloat16": (7, -126, 127),
    "float16": (10, -14, 15),
}

Matrix = Sequence[Sequence[float]]
Codes = list[list[int]]


def scale_up(amax: float, fmt: str) -> int:
    """The smallest power of two that is not below ``amax * float32(1 / max)``, itself a float32."""
    # A product of two float32 is exact as a double, so there is one rounding.
    product = oracle.float32(amax * oracle.float32(1.0 / oracle.MAX[fmt]))
    if math.isnan(product):
        return NAN
    if math.isinf(product):
        return INFINITE
    if product == 0:
        return 0
    fraction, exponent = math.frexp(product)  # fraction in [1/2, 1)
    ceiling = exponent - 1 if fraction == 0.5 else exponent
    return min(max(ceiling + BIAS, 0), INFINITE)


def scale_floor(amax: float, fmt: str) -> int:
    """The exponent of ``amax`` less the largest exponent of an element."""
    if math.isnan(amax):
        return NAN
    if math.isinf(amax):
        return INFINITE
    if amax == 0:
        return 0
    exponent = math.frexp(amax)[1] - 1 - LARGEST_EXPONENT[fmt]
    return min(max(exponent, -127), 127) + BIAS


def scale_code(amax: float, fmt: str, rounding: str) -> int:
    """The E8M0 code of a block whose largest magnitude is ``amax``."""
    return {"up": scale_up, "floor": scale_floor}[rounding](amax, fmt)


def block_amax(values: Sequence[float]) -> float:
    """The largest magnitude; NaN does not count."""
    return max((abs(value) for value in values if not math.isnan(value)), default=0.0)


def element(value: float, scale: int, fmt: str) -> int:
    """The code of ``value * 2^(127 - scale)``, a float32 product."""
    return oracle.encode(oracle.float32(value * 2.0 ** (BIAS - scale)), fmt)


def block_ranges(size: int) -> list[range]:
    """The blocks of a dimension; the last one may be smaller."""
    return [range(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]


def quantize(
    x: Matrix, columns: int, fmt: str, rounding: str = "up", two_dimensional: bool = False
) -> tuple[Codes, Codes, Codes, Codes]:
    """Rowwise data and scales, columnwise data and scales, of a matrix with ``columns`` columns."""
    rows = len(x)
    across, down = block_ranges(columns), block_ranges(rows)
    if two_dimensional:
        squares = [
            [
                scale_code(block_amax([x[i][j] for i in high for j in wide]), fmt, rounding)
                for wide in across
            ]
            for high in down
        ]
        row_scales = [list(squares[i // BLOCK]) for i in range(rows)]
        column_scales = [[line[j // BLOCK] for j in range(columns)] for line in squares]
    else:
        row_scales = [
            [scale_code(block_amax([x[i][j] for j in wide]), fmt, rounding) for wide in across]
            for i in range(rows)
        ]
        column_scales = [
            [scale_code(block_amax([x[i][j] for i in high]), fmt, rounding) for j in range(columns)]
            for high in down
        ]
    row_data = [
        [element(x[i][j], row_scales[i][j // BLOCK], fmt) for j in range(columns)]
        for i in range(rows)
    ]
    column_data = [
        [element(x[i][j], column_scales[i // BLOCK][j], fmt) for j in range(columns)]
        for i in range(rows)
    ]
    return row_data, row_scales, column_data, column_scales


def wide_pattern(value: float, dtype: str) -> int:
    """The bits of the nearest value of ``dtype``, to even on a tie; beyond the largest, infinity.
    NaN is refused."""
    mantissa, lowest, highest = WIDE[dtype]
    top = (highest - lowest + 2) << mantissa  # infinity
    sign = (highest - lowest + 3) << mantissa
    if math.isnan(value):
        raise ValueError("a NaN has many patterns")
    negative = sign if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return negative | top
    if value == 0:
        return negative
    exponent = max(math.frexp(value)[1] - 1, lowest)
    steps = Fraction(abs(value)) / Fraction(2) ** (exponent - mantissa)
    return negative | min(((exponent - lowest) << mantissa) + round(steps), top)


def decode(code: int, scale: int, fmt: str) -> float:
    """``element * 2^(scale - 127)``, exact as a double."""
    return math.nan if scale == NAN else math.ldexp(oracle.decode(code, fmt), scale - BIAS)
