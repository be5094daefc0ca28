"""Scalar oracles, written from the documented rules with Python numbers and exact fractions
only."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
MANTISSA = {"e4m3": 3, "e5m2": 2}
MIN_EXPONENT = {"e4m3": -6, "e5m2": -14}
FLOAT32_MAX = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]


def float32(value: float) -> float:
    """The nearest float32, to even on a tie."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def divide(numerator: float, denominator: float) -> float:
    """Correctly rounded float32 quotient. A double quotient of two floats rounds to the same
    float32."""
    return float32(numerator / denominator)


def scale_from_amax(
    amax: float, fp8_max: float, epsilon: float, pow_2: bool
) -> tuple[float, float]:
    if amax < float32(epsilon):
        amax = float32(epsilon)
    if math.isnan(amax) or math.isinf(amax) or amax == 0:
        scale = 1.0
    else:
        scale = divide(fp8_max, amax)
        if math.isinf(scale):
            scale = FLOAT32_MAX
    if pow_2:
        scale = math.ldexp(1.0, math.frexp(scale)[1] - 1)
    return scale, divide(1.0, scale)


def encode(value: float, fmt: str) -> int:
    """Round to nearest even, saturating; NaN is 0x7F; the sign of zero is kept."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = min(abs(value), MAX[fmt])
    if magnitude == 0:
        return sign
    mantissa, lowest = MANTISSA[fmt], MIN_EXPONENT[fmt]
    exponent = max(math.frexp(magnitude)[1] - 1, lowest)
    steps = Fraction(magnitude) / Fraction(2) ** (exponent - mantissa)
    rounded = round(steps)  # ties to even, exactly
    return sign | ((exponent - lowest) << mantissa) + rounded


def decode(code: int, fmt: str) -> float:
    mantissa, lowest = MANTISSA[fmt], MIN_EXPONENT[fmt]
    magnitude = code & 0x7F
    if fmt == "e4m3" and magnitude == 0x7F:
        return math.nan
    if fmt == "e5m2" and magnitude >= 0x7C:
        value = math.inf if magnitude == 0x7C else math.nan
        return math.copysign(value, -1.0 if code & 0x80 else 1.0)
    exponent, fraction = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
    if exponent == 0:
        value = fraction * 2.0 ** (lowest - mantissa)
    else:
        value = ((1 << mantissa) + fraction) * 2.0 ** (exponent - 1 + lowest - mantissa)
    return -value if code & 0x80 else value
