"""The scalar oracle of layouts: :mod:`tests.scalar` with what the contract of a layout says.

``tests/core/test_contract.py`` compares contracts with what layouts are made of, and the golden
vectors of ottava-verify have hashes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ottava import Contract, Layout
from ottava.contract.steps import USAGES, Steps, steps_of
from ottava.layout import Rotation
from tests import numbers, scalar
from tests.numbers import FLT_MAX, rounded

Rows = list[list[Any]]
#: The names of dtypes, for rounding.
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
FLOAT32_MAX = FLT_MAX
#: The nearest float32.
float32 = rounded


class Element(NamedTuple):
    """A format of elements or of scales.

    Attributes:
        name: the dtype or the name that a layout has.
        bits: those of a code.
        nan: the code that NaN becomes.
        positive, negative: the magnitudes of the numbers with each sign, in the order of codes.
        values: the number of each code.
        mantissa: the bits after the leading one that a large number has.
    """

    name: torch.dtype | str
    bits: int
    nan: int
    positive: list[float]
    negative: list[float]
    values: list[float]
    mantissa: int

    @property
    def max(self) -> float:
        return self.positive[-1]

    @property
    def exponent(self) -> int:
        """That of the largest power of two."""
        return math.frexp(self.max)[1] - 1


@functools.cache
def steps(layout: Layout) -> Steps:
    """What the contract of a layout says of its rowwise data."""
    return steps_of(Contract.of_layout(layout), "rowwise")


def _element(name: torch.dtype | str) -> Element:
    """The format of the elements of a layout."""
    step = steps(Layout(name, (1, 32), columnwise="transposed")).element
    return _format(name, step.format, step.nan, step.least)


def _format(name: torch.dtype | str, text: str, nan: int, least: float) -> Element:
    fmt = numbers.format_of(text)
    values = [fmt.number(code) for code in range(1 << min(fmt.bits, 8))]
    positive = [value for value in fmt.magnitudes if value in values]
    negative = [value for value in fmt.magnitudes if value <= -least]
    return Element(name, fmt.bits, nan, positive, negative, values, fmt.mantissa_bits)


#: The formats of elements, with names for tests.
ELEMENTS = {
    "e4m3": _element(torch.float8_e4m3fn),
    "e5m2": _element(torch.float8_e5m2),
    "e2m1": _element("E2M1"),
    "e2m3": _element("E2M3"),
    "e3m2": _element("E3M2"),
    "int8": _element(torch.int8),
    "int4": _element("INT4"),
    "mxint8": _element("MXINT8"),
    "mxint8s": _element("MXINT8S"),
}
#: The names of elements by what a layout has.
NAMES = {element.name: name for name, element in ELEMENTS.items()}
MAX = {name: element.max for name, element in ELEMENTS.items()}
#: The formats of scales that have a mantissa, in a byte.
SCALES: dict[torch.dtype | str, Element] = {
    torch.float8_e4m3fn: ELEMENTS["e4m3"],
    "UE5M3": _format("UE5M3", "UE5M3", 0xFF, 0.0),
}
#: Rules for the exponents of E8M0 scales.
E8M0_RULES = ("up", "floor", "even", "nearest")


@functools.cache
def _one_scale(element: torch.dtype | str, seeded: bool) -> scalar.Quantization:
    layout = Layout(element, (None, None), columnwise="transposed", stochastic=seeded)
    return scalar.Quantization(steps(layout), "rowwise", "float32")


def encode(value: float, element: str) -> int:
    """The code of a number of an element's format: the nearest."""
    return _one_scale(ELEMENTS[element].name, False).element(value, 0)


def decode(code: int, element: str) -> float:
    return ELEMENTS[element].values[code]


def rotate(row: list[float], size: int, signs: int, dtype: torch.dtype) -> list[float]:
    """A row after the rotation of its groups, padded with zeros."""
    rotation = Rotation(size, signs, "rowwise")
    layout = Layout(torch.int8, (1, None), columnwise="transposed", rotation=rotation)
    return scalar.Quantization(steps(layout), "rowwise", DTYPES[dtype]).transformed_line(row)


# -- scales --


def scale(
    amax: float, layout: Layout, dtype: torch.dtype, factor: float | None = None
) -> tuple[float, float]:
    """The multiplier of elements, and the scale that is stored, for values in ``dtype``.

    A candidate's factor multiplies the amax; where the scale has eight bits, the scale.
    """
    quantization = scalar.Quantization(steps(layout), "rowwise", DTYPES[dtype])
    result = quantization.scale(amax, scalar.ONE, factor)
    return result.multiplier, result.stored


def scale_from_amax(amax: float, maximum: float) -> tuple[float, float]:
    """``(scale, scale_inv)`` in float32, for elements of this largest number."""
    (name,) = (element.name for element in ELEMENTS.values() if element.max == maximum)
    return scale(amax, Layout(name, (None, None)), torch.float32)


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

    The matrix may be rows of a larger one, from ``first_row`` on, in which elements have their
    random words. Without a seed elements are the nearest.
    """
    contract = Contract.of_layout(replace(layout, stochastic=seed is not None))
    made = [
        scalar.quantize(contract, usage, rows, dtype=DTYPES[dtype], seed=seed, first_row=first_row)
        for usage in USAGES
    ]
    data = [[list(line) for line in side.data] for side in made]
    amaxes = [[amax for line in side.amax or () for amax in line] for side in made]
    return Quantized(data[0], made[0].scales, data[1], made[1].scales, amaxes[0], amaxes[1])


def unpack(data: list[int]) -> list[int]:
    """The codes of bytes that have two, the first in the low half."""
    return [code for byte in data for code in (byte & 15, byte >> 4)]


def dequantize_rows(
    data: Rows, scales: Rows, layout: Layout, dtype: torch.dtype, amaxes: list[float]
) -> Rows:
    """The values of stored rows; columnwise data are rows after they are transposed.

    A value is ``float32(element) * scale``, rounded to float32, then to ``dtype``; float64 is
    exact. A second level has the factor ``amax / (bound * max)`` besides.
    """
    made, element = steps(layout), ELEMENTS[NAMES[layout.element]]
    factors = [rounded(amax / scalar.top(made)) for amax in amaxes] or [None]
    height, width = layout.block
    values = []
    for i, row in enumerate(data):
        stored = scales[i // height if height else 0]
        of_blocks = [scalar.scale_number(made.scale, each) for each in stored]
        factor = factors[min(i, len(factors) - 1)]
        line = []
        for j, code in enumerate(unpack(row) if element.bits == 4 else row):
            # Exact: a float64 has the product of an element and of a float32 or a power of two.
            value = element.values[code] * of_blocks[j // width if width else 0]
            if dtype is not torch.float64 or layout.scale is not torch.float8_e8m0fnu:
                value = rounded(value)
                value = value if factor is None else rounded(value * factor)
                value = rounded(value, DTYPES[dtype])
            line.append(value)
        values.append(line)
    return values
