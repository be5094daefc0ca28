"""Number formats as data: every constant of a format is defined here once.

E4M3 and E5M2 (``torch.float8_e4m3fn`` and ``torch.float8_e5m2``) follow the OCP 8-bit Floating
Point Specification 1.0. E2M1, E2M3, E3M2, the integers of MXINT8 and E8M0, the format of shared
scales, follow the OCP Microscaling Formats Specification 1.0. UE5M3 is E5M3 without a sign, for
scales alone.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from ottava.errors import DTypeError
from ottava.torch_private import constant_to_compiler

_BYTES = torch.uint8


@dataclass(frozen=True)
class FloatFormat:
    """One floating-point format of at most eight bits.

    Attributes:
        name: the common name, for example ``"E4M3"``.
        torch_dtype: the torch dtype with the same bytes and numbers; uint8 if torch has none.
        mantissa_bits: width of the explicit mantissa field.
        bias: exponent bias.
        max: largest finite value.
        min_normal: smallest positive normal value.
        min_subnormal: smallest positive value.
        nan_code: the code that a cast writes for NaN. A format without NaN has its largest value
            there. A cast never writes the infinities of E5M2, because it saturates.
        code: the number of the format in compiled kernels; -1 if they do not know it.
        bits: the width of a code. The sign, if there is one, is the highest bit.
        signed: whether the format has negative numbers.
    """

    name: str
    torch_dtype: torch.dtype
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    nan_code: int
    code: int = -1
    bits: int = 8
    signed: bool = True

    @property
    def significant_bits(self) -> int:
        """How many bits of precision the numbers of the format need at most."""
        return self.mantissa_bits + 1


E4M3 = FloatFormat("E4M3", torch.float8_e4m3fn, 3, 7, 448.0, 2.0**-6, 2.0**-9, 0x7F, 0)
E5M2 = FloatFormat("E5M2", torch.float8_e5m2, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 0x7F, 1)
E8M0 = FloatFormat(
    "E8M0", torch.float8_e8m0fnu, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, 0xFF, 2, signed=False
)
E2M1 = FloatFormat("E2M1", _BYTES, 1, 1, 6.0, 1.0, 0.5, 0x7, bits=4)
E2M3 = FloatFormat("E2M3", _BYTES, 3, 1, 7.5, 1.0, 0.125, 0x1F, bits=6)
E3M2 = FloatFormat("E3M2", _BYTES, 2, 3, 28.0, 0.25, 0.0625, 0x1F, bits=6)
UE5M3 = FloatFormat("UE5M3", _BYTES, 3, 15, 114688.0, 2.0**-14, 2.0**-17, 0xFF, signed=False)


@dataclass(frozen=True)
class IntegerFormat:
    """One integer format in two's complement. Its numbers are whole multiples of ``step``.

    Attributes:
        name: the common name, for example ``"INT8"``.
        torch_dtype: the torch dtype with the same bytes and numbers; uint8 if torch has none.
        max, least: the largest and the least number.
        nan_code: the code that a cast writes for NaN: that below ``least``, or of ``max`` in a
            format whose codes are all numbers.
        code: the number of the format in compiled kernels; -1 if they do not know it.
        bits: the width of a code.
        step: the difference of neighbouring numbers.
    """

    name: str
    torch_dtype: torch.dtype
    max: float
    least: float
    nan_code: int
    code: int = -1
    bits: int = 8
    step: float = 1.0

    @property
    def has_nan(self) -> bool:
        """Whether ``nan_code`` stands for no number."""
        return self.nan_code == 1 << (self.bits - 1)

    @property
    def significant_bits(self) -> int:
        """How many bits of precision the numbers of the format need at most."""
        return self.bits - 1


INT8 = IntegerFormat("INT8", torch.int8, 127.0, -127.0, 0x80, 3)
INT4 = IntegerFormat("INT4", _BYTES, 7.0, -7.0, 0x8, bits=4)
#: The INT8 of MX has an implied scale of 2^-6, and uses the least code, -2, too.
MXINT8 = IntegerFormat("MXINT8", _BYTES, 127 * 2.0**-6, -2.0, 0x7F, step=2.0**-6)
#: The same, clamped symmetrically.
MXINT8S = IntegerFormat("MXINT8S", _BYTES, 127 * 2.0**-6, -127 * 2.0**-6, 0x7F, step=2.0**-6)

#: A format of elements.
ElementFormat = FloatFormat | IntegerFormat

#: Elements that share a scale in the MX formats.
MX_BLOCK = 32

#: The formats of elements by dtype.
ELEMENTS: dict[torch.dtype, ElementFormat] = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.int8: INT8,
}
#: The formats of elements by name.
ELEMENT_NAMES: dict[str, ElementFormat] = {
    f.name: f for f in (E4M3, E5M2, E2M3, E3M2, E2M1, INT8, INT4, MXINT8, MXINT8S)
}
_FP8 = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
#: The dtypes of FP8 elements.
FP8 = frozenset(_FP8)


class Format(Enum):
    """The formats of forward tensors (input, weight) and of gradients."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def forward(self) -> FloatFormat:
        """Format of inputs and weights."""
        return E5M2 if self is Format.E5M2 else E4M3

    @property
    def backward(self) -> FloatFormat:
        """Format of ``grad_output``."""
        return E4M3 if self is Format.E4M3 else E5M2


HYBRID = Format.HYBRID


# The numbers of a format are constants of compiled code, not inputs of its graph.
@constant_to_compiler
def fp8_format(dtype: torch.dtype) -> FloatFormat:
    """The format of ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Raises:
        DTypeError: ``dtype`` is another one.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in FP8:
        raise DTypeError(
            f"{dtype!r} is not an FP8 element format", "torch.float8_e4m3fn or torch.float8_e5m2"
        )
    return _FP8[dtype]


@constant_to_compiler
def element_format(element: torch.dtype | str) -> ElementFormat:
    """The format of elements with this dtype or this name.

    Raises:
        DTypeError: there is none.
    """
    if isinstance(element, torch.dtype) and element in ELEMENTS:
        return ELEMENTS[element]
    if isinstance(element, str) and element in ELEMENT_NAMES:
        return ELEMENT_NAMES[element]
    raise DTypeError(
        f"{element!r} is not a format of elements",
        expected="torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, or a name: "
        + ", ".join(ELEMENT_NAMES),
    )
