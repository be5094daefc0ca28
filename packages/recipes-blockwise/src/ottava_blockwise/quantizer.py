"""``Float8BlockQuantizer``: a float32 scale for each 1 × 128 or 128 × 128 elements, along rows, columns or both."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.formats import fp8_format
from ottava.kernels import check_epsilon
from ottava.tensors import GridQuantizer, GridTensor, GridTensorStorage
from ottava_blockwise.tensors import Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage, block_layout, check_options


class Float8BlockQuantizer(GridQuantizer):
    """Quantizes along rows, columns or both, each from the values themselves: ``scale = max / amax`` of each block.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise, columnwise: usages to produce.
        amax_epsilon: a smaller amax counts as this.
        force_pow_2_scales: floor scales to powers of two.
        block_scaling_dim: 1 for blocks of 128 elements along the direction, 2 for 128 × 128: both directions then hold
            the same values.

    Raises:
        DTypeError: ``fp8_dtype`` is not an FP8 element format.
        OptionError: an option has a value that is not allowed.
    """

    storage_class: ClassVar[type[GridTensorStorage]] = Float8BlockwiseQTensorStorage
    tensor_class: ClassVar[type[GridTensor]] = Float8BlockwiseQTensor

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
        fp8_format(fp8_dtype)
        check_epsilon(amax_epsilon)
        check_options(flag=("force_pow_2_scales", force_pow_2_scales), block_scaling_dim=block_scaling_dim)
        layout = block_layout(fp8_dtype, block_scaling_dim, force_pow_2_scales, float(amax_epsilon))
        super().__init__(layout, rowwise=rowwise, columnwise=columnwise)
        self.fp8_dtype = fp8_dtype
        self.amax_epsilon = float(amax_epsilon)
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    def static_fields(self) -> dict[str, Any]:
        return {
            "fp8_dtype": self.fp8_dtype,
            "block_scaling_dim": self.block_scaling_dim,
            "pow_2_scales": self.force_pow_2_scales,
        }
