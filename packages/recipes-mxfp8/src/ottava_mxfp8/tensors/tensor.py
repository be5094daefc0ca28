"""``MXFP8Tensor``: MXFP8 data as a ``torch.Tensor``."""

from __future__ import annotations

from ottava.tensors import GridTensor
from ottava_mxfp8.tensors.storage import MXFP8TensorStorage


class MXFP8Tensor(GridTensor, MXFP8TensorStorage):
    """MXFP8 data as a ``torch.Tensor`` of its nominal dtype.

    Views, slices, splits and transposes keep the class where they lie on the boundaries of blocks,
    in every direction held, and share the data; elsewhere they give the dequantized values.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv: see
            :class:`MXFP8TensorStorage`.
        fp8_dtype, with_2d_quantization, values_from_columns, quantizer: see
            :class:`MXFP8TensorStorage`.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError: the arguments do not fit together.
        UsageError: there is no data, or data without scales.
    """
