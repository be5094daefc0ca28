"""``NVFP4Quantizer``, ``NVFP4Tensor``: E2M1 in blocks of 16, E4M3 scales, one float32 for all."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.layout import Layout, Rotation
from ottava.tensors import (
    GridQuantizer,
    GridTensor,
    GridTensorStorage,
    PackedTensor,
    PackedTensorStorage,
)
from ottava.tensors.quantizer import choice_option, flag_option

#: Elements that share a scale.
BLOCK = 16
# The signs of the transform, + + + - + - - - - - - + - + - -: bit i is set where element i of a
# group changes its sign.
_MINUS = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)
#: The random Hadamard transform of NVFP4, for data of the columns.
RHT = Rotation(BLOCK, sum(1 << i for i in _MINUS))
#: The factors of the two scales of a block, of which 4-over-6 takes the better one: its largest
#: magnitude becomes 6, or 4.
_MAP_TO_6_OR_4 = (1.0, 1.5)
#: The scales that the largest block may get under 4-over-6, and the errors by which it chooses.
BOUNDS = (256, 448)
ERRORS = ("MAE", "MSE")


class NVFP4Tensor(PackedTensor):
    """NVFP4 data as a ``torch.Tensor`` of its nominal dtype.

    ``_rowwise_data`` is uint8 ``[*leading, ceil(K / 2)]``, two elements in a byte, the even column
    in the low half. ``_rowwise_scale_inv`` has the bytes of E4M3, ``[M, ceil(K / 16)]`` (or one for
    each 16 × 16), and ``_amax_rowwise`` the amax of the tensor, or of each row. ``_columnwise_data,
    _columnwise_scale_inv, _amax_columnwise`` are the same of the transpose, ``[K, ceil(M / 2)]``.
    Arguments and errors are those of :class:`ottava.tensors.PackedTensor`.
    """


class NVFP4Quantizer(GridQuantizer):
    """Quantizes along rows, columns or both, each from the high-precision values.

    Args:
        rowwise, columnwise: usages to produce.
        with_rht: columnwise data are those of the values after the random Hadamard transform, which
            cancels in the product of two operands that both have it.
        with_2d_quantization: one scale for each block of 16 × 16; both directions then hold the
            same values.
        stochastic_rounding: elements are rounded at random, in proportion to the distances. The
            seed is drawn from torch's generator once for each quantization.
        row_scaled: one amax for each row of the summed dimension, in the place of one for all.
        four_over_six: each block takes the better one of two scales.
        four_over_six_bound: 256 or 448.
        four_over_six_error: ``"MAE"`` or ``"MSE"``.

    Raises:
        OptionError: an option has a value that is not allowed, or two options contradict each
            other.
    """

    storage_class: ClassVar[type[GridTensorStorage]] = PackedTensorStorage
    tensor_class: ClassVar[type[GridTensor]] = NVFP4Tensor
    with_rht: bool = flag_option()
    with_2d_quantization: bool = flag_option()
    stochastic_rounding: bool = flag_option()
    row_scaled: bool = flag_option()
    four_over_six: bool = flag_option()
    four_over_six_bound: int = choice_option(BOUNDS)
    four_over_six_error: str = choice_option(ERRORS)

    def __init__(
        self,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_rht: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled: bool = False,
        four_over_six: bool = False,
        four_over_six_bound: int = 256,
        four_over_six_error: str = "MAE",
    ) -> None:
        self.with_rht = with_rht
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled = row_scaled
        self.four_over_six = four_over_six
        self.four_over_six_bound = four_over_six_bound
        self.four_over_six_error = four_over_six_error
        super().__init__(self.make_layout(), rowwise=rowwise, columnwise=columnwise)

    def make_layout(self) -> Layout:
        options: dict[str, Any] = {}
        if self.four_over_six:
            options = {
                "candidates": _MAP_TO_6_OR_4,
                "bound": self.four_over_six_bound,
                "error": self.four_over_six_error,
            }
        # The layout refuses what cannot be combined.
        return Layout(
            "E2M1",
            (BLOCK if self.with_2d_quantization else 1, BLOCK),
            torch.float8_e4m3fn,
            columnwise="transposed",
            second_level="row" if self.row_scaled else "tensor",
            stochastic=self.stochastic_rounding,
            rotation=RHT if self.with_rht else None,
            **options,
        )
