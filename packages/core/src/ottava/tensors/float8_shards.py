"""Shards of weights with one scale a tensor: one amax of each is reduced, and all of them are cast in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch

from ottava import kernels
from ottava.tensors.float8 import Float8QuantizerBase
from ottava.tensors.shards import ShardBatch, ShardJob, ShardOutput
from ottava.torch_private import foreach_copy_


class PerTensorBatch(ShardBatch):
    """Many shards in a call of a kernel for the amaxes, and one for the casts."""

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        self._quantizers = [cast("PerTensorShards", job.quantizer) for job in jobs]
        self._shards, self._dtypes = [job.shard for job in jobs], [job.dtype for job in jobs]
        self._formats = [quantizer.fp8_dtype for quantizer in self._quantizers]
        self._codes = [job.output.codes[0] for job in jobs]
        holders: list[Any] = [job.output.holder for job in jobs]
        self._scale_invs = [holder._scale_inv for holder in holders]
        # After a call that raised nothing the same arguments are not looked at again.
        self._seen, self._cast = False, False

    def amaxes(self) -> torch.Tensor:
        amaxes = kernels.multi_amax(self._shards, self._dtypes, checked=self._seen)
        self._seen = True
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        scale, scale_inv = type(self._quantizers[0]).shard_scales(self.jobs, amaxes)
        kernels.multi_cast(self._shards, self._dtypes, scale, self._formats, self._codes, checked=self._cast)
        self._cast = True
        foreach_copy_(self._scale_invs, list(scale_inv.unbind()))
        self.written()


class PerTensorShards(Float8QuantizerBase):
    """Base class of quantizers with one scale a tensor that follows from the tensor's amax, or is known.

    A subclass defines :meth:`shard_scales`.
    """

    scale_per_tensor: ClassVar[bool] = True
    shard_batch: ClassVar[type[ShardBatch]] = PerTensorBatch

    @classmethod
    @abstractmethod
    def shard_scales(cls, jobs: Sequence[ShardJob], amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(scale, scale_inv)`` of many weights from their amaxes, float32 ``[jobs]`` each."""

    def shard_amaxes(self, shard: torch.Tensor, weight: Any, start_offset: int) -> torch.Tensor:
        """One number: the amax of the shard."""
        return kernels.amax(shard).reshape(1)

    def cast_shard(
        self, shard: torch.Tensor, weight: Any, start_offset: int, amaxes: torch.Tensor, out: ShardOutput
    ) -> None:
        """The part's bytes, with the scale that the amax of the whole gives."""
        job = ShardJob(self, shard, tuple(weight.shape), shard.dtype, weight, start_offset, out)
        PerTensorBatch([job]).cast(amaxes)

    @staticmethod
    def scales_by_format(
        jobs: Sequence[ShardJob], amaxes: torch.Tensor, epsilon: float = 0.0, force_pow_2: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:func:`ottava.kernels.scale_from_amax` of many weights, one call for each FP8 format among them."""
        places: dict[torch.dtype, list[int]] = {}
        for place, job in enumerate(jobs):
            places.setdefault(job.quantizer.fp8_dtype, []).append(place)  # type: ignore[attr-defined]
        if len(places) == 1:
            return kernels.scale_from_amax(amaxes, next(iter(places)), epsilon, force_pow_2)
        scale, scale_inv = torch.empty_like(amaxes), torch.empty_like(amaxes)
        for fp8_dtype, own in places.items():
            index = torch.tensor(own, device=amaxes.device)
            scale[index], scale_inv[index] = kernels.scale_from_amax(amaxes[index], fp8_dtype, epsilon, force_pow_2)
        return scale, scale_inv
