"""``MXFP8Tensor``: MXFP8 data as a ``torch.Tensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ottava.errors import ShapeError, UsageError
from ottava.tensors import QuantizedTensor, Quantizer, StaticField
from ottava.torch_private import make_wrapper_subclass
from ottava_mxfp8.tensors.storage import MXFP8TensorStorage, checked_parts


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """MXFP8 data as a ``torch.Tensor`` of its nominal dtype.

    Views, slices, splits and transposes keep the class where they lie on the boundaries of blocks, in every direction
    held, and share the data; elsewhere they give the dequantized values.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv: see :class:`MXFP8TensorStorage`.
        fp8_dtype, with_2d_quantization, values_from_columns, quantizer: see :class:`MXFP8TensorStorage`.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError: the parts do not fit together.
        UsageError: there is no data, or data without scales.
    """

    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_fp8_dtype", "fp8_dtype"),
        StaticField("_with_2d_quantization", "with_2d_quantization"),
        StaticField("_values_from_columns", "values_from_columns"),
    )

    # As in QuantizedTensor: torch.Tensor answers these.
    shape = torch.Tensor.shape
    device = torch.Tensor.device
    dtype = torch.Tensor.dtype
    size = torch.Tensor.size  # type: ignore[assignment]
    dequantize = QuantizedTensor.dequantize
    _dtype = QuantizedTensor._dtype

    @staticmethod
    def __new__(
        cls,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        with_2d_quantization: bool = False,
        values_from_columns: bool = False,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
    ) -> MXFP8Tensor:
        rows, columns = checked_parts(
            (rowwise_data, rowwise_scale_inv),
            (columnwise_data, columnwise_scale_inv),
            fp8_dtype,
            dtype,
            with_2d_quantization,
            values_from_columns,
        )
        held = rows[0] if rows[0] is not None else columns[0]
        if held is None:
            raise UsageError("an MXFP8Tensor needs data", expected="rowwise_data or columnwise_data, with its scales")
        if shape is not None and tuple(shape) != tuple(held.shape):
            raise ShapeError(f"the data has shape {tuple(held.shape)}", expected=str(tuple(shape)))
        made: MXFP8Tensor = make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=dtype,
            device=held.device,
            requires_grad=requires_grad,
            storage_size=0,
        )
        return made

    def __init__(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: torch.dtype,
        with_2d_quantization: bool = False,
        values_from_columns: bool = False,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
    ) -> None:
        rows, columns = checked_parts(
            (rowwise_data, rowwise_scale_inv),
            (columnwise_data, columnwise_scale_inv),
            fp8_dtype,
            dtype,
            with_2d_quantization,
            values_from_columns,
        )
        self._values_from_columns = values_from_columns
        self._set_data(rows, columns, fp8_dtype, with_2d_quantization, quantizer)

    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return MXFP8TensorStorage.dequantize(self, dtype)

    def _share_freshness(self, other: QuantizedTensor) -> None:
        if isinstance(other, MXFP8Tensor):
            self.share_writes(other)

    def adopts_bytes_of(self, other: QuantizedTensor) -> bool:
        """Whether copying from ``other`` can copy codes and scales instead of quantizing again."""
        return (
            isinstance(other, MXFP8Tensor)
            and other._fp8_dtype == self._fp8_dtype
            and other.shape == self.shape
            # Data of one direction would not do for the other.
            and (other._with_2d_quantization or not self._with_2d_quantization)
            and all(
                self.direction(columnwise=c) is None or other.direction(columnwise=c) is not None for c in (False, True)
            )
        )
