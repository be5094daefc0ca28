"""``MXFP8Quantizer``: blocks of 32 elements with a power of two each, along rows, columns or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

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
        if self.internal:
            return MXFP8TensorStorage.around(rows, columns, self.fp8_dtype, dtype, self.with_2d_quantization, self)
        return self._wrap(rows or _ABSENT, columns or _ABSENT, dtype)

    def _wrap(
        self,
        rowwise: tuple[torch.Tensor | None, torch.Tensor | None],
        columnwise: tuple[torch.Tensor | None, torch.Tensor | None],
        dtype: torch.dtype,
    ) -> QuantizedTensorStorage:
        cls = MXFP8TensorStorage if self.internal else MXFP8Tensor
        return cls(
            rowwise_data=rowwise[0],
            rowwise_scale_inv=rowwise[1],
            columnwise_data=columnwise[0],
            columnwise_scale_inv=columnwise[1],
            fp8_dtype=self.fp8_dtype,
            dtype=dtype,
            with_2d_quantization=self.with_2d_quantization,
            quantizer=self,
        )

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensorStorage:
        shape, place = self.check_empty(shape, dtype, device, requires_grad)
        pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        for wanted, scales in zip((self.rowwise_usage, self.columnwise_usage), mx_scale_shapes(shape), strict=True):
            codes = torch.empty(shape, dtype=torch.uint8, device=place) if wanted else None
            pairs.append((codes, torch.empty(scales, dtype=torch.uint8, device=place) if wanted else None))
        made = self._wrap(pairs[0], pairs[1], dtype)
        if requires_grad and isinstance(made, torch.Tensor):
            made.requires_grad_(True)
        return made
