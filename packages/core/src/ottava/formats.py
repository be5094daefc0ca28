"""Number formats as data: every constant of a format stands here once.

Sources: E4M3 and E5M2 follow the OCP 8-bit Floating Point Specification 1.0
(``torch.float8_e4m3fn`` and
``torch.float8_e5m2``); E8M0 is the shared-scale format of the OCP Microscaling Formats
Specification 1.0.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from ottava.errors import DTypeError
from ottava.torch_private import constant_to_compiler


@dataclass(frozen=True)
class FloatFormat:
    """One 8-bit format.

    Attributes:
        name: the field's name for it, for example ``"E4M3"``.
        torch_dtype: the torch dtype with the same bytes.
        mantissa_bits: width of the explicit mantissa field.
        bias: exponent bias.
        max: largest finite value.
        min_normal: smallest positive normal value.
        min_subnormal: smallest positive value.
        nan_code: the byte that a cast writes for NaN. Infinities, which E5M2 has, it never writes:
            it saturates.
        code: the number by which compiled kernels know the format.
    """

    name: str
    torch_dtype: torch.dtype
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    nan_code: int
    code: int


E4M3 = FloatFormat("E4M3", torch.float8_e4m3fn, 3, 7, 448.0, 2.0**-6, 2.0**-9, 0x7F, 0)
E5M2 = FloatFormat("E5M2", torch.float8_e5m2, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 0x7F, 1)
E8M0 = FloatFormat("E8M0", torch.float8_e8m0fnu, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, 0xFF, 2)


@dataclass(frozen=True)
class IntegerFormat:
    """One integer format, symmetric: numbers lie within ``-max`` and ``max``, the one below is NaN;
    else as :class:`FloatFormat`."""

    name: str
    torch_dtype: torch.dtype
    max: float
    nan_code: int
    code: int


INT8 = IntegerFormat("INT8", torch.int8, 127.0, 0x80, 3)

#: Elements that share a scale in the MX formats.
MX_BLOCK = 32

_FP8 = {f.torch_dtype: f for f in (E4M3, E5M2)}
#: The formats of elements by their dtypes.
ELEMENTS: dict[torch.dtype, FloatFormat | IntegerFormat] = {**_FP8, INT8.torch_dtype: INT8}
#: The dtypes of FP8 elements.
FP8 = frozenset(_FP8)


class Format(Enum):
    """Which format serves forward tensors (input, weight) and which the gradients."""

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
    """The element format of ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``; a DTypeError for any
    other dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in _FP8:
        raise DTypeError(
            f"{dtype!r} is not an FP8 element format", "torch.float8_e4m3fn or torch.float8_e5m2"
        )
    return _FP8[dtype]


@constant_to_compiler
def element_format(dtype: torch.dtype) -> FloatFormat | IntegerFormat:
    """The format of elements of one of the two FP8 dtypes, or ``torch.int8``; a DTypeError for any
    other dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in ELEMENTS:
        expected = "torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8"
        raise DTypeError(f"{dtype!r} is not a format of elements", expected=expected)
    return ELEMENTS[dtype]
