"""Blockwise storages and tensors: data on a grid, with blockwise FP8's names for its arguments."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava import Layout
from ottava.errors import OptionError
from ottava.formats import FP8, fp8_format
from ottava.tensors import GridTensor, GridTensorStorage, StaticField

_BLOCK = 128


def block_layout(
    fp8_dtype: torch.dtype, dim: int, pow_2_scales: bool, epsilon: float = 0.0
) -> Layout:
    """Blocks of 1 × 128 (``dim`` 1) or 128 × 128 (2), each with a float32 scale.

    Columnwise data is held transposed.
    """
    block = (1 if dim == 1 else _BLOCK, _BLOCK)
    rounding = "floor" if pow_2_scales else "nearest"
    return Layout(
        fp8_dtype,
        block,
        rounding=rounding,
        epsilon=epsilon,
        columnwise="transposed",
        finite_as="input",
    )


# The epsilon is no key, because stored data does not depend on it. This is a plain dict, because
# compiled code can look into one.
_LAYOUTS = {
    (dtype, dim, pow_2): block_layout(dtype, dim, pow_2)
    for dtype in FP8
    for dim in (1, 2)
    for pow_2 in (False, True)
}


def check_options(*, flag: tuple[str, Any] | None = None, **dims: Any) -> None:
    """Refuse a ``dim`` other than 1 and 2, and a ``flag`` (name and value) that is not a bool.

    Raises:
        OptionError: one of them has a value that is not allowed.
    """
    for name, value in dims.items():
        if type(value) is not int or value not in (1, 2):
            raise OptionError(f"{name} is {value!r}", expected="1 (1 x 128) or 2 (128 x 128)")
    if flag is not None and not isinstance(flag[1], bool):
        raise OptionError(f"{flag[0]} is {flag[1]!r}", expected="True or False")


class Float8BlockwiseQTensorStorage(GridTensorStorage):
    """Blockwise FP8 data without the tensor interface.

    Args:
        rowwise_data: uint8 ``[*leading, K]`` (a float8 tensor is viewed as such), in blocks along
            the rows.
        rowwise_scale_inv: float32 ``[M, ceil(K / 128)]``, M the product of the leading dimensions;
            for square blocks ``[ceil(M / 128), ceil(K / 128)]``.
        columnwise_data: uint8 ``[K, *leading]``, the transpose, in blocks along its rows.
        columnwise_scale_inv: float32 ``[K, ceil(M / 128)]``; for square blocks
            ``[ceil(K / 128), ceil(M / 128)]``.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block_scaling_dim: 1, or 2 for square blocks; with square blocks both directions hold the
            same values.
        pow_2_scales: all scales are powers of two, so that values decode exactly.
        dtype: nominal dtype.
        values_from_columns: dequantize columnwise data where both directions are held, as a
            transposed view does.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError, UsageError: the arguments do not fit
            together.
    """

    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("_fp8_dtype", "fp8_dtype"),
        StaticField("_block_scaling_dim", "block_scaling_dim", default=2),
        StaticField("_pow_2_scales", "pow_2_scales", default=False),
        StaticField("_values_from_columns", "values_from_columns", default=False),
    )
    squares = "block_scaling_dim=2"

    _fp8_dtype: torch.dtype
    _block_scaling_dim: int
    _pow_2_scales: bool

    @classmethod
    def layout_of(cls, declared: dict[str, Any]) -> Layout:
        fp8_dtype = declared["fp8_dtype"]
        dim = declared["block_scaling_dim"]
        pow_2 = declared["pow_2_scales"]
        fp8_format(fp8_dtype)
        check_options(flag=("pow_2_scales", pow_2), block_scaling_dim=dim)
        return _LAYOUTS[fp8_dtype, dim, pow_2]


class Float8BlockwiseQTensor(GridTensor, Float8BlockwiseQTensorStorage):
    """Blockwise FP8 data as a ``torch.Tensor`` of its nominal dtype.

    Views, slices, splits and transposes keep the class where they lie on the boundaries of blocks,
    in every direction held, and share the data; elsewhere they give the dequantized values.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv: see
            :class:`Float8BlockwiseQTensorStorage`.
        fp8_dtype, block_scaling_dim, pow_2_scales, values_from_columns, quantizer: see there.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError: the arguments do not fit together.
        UsageError: there is no data, or data without scales.
    """
