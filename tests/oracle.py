"""The scalar oracle of quantization: the rules of the documentation with Python numbers.

Numbers are exact: a float32 or a narrower number is a Python float, and rounding uses fractions. Of
a layout only the fields of its constructor are read, and nothing that the layout derives. Formats
and rules are rows of tables, so another format or another rule is another row.
"""

from __future__ import annotations

import bisect
import functools
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
}
FLOAT32_MAX = FLOATS[torch.float32].max


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a floating-point dtype, to even on a tie; infinite beyond its range."""
    if not math.isfinite(value) or value == 0:
        return value
    fmt = FLOATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, fmt.lowest)
    # The number of units in the last place; scaling by a power of two is exact.
    units = round(math.ldexp(abs(value), fmt.mantissa - exponent))
    magnitude = math.ldexp(units, exponent - fmt.mantissa)
    return math.copysign(math.inf if magnitude > fmt.max else magnitude, value)


def float32(value: float) -> float:
    """The nearest float32, by the rounding of ``struct``, which is faster than fractions."""
    try:
        (result,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(result)


# -- elements --


class Element(NamedTuple):
    """A format of elements or of scales.

    Attributes:
        name: the dtype or the name that a layout has.
        bits: those of a code.
        nan: the code that NaN becomes.
        positive, negative: the magnitudes of the numbers with each sign, in the order of codes.
        values: the number of each code.
        mantissa: the bits after the leading one that a large number has.
        negate: the code of minus a magnitude, of the code of the magnitude.
    """

    name: torch.dtype | str
    bits: int
    nan: int
    positive: list[float]
    negative: list[float]
    values: list[float]
    mantissa: int
    negate: Callable[[int], int]

    @property
    def max(self) -> float:
        return self.positive[-1]

    @property
    def exponent(self) -> int:
        """That of the largest power of two."""
        return math.frexp(self.max)[1] - 1


def _floating(
    name: torch.dtype | str,
    bits: int,
    fmt: Float,
    nan: int,
    *,
    signed: bool = True,
    infinity: int | None = None,
) -> Element:
    """Codes of magnitudes count the numbers from 0 on; the highest bit is the sign."""
    sign = 1 << bits - 1 if signed else 0
    magnitudes = []
    for code in range((1 << bits) - sign):
        field, fraction = divmod(code, 1 << fmt.mantissa)
        one = 1 << fmt.mantissa if field else 0
        number = math.ldexp(one + fraction, max(field, 1) - 1 + fmt.lowest - fmt.mantissa)
        beyond = math.inf if code == infinity else math.nan
        magnitudes.append(number if number <= fmt.max else beyond)
    finite = [magnitude for magnitude in magnitudes if magnitude <= fmt.max]
    values = magnitudes + [-magnitude for magnitude in magnitudes if signed]
    return Element(name, bits, nan, finite, finite, values, fmt.mantissa, sign.__or__)


def _integer(name: torch.dtype | str, bits: int, nan: int, step: float, least: int) -> Element:
    """Two's complement; a code of NaN that is half of all codes is no number."""
    count, half = 1 << bits, 1 << bits - 1
    values = [step * (code - count if code >= half else code) for code in range(count)]
    if nan == half:
        values[nan] = math.nan
    positive, negative = ([step * code for code in range(top)] for top in (half, 1 - least))
    return Element(
        name, bits, nan, positive, negative, values, bits - 2, lambda code: -code % count
    )


#: The formats of elements, with names for tests.
ELEMENTS = {
    "e4m3": _floating(torch.float8_e4m3fn, 8, Float(3, -6, 448.0), 0x7F),
    "e5m2": _floating(torch.float8_e5m2, 8, Float(2, -14, 57344.0), 0x7F, infinity=0x7C),
    "e2m1": _floating("E2M1", 4, Float(1, 0, 6.0), 0x7),
    "e2m3": _floating("E2M3", 6, Float(3, 0, 7.5), 0x1F),
    "e3m2": _floating("E3M2", 6, Float(2, -2, 28.0), 0x1F),
    "int8": _integer(torch.int8, 8, 0x80, 1.0, -127),
    "int4": _integer("INT4", 4, 0x8, 1.0, -7),
    "mxint8": _integer("MXINT8", 8, 0x7F, 2.0**-6, -128),
    "mxint8s": _integer("MXINT8S", 8, 0x7F, 2.0**-6, -127),
}
#: The names of elements by what a layout has.
NAMES = {element.name: name for name, element in ELEMENTS.items()}
MAX = {name: element.max for name, element in ELEMENTS.items()}


def encode(value: float, element: str, word: int | None = None) -> int:
    """The code of a number of an element's format: the nearest, or one of the two neighbours.

    Ties go to the even code, and what is beyond the format becomes its largest number. ``word`` is
    a random one of 32 bits: the neighbour that is further from 0 is taken if the word is below the
    share of the way to it.
    """
    return _encode(value, ELEMENTS[element], word)


def _encode(value: float, element: Element, word: int | None = None) -> int:
    if math.isnan(value):
        return element.nan
    if math.copysign(1.0, value) < 0:
        return element.negate(_code(-value, element.negative, word))
    return _code(value, element.positive, word)


def _code(magnitude: float, magnitudes: list[float], word: int | None) -> int:
    above = bisect.bisect_left(magnitudes, magnitude)
    if above == len(magnitudes):
        return above - 1
    if magnitudes[above] == magnitude:
        return above
    below = above - 1
    low, high = magnitudes[below], magnitudes[above]
    if word is not None:
        share = (Fraction(magnitude) - Fraction(low)) / Fraction(high - low)
        return above if word < math.floor(share * 2**32) else below
    middle = (low + high) / 2
    if magnitude == middle:
        return below + below % 2
    return above if magnitude > middle else below


def decode(code: int, element: str) -> float:
    return ELEMENTS[element].values[code]


# -- random words --


@functools.lru_cache(1 << 16)
def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds: four words of 32 bits."""
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(10):
        high_a, low_a = divmod(a * 0xD2511F53, 1 << 32)
        high_c, low_c = divmod(c * 0xCD9E8D57, 1 << 32)
        a, b, c, d = high_c ^ b ^ low_key, low_c, high_a ^ d ^ high_key, low_a
        low_key, high_key = (low_key + 0x9E3779B9) % (1 << 32), (high_key + 0xBB67AE85) % (1 << 32)
    return a, b, c, d


def random_word(place: int, seed: int, *, second_stream: bool) -> int:
    """The word of the element at this place of a tensor, which counts row by row."""
    high, low = divmod(place // 4, 1 << 32)
    high_seed, low_seed = divmod(seed % (1 << 64), 1 << 32)
    return philox((low, high, int(second_stream), 0), (low_seed, high_seed))[place % 4]


# -- rotation --


def signs_of(bits: int, size: int) -> list[int]:
    """The signs of a group; minus where a bit is set."""
    return [-1 if bits >> number & 1 else 1 for number in range(size)]


def rotate(row: list[float], size: int, signs: int, dtype: torch.dtype) -> list[float]:
    """``x · diag(signs) · H / sqrt(size)`` for each group of a row, padded with zeros.

    Sums are those of the butterfly with strides 1, 2, 4, …, in float32. The last step multiplies
    by the root's inverse, rounded to float32, and rounds to ``dtype``.
    """
    padded = row + [0.0] * (-len(row) % size)
    rotated, factor = [], float32(1 / math.sqrt(size))
    for start in range(0, len(padded), size):
        group = [s * x for s, x in zip(signs_of(signs, size), padded[start:], strict=False)]
        stride = 1
        while stride < size:
            for i in range(size):
                if not i & stride:
                    a, b = group[i], group[i + stride]
                    group[i], group[i + stride] = float32(a + b), float32(a - b)
            stride *= 2
        rotated += [nearest(float32(x * factor), dtype) for x in group]
    return rotated


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


def _code_even(amax: float, element: Element) -> float:
    """As ``_code_floor``, of the amax with half a unit in the element's last place added."""
    (bits,) = struct.unpack("<I", struct.pack("<f", amax))
    return ((bits + (1 << 22 - element.mantissa)) >> 23) - 127 - element.exponent


def _code_nearest(amax: float, element: Element) -> float:
    """The integer that is nearest to the logarithm of ``amax * float32(1 / max)``."""
    product = float32(amax * float32(1.0 / element.max))
    if product == 0:
        return -127
    exponent = math.frexp(product)[1] - 1
    # Halfway is the root of two, which no number is.
    return exponent + (Fraction(product) ** 2 > Fraction(2) ** (2 * exponent + 1))


#: Rules for the exponents of E8M0 scales, by their names in layouts.
E8M0_RULES = {
    "up": _code_up,
    "floor": _code_floor,
    "even": _code_even,
    "nearest": _code_nearest,
}


def e8m0_code(amax: float, element: str, rule: str) -> int:
    """The byte of a block's E8M0 scale: 255 for NaN, 254 for infinity, at least 0, at most 254."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    return int(min(max(E8M0_RULES[rule](amax, ELEMENTS[element]), -127), 127)) + 127


class Level(NamedTuple):
    """The second level of scales: its multiplier, and the inverse; 1 without one."""

    scale: float
    inverse: float


ONE = Level(1.0, 1.0)


def level_of(amax: float, layout: Layout) -> Level:
    """``min(bound * max / amax, FLT_MAX)``, where an amax of 0 has the largest, and its inverse."""
    quotient = float32(_top(layout) / amax) if amax else math.inf
    scale = min(quotient, FLOAT32_MAX)
    return Level(scale, float32(1.0 / scale))


def _top(layout: Layout) -> float:
    """What the second level makes of its largest amax: ``bound * max``."""
    bound = SCALES[layout.scale].max if layout.bound is None else layout.bound
    return float32(bound * MAX[NAMES[layout.element]])


def _e8m0_scale(
    amax: float, layout: Layout, dtype: torch.dtype, level: Level, factor: float
) -> tuple[float, float]:
    code = e8m0_code(float32(amax * factor), NAMES[layout.element], layout.rounding)
    return math.nan if code == 255 else math.ldexp(1.0, 127 - code), code


def _float_scale(
    amax: float, layout: Layout, dtype: torch.dtype, level: Level, factor: float
) -> tuple[float, float]:
    infinite = FLOATS[dtype].max if layout.finite_as == "input" else FLOAT32_MAX
    amax, maximum = float32(amax * factor), MAX[NAMES[layout.element]]
    return scale_from_amax(amax, maximum, layout.epsilon, layout.rounding == "floor", infinite)


def _narrow_scale(
    amax: float, layout: Layout, dtype: torch.dtype, level: Level, factor: float
) -> tuple[float, float]:
    """A scale in eight bits; with candidates it is of a true quotient, times the factor."""
    fmt, maximum = SCALES[layout.scale], MAX[NAMES[layout.element]]
    amax = min(amax, FLOAT32_MAX)
    if layout.candidates:
        base = float32(float32(amax / maximum) * level.scale)
        wanted = float32(base * factor)
    else:
        wanted = float32(amax * float32(level.scale * float32(1.0 / maximum)))
    assert fmt.number is not None
    code = _encode(min(wanted, fmt.max), fmt.number)
    product = float32(fmt.value(code) * level.inverse)
    inverse = float32(1.0 / product) if product else math.inf
    return min(inverse, FLOAT32_MAX), code


class Scale(NamedTuple):
    """A format of scales.

    Attributes:
        of_amax: ``(multiplier, stored scale)`` of an amax.
        value: the number that a stored scale is.
        number: the format of numbers in eight bits.
    """

    of_amax: Callable[[float, Layout, torch.dtype, Level, float], tuple[float, float]]
    value: Callable[[float], float]
    number: Element | None = None

    @property
    def max(self) -> float:
        assert self.number is not None
        return self.number.max


def _narrow(number: Element) -> Scale:
    return Scale(_narrow_scale, lambda code: number.values[int(code)], number)


SCALES: dict[torch.dtype | str, Scale] = {
    torch.float32: Scale(_float_scale, lambda stored: stored),
    torch.float8_e8m0fnu: Scale(
        _e8m0_scale, lambda code: math.nan if code == 255 else math.ldexp(1.0, int(code) - 127)
    ),
    torch.float8_e4m3fn: _narrow(ELEMENTS["e4m3"]),
    "UE5M3": _narrow(_floating("UE5M3", 8, Float(3, -14, 114688.0), 0xFF, signed=False)),
}


def scale(
    amax: float, layout: Layout, dtype: torch.dtype, level: Level = ONE, factor: float = 1.0
) -> tuple[float, float]:
    """The multiplier of elements, and the scale that is stored, for values in ``dtype``.

    A candidate's factor multiplies the amax; where the scale has eight bits, the scale.
    """
    return SCALES[layout.scale].of_amax(amax, layout, dtype, level, factor)


# -- matrices --


class Quantized(NamedTuple):
    """Codes and stored scales of a matrix, each as rows in the order in which they are stored, and
    the amaxes of the second level: none, one, or one for each row."""

    rowwise_data: Rows
    rowwise_scale_inv: Rows
    columnwise_data: Rows
    columnwise_scale_inv: Rows
    rowwise_amax: list[float]
    columnwise_amax: list[float]


def quantize(
    rows: Rows, layout: Layout, dtype: torch.dtype, seed: int | None = None, first_row: int = 0
) -> Quantized:
    """Quantize a matrix of numbers of ``dtype`` in both directions, each from the matrix.

    Columnwise data are the rowwise data of the transpose, held as the layout says. The matrix may
    be rows of a larger one, from ``first_row`` on, in which elements have their random words.
    """
    words = Words(seed, first_row)
    data, scales, amaxes = _Direction(rows, layout, dtype, words, columnwise=False).quantized()
    columns, column_scales, column_amaxes = _Direction(
        transpose(rows), layout, dtype, words, columnwise=True
    ).quantized()
    if layout.columnwise != "transposed":
        columns, column_scales = transpose(columns), transpose(column_scales)
    return Quantized(data, scales, columns, column_scales, amaxes, column_amaxes)


def transpose(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


class Words(NamedTuple):
    """The seed of random words, None for rounding to nearest, and the row of the first element."""

    seed: int | None
    first_row: int


Place = tuple[int, int]


class _Direction:
    """A matrix, transposed for columnwise data, that is quantized along its rows."""

    def __init__(
        self,
        rows: Rows,
        layout: Layout,
        dtype: torch.dtype,
        words: Words,
        *,
        columnwise: bool,
    ) -> None:
        rotation = layout.rotation
        if rotation is not None and rotation.directions in (
            "both",
            "columnwise" if columnwise else "rowwise",
        ):
            rows = [rotate(row, rotation.size, rotation.signs, dtype) for row in rows]
        self.rows, self.layout, self.dtype = rows, layout, dtype
        self.words, self.columnwise = words, columnwise
        self.element = NAMES[layout.element]
        self.area = layout.shared or layout.block

    def quantized(self) -> tuple[Rows, Rows, list[float]]:
        """Stored data and scales, and the amaxes of the second level."""
        layout, levels = self.layout, self._level_amaxes()
        areas: dict[Place, list[Place]] = {}
        for i, row in enumerate(self.rows):
            for j in range(len(row)):
                areas.setdefault(_place(i, j, self.area), []).append((i, j))
        data = [[0] * len(row) for row in self.rows]
        scales = {}
        for place, inside in areas.items():
            amax = levels[min(inside[0][0], len(levels) - 1)] if levels else None
            scales[place], codes = self._best(inside, amax)
            for (i, j), code in zip(inside, codes, strict=True):
                data[i][j] = code
        # The first element of each block says in which area the block is.
        stored = [
            [scales[_place(i, j, self.area)] for j in _starts(len(self.rows[i]), layout.block[1])]
            for i in _starts(len(self.rows), layout.block[0])
        ]
        if ELEMENTS[self.element].bits == 4:
            data = [pack(row) for row in data]
        return data, stored, levels

    def _level_amaxes(self) -> list[float]:
        """Of the tensor, or of each row; an infinite one counts as the largest number."""
        amaxes = [min(_amax(row), FLOAT32_MAX) for row in self.rows]
        return {"none": [], "tensor": [max(amaxes, default=0.0)], "row": amaxes}[
            self.layout.second_level
        ]

    def _best(self, inside: list[Place], level_amax: float | None) -> tuple[float, list[int]]:
        """The stored scale and the codes of an area; with candidates those of the least error."""
        level = ONE if level_amax is None else level_of(level_amax, self.layout)
        amax = _amax([self.rows[i][j] for i, j in inside])
        candidates = []
        for factor in self.layout.candidates or (1.0,):
            multiplier, stored = scale(amax, self.layout, self.dtype, level, float32(factor))
            codes = [
                encode(float32(self.rows[i][j] * multiplier), self.element, self._word(i, j))
                for i, j in inside
            ]
            candidates.append((stored, codes))
        best, *others = candidates
        if others:
            least = self._error(inside, best, level_amax)
            for candidate in others:
                error = self._error(inside, candidate, level_amax)
                # No error is smaller than that of NaN, nor is that of NaN.
                if error < least:
                    best, least = candidate, error
        return best

    def _word(self, i: int, j: int) -> int | None:
        """The random word of an element: its place is that in the tensor, not in the transpose."""
        if self.words.seed is None:
            return None
        row, column = (j, i) if self.columnwise else (i, j)
        width = len(self.rows) if self.columnwise else len(self.rows[0])
        place = (self.words.first_row + row) * width + column
        # Both directions of squares are rounded alike.
        second = self.columnwise and self.area[0] != self.area[1]
        return random_word(place, self.words.seed, second_stream=second)

    def _error(
        self, inside: list[Place], candidate: tuple[float, list[int]], level_amax: float | None
    ) -> float:
        """The sums of each row's columns in order, then of rows by halves.

        The rows of squares are those of the tensor, so that both directions choose alike.
        """
        stored, codes = candidate
        of_tensor = self.columnwise and self.area[0] == self.area[1]
        sums: dict[int, float] = {}
        for (i, j), code in zip(inside, codes, strict=True):
            value = float32(decode(code, self.element) * SCALES[self.layout.scale].value(stored))
            if level_amax is not None:
                value = float32(float32(value * level_amax) / _top(self.layout))
            difference = float32(value - self.rows[i][j])
            error = abs(difference)
            if self.layout.error == "MSE":
                error = float32(difference * difference)
            row = j if of_tensor else i
            sums[row] = float32(sums.get(row, 0.0) + error)
        return _by_halves(list(sums.values()), self.area[0] or len(sums))


def _by_halves(sums: list[float], count: int) -> float:
    """The sum of ``count`` numbers, of which those at the end may be missing, by halves."""
    size = 1 << (count - 1).bit_length()
    sums = sums + [0.0] * (size - len(sums))
    while size > 1:
        size //= 2
        sums = [float32(sums[i] + sums[i + size]) for i in range(size)]
    return sums[0]


def pack(codes: list[int]) -> list[int]:
    """Two codes of four bits in a byte, the first in the low half; 0 follows an odd last one."""
    padded = codes + [0] * (len(codes) % 2)
    return [low | high << 4 for low, high in zip(padded[::2], padded[1::2], strict=True)]


def unpack(data: list[int]) -> list[int]:
    return [code for byte in data for code in (byte & 15, byte >> 4)]


def _amax(values: list[float]) -> float:
    return max((abs(value) for value in values if not math.isnan(value)), default=0.0)


def _place(row: int, column: int, sides: tuple[int | None, int | None]) -> Place:
    """The block of an element, where a side of None has all."""
    return row // sides[0] if sides[0] else 0, column // sides[1] if sides[1] else 0


def _starts(size: int, side: int | None) -> range:
    """The first row, or the first column, of each block."""
    return range(0, size, side or max(size, 1))


def dequantize_rows(
    data: Rows, scales: Rows, layout: Layout, dtype: torch.dtype, amaxes: list[float]
) -> Rows:
    """The values of stored rows; columnwise data are rows after they are transposed."""
    packed = ELEMENTS[NAMES[layout.element]].bits == 4
    values = []
    for i, row in enumerate(data):
        amax = amaxes[min(i, len(amaxes) - 1)] if amaxes else None
        line = []
        for j, code in enumerate(unpack(row) if packed else row):
            block, side = _place(i, j, layout.block)
            line.append(dequantize(code, scales[block][side], layout, dtype, amax))
        values.append(line)
    return values


def dequantize(
    code: int, stored: float, layout: Layout, dtype: torch.dtype, amax: float | None = None
) -> float:
    """``float32(element) * scale``, rounded to float32, then to ``dtype``; float64 is exact.

    ``amax`` is that of the second level, whose factor is ``amax / (bound * max)``.
    """
    # The product of an element and of a float32 or a power of two is exact as a Python float.
    product = decode(code, NAMES[layout.element]) * SCALES[layout.scale].value(stored)
    if dtype is torch.float64 and layout.scale is torch.float8_e8m0fnu:
        return product
    value = float32(product)
    if amax is not None:
        value = float32(value * float32(amax / _top(layout)))
    return nearest(value, dtype)
