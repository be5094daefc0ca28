"""E4M3 with one scale for each row, on core's base classes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava import QuantizedTensorStorage, Quantizer, QuantizerRole, Recipe
from ottava.tensors import InnerTensor, StaticField


class RowStorage(QuantizedTensorStorage):
    """Codes and a scale for each row; dequantized for every GEMM."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", gather=True),
        InnerTensor("_scale_inv", "scale_inv", gather=True),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (StaticField("_dtype", "dtype"),)

    def __init__(
        self, *, data: Any, scale_inv: Any, dtype: torch.dtype, quantizer: Any = None
    ) -> None:
        self._data, self._scale_inv, self._dtype, self._quantizer = (
            data,
            scale_inv,
            dtype,
            quantizer,
        )

    def size(self, dim: int | None = None) -> Any:
        """Shape of the original."""
        return self._data.size() if dim is None else self._data.size(dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """High-precision values."""
        values = self._data.view(torch.float8_e4m3fn).to(torch.float32) * self._scale_inv
        return values.to(dtype or self._dtype)


class RowQuantizer(Quantizer):
    """A scale for each row."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> RowStorage:
        """Quantize."""
        x = tensor.float()
        amax = x.abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros(*x.shape[:-1], 1)
        scale_inv = amax.clamp(min=1e-12) / 448.0
        data = (x / scale_inv).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return RowStorage(data=data, scale_inv=scale_inv, dtype=dtype, quantizer=self)

    def make_empty(self, shape: Sequence[int], **options: Any) -> RowStorage:
        """An uninitialized result."""
        options.pop("requires_grad", None)
        return self.quantize_impl(
            torch.empty(tuple(shape), **options), options.get("dtype", torch.float32)
        )


class AcmeRows(Recipe):
    """The recipe."""

    name = "acme-rows"

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> RowQuantizer:
        """The same for every role."""
        return RowQuantizer()


def weights_by_row(role: QuantizerRole) -> RowQuantizer | None:
    """A quantizer factory: weights by row, everything else by the recipe that it is put over."""
    return RowQuantizer() if role.tensor_type == "weight" else None
