"""A recipe of a third party: E4M3 with a scale for each row, on core's base classes alone."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    QuantizerRole,
    Recipe,
    RecipeSpec,
)
from ottava.tensors import InnerTensor, StaticField

SPEC = RecipeSpec(
    name="rows",
    summary="E4M3 by row",
    factory="tests.testing.row_recipe:Rows",
    block_size=(1, None),
    formats=("E4M3",),
)


class RowStorage(QuantizedTensorStorage):
    """Codes ``[*, K]`` and scales ``[*, 1]``."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", gather=True, native=torch.float8_e4m3fn),
        InnerTensor("_scale_inv", "scale_inv", gather=True),
    )
    static_fields: ClassVar[tuple[StaticField, ...]] = (StaticField("_dtype", "dtype"),)

    _data: torch.Tensor
    _scale_inv: torch.Tensor

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = self._data.view(torch.float8_e4m3fn).to(torch.float32) * self._scale_inv
        return values.to(dtype or self.dtype)


class RowTensor(QuantizedTensor, RowStorage):
    """The same as a tensor."""


class RowQuantizer(Quantizer):
    """A scale for each row, from its amax."""

    storage: ClassVar[type[QuantizedTensorStorage]] = RowStorage
    tensor: ClassVar[type[QuantizedTensorStorage]] = RowTensor

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        data, scale_inv = self.data_and_scale(tensor.to(torch.float32))
        make: Any = self.storage if self.internal else self.tensor
        made: QuantizedTensorStorage = make(
            data=data, scale_inv=scale_inv, dtype=dtype, quantizer=self
        )
        return made

    def data_and_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        magnitudes = x.abs().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max)
        amax = (
            x.new_zeros((*x.shape[:-1], 1))
            if x.dim() and not x.shape[-1]
            else magnitudes.amax(-1, keepdim=True)
        )
        scale_inv = torch.where(amax > 0, amax, 448.0).clamp(min=1e-35) / 448.0
        return (x / scale_inv).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(
            torch.uint8
        ), scale_inv


class Rows(Recipe):
    """The recipe, with a quantizer of any class."""

    name = "rows"

    def __init__(self, quantizer: type[RowQuantizer] = RowQuantizer) -> None:
        self.quantizer_class = quantizer

    def make_quantizer(self, role: QuantizerRole, *, amax_reduction_group: Any = None) -> Quantizer:
        return self.quantizer_class()


class BareQuantizer(RowQuantizer):
    """Gives bare storages only."""

    tensor = RowStorage


class Bare(Rows):
    """The recipe, for a spec with quantized_weights=False."""

    def __init__(self) -> None:
        super().__init__(BareQuantizer)
