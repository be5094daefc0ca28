"""Shards of weights with scales on a grid: amaxes of blocks are reduced, whatever shards cut; one call casts all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.distributed.rules import ShardBatch, ShardRule
from ottava.distributed.shards import ShardJob
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout
from ottava.tensors.declaration import InnerTensor
from ottava.torch_private import foreach_copy_


class GridBatch(ShardBatch):
    """The amaxes of each weight are those of the blocks of rowwise data, then of columnwise data that are others."""

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        quantizers: list[Any] = [job.quantizer for job in jobs]
        self._layouts: list[Layout] = [quantizer.layout for quantizer in quantizers]
        self._matrices = [job.matrix for job in jobs]
        self._lengths = [kernels.grid_amax_sizes(*m, own) for m, own in zip(self._matrices, self._layouts, strict=True)]
        self._places = (
            [job.shard for job in jobs],
            [job.dtype for job in jobs],
            self._matrices,
            [job.start_offset for job in jobs],
            self._layouts,
        )
        self._data = [_by_usage(job) for job in jobs]
        self._scales = [_scales_of(job) for job in jobs]
        # After a call that raised nothing the same arguments are not looked at again.
        self._seen, self._cast = False, False

    def amaxes(self) -> torch.Tensor:
        amaxes = kernels.grid_multi_amax(*self._places, checked=self._seen)
        self._seen = True
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        pairs: dict[str, list[Any]] = {"rowwise": [], "columnwise": []}
        held: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for at, (job, own) in enumerate(zip(self.jobs, self._made(amaxes), strict=True)):
            for usage, pair in pairs.items():
                inner, data = self._scales[at][usage], self._data[at].get(usage)
                factors, stored = own[usage]
                pair.append(None if data is None else (factors, data))
                target = None if data is None else getattr(job.output.holder, inner.attribute)
                if target is None:
                    continue
                if target.shape == stored.shape:
                    held.append(target)
                    found.append(stored)
                else:
                    job.output.write_inner(inner, stored)
        if held:
            foreach_copy_(held, found)
        kernels.grid_multi_cast(*self._places, pairs["rowwise"], pairs["columnwise"], checked=self._cast)
        self._cast = True
        self.written()

    def _made(self, amaxes: torch.Tensor) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """For each weight and usage what elements are multiplied by, and the scales that are stored."""
        lengths = [sum(pair) for pair in self._lengths]
        kinds = [(layout.text, job.dtype) for layout, job in zip(self._layouts, self.jobs, strict=True)]
        if len(set(kinds)) == 1:
            scale, stored = kernels.grid_scales(amaxes, self._layouts[0], kinds[0][1])
            every = [(stored if scale is None else scale).split(lengths), stored.split(lengths)]
        else:
            made = [
                kernels.grid_scales(own, layout, job.dtype)
                for own, layout, job in zip(amaxes.split(lengths), self._layouts, self.jobs, strict=True)
            ]
            every = [[s if f is None else f for f, s in made], [s for _, s in made]]
        places = zip(*every, self._layouts, self._matrices, self._lengths, strict=True)
        return [_by_direction(*place) for place in places]


class GridShards(ShardRule):
    """Declared by quantizers with a layout: amaxes of blocks say all, and whole blocks of rows are quantized alone."""

    batch: ClassVar[type[ShardBatch]] = GridBatch

    def batch_for(self, quantizer: Any) -> type[ShardBatch] | None:
        layout: Layout = quantizer.layout
        # A range of the weight is no range of transposed columns that have scales of their own.
        scattered = quantizer.columnwise_usage and layout.transposed and not layout.square
        return None if scattered else self.batch

    def independent_rows(self, quantizer: Any) -> int | None:
        layout: Layout = quantizer.layout
        if self.batch_for(quantizer) is None:
            return None
        # Columns that are made of rows need no rows of their own.
        sides = (False, True) if quantizer.columnwise_usage else (False,)
        rows = [layout.block_of(columnwise, shared=True)[0] for columnwise in sides]
        return None if None in rows else math.lcm(*rows)  # type: ignore[arg-type]


def _by_direction(
    factors: torch.Tensor, stored: torch.Tensor, layout: Layout, matrix: tuple[int, int], lengths: tuple[int, int]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What one weight has, from one entry for each of what has a scale in common."""
    found = {}
    for columnwise, usage in enumerate(("rowwise", "columnwise")):
        part = slice(0, lengths[0]) if layout.square or not columnwise else slice(lengths[0], None)
        grid = layout.grid(matrix, bool(columnwise), shared=True)
        own = [
            for_blocks(values[part].view(grid), layout, bool(columnwise), matrix).contiguous()
            for values in (factors, stored)
        ]
        found[usage] = own[0], own[1]
    return found


def _scales_of(job: ShardJob) -> dict[str, InnerTensor]:
    inner = job.output.holder.inner_tensors
    return {own.usage: own for own in inner if own.argument.endswith("scale_inv")}


def _by_usage(job: ShardJob) -> dict[str, torch.Tensor]:
    raw = job.output.holder.raw_inner()
    return {inner.usage: data for inner, data in zip(raw, job.output.data, strict=True)}
