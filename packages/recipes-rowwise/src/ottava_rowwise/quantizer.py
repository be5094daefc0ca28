"""Rowwise FP8: a float32 scale for each row, for each column, or both."""

from __future__ import annotations

from typing import ClassVar

import torch

from ottava import Layout
from ottava.tensors import GridQuantizer, GridTensor
from ottava.tensors.quantizer import epsilon_option, flag_option, fp8_option


class Float8RowwiseTensor(GridTensor):
    """Rowwise FP8 data as a ``torch.Tensor`` of its nominal dtype.

    ``_rowwise_data`` and ``_columnwise_data`` are uint8 ``[*leading, K]``, ``_rowwise_scale_inv``
    is float32 ``[M, 1]`` (M the product of the leading dimensions), and ``_columnwise_scale_inv``
    is float32 ``[1, K]``. Arguments and errors are those of :class:`ottava.tensors.GridTensor`.
    """

    @property
    def _fp8_dtype(self) -> torch.dtype:
        return self.grid_layout.element_dtype


class Float8RowwiseQuantizer(GridQuantizer):
    """Quantizes along rows, columns or both, each from the high-precision values.

    The scale of a row or column is ``max / amax``.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        amax_epsilon: a smaller amax is replaced by this value.
        force_pow_2_scales: floor scales to powers of two.

    Raises:
        DTypeError: ``fp8_dtype`` is not an FP8 element format.
        OptionError: an option has a value that is not allowed.
    """

    tensor_class: ClassVar[type[GridTensor]] = Float8RowwiseTensor
    fp8_dtype: torch.dtype = fp8_option()
    amax_epsilon: float = epsilon_option()
    force_pow_2_scales: bool = flag_option()

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = False,
    ) -> None:
        self.fp8_dtype = fp8_dtype
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        super().__init__(self.make_layout(), rowwise=rowwise, columnwise=columnwise)

    def make_layout(self) -> Layout:
        rounding = "floor" if self.force_pow_2_scales else "nearest"
        return Layout(
            self.fp8_dtype, (1, None), rounding=rounding, epsilon=float(self.amax_epsilon)
        )
