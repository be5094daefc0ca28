"""Number formats as data: every constant of a format is defined here once.

E4M3 and E5M2 (``torch.float8_e4m3fn`` and ``torch.float8_e5m2``) follow the OCP 8-bit Floating
Point Specification 1.0. E8M0 is the format of shared scales in the OCP Microscaling Formats
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
        name: the common name, for example ``"E4M3"``.
        torch_dtype: the torch dtype with the same bytes.
        mantissa_bits: width of the explicit mantissa field.
        bias: exponent bias.
        max: largest finite value.
        min_normal: smallest positive normal value.
        min_subnormal: smallest positive value.
        nan_code: the byte that a cast writes for NaN. A cast never writes the infinities of E5M2,
            because it saturates.
        code: the number of the format in compiled kernels.
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
    """One symmetric integer format: numbers are from ``-max`` to ``max``, and ``-max - 1`` is NaN.

    Its attributes are those of :class:`FloatFormat`.
    """

    name: str
    torch_dtype: torch.dtype
    max: float
    nan_code: int
    code: int


INT8 = IntegerFormat("INT8", torch.int8, 127.0, 0x80, 3)

#: Elements that share a scale in the MX formats.
MX_BLOCK = 32

_FP8 = {f.torch_dtype: f for f in (E4M3, E5M2)}
#: The formats of elements by dtype.
ELEMENTS: dict[torch.dtype, FloatFormat | IntegerFormat] = {**_FP8, INT8.torch_dtype: INT8}
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
    if not isinstance(dtype, torch.dtype) or dtype not in _FP8:
        raise DTypeError(
            f"{dtype!r} is not an FP8 element format", "torch.float8_e4m3fn or torch.float8_e5m2"
        )
    return _FP8[dtype]


@constant_to_compiler
def element_format(dtype: torch.dtype) -> FloatFormat | IntegerFormat:
    """The format of elements in one of the two FP8 dtypes or in ``torch.int8``.

    Raises:
        DTypeError: ``dtype`` is another one.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in ELEMENTS:
        expected = "torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8"
        raise DTypeError(f"{dtype!r} is not a format of elements", expected=expected)
    return ELEMENTS[dtype]
