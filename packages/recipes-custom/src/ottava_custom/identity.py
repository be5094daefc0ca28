"""``IdentityQuantizer``: keeps values as they are, in high precision, where a quantizer is asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.distributed import ShardRule
from ottava.gemm import as_matrix
from ottava.tensors import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer, check_values_dtype
from ottava_custom.shared_elements import SharedElements


class IdentityTensorStorage(SharedElements):
    """Values in high precision as if they were quantized.

    Args:
        values: the values, of the nominal dtype.
        dtype: nominal dtype.
        columnwise, rowwise: the usages that they are said to serve.
        quantizer: used by in-place updates.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (InnerTensor("_kept", "values", gather=True),)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of the values.

        Raises:
            DTypeError: ``dtype`` is not a floating-point dtype.
        """
        check_values_dtype(dtype)
        return self._held().to(dtype or self.dtype, copy=True)

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values themselves."""
        return as_matrix(self._held().to(dtype)), None


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """Values in high precision as a quantized tensor."""


class IdentityQuantizer(Quantizer):
    """Quantizes nothing: a layer or a tensor of it stays in high precision, in the dtype that the layer computes in."""

    shards = ShardRule(rows=1)
    keeps_operands = keeps_values = True

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        make: Any = IdentityTensorStorage if self.internal else IdentityTensor
        made: QuantizedTensorStorage = make(
            # What a layer saves may be its operand itself: autograd sees to it that nobody writes to that.
            values=tensor.detach().to(dtype, copy=not self.internal).contiguous(),
            dtype=dtype,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            quantizer=self,
        )
        return made

    def is_requantization_safe(self) -> bool:
        return True
