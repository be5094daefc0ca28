"""Shards of weights in MXFP8: amaxes of blocks are reduced, whatever the shards cut; one call casts all shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.distributed import ShardBatch, ShardJob, ShardRule
from ottava.formats import MX_BLOCK, mx_scale_shapes
from ottava.torch_private import foreach_copy_
from ottava_mxfp8.tensors import MXFP8TensorStorage

_SCALES = {inner.usage: inner for inner in MXFP8TensorStorage.inner_tensors if inner.block_rows is not None}


class MXFP8Batch(ShardBatch):
    """The amaxes of each weight are those of its blocks along rows, then along columns; or those of its squares."""

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        self._quantizers: list[Any] = [job.quantizer for job in jobs]
        self._squares = [quantizer.with_2d_quantization for quantizer in self._quantizers]
        self._matrices = [job.matrix for job in jobs]
        self._lengths = [kernels.mx_amax_sizes(*m, s) for m, s in zip(self._matrices, self._squares, strict=True)]
        self._places = (
            [job.shard for job in jobs],
            [job.dtype for job in jobs],
            self._matrices,
            [job.start_offset for job in jobs],
        )
        self._formats = [quantizer.fp8_dtype for quantizer in self._quantizers]
        self._data = [_by_usage(job) for job in jobs]
        self._options = {(quantizer.fp8_dtype, quantizer.scale_rounding) for quantizer in self._quantizers}
        # After a call that raised nothing the same arguments are not looked at again.
        self._seen, self._cast = False, False
        self._into = None if any(self._squares) or len(self._options) > 1 else self._held_scales()

    def _held_scales(self) -> list[torch.Tensor | None] | None:
        """The held scales of all weights, along rows and columns in turns; None if one has a shard of them."""
        found: list[torch.Tensor | None] = []
        for job, matrix in zip(self.jobs, self._matrices, strict=True):
            for usage, shape in zip(("rowwise", "columnwise"), mx_scale_shapes(matrix), strict=True):
                held: torch.Tensor | None = getattr(job.output.holder, _SCALES[usage].attribute)  # type: ignore[index]
                if held is not None and (tuple(held.shape) != shape or not held.is_contiguous()):
                    return None
                found.append(held)
        return found

    def amaxes(self) -> torch.Tensor:
        amaxes = kernels.mx_multi_amax(*self._places, self._squares, checked=self._seen)
        self._seen = True
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        if self._into is not None:
            self._cast_in_place(amaxes, self._into)
            return
        scales = self._scales(amaxes)
        for job, usages, found in zip(self.jobs, self._data, scales, strict=True):
            for usage in usages:
                job.output.write_inner(_SCALES[usage], found[usage])  # type: ignore[index]
        kernels.mx_multi_cast(
            *self._places,
            self._formats,
            *(
                [
                    (found[usage], own[usage]) if usage in own else None
                    for found, own in zip(scales, self._data, strict=True)
                ]
                for usage in ("rowwise", "columnwise")
            ),
        )
        self.written()

    def _cast_in_place(self, amaxes: torch.Tensor, into: list[torch.Tensor | None]) -> None:
        """The scales go where they are held in one call, and are read from there."""
        scales = kernels.mx_scale_from_amax(amaxes, *next(iter(self._options)))
        found = scales.split([length for pair in self._lengths for length in pair])
        pairs = [(held, own) for held, own in zip(into, found, strict=True) if held is not None and held.numel()]
        if pairs:
            foreach_copy_([held.view(-1) for held, _ in pairs], [own for _, own in pairs])
        directions = [
            [None if h is None else (h, own[usage]) for h, own in zip(into[place::2], self._data, strict=True)]
            for place, usage in enumerate(("rowwise", "columnwise"))
        ]
        kernels.mx_multi_cast(*self._places, self._formats, *directions, checked=self._cast)
        self._cast = True
        self.written()

    def _scales(self, amaxes: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Scales along rows and along columns of each whole weight."""
        lengths = [sum(pair) for pair in self._lengths]
        options = [(quantizer.fp8_dtype, quantizer.scale_rounding) for quantizer in self._quantizers]
        if len(set(options)) == 1:
            every = kernels.mx_scale_from_amax(amaxes, *options[0]).split(lengths)
        else:
            pairs = zip(amaxes.split(lengths), options, strict=True)
            every = tuple(kernels.mx_scale_from_amax(own, *option) for own, option in pairs)
        places = zip(every, self._squares, self._matrices, self._lengths, strict=True)
        return [_spread(*place) for place in places]


class MXFP8Shards(ShardRule):
    """Declared by MXFP8: amaxes of blocks say all, and whole blocks of rows are quantized the same alone."""

    batch: ClassVar[type[ShardBatch]] = MXFP8Batch

    def independent_rows(self, quantizer: Any) -> int:
        """A row, or a row of blocks."""
        return MX_BLOCK if quantizer.columnwise_usage or quantizer.with_2d_quantization else 1


def _spread(
    scales: torch.Tensor, square: bool, matrix: tuple[int, int], lengths: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The scales of one weight, from those of its blocks or squares."""
    rows, columns = matrix
    down, across = -(-rows // MX_BLOCK), -(-columns // MX_BLOCK)
    if not square:
        along_rows, along_columns = scales.split(lengths)
        return {"rowwise": along_rows.view(rows, across), "columnwise": along_columns.view(down, columns)}
    squares = scales.view(down, across)
    return {
        "rowwise": squares.repeat_interleave(MX_BLOCK, 0)[:rows].contiguous(),
        "columnwise": squares.repeat_interleave(MX_BLOCK, 1)[:, :columns].contiguous(),
    }


def _by_usage(job: ShardJob) -> dict[str, torch.Tensor]:
    raw = job.output.holder.raw_inner()
    return {inner.usage: data for inner, data in zip(raw, job.output.data, strict=True)}
