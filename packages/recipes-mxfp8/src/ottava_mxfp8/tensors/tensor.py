"""``MXFP8Tensor``: MXFP8 data as a ``torch.Tensor``."""

from __future__ import annotations

from typing import Any

import torch

from ottava.tensors import QuantizedTensor
from ottava_mxfp8.tensors.storage import Direction, MXFP8TensorStorage


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):
    """MXFP8 data as a ``torch.Tensor`` of its nominal dtype.

    Views, slices, splits and transposes keep the class where they lie on the boundaries of blocks, in every direction
    held, and share the data; elsewhere they give the dequantized values.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv: see :class:`MXFP8TensorStorage`.
        fp8_dtype, with_2d_quantization, values_from_columns, quantizer: see :class:`MXFP8TensorStorage`.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError: the arguments do not fit together.
        UsageError: there is no data, or data without scales.
    """

    @classmethod
    def laid_out_like(cls, declared: dict[str, Any]) -> torch.Tensor | None:
        rows: torch.Tensor | None = declared["rowwise_data"]
        return declared["columnwise_data"] if rows is None else rows

    def _for_usage(self, columnwise: bool) -> Direction:
        if columnwise and self._columnwise_data is None and not self.rowwise_serves_columnwise:
            self._quantize_columns()
        return super()._for_usage(columnwise)

    def _quantize_columns(self) -> None:
        """Quantize the initial values of a weight that was made under ``no_grad`` along columns, too.

        Nothing is done where they were given up, or the rows are not theirs any more, nor where columns were dropped.
        """
        initial, quantizer = self.get_high_precision_init_val(), self._quantizer
        if initial is None or quantizer is None or quantizer.columnwise_usage or torch.compiler.is_compiling():
            return
        with torch.no_grad():
            made = quantizer.with_usage(True, True).quantize(initial.to(self.device))
        pairs = zip(made.inner_list()[:2], self.inner_list()[:2], strict=True)
        if all(theirs is not None and torch.equal(mine, theirs) for mine, theirs in pairs):
            self._columnwise_data, self._columnwise_scale_inv = made.direction(columnwise=True)

    def adopts_bytes_of(self, other: QuantizedTensor) -> bool:
        """Whether copying from ``other`` can copy data and scales instead of quantizing again."""
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
