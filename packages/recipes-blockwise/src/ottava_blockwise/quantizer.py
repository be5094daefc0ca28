"""``Float8BlockQuantizer``: a float32 scale for each block of 1 × 128 or 128 × 128 elements."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.layout import Layout
from ottava.tensors import GridQuantizer, GridTensor, GridTensorStorage, Option
from ottava.tensors.quantizer import epsilon_option, flag_option, fp8_option
from ottava_blockwise.tensors import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    block_layout,
    check_options,
)


def _dim(name: str, value: Any) -> int:
    check_options(block_scaling_dim=value)
    return value  # type: ignore[no-any-return]


class Float8BlockQuantizer(GridQuantizer):
    """Quantizes along rows, columns or both, each from the high-precision values.

    The scale of a block is ``max / amax``.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        amax_epsilon: a smaller amax is replaced by this value.
        force_pow_2_scales: floor scales to powers of two.
        block_scaling_dim: 1 for blocks of 128 elements along the direction, 2 for 128 × 128; with 2
            both directions hold the same values.

    Raises:
        DTypeError: ``fp8_dtype`` is not an FP8 element format.
        OptionError: an option has a value that is not allowed.
    """

    storage_class: ClassVar[type[GridTensorStorage]] = Float8BlockwiseQTensorStorage
    tensor_class: ClassVar[type[GridTensor]] = Float8BlockwiseQTensor
    fp8_dtype: torch.dtype = fp8_option()
    amax_epsilon: float = epsilon_option()
    force_pow_2_scales: bool = flag_option()
    block_scaling_dim: int = Option(_dim)  # type: ignore[assignment]

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        self.fp8_dtype = fp8_dtype
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim
        super().__init__(self.make_layout(), rowwise=rowwise, columnwise=columnwise)

    def make_layout(self) -> Layout:
        return block_layout(
            self.fp8_dtype,
            self.block_scaling_dim,
            self.force_pow_2_scales,
            float(self.amax_epsilon),
        )

    def static_fields(self) -> dict[str, Any]:
        return {
            "fp8_dtype": self.fp8_dtype,
            "block_scaling_dim": self.block_scaling_dim,
            "pow_2_scales": self.force_pow_2_scales,
        }
