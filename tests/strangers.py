"""Quantizers of third parties, written on the declaration of tensors alone: a scale for each row or
for the tensor, with and without a word on shards."""

from __future__ import annotations

import math
from typing import Any

import torch

from ottava import QuantizedTensor, QuantizedTensorStorage, Quantizer, Recipe
from ottava.distributed import ShardBatch, ShardJob, ShardRule
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


class OneScaleTensor(RowTensor):
    """Codes and one scale, the same on every shard."""

    inner_tensors = (
        InnerTensor("_codes", "codes", gather=True, native=E4M3),
        InnerTensor("_scale_inv", "scale_inv"),
    )


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """Of each row, a column; of a scalar its magnitude."""
    magnitudes = x.float().abs().nan_to_num(0.0, posinf=1e30)
    if not x.dim():
        return magnitudes
    return magnitudes.amax(-1, True) if x.shape[-1] else magnitudes.new_zeros(*x.shape[:-1], 1)


def codes_of(x: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    scaled = (x.float() / scale_inv).nan_to_num(0.0).clamp(-448.0, 448.0)
    return scaled.to(E4M3).view(torch.uint8)


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    return amax.clamp(1e-12, 1e30) / 448.0


class SilentRows(Quantizer):
    """A scale for each row; says nothing about shards."""

    custom = True

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        scale_inv = scale_of(row_amax(tensor))
        codes = codes_of(tensor, scale_inv)
        cls = RowStorage if self.internal else RowTensor
        return cls(codes=codes, scale_inv=scale_inv, dtype=dtype, quantizer=self)


class AloneRows(SilentRows):
    """Rows need no other rows."""

    quantize_impl = SilentRows.quantize_impl
    shards = ShardRule(rows=1)


class SilentOneScale(SilentRows):
    """A scale for the tensor; says nothing about shards."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        scale_inv = scale_of(row_amax(tensor.reshape(-1)).reshape(()))
        codes = codes_of(tensor, scale_inv)
        return OneScaleTensor(codes=codes, scale_inv=scale_inv, dtype=dtype, quantizer=self)


class RowAmaxBatch(ShardBatch):
    """One amax for each row."""

    def places(self, job: ShardJob) -> tuple[int, torch.Tensor]:
        """The number of rows of a weight, and the row of each element of the shard."""
        length = job.shape[-1] if job.shape else 1
        elements = torch.arange(job.start_offset, job.start_offset + job.shard.numel())
        return math.prod(job.shape[:-1]), elements // max(length, 1)

    def amaxes(self) -> torch.Tensor:
        found = []
        for job in self.jobs:
            rows, row = self.places(job)
            values = row_amax(job.rounded().unsqueeze(-1)).squeeze(-1)
            found.append(torch.zeros(rows).scatter_reduce_(0, row, values, "amax"))
        return torch.cat(found)

    def cast(self, amaxes: torch.Tensor) -> None:
        counts = [self.places(job)[0] for job in self.jobs]
        for job, amax in zip(self.jobs, amaxes.split(counts), strict=True):
            scale_inv = scale_of(amax)
            codes = codes_of(job.rounded(), scale_inv[self.places(job)[1]])
            job.output.data[0].copy_(codes)
            shape = (*job.shape[:-1], 1) if job.shape else ()
            job.output.write_inner(RowTensor.inner_tensors[1], scale_inv.view(shape))
        self.written()


class RowAmaxes(ShardRule):
    batch = RowAmaxBatch


class ReducedRows(SilentRows):
    """Ranks reduce one amax for each row."""

    quantize_impl = SilentRows.quantize_impl
    shards = RowAmaxes()


class OneQuantizer(Recipe):
    """One quantizer for every role."""

    name = "one-quantizer"

    def __init__(self, quantizer: Quantizer) -> None:
        self.one = quantizer

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Quantizer:
        return self.one.copy()
