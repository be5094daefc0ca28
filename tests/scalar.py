"""The oracle of contracts: quantizes as a contract says, one number at a time.

The methods of :class:`Quantization` follow the steps of :mod:`ottava.contract` in their order.
They read nothing but the contract, use no kernel and no torch, and are slow: they are the meaning
of a contract, to be read and to be compared with faster code.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple, cast

from ottava.contract import Contract, Element, Scale, Storage
from ottava.contract.steps import Steps, Usage, check_given, steps_of
from ottava.errors import OptionError
from tests import numbers
from tests.numbers import FLT_MAX, bits_of, format_of, product, quotient, rounded

Rows = Sequence[Sequence[float]]
Matrix = list[list[float]]
Spans = tuple[range, range]
Place = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """A matrix in blocks. The last ones of a row and of a column may be smaller.

    Attributes:
        block: rows and columns of a block; None for all, which are one block even if there are
            none.
        shape: rows and columns of the matrix.
    """

    block: tuple[int | None, int | None]
    shape: tuple[int, int]

    @property
    def counts(self) -> Place:
        """How many blocks a column and a row of the matrix have."""
        sides = zip(self.shape, self.block, strict=True)
        return cast(Place, tuple(1 if side is None else -(-size // side) for size, side in sides))

    def place(self, row: int, column: int) -> Place:
        """The block of an element."""
        sides = zip((row, column), self.block, strict=True)
        return cast(Place, tuple(0 if side is None else index // side for index, side in sides))

    def spans(self, place: Place) -> tuple[range, range]:
        """The rows and columns of a block."""
        spans = []
        for index, size, side in zip(place, self.shape, self.block, strict=True):
            length = size if side is None else side
            spans.append(range(index * length, min(index * length + length, size)))
        return spans[0], spans[1]

    def place_of_first(self, spans: tuple[range, range]) -> Place:
        """The block of the first element of some rows and columns."""
        return self.place(spans[0].start, spans[1].start)

    def places(self) -> Iterator[Place]:
        """All blocks, row by row."""
        down, across = self.counts
        return ((row, column) for row in range(down) for column in range(across))

    def matrix(self, number: Callable[[Place], float]) -> list[list[float]]:
        """A number for each block."""
        down, across = self.counts
        return [[number((row, column)) for column in range(across)] for row in range(down)]


@dataclass(frozen=True)
class Bytes:
    """What is stored of one usage.

    Attributes:
        data: the bytes of each row of the held matrix, which is the tensor or its transpose.
        shape: rows and elements of a row of the held matrix, padding included.
        scales: as stored, for each block of the held matrix: float32 numbers, or codes.
        amax: of the second level, for each of its areas of the held matrix; None without it.
    """

    data: list[bytes]
    shape: tuple[int, int]
    scales: list[list[float]]
    amax: list[list[float]] | None


def quantize(
    contract: Contract,
    usage: Usage,
    rows: Rows,
    *,
    dtype: str,
    columns: int | None = None,
    seed: int | None = None,
    scale: float | None = None,
    first_row: int = 0,
) -> Bytes:
    """What a quantizer with this contract stores for one usage.

    Args:
        contract: states every choice of the usage.
        usage: "rowwise" or "columnwise".
        rows: the numbers of the whole tensor, as a matrix. Each is one of ``dtype``.
        dtype: of the tensor: "float32", "bfloat16" or "float16".
        columns: of the tensor, which a tensor without rows does not tell.
        seed: of the random words, where elements are rounded at random.
        scale: a float32, where the scale comes from outside.
        first_row: of the rows in a larger tensor, whose elements have their random words.

    Raises:
        OptionError: a choice is not stated; the dtype is unknown; the seed or the scale is missing.
    """
    if dtype not in numbers.DTYPES:
        raise OptionError(f"dtype is {dtype!r}", expected=f"one of {', '.join(numbers.DTYPES)}")
    width = columns if columns is not None else len(rows[0]) if rows else 0
    if getattr(contract, usage) == "identity":
        data = [b"".join(_number_bytes(value, dtype) for value in row) for row in rows]
        return Bytes(data, (len(rows), width), [], None)
    steps = steps_of(contract, usage)
    check_given(steps, seed, scale)
    quantization = Quantization(steps, usage, dtype, seed or 0, scale or 0.0, first_row)
    return quantization.run(rows, width)


def _number_bytes(value: float, dtype: str) -> bytes:
    """A number as it comes, the low byte first."""
    if dtype == "float16":
        return struct.pack("<e", value)
    whole = struct.pack("<f", value)
    return whole[2:] if dtype == "bfloat16" else whole


def _transposed(values: Matrix, columns: int) -> Matrix:
    """The transpose, of a matrix that may have no rows."""
    return [[row[column] for row in values] for column in range(columns)]


class Level(NamedTuple):
    """Step 4 for one area."""

    amax: float
    scale: float
    inverse: float


#: Without a second level.
ONE = Level(math.nan, 1.0, 1.0)


class BlockScale(NamedTuple):
    """Step 5 for one block: the stored scale, the number that it is, and the multiplier."""

    stored: float
    number: float
    multiplier: float


@dataclass(frozen=True)
class Quantization:
    """The steps of one usage of a tensor.

    Attributes:
        steps: what the contract says of them.
        usage: what the bytes are for.
        dtype: of the tensor.
        seed: of random words.
        given: the scale from outside.
        first_row: of the tensor, in a larger one.
    """

    steps: Steps
    usage: Usage
    dtype: str
    seed: int = 0
    given: float = 0.0
    first_row: int = 0

    def run(self, rows: Rows, width: int) -> Bytes:
        """All steps."""
        values, shape = self.transformed(self.source(rows), (len(rows), width))
        level_grid, levels = self.levels(values, shape)
        # Blocks of one area have one amax, and so one scale.
        areas = Grid(self.steps.amax.area or self.steps.amax.block, shape)
        codes, scales = [[0] * shape[1] for _ in range(shape[0])], {}
        for place in areas.places():
            spans = areas.spans(place)
            level = levels.get(level_grid.place_of_first(spans), ONE)
            scale, results = self.best(values, spans, level)
            scales[place] = scale.stored
            for row, result in zip(spans[0], results, strict=True):
                codes[row][spans[1].start : spans[1].stop] = result
        blocks = Grid(self.steps.amax.block, shape)
        stored = blocks.matrix(lambda at: scales[areas.place_of_first(blocks.spans(at))])
        amax = None
        if self.steps.second_level is not None:
            amax = level_grid.matrix(lambda at: levels[at].amax)
        return self.storage(codes, shape, stored, amax)

    # Steps 1 to 4.

    def source(self, rows: Rows) -> Matrix:
        """Step 1: the values that are quantized."""
        name = self.steps.source.rounded_to
        if name == "none":
            return [list(row) for row in rows]
        return [[rounded(value, name) for value in row] for row in rows]

    def transformed(self, values: Matrix, shape: Place) -> tuple[Matrix, Place]:
        """Step 2: the transformed groups of the summed dimension, and their shape with padding."""
        step, (rows, columns) = self.steps.transform, shape
        if step is None:
            return values, shape
        if self.usage == "columnwise":
            padded = rows + -rows % step.size
            turned = [self.transformed_line(line) for line in _transposed(values, columns)]
            return _transposed(turned, padded), (padded, columns)
        padded = columns + -columns % step.size
        return [self.transformed_line(line) for line in values], (rows, padded)

    def transformed_line(self, line: list[float]) -> list[float]:
        """Step 2 for one row, or one column."""
        assert self.steps.transform is not None
        size = self.steps.transform.size
        line = line + [0.0] * (-len(line) % size)
        groups = [line[at : at + size] for at in range(0, len(line), size)]
        return [value for group in groups for value in self.transformed_group(group)]

    def transformed_group(self, group: list[float]) -> list[float]:
        """Step 2 for one group."""
        step = self.steps.transform
        assert step is not None
        signs = int(step.signs, 16)
        sums = [-value if signs >> i & 1 else value for i, value in enumerate(group)]
        stride = 1
        while stride < step.size:
            for i in range(step.size):
                if not i & stride:
                    one, other = sums[i], sums[i + stride]
                    sums[i], sums[i + stride] = rounded(one + other), rounded(one - other)
            stride *= 2
        factor = rounded(1 / math.sqrt(step.size))
        return [rounded(product(value, factor), self.dtype) for value in sums]

    def amax(self, values: Matrix, spans: Spans, nan: str) -> float:
        """Step 3: the largest magnitude; a NaN is "ignored" or "propagates"."""
        magnitudes = [abs(values[row][column]) for row in spans[0] for column in spans[1]]
        if nan == "propagates" and any(map(math.isnan, magnitudes)):
            return math.nan
        return max((each for each in magnitudes if not math.isnan(each)), default=0.0)

    def levels(self, values: Matrix, shape: Place) -> tuple[Grid, dict[Place, Level]]:
        """Step 4: the second level of each area; of none without one."""
        step = self.steps.second_level
        if step is None:
            return Grid((None, None), shape), {}
        grid, levels = Grid(step.over, shape), {}
        for place in grid.places():
            amax = min(self.amax(values, grid.spans(place), "ignored"), FLT_MAX)
            scale = min(quotient(top(self.steps), amax), FLT_MAX)
            levels[place] = Level(amax, scale, quotient(1.0, scale))
        return grid, levels

    # Step 5.

    def best(
        self, values: Matrix, spans: Spans, level: Level
    ) -> tuple[BlockScale, list[list[int]]]:
        """The scale with the least error, the first one of equal errors, and the codes."""
        step = self.steps.candidates
        amax = self.amax(values, spans, self.steps.amax.nan)
        if step is None:
            scale = self.scale(amax, level, None)
            return scale, self.codes(values, spans, scale.multiplier)
        tried = [self.scale(amax, level, factor) for factor in step.factors]
        codes = [self.codes(values, spans, scale.multiplier) for scale in tried]
        best, least = 0, self.error(values, spans, codes[0], tried[0], level)
        for i in range(1, len(tried)):
            error = self.error(values, spans, codes[i], tried[i], level)
            if error < least:
                best, least = i, error
        return tried[best], codes[best]

    def scale(self, amax: float, level: Level, factor: float | None) -> BlockScale:
        """The scale of a block; ``factor`` is a candidate's."""
        step = self.steps.scale
        if step.rule == "rounded":
            return self.byte_scale(amax, level, factor)
        if factor is not None:
            amax = product(amax, rounded(factor))
        if step.format == "E8M0":
            code = self.exponent_code(amax)
            return BlockScale(code, _power(code - 127), _power(127 - code))
        scale = self.float_scale(amax)
        inverse = quotient(1.0, scale)
        return BlockScale(inverse, inverse, scale)

    def float_scale(self, amax: float) -> float:
        """A float32 scale."""
        step = self.steps.scale
        if step.rule == "given":
            return self.given
        if amax < rounded(step.epsilon):
            amax = rounded(step.epsilon)
        scale = 1.0
        if amax != 0 and math.isfinite(amax):
            scale = quotient(step.maximum, amax)
        if math.isinf(scale) and step.infinite != "none":
            scale = numbers.largest("float32" if step.infinite == "float32" else self.dtype)
        if step.rule == "quotient-floor":
            return _power((bits_of(scale) >> 23) - 127) if scale >= 2.0**-126 else 0.0
        return min(self.given, scale) if step.rule == "given-fitting" else scale

    def exponent_code(self, amax: float) -> int:
        """A code of E8M0."""
        step = self.steps.scale
        if not math.isfinite(amax):
            return 255 if math.isnan(amax) else 254
        if step.rule in ("floor", "even"):
            bits = bits_of(amax)
            if step.rule == "even":
                bits += 1 << (22 - format_of(self.steps.element.format).mantissa_bits)
            code = (bits >> 23) - (bits_of(step.maximum) >> 23) + 127
        else:
            mantissa, exponent = math.frexp(product(amax, rounded(1 / step.maximum)))
            # The mantissa is from 0.5 to 1, and 0 of zero; its square is exact.
            above = mantissa > 0.5 if step.rule == "up" else mantissa * mantissa > 0.5
            code = exponent - 1 + above + 127 if mantissa else 0
        return min(max(code, 0), 254)

    def byte_scale(self, amax: float, level: Level, factor: float | None) -> BlockScale:
        """A scale in a byte, with a multiplier that undoes the second level, too."""
        step, fmt = self.steps.scale, format_of(self.steps.scale.format)
        amax = min(amax, FLT_MAX)
        if factor is None:
            exact = product(amax, product(level.scale, rounded(1 / step.maximum)))
        else:
            base = product(quotient(amax, step.maximum), level.scale)
            exact = product(base, rounded(factor))
        # The code after that of the largest number is NaN.
        code = len(fmt.magnitudes)
        if not math.isnan(exact):
            code = fmt.nearest(min(exact, fmt.magnitudes[-1]))
        number = fmt.number(code)
        multiplier = min(quotient(1.0, product(number, level.inverse)), FLT_MAX)
        return BlockScale(code, number, multiplier)

    def error(
        self,
        values: Matrix,
        spans: Spans,
        codes: list[list[int]],
        scale: BlockScale,
        level: Level,
    ) -> float:
        """The error of a candidate, summed over the area."""
        step = self.steps.candidates
        assert step is not None
        errors = []
        for row, line in zip(spans[0], codes, strict=True):
            pairs = zip(line, spans[1], strict=True)
            decoded = [(self.decoded(code, scale, level), column) for code, column in pairs]
            differences = [rounded(number - values[row][column]) for number, column in decoded]
            squares = step.error == "MSE"
            errors.append([product(d, d) if squares else abs(d) for d in differences])
        if step.sums == "rows in order, columns by halves":
            errors = _transposed(errors, len(spans[1]))
        return _by_halves([reduce(lambda a, b: rounded(a + b), line, 0.0) for line in errors])

    def decoded(self, code: int, scale: BlockScale, level: Level) -> float:
        """The number that a candidate's code stands for."""
        assert self.steps.candidates is not None
        number = product(_number(self.steps.element, code), scale.number)
        if self.steps.candidates.decoded == "element*scale":
            return number
        return quotient(product(number, level.amax), top(self.steps))

    # Steps 6 and 7.

    @cached_property
    def format(self) -> numbers.Format:
        """The format of the elements."""
        return format_of(self.steps.element.format)

    def codes(self, values: Matrix, spans: Spans, multiplier: float) -> list[list[int]]:
        """The codes of a block."""
        result = []
        for row in spans[0]:
            start = (self.first_row + row) * len(values[row])
            places = [start + column for column in spans[1]]
            scaled = [product(values[row][column], multiplier) for column in spans[1]]
            result.append(list(map(self.element, scaled, places)))
        return result

    def element(self, value: float, place: int) -> int:
        """The code of a number; its place in the tensor decides where it is rounded at random."""
        step = self.steps.element
        if math.isnan(value):
            return step.nan
        value = min(max(value, step.least), step.maximum)
        if self.steps.random is None:
            code = self.format.nearest(abs(value))
        else:
            word = numbers.philox(self.seed, place // 4, self.steps.random.stream)[place % 4]
            code = self.format.at_random(abs(value), word)
        return self.format.code(code, negative=math.copysign(1.0, value) < 0)

    def storage(
        self, codes: list[list[int]], shape: Place, scales: Matrix, amax: Matrix | None
    ) -> Bytes:
        """What is stored of the held matrix."""
        if self.steps.storage.held == "transpose":
            codes = [[row[column] for row in codes] for column in range(shape[1])]
            scales = _transposed(scales, Grid(self.steps.amax.block, shape).counts[1])
            if amax is not None and self.steps.second_level is not None:
                amax = _transposed(amax, Grid(self.steps.second_level.over, shape).counts[1])
            shape = shape[1], shape[0]
        data = [_packed(self.steps.storage, self.steps.element.bits, row) for row in codes]
        return Bytes(data, shape, scales, amax)


def _power(exponent: int) -> float:
    """2 to the exponent of a code of E8M0, or of its inverse. The code 255 is NaN."""
    return math.nan if abs(exponent) == 128 else math.ldexp(1.0, exponent)


def top(steps: Steps) -> float:
    """``bound * maximum`` of the second level."""
    assert steps.second_level is not None
    return product(steps.second_level.bound, steps.second_level.maximum)


def _by_halves(sums: list[float]) -> float:
    """The sum: the second half is added to the first one, until one number is left."""
    size = 1 << max(len(sums) - 1, 0).bit_length()
    sums = sums + [0.0] * (size - len(sums))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [rounded(a + b) for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def _packed(step: Storage, bits: int, codes: list[int]) -> bytes:
    """Step 7: the bytes of a row."""
    if step.per_byte == 1:
        return bytes(codes)
    low, high = codes[::2], codes[1::2] + [0] * (len(codes) % 2)
    if step.first == "high":
        low, high = high, low
    return bytes(a | b << bits for a, b in zip(low, high, strict=True))


def unpacked(step: Storage, bits: int, data: bytes) -> list[int]:
    """The codes of a row, and of the other half of an odd last element."""
    if step.per_byte == 1:
        return list(data)
    pairs = [(byte & (1 << bits) - 1, byte >> bits) for byte in data]
    return [code for pair in pairs for code in (pair if step.first == "low" else pair[::-1])]


# What bytes stand for.


def decode(contract: Contract, usage: Usage, stored: Bytes) -> Matrix:
    """The numbers that bytes stand for, of the held matrix, as they are after a transform.

    Raises:
        OptionError: a choice is not stated.
    """
    steps = steps_of(contract, usage)
    turned = steps.storage.held == "transpose"
    block = steps.amax.block[::-1] if turned else steps.amax.block
    factors = [[1.0]]
    over: tuple[int | None, int | None] = (None, None)
    if steps.second_level is not None and stored.amax is not None:
        over = steps.second_level.over[::-1] if turned else steps.second_level.over
        factors = [[quotient(amax, top(steps)) for amax in row] for row in stored.amax]
    blocks, areas = Grid(block, stored.shape), Grid(over, stored.shape)
    result: Matrix = []
    for i, data in enumerate(stored.data):
        codes = unpacked(steps.storage, steps.element.bits, data)[: stored.shape[1]]
        result.append([])
        for j, code in enumerate(codes):
            (row, column), (down, across) = blocks.place(i, j), areas.place(i, j)
            scale = scale_number(steps.scale, stored.scales[row][column])
            number = product(_number(steps.element, code), scale)
            result[-1].append(product(number, factors[down][across]))
    return result


def scale_number(step: Scale, stored: float) -> float:
    """The number that a stored scale is."""
    if step.format == "float32":
        return stored
    if step.format == "E8M0":
        return _power(int(stored) - 127)
    return format_of(step.format).number(int(stored))


def _number(step: Element, code: int) -> float:
    """The number of an element."""
    return format_of(step.format).number(code)
