"""``MXFP8TensorStorage``: data on a grid, with MXFP8's names for its arguments."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava import Layout
from ottava.errors import OptionError
from ottava.formats import E4M3, E8M0, FP8, MX_BLOCK, fp8_format
from ottava.tensors import GridTensorStorage, InnerTensor, StaticField, inner_tensors_of


def mx_layout(
    fp8_dtype: torch.dtype, with_2d_quantization: bool = False, scale_rounding: str = "up"
) -> Layout:
    """Blocks of 1 × 32, or of 32 × 32 with 2D quantization, that share a power of two."""
    shared = (MX_BLOCK, MX_BLOCK) if with_2d_quantization else None
    return Layout(fp8_dtype, (1, MX_BLOCK), E8M0.torch_dtype, scale_rounding, shared=shared)


# The rounding of scales is no key, because stored data does not depend on it. This is a plain dict,
# because compiled code can look into one.
_LAYOUTS = {(dtype, square): mx_layout(dtype, square) for dtype in FP8 for square in (False, True)}


def _native(inner: InnerTensor) -> InnerTensor:
    """``inner``, whose native dtype is E8M0 for scales, and the storage's ``_fp8_dtype`` for
    data."""
    if inner.native == E8M0.torch_dtype:
        return inner
    return InnerTensor(**vars(inner) | {"native": "_fp8_dtype"})


class MXFP8TensorStorage(GridTensorStorage):
    """MXFP8 data without the tensor interface.

    Args:
        rowwise_data: uint8 ``[*leading, K]`` (a float8 tensor is viewed as such), in blocks along
            the rows.
        rowwise_scale_inv: E8M0 as uint8, ``[M, ceil(K / 32)]``, M the product of the leading
            dimensions.
        columnwise_data: uint8 ``[*leading, K]``, not transposed, in blocks along the columns.
        columnwise_scale_inv: ``[ceil(M / 32), K]``.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        dtype: nominal dtype.
        with_2d_quantization: one scale for each block of 32 × 32, so that both directions hold the
            same values.
        values_from_columns: dequantize columnwise data where both directions are held, as a
            transposed view does.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError, UsageError: the arguments do not fit
            together.
    """

    inner_tensors = tuple(map(_native, inner_tensors_of(mx_layout(E4M3.torch_dtype))))
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("_fp8_dtype", "fp8_dtype"),
        StaticField("_with_2d_quantization", "with_2d_quantization", default=False),
        StaticField("_values_from_columns", "values_from_columns", default=False),
    )
    squares = "with_2d_quantization=True"

    _fp8_dtype: torch.dtype
    _with_2d_quantization: bool

    # Columnwise blocks are never derived from rowwise data, so these are plain attributes.
    _columnwise_data: torch.Tensor | None = None
    _columnwise_scale_inv: torch.Tensor | None = None

    @classmethod
    def layout_of(cls, declared: dict[str, Any]) -> Layout:
        fp8_format(declared["fp8_dtype"])
        square = declared["with_2d_quantization"]
        if not isinstance(square, bool):
            raise OptionError(f"with_2d_quantization is {square!r}", expected="True or False")
        return _LAYOUTS[declared["fp8_dtype"], square]
