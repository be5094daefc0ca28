"""The inputs of golden vectors: the same numbers on every machine and with every version.

Random numbers are those of SplitMix64 (Steele, Lea and Flood, 2014), which is a few operations on
integers. Nothing here rounds: each input is made of integers and powers of two, or of bits.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from ottava.contract.numbers import magnitudes, with_neighbours
from ottava.contract.steps import Steps

_MASK = (1 << 64) - 1
#: Dtypes by the names that inputs have.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: Rows and columns that no block divides.
RAGGED = ((0, 16), (5, 0), (1, 1), (3, 17), (33, 31), (131, 130))
#: The least and the largest mantissas of float32, and ties of formats of few bits with neighbours.
_TIES = (0x100000, 0x200000, 0x400000, 0x600000)
_MANTISSAS = [0, 1, 0x7FFFFE, 0x7FFFFF, *(tie + step for tie in _TIES for step in (-1, 0, 1))]
#: The integers of the same width, and the bits of the quiet NaN.
_NAN = {
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float32: (torch.int32, 0x7FC00000),
}
_SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0)


def splitmix64(seed: int, count: int) -> Iterator[int]:
    """The first ``count`` words of SplitMix64, 64 bits each."""
    for _ in range(count):
        seed = seed + 0x9E3779B97F4A7C15 & _MASK
        word = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
        yield word ^ word >> 31


def inputs_of(steps: Iterable[Steps]) -> dict[str, Tensor]:
    """The inputs by their names.

    Args:
        steps: of all usages, for the ties of their elements.
    """
    inputs = {"bfloat16/every": every_bfloat16(), "float32/exponents": every_exponent()}
    for name, dtype in DTYPES.items():
        inputs[f"{name}/special"] = special(dtype)
        inputs[f"{name}/outliers"] = outliers(64, 160, seed=1, dtype=dtype)
    for rows, columns in RAGGED:
        inputs[f"float32/ragged_{rows}x{columns}"] = outliers(rows, columns, seed=2)
    for each in steps:
        name = f"float32/ties_{each.element.format}"
        if each.second_level is not None:
            name += f"_{each.second_level.bound:g}"
        tied = ties(each)
        inputs[name], inputs[f"{name}_transposed"] = tied, tied.t().contiguous()
    return inputs


def every_bfloat16() -> Tensor:
    """Every number of bfloat16, NaN and infinities included, in the order of its bits."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).view(256, 256)


def every_exponent() -> Tensor:
    """A row for each exponent of float32, with several mantissas and both signs."""
    rows = [
        [exponent << 23 | mantissa | sign for mantissa in _MANTISSAS for sign in (0, -(1 << 31))]
        for exponent in range(256)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32).view(torch.float32)


def special(dtype: torch.dtype) -> Tensor:
    """Rows with one unusual number among ordinary ones, then rows of that number alone."""
    limits = torch.finfo(dtype)
    tiny = [limits.smallest_normal, limits.smallest_normal / 2, limits.smallest_normal * limits.eps]
    values = [*_SPECIAL, limits.max, limits.min, *tiny]
    rows = outliers(len(values), 40, seed=3, dtype=dtype)
    numbers = torch.tensor(values, dtype=torch.float64).to(dtype)
    # Processors differ in the bits of a converted NaN.
    integers, bits = _NAN[dtype]
    numbers.view(integers)[numbers.isnan()] = bits
    places = torch.arange(len(values))
    rows[places, places * 3] = numbers
    alone = numbers.unsqueeze(1).expand(-1, 40)
    return torch.cat([rows, alone])


def outliers(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Nearly normal numbers, some columns of which are larger, and single ones much larger.

    A number is the sum of four uniform ones of 16 bits, and so nearly normal. Of the columns, one
    in 16 is 32 times as large, and of all numbers one in 256 is 64 times as large.
    """
    # The sums have 18 bits: each rounds once to the narrower dtypes.
    return _outliers(rows, columns, seed).view(rows, columns).to(dtype, copy=True)


@cache
def _outliers(rows: int, columns: int, seed: int) -> Tensor:
    """The numbers in float64, row by row."""
    numbers = []
    for place, word in enumerate(splitmix64(seed, rows * columns)):
        sixteen = [word >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
        number = (sum(sixteen) - 2 * 0xFFFF) * 2.0**-16
        if place % columns % 16 == 5:
            number *= 32
        numbers.append(number * 64 if word * 0x2545F491 >> 20 & 0xFF == 0 else number)
    return torch.tensor(numbers, dtype=torch.float64)


def ties(steps: Steps) -> Tensor:
    """Numbers halfway between two elements, and their neighbours in float32.

    Each group of 16 begins with the largest element, so that multipliers are powers of two where
    the rule allows it. With a second level the first row has the number for which ``S`` is 1.
    """
    element = steps.element
    finite = magnitudes(element.format)
    finite = finite[finite <= element.maximum]
    halfway = (finite[:-1] + finite[1:]) / 2
    values = with_neighbours(halfway)[[1, 0, 2]].t().flatten()
    values[1::2] *= -1
    values = torch.nn.functional.pad(values, [0, -len(values) % 30]).view(-1, 2, 15)
    first = torch.full((len(values), 2, 1), element.maximum)
    rows = torch.cat([first, values], 2).flatten(1)
    rows = torch.cat([rows, rows * 2.0**-20, rows * 2.0**7])
    if steps.second_level is not None:
        top = torch.zeros(1, 32)
        top[0, 0] = steps.second_level.bound * steps.second_level.maximum
        rows = torch.cat([top, rows[: len(rows) // 3]])
    return rows
