"""The numbers of formats as tensors, computed from their definitions."""

import math
from functools import cache

import torch
from torch import Tensor

from ottava.formats import ELEMENT_NAMES, UE5M3, ElementFormat, IntegerFormat

FLT_MAX = torch.finfo(torch.float32).max


def format_of(name: str) -> ElementFormat:
    """The format of elements, or of scales in a byte with a mantissa, of this name."""
    return UE5M3 if name == UE5M3.name else ELEMENT_NAMES[name]


def mantissa_bits(name: str) -> int:
    """The bits behind the leading bit of a large number."""
    fmt = format_of(name)
    return fmt.bits - 2 if isinstance(fmt, IntegerFormat) else fmt.mantissa_bits


@cache
def magnitudes(name: str) -> Tensor:
    """The finite magnitudes of a format in ascending order, float32; the place of one is its
    code."""
    fmt = format_of(name)
    if isinstance(fmt, IntegerFormat):
        return torch.arange((1 << (fmt.bits - 1)) + 1) * fmt.step
    codes = torch.arange(1 << (fmt.bits - fmt.signed))
    exponents = codes >> fmt.mantissa_bits
    implied = torch.where(exponents > 0, 1 << fmt.mantissa_bits, 0)
    digits = implied + codes % (1 << fmt.mantissa_bits)
    units = exponents.clamp(min=1) - fmt.bias - fmt.mantissa_bits
    numbers = torch.ldexp(digits.double(), units)
    return numbers[numbers <= fmt.max].float()


@cache
def middles(name: str) -> Tensor:
    """The numbers halfway between neighbouring magnitudes, which float32 has exactly, too."""
    numbers = magnitudes(name)
    return (numbers[:-1] + numbers[1:]) / 2


def with_neighbours(numbers: Tensor) -> Tensor:
    """Three rows: the next smaller float32, the numbers, and the next larger one."""
    zero, more = torch.zeros(()), torch.full((), math.inf)
    return torch.stack([torch.nextafter(numbers, zero), numbers, torch.nextafter(numbers, more)])


@cache
def numbers_of_codes(name: str) -> Tensor:
    """The number of each code of a format, float32; NaN where no finite number has it."""
    fmt = format_of(name)
    finite = magnitudes(name)
    if isinstance(fmt, IntegerFormat):
        numbers = torch.cat([finite[:-1], -finite[1:].flip(0)])
        if fmt.has_nan:
            numbers[len(numbers) // 2] = math.nan
        return numbers
    half = 1 << (fmt.bits - fmt.signed)
    positive = torch.full((half,), math.nan)
    positive[: len(finite)] = finite
    return torch.cat([positive, -positive]) if fmt.signed else positive


def numbers_of_scales(codes: Tensor, format: str) -> Tensor:
    """The numbers of stored scales: of codes in uint8, or of float32 numbers, which stay."""
    if codes.dtype != torch.uint8:
        return codes
    if format == "E8M0":
        return power_of_two(codes.int() - 127)
    table = numbers_of_codes(format)
    return table[codes.long()]


def power_of_two(exponents: Tensor) -> Tensor:
    """Powers of two in float32; NaN for the code 255 of E8M0, whose exponent is 128."""
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents)
    return torch.where(exponents.abs() == 128, math.nan, powers).float()


def nearest(numbers: Tensor, name: str) -> Tensor:
    """The place of the nearest magnitude of a format, of the even one of two, for float32."""
    return _nearest_of_classes(name).take(_classes(numbers))


def below(numbers: Tensor, name: str) -> Tensor:
    """The place of the largest magnitude of a format that is not larger, for float32."""
    return _below_of_classes(name).take(_classes(numbers))


# A table of places is faster than a search among magnitudes. Magnitudes, and the numbers halfway
# between two, have at most eight bits behind the leading one. So the place of a number depends on
# its sign, its exponent, its first eight bits, and on whether another bit is set.
_OTHERS = 15


def _classes(numbers: Tensor) -> Tensor:
    """The class of each number. Numbers of one class have the same place in every format."""
    bits = numbers.contiguous().view(torch.int32)
    # The shift puts copies of the sign before it; the mask drops them.
    first = bits >> _OTHERS - 1 & (2 << 32 - _OTHERS) - 2
    others = bits & (1 << _OTHERS) - 1
    return (first | (others != 0)).long()


@cache
def _one_of_each_class() -> Tensor:
    """A number of each class, in the order of the classes."""
    classes = torch.arange(2 << 32 - _OTHERS)
    return (classes >> 1 << _OTHERS | classes & 1).int().view(torch.float32)


@cache
def _nearest_of_classes(name: str) -> Tensor:
    numbers = _one_of_each_class()
    places = torch.bucketize(numbers, middles(name))
    tie = numbers == middles(name)[places.clamp(max=len(middles(name)) - 1)]
    return places + (tie & (places % 2 == 1))


@cache
def _below_of_classes(name: str) -> Tensor:
    return torch.bucketize(_one_of_each_class(), magnitudes(name), right=True) - 1
