"""Rowwise FP8: a float32 scale for each row, for each column, or both."""

from __future__ import annotations

from typing import ClassVar

import torch

from ottava import Layout
from ottava.errors import OptionError
from ottava.formats import fp8_format
from ottava.kernels import check_epsilon
from ottava.tensors import GridQuantizer, GridTensor


class Float8RowwiseTensor(GridTensor):
    """Rowwise FP8 data as a ``torch.Tensor`` of its nominal dtype: ``_rowwise_data``, ``_columnwise_data`` uint8
    ``[*leading, K]``, ``_rowwise_scale_inv`` float32 ``[M, 1]`` (M the product of the leading dimensions),
    ``_columnwise_scale_inv`` ``[1, K]``. Arguments and errors are those of :class:`ottava.tensors.GridTensor`.
    """

    @property
    def _fp8_dtype(self) -> torch.dtype:
        return self.grid_layout.element


class Float8RowwiseQuantizer(GridQuantizer):
    """Quantizes along rows, columns or both, each from the values themselves: ``scale = max / amax`` of each.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        amax_epsilon: a smaller amax counts as this.
        force_pow_2_scales: floor scales to powers of two.

    Raises:
        DTypeError: ``fp8_dtype`` is not an FP8 element format.
        OptionError: an option has a value that is not allowed.
    """

    tensor_class: ClassVar[type[GridTensor]] = Float8RowwiseTensor

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = False,
    ) -> None:
        fp8_format(fp8_dtype)
        check_epsilon(amax_epsilon)
        if not isinstance(force_pow_2_scales, bool):
            raise OptionError(f"force_pow_2_scales is {force_pow_2_scales!r}", expected="True or False")
        rounding = "floor" if force_pow_2_scales else "nearest"
        layout = Layout(fp8_dtype, (1, None), rounding=rounding, epsilon=float(amax_epsilon))
        super().__init__(layout, rowwise=rowwise, columnwise=columnwise)
        self.fp8_dtype, self.amax_epsilon = fp8_dtype, float(amax_epsilon)
        self.force_pow_2_scales = force_pow_2_scales
