"""Number formats as data: every constant of a format stands here once.

Sources: E4M3 and E5M2 follow the OCP 8-bit Floating Point Specification 1.0 (``torch.float8_e4m3fn`` and
``torch.float8_e5m2``); E8M0 is the shared-scale format of the OCP Microscaling Formats Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from ottava.errors import DTypeError


@dataclass(frozen=True)
class FloatFormat:
    """One 8-bit format.

    Attributes:
        name: the field's name for it, for example ``"E4M3"``.
        torch_dtype: the torch dtype with the same bytes.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the explicit mantissa field.
        bias: exponent bias.
        max: largest finite value.
        min_normal: smallest positive normal value.
        min_subnormal: smallest positive value.
        has_inf: whether the format encodes infinities (a cast never produces them: it saturates).
        nan_code: the byte that a cast writes for NaN.
        code: the number by which compiled kernels know the format.
    """

    name: str
    torch_dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    has_inf: bool
    nan_code: int
    code: int


E4M3 = FloatFormat("E4M3", torch.float8_e4m3fn, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, False, 0x7F, 0)
E5M2 = FloatFormat("E5M2", torch.float8_e5m2, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, True, 0x7F, 1)
E8M0 = FloatFormat("E8M0", torch.float8_e8m0fnu, 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, False, 0xFF, 2)


@dataclass(frozen=True)
class IntegerFormat:
    """One integer format, symmetric: numbers lie within ``-max`` and ``max``, and the one below is NaN.

    Attributes:
        name, torch_dtype, max, nan_code, code: as of :class:`FloatFormat`.
    """

    name: str
    torch_dtype: torch.dtype
    max: float
    nan_code: int
    code: int


INT8 = IntegerFormat("INT8", torch.int8, 127.0, 0x80, 3)

#: Elements that share a scale in the MX formats.
MX_BLOCK = 32

_BY_DTYPE: dict[torch.dtype, FloatFormat] = {f.torch_dtype: f for f in (E4M3, E5M2)}
#: The dtypes of FP8 elements.
FP8 = frozenset(_BY_DTYPE)


# Inside the enum's body its own members would shadow the formats.
_FORWARD_BACKWARD = {"E4M3": (E4M3, E4M3), "E5M2": (E5M2, E5M2), "HYBRID": (E4M3, E5M2)}


class Format(Enum):
    """Which format serves forward tensors (input, weight) and which the gradients."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def forward(self) -> FloatFormat:
        """Format of inputs and weights."""
        return _FORWARD_BACKWARD[self.name][0]

    @property
    def backward(self) -> FloatFormat:
        """Format of ``grad_output``."""
        return _FORWARD_BACKWARD[self.name][1]


HYBRID = Format.HYBRID


def fp8_format(dtype: torch.dtype) -> FloatFormat:
    """The element format of a float8 torch dtype.

    Raises:
        DTypeError: ``dtype`` is not ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    """
    found = _BY_DTYPE.get(dtype) if isinstance(dtype, torch.dtype) else None
    if found is None:
        raise DTypeError(
            f"{dtype!r} is not an FP8 element format",
            expected="torch.float8_e4m3fn or torch.float8_e5m2",
            remedy="pass one of these as fp8_dtype",
        )
    return found


def element_format(dtype: torch.dtype) -> FloatFormat | IntegerFormat:
    """The format of elements of a torch dtype.

    Raises:
        DTypeError: ``dtype`` is none of ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` and ``torch.int8``.
    """
    if dtype == INT8.torch_dtype:
        return INT8
    try:
        return fp8_format(dtype)
    except DTypeError:
        what = f"{dtype!r} is not a format of elements"
        raise DTypeError(what, expected="torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8") from None
