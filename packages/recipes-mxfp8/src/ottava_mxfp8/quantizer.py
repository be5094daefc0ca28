"""``MXFP8Quantizer``: blocks of 32 elements with a power of two each, along rows, columns or both."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.distributed import ShardRule
from ottava.errors import OptionError
from ottava.formats import fp8_format, mx_scale_shapes
from ottava.kernels import for_layers
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_mxfp8.shards import MXFP8Shards
from ottava_mxfp8.tensors import MXFP8Tensor, MXFP8TensorStorage

_ABSENT = None, None


class MXFP8Quantizer(Quantizer):
    """Quantizes along rows, columns or both, each from the values themselves, in one pass over them.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        with_2d_quantization: one scale for 32 rows and columns: both directions then hold the same values.
        scale_rounding: ``"up"``, by which no element is clamped, or ``"floor"``, the standard's rule.

    Raises:
        DTypeError: ``fp8_dtype`` is not an FP8 element format.
        OptionError: an option has a value that is not allowed.
    """

    shards: ClassVar[ShardRule] = MXFP8Shards()
    columns_when_asked = True

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        scale_rounding: str = "up",
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_format(fp8_dtype)
        kernels.check_scale_rounding(scale_rounding)
        if not isinstance(with_2d_quantization, bool):
            raise OptionError(f"with_2d_quantization is {with_2d_quantization!r}", expected="True or False")
        self.fp8_dtype = fp8_dtype
        self.with_2d_quantization = with_2d_quantization
        self.scale_rounding = scale_rounding

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        rows, columns = for_layers.mx_quantize(
            tensor,
            self.fp8_dtype,
            self.rowwise_usage,
            self.columnwise_usage,
            self.with_2d_quantization,
            self.scale_rounding == "floor",
        )
        return self._wrap((*(rows or _ABSENT), *(columns or _ABSENT)), dtype)

    def _wrap(self, tensors: tuple[torch.Tensor | None, ...], dtype: torch.dtype) -> QuantizedTensorStorage:
        """Data and scales of rows, then of columns, which fit together: a bare storage is not checked."""
        static = dtype, self.fp8_dtype, self.with_2d_quantization, False
        if self.internal:
            return MXFP8TensorStorage.unchecked(tensors, static, self)
        names = [inner.argument for inner in MXFP8Tensor.inner_tensors]
        given: dict[str, Any] = dict(zip(names, tensors, strict=True))
        given |= {"fp8_dtype": self.fp8_dtype, "with_2d_quantization": self.with_2d_quantization}
        return MXFP8Tensor(**given, dtype=dtype, quantizer=self)

    def empty_impl(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> QuantizedTensorStorage:
        tensors: list[torch.Tensor | None] = []
        for wanted, scales in zip((self.rowwise_usage, self.columnwise_usage), mx_scale_shapes(shape), strict=True):
            tensors += [torch.empty(s, dtype=torch.uint8, device=device) if wanted else None for s in (shape, scales)]
        return self._wrap(tuple(tensors), dtype)
