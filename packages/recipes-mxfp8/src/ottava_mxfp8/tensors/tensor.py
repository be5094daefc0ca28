"""``MXFP8Tensor``: MXFP8 data as a ``torch.Tensor``."""

from __future__ import annotations

from typing import Any

import torch

from ottava.tensors import QuantizedTensor
from ottava_mxfp8.tensors.storage import MXFP8TensorStorage


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
