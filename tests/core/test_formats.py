"""The constants of formats, against those of gfloat and the definitions of integers."""

from __future__ import annotations

import gfloat.formats
import pytest

from ottava import formats
from ottava.formats import ELEMENT_NAMES, FloatFormat, IntegerFormat

#: Formats, by their names in gfloat.
FLOATS = {
    "format_info_ocp_e4m3": formats.E4M3,
    "format_info_ocp_e5m2": formats.E5M2,
    "format_info_ocp_e8m0": formats.E8M0,
    "format_info_ocp_e2m1": formats.E2M1,
    "format_info_ocp_e2m3": formats.E2M3,
    "format_info_ocp_e3m2": formats.E3M2,
}
#: Bits, the least code that is a number, the step, and the code of NaN.
INTEGERS = {
    "INT8": (8, -127, 1.0, 0x80),
    "INT4": (4, -7, 1.0, 0x8),
    "MXINT8": (8, -128, 2.0**-6, 0x7F),
    "MXINT8S": (8, -127, 2.0**-6, 0x7F),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    fmt, other = FLOATS[name], getattr(gfloat.formats, name)
    assert fmt.mantissa_bits == other.precision - 1
    assert (fmt.bias, fmt.bits, fmt.signed) == (other.bias, other.bits, other.is_signed)
    assert (fmt.max, fmt.min_normal) == (other.max, other.smallest_normal)
    # E8M0 has no subnormals: its least number is the least normal one.
    least = other.smallest_subnormal if other.has_subnormals else other.smallest_normal
    assert fmt.min_subnormal == least
    magnitudes = 1 << (fmt.bits - int(fmt.signed))
    # NaN is the last code of magnitudes; without NaN that is the largest number.
    assert fmt.nan_code == magnitudes - 1


def test_unsigned_e5m3() -> None:
    """No library has it. Its least codes are as of E5M2 with one more bit, its last one is NaN."""
    fmt = formats.UE5M3
    assert (fmt.bits, fmt.signed, fmt.mantissa_bits, fmt.bias) == (8, False, 3, 15)
    assert fmt.max == 2.0 ** (31 - 15) * (1 + 6 / 8)
    assert (fmt.min_normal, fmt.min_subnormal, fmt.nan_code) == (2.0**-14, 2.0**-17, 0xFF)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    fmt = ELEMENT_NAMES[name]
    assert isinstance(fmt, IntegerFormat)
    bits, least, step, nan_code = INTEGERS[name]
    largest = (1 << (bits - 1)) - 1
    assert (fmt.bits, fmt.step, fmt.nan_code) == (bits, step, nan_code)
    assert (fmt.max, fmt.least) == (largest * step, least * step)
    assert fmt.has_nan == (nan_code > largest)
    assert fmt.significant_bits == bits - 1


def test_every_format_is_in_a_table() -> None:
    named = {fmt.name for fmt in (*FLOATS.values(), formats.UE5M3)} | set(INTEGERS)
    found = {f.name for f in vars(formats).values() if isinstance(f, FloatFormat | IntegerFormat)}
    assert found == named
