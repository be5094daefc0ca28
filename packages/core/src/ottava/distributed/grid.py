"""Shards of weights with scales on a grid: amaxes of blocks are reduced, whatever shards cut; one call casts all."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.distributed.rules import ShardBatch, ShardRule, rule_of
from ottava.distributed.shards import ShardJob
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout, Size
from ottava.tensors.declaration import InnerTensor
from ottava.torch_private import foreach_copy_

Scales = Callable[[Sequence[ShardJob], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def scales_of_layout(jobs: Sequence[ShardJob], amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What elements are multiplied by, and the scales that are stored, as the layout of the jobs says."""
    quantizer: Any = jobs[0].quantizer
    scale, stored = kernels.grid_scales(amaxes, quantizer.layout, jobs[0].dtype)
    return stored if scale is None else scale, stored


def scales_by_format(
    jobs: Sequence[ShardJob], amaxes: torch.Tensor, epsilon: float = 0.0, force_pow_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ottava.kernels.scale_from_amax` of many weights of one FP8 format."""
    quantizer: Any = jobs[0].quantizer
    return kernels.scale_from_amax(amaxes, quantizer.fp8_dtype, epsilon, force_pow_2)


class GridBatch(ShardBatch):
    """Shards of one layout.

    The amaxes of each weight are those of the blocks of rowwise data, then of columnwise data that are others.
    """

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        quantizer: Any = jobs[0].quantizer
        rule: Any = rule_of(quantizer)
        self._scales: Scales = rule.scales
        self._layout: Layout = quantizer.layout
        matrices, starts = [job.matrix for job in jobs], [job.start_offset for job in jobs]
        sources = [job.shard for job in jobs], [job.dtype for job in jobs]
        self._places = (*sources, matrices, starts, [self._layout] * len(jobs))
        # How many amaxes there are of each direction. For each that is written: the number of the job, whether it is
        # columnwise, its place among those amaxes, their grid, and where its data and scales go: to a tensor that has
        # those of the whole weight, if there is one.
        self._lengths: list[int] = []
        self._sides: list[tuple[int, bool, int, Size, torch.Tensor, InnerTensor, torch.Tensor | None]] = []
        for at, matrix in enumerate(matrices):
            self._look(at, matrix)
        self._held = [held for *_, held in self._sides if held is not None]
        # After a call that raised nothing the same arguments are not looked at again.
        self._seen, self._cast = False, False

    def _look(self, at: int, matrix: Size) -> None:
        layout, output, first = self._layout, self.jobs[at].output, len(self._lengths)
        data = {inner.usage: own for inner, own in zip(output.holder.raw_inner(), output.data, strict=True)}
        scales = {inner.usage: inner for inner in output.holder.inner_tensors if inner.argument.endswith("scale_inv")}
        grids = [layout.grid(matrix, columnwise, shared=True) for columnwise in (False, True)]
        self._lengths += [math.prod(grid) for grid in (grids[:1] if layout.square else grids)]
        for columnwise, usage in ((False, "rowwise"), (True, "columnwise")):
            if usage not in data:
                continue
            inner = scales[usage] if usage in scales else scales["both"]
            held: torch.Tensor | None = getattr(output.holder, inner.attribute)
            if held is not None and held.numel() != math.prod(layout.grid(matrix, columnwise)):
                held = None
            side = int(columnwise and not layout.square)
            self._sides.append((at, columnwise, first + side, grids[side], data[usage], inner, held))

    def amaxes(self) -> torch.Tensor:
        amaxes = kernels.grid_multi_amax(*self._places, checked=self._seen)
        self._seen = True
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        factors, stored = (values.split(self._lengths) for values in self._scales(self.jobs, amaxes))
        pairs: tuple[list[Any], list[Any]] = [None] * len(self.jobs), [None] * len(self.jobs)
        found: list[torch.Tensor] = []
        for at, columnwise, part, grid, data, inner, held in self._sides:
            own, scales = factors[part].view(grid), stored[part]
            if self._layout.shared is not None:
                about = self._layout, columnwise, self._places[2][at]
                own, scales = (for_blocks(each.view(grid), *about).contiguous() for each in (own, scales))
            pairs[columnwise][at] = own, data
            if held is None:
                self.jobs[at].output.write_inner(inner, scales.view(own.shape))
            else:
                found.append(scales.view(held.shape))
        if found:
            foreach_copy_(self._held, found)
        kernels.grid_multi_cast(*self._places, *pairs, checked=self._cast)
        self._cast = True
        self.written()


class GridShards(ShardRule):
    """Declared by quantizers with a layout: amaxes of blocks say all, and whole blocks of rows are quantized alone.

    The quantizers have it as their attribute ``layout``, as those that derive from
    :class:`ottava.tensors.GridQuantizer` or :class:`ottava.tensors.Float8QuantizerBase` do.

    Args:
        scales: ``scales(jobs, amaxes)`` gives what elements are multiplied by, and the scales that are stored, for the
            reduced amaxes of many weights of one layout, one after the other. By default the layout says; a quantizer
            whose scales are known gives others, and records the amaxes.
        options: as of :class:`ShardRule`.
    """

    batch: ClassVar[type[ShardBatch]] = GridBatch

    def __init__(self, scales: Scales = scales_of_layout, *, options: Sequence[str] = ()) -> None:
        super().__init__(options=options)
        self.scales = scales

    def batch_for(self, quantizer: Any) -> type[ShardBatch] | None:
        layout: Layout = quantizer.layout
        # A range of the weight is no range of transposed columns that have scales of their own.
        scattered = quantizer.columnwise_usage and layout.transposed and not layout.square
        return None if scattered else self.batch

    def together(self, job: ShardJob) -> Hashable:
        return super().together(job), job.quantizer.layout.text, job.dtype  # type: ignore[attr-defined]

    def one_amax(self, quantizer: Any) -> bool:
        return bool(quantizer.layout.block == (None, None))

    def _heights(self, quantizer: Any) -> list[int | None]:
        """Rows that have a scale in common, in each direction."""
        sides = (False, True) if quantizer.columnwise_usage else (False,)
        return [quantizer.layout.block_of(columnwise, shared=True)[0] for columnwise in sides]

    def independent_rows(self, quantizer: Any) -> int | None:
        return None if None in self._heights(quantizer) else self.rows_of_blocks(quantizer)

    def rows_of_blocks(self, quantizer: Any) -> int:
        return math.lcm(*(rows for rows in self._heights(quantizer) if rows is not None))


#: The rule of quantizers with one scale a tensor that a function of their own gives.
PerTensorShards = GridShards
