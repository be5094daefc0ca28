"""Shards of weights in MXFP8: amaxes of blocks are reduced, whatever the shards cut; one call casts all parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from ottava import kernels
from ottava.formats import MX_BLOCK, mx_scale_shapes
from ottava.tensors import ShardBatch, ShardJob
from ottava.torch_private import foreach_copy_
from ottava_mxfp8.tensors import MXFP8TensorStorage

if TYPE_CHECKING:
    from ottava_mxfp8.quantizer import MXFP8Quantizer

_SCALES = {inner.usage: inner for inner in MXFP8TensorStorage.inner_tensors if inner.block_rows is not None}


class MXFP8Batch(ShardBatch):
    """The amaxes of each weight are those of its blocks along rows, then along columns; or those of its squares."""

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        self._quantizers = [cast("MXFP8Quantizer", job.quantizer) for job in jobs]
        self._squares = [quantizer.with_2d_quantization for quantizer in self._quantizers]
        self._matrices = [job.matrix for job in jobs]
        self._parts = [kernels.mx_amax_sizes(*m, s) for m, s in zip(self._matrices, self._squares, strict=True)]
        self._places = (
            [job.shard for job in jobs],
            [job.dtype for job in jobs],
            self._matrices,
            [job.start_offset for job in jobs],
        )
        self._formats = [quantizer.fp8_dtype for quantizer in self._quantizers]
        self._codes = [_by_usage(job) for job in jobs]
        self._options = {(quantizer.fp8_dtype, quantizer.scale_rounding) for quantizer in self._quantizers}
        # After a call that raised nothing the same arguments are not looked at again.
        self._seen, self._cast = False, False
        self._into = None if any(self._squares) or len(self._options) > 1 else self._held_scales()

    def _held_scales(self) -> list[torch.Tensor | None] | None:
        """The held scales of all weights, along rows and columns in turns; None if one has a part of them."""
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
        for job, usages, found in zip(self.jobs, self._codes, scales, strict=True):
            for usage in usages:
                job.output.write_inner(_SCALES[usage], found[usage])  # type: ignore[index]
        kernels.mx_multi_cast(
            *self._places,
            self._formats,
            *(
                [
                    (found[usage], own[usage]) if usage in own else None
                    for found, own in zip(scales, self._codes, strict=True)
                ]
                for usage in ("rowwise", "columnwise")
            ),
        )
        self.written()

    def _cast_in_place(self, amaxes: torch.Tensor, into: list[torch.Tensor | None]) -> None:
        """The scales go where they are held in one call, and are read from there."""
        codes = kernels.mx_scale_from_amax(amaxes, *next(iter(self._options)))
        parts = codes.split([length for part in self._parts for length in part])
        pairs = [(held, part) for held, part in zip(into, parts, strict=True) if held is not None and held.numel()]
        if pairs:
            foreach_copy_([held.view(-1) for held, _ in pairs], [part for _, part in pairs])
        directions = [
            [None if h is None else (h, own[usage]) for h, own in zip(into[place::2], self._codes, strict=True)]
            for place, usage in enumerate(("rowwise", "columnwise"))
        ]
        kernels.mx_multi_cast(*self._places, self._formats, *directions, checked=self._cast)
        self._cast = True
        self.written()

    def _scales(self, amaxes: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """E8M0 codes along rows and along columns of each whole weight."""
        lengths = [sum(part) for part in self._parts]
        options = [(quantizer.fp8_dtype, quantizer.scale_rounding) for quantizer in self._quantizers]
        if len(set(options)) == 1:
            every = kernels.mx_scale_from_amax(amaxes, *options[0]).split(lengths)
        else:
            parts = zip(amaxes.split(lengths), options, strict=True)
            every = tuple(kernels.mx_scale_from_amax(own, *option) for own, option in parts)
        places = zip(every, self._squares, self._matrices, self._parts, strict=True)
        return [_spread(*place) for place in places]


def _spread(
    codes: torch.Tensor, square: bool, matrix: tuple[int, int], parts: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The scales of one weight, from those of its blocks or squares."""
    rows, columns = matrix
    down, across = -(-rows // MX_BLOCK), -(-columns // MX_BLOCK)
    if not square:
        along_rows, along_columns = codes.split(parts)
        return {"rowwise": along_rows.view(rows, across), "columnwise": along_columns.view(down, columns)}
    squares = codes.view(down, across)
    return {
        "rowwise": squares.repeat_interleave(MX_BLOCK, 0)[:rows].contiguous(),
        "columnwise": squares.repeat_interleave(MX_BLOCK, 1)[:, :columns].contiguous(),
    }


def _by_usage(job: ShardJob) -> dict[str, torch.Tensor]:
    raw = job.output.holder.raw_inner()
    return {inner.usage: codes for inner, codes in zip(raw, job.output.codes, strict=True)}
