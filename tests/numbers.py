"""Number formats, float32 and random words in plain Python.

Formats are as the OCP specifications for FP8 and MX define them, and as SPEC.md says of UE5M3. A
number is a Python float that float32 has exactly. An operation on two such numbers in binary64,
rounded to float32 once more, has the correctly rounded result of float32: 53 bits are more than
twice 24 bits and two.
"""

from __future__ import annotations

import bisect
import math
import struct
from dataclasses import dataclass
from functools import cache, lru_cache

FLT_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
#: Dtype of an input -> bits of its significand, its largest exponent, and its least exponent.
DTYPES = {"float32": (24, 127, -126), "bfloat16": (8, 127, -126), "float16": (11, 15, -14)}
_FLOAT32 = struct.Struct("<f")


def rounded(value: float, dtype: str = "float32") -> float:
    """A number rounded to the nearest one of a dtype, to the even one of two, as IEEE 754 says."""
    if dtype == "float32":
        # The rounding of ``struct`` is the fastest.
        try:
            return _FLOAT32.unpack(_FLOAT32.pack(value))[0]  # type: ignore[no-any-return]
        except OverflowError:
            return math.copysign(math.inf, value)
    if value == 0 or not math.isfinite(value) or dtype == "float64":
        return value
    bits, largest, least = DTYPES[dtype]
    exponent = max(math.frexp(value)[1] - 1, least)
    unit = exponent - (bits - 1)
    result = math.ldexp(round(math.ldexp(value, -unit)), unit)
    if abs(result) >= 2.0 ** (largest + 1):
        return math.copysign(math.inf, value)
    # An integer has no signed zero.
    return math.copysign(result, value)


def largest(dtype: str) -> float:
    """The largest finite number of a dtype."""
    bits, exponent, _ = DTYPES[dtype]
    return (2 - 2.0 ** (1 - bits)) * 2.0**exponent


def product(one: float, other: float) -> float:
    """The product in float32. The product of infinity and zero is NaN."""
    return rounded(one * other)


def quotient(one: float, other: float) -> float:
    """The quotient in float32, of a divisor that is not negative."""
    if other == 0:
        return math.nan if one == 0 or math.isnan(one) else math.copysign(math.inf, one)
    return rounded(one / other)


def bits_of(value: float) -> int:
    """The bits of a float32 as an integer."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


@dataclass(frozen=True)
class Format:
    """Codes of numbers with a sign: a magnitude and a sign bit, or two's complement.

    Attributes:
        magnitudes: the finite magnitudes in ascending order; the place of one is its code.
        bits: of a code.
        mantissa_bits: behind the leading bit of a large number.
        twos_complement: whether a negative number is the two's complement of its magnitude.
        infinite: whether the code after the largest magnitude is infinity.
    """

    magnitudes: tuple[float, ...]
    bits: int
    mantissa_bits: int
    twos_complement: bool = False
    infinite: bool = False

    def code(self, place: int, negative: bool) -> int:
        """The code of a magnitude with a sign."""
        if not negative:
            return place
        if self.twos_complement:
            return -place % (1 << self.bits)
        return place | 1 << (self.bits - 1)

    def number(self, code: int) -> float:
        """The number of a code; NaN where no finite number has it."""
        half = 1 << (self.bits - 1)
        place = (1 << self.bits) - code if self.twos_complement and code >= half else code % half
        if place >= len(self.magnitudes):
            infinity = math.inf if code < half else -math.inf
            return infinity if self.infinite and place == len(self.magnitudes) else math.nan
        return self.magnitudes[place] if code < half else -self.magnitudes[place]

    def nearest(self, magnitude: float) -> int:
        """The place of the nearest magnitude, of the even code of two."""
        below = self.below(magnitude)
        if below + 1 == len(self.magnitudes):
            return below
        middle = (self.magnitudes[below] + self.magnitudes[below + 1]) / 2
        if magnitude == middle:
            return below + below % 2
        return below + (magnitude > middle)

    def at_random(self, magnitude: float, word: int) -> int:
        """The place of one of the two neighbours, by a random word of 32 bits."""
        below = self.below(magnitude)
        low = self.magnitudes[below]
        if magnitude == low:
            return below
        # Exact: neighbours are a power of two apart, and the magnitude is at most twice the lower.
        share = (magnitude - low) / (self.magnitudes[below + 1] - low)
        return below + (word < math.floor(share * 2**32))

    def below(self, magnitude: float) -> int:
        """The place of the largest magnitude that is not larger."""
        return bisect.bisect_right(self.magnitudes, magnitude) - 1


def _floats(exponent_bits: int, mantissa_bits: int, finite: int, infinite: bool = False) -> Format:
    """The format with the bias of IEEE 754 and this many finite magnitudes."""
    bias = (1 << (exponent_bits - 1)) - 1
    numbers = []
    for code in range(finite):
        exponent, mantissa = code >> mantissa_bits, code % (1 << mantissa_bits)
        implied = (1 << mantissa_bits) if exponent else 0
        unit = max(exponent, 1) - bias - mantissa_bits
        numbers.append(math.ldexp(implied + mantissa, unit))
    bits = 1 + exponent_bits + mantissa_bits
    return Format(tuple(numbers), bits, mantissa_bits, infinite=infinite)


def _integers(bits: int, unit: float, has_nan: bool) -> Format:
    """The format of multiples of a unit; NaN takes the code of the least one."""
    magnitudes = tuple(place * unit for place in range((1 << (bits - 1)) + 1 - has_nan))
    return Format(magnitudes, bits, bits - 2, twos_complement=True)


@cache
def format_of(name: str) -> Format:
    """The format of this name, of elements or of scales."""
    match name:
        case "E4M3":
            return _floats(4, 3, 0x7F)
        case "E5M2":
            return _floats(5, 2, 0x7C, infinite=True)
        case "E2M1":
            return _floats(2, 1, 8)
        case "E2M3":
            return _floats(2, 3, 32)
        case "E3M2":
            return _floats(3, 2, 32)
        case "UE5M3":
            # No code of a scale has the sign bit, which would be the ninth.
            return _floats(5, 3, 0xFF)
        case "INT8":
            return _integers(8, 1.0, has_nan=True)
        case "INT4":
            return _integers(4, 1.0, has_nan=True)
        case "MXINT8" | "MXINT8S":
            return _integers(8, 2.0**-6, has_nan=False)
    raise KeyError(name)


@lru_cache(1 << 10)
def philox(seed: int, block: int, stream: int) -> tuple[int, int, int, int]:
    """The four words of Philox4x32-10 (Salmon and others, 2011).

    Args:
        seed: the key, 64 bits.
        block, stream: the counter, 64 bits each.
    """
    mask = (1 << 32) - 1
    words = (block & mask, block >> 32 & mask, stream & mask, stream >> 32 & mask)
    key = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = (
            second >> 32 ^ words[1] ^ key[0],
            second & mask,
            first >> 32 ^ words[3] ^ key[1],
            first & mask,
        )
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return words
