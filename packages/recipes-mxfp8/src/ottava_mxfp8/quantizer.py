"""``MXFP8Quantizer``: a power-of-two scale for each 32 elements, along rows, columns or both."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.errors import OptionError
from ottava.layout import Layout
from ottava.tensors import GridQuantizer, GridTensor, GridTensorStorage, Option
from ottava.tensors.quantizer import flag_option, fp8_option
from ottava_mxfp8.tensors import MXFP8Tensor, MXFP8TensorStorage
from ottava_mxfp8.tensors.storage import mx_layout


def _rounding(name: str, value: Any) -> str:
    if value not in ("up", "floor"):
        raise OptionError(f"{name} is {value!r}", expected="'up' or 'floor'")
    return value  # type: ignore[no-any-return]


class MXFP8Quantizer(GridQuantizer):
    """Quantizes along rows, columns or both in one pass, each from the high-precision values.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        with_2d_quantization: one scale for each block of 32 × 32; both directions then hold the
            same values.
        scale_rounding: ``"up"``, which clamps no element, or ``"floor"``, the standard's rule.

    Raises:
        DTypeError: ``fp8_dtype`` is not an FP8 element format.
        OptionError: an option has a value that is not allowed.
    """

    storage_class: ClassVar[type[GridTensorStorage]] = MXFP8TensorStorage
    tensor_class: ClassVar[type[GridTensor]] = MXFP8Tensor
    fp8_dtype: torch.dtype = fp8_option()
    with_2d_quantization: bool = flag_option()
    scale_rounding: str = Option(_rounding)  # type: ignore[assignment]

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        scale_rounding: str = "up",
    ) -> None:
        self.fp8_dtype = fp8_dtype
        self.with_2d_quantization = with_2d_quantization
        self.scale_rounding = scale_rounding
        super().__init__(self.make_layout(), rowwise=rowwise, columnwise=columnwise)

    def make_layout(self) -> Layout:
        return mx_layout(self.fp8_dtype, self.with_2d_quantization, self.scale_rounding)

    def static_fields(self) -> dict[str, Any]:
        return {"fp8_dtype": self.fp8_dtype, "with_2d_quantization": self.with_2d_quantization}
