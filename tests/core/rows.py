"""A recipe with a scale for each row, and one with a scale for the tensor, written on the
declaration alone."""

from __future__ import annotations

from typing import Any

import torch

from ottava import QuantizedTensor, QuantizedTensorStorage, Quantizer, Recipe
from ottava.distributed import ShardRule
from ottava.tensors import InnerTensor, StaticField

E4M3 = torch.float8_e4m3fn


class RowStorage(QuantizedTensorStorage):
    """Codes and a scale for each row."""

    inner_tensors = (
        InnerTensor("_codes", "codes", gather=True, native=E4M3),
        InnerTensor("_scale_inv", "scale_inv", gather=True),
    )
    static_fields = (StaticField("_dtype", "dtype"),)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self._codes.view(E4M3).float() * self._scale_inv).to(dtype or self.dtype)


class RowTensor(QuantizedTensor, RowStorage):
    """The same as a tensor."""


class RowQuantizer(Quantizer):
    """amax / 448 of each row."""

    shards = ShardRule(rows=1)
    per_row = True

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> RowStorage:
        x = tensor.float()
        magnitudes = x.abs()
        if not self.per_row:
            amax = magnitudes.max() if x.numel() else x.new_zeros(())
        elif x.dim() and x.shape[-1]:
            amax = magnitudes.amax(-1, keepdim=True)
        else:
            amax = x.new_zeros((*x.shape[:-1], 1) if x.dim() else ())
        scale_inv = amax.clamp(min=1e-12) / 448.0
        codes = (x / scale_inv).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8)
        return self.wrap(codes=codes, scale_inv=scale_inv, dtype=dtype, quantizer=self)

    def wrap(self, **parts: Any) -> Any:
        return RowStorage(**parts) if self.internal else RowTensor(**parts)


class OneScaleStorage(RowStorage):
    """Codes and one scale, the same on every shard."""

    inner_tensors = (
        InnerTensor("_codes", "codes", gather=True, native=E4M3),
        InnerTensor("_scale_inv", "scale_inv"),
    )


class OneScaleTensor(QuantizedTensor, OneScaleStorage):
    """The same as a tensor."""


class OneScaleQuantizer(RowQuantizer):
    """amax / 448 of the tensor."""

    shards = ShardRule()
    per_row = False

    def wrap(self, **parts: Any) -> Any:
        return OneScaleStorage(**parts) if self.internal else OneScaleTensor(**parts)


class Rows(Recipe):
    """One quantizer for every role."""

    name = "rows"

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> RowQuantizer:
        return RowQuantizer()
