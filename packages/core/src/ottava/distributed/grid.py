"""Shards of weights with scales on a grid: amaxes of blocks are reduced, whatever shards cut; one call casts all."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.distributed.rules import ShardBatch, ShardRule, rule_of
from ottava.distributed.shards import ShardJob
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout, Size
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
        layout, matrices = self._layout, [job.matrix for job in jobs]
        sources = [job.shard for job in jobs], [job.dtype for job in jobs]
        self._places = (*sources, matrices, [job.start_offset for job in jobs], [layout] * len(jobs))
        sides = (False,) if layout.square else (False, True)
        grids = [layout.grid(matrix, side, shared=True) for matrix in matrices for side in sides]
        lengths = [math.prod(grid) for grid in grids]
        # What elements are multiplied by, and what is stored: of E8M0 one for both. Each cast writes into them, because
        # a view of them for each weight takes longer to make than a small weight to cast.
        count = 2 if layout.scale is torch.float32 else 1
        self._made = [jobs[0].shard.new_empty(sum(lengths), dtype=layout.stored_scale) for _ in range(count)]
        made = [[part.view(grid) for part, grid in zip(m.split(lengths), grids, strict=True)] for m in self._made]
        # Of a layout whose blocks have scales in common: those of blocks, those in common, and which they are.
        self._spread: list[tuple[torch.Tensor, torch.Tensor, bool, Size]] = []
        self._pairs: tuple[list[Any], list[Any]] = [None] * len(jobs), [None] * len(jobs)
        # Where scales go, and those that go there.
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at, job in enumerate(jobs):
            holder = job.output.holder
            data = {inner.usage: own for inner, own in zip(holder.raw_inner(), job.output.data, strict=True)}
            scales = {inner.usage: inner for inner in holder.inner_tensors if inner.argument.endswith("scale_inv")}
            for columnwise, usage in enumerate(("rowwise", "columnwise")):
                if usage not in data:
                    continue
                place = len(sides) * at + columnwise * (len(sides) - 1)
                own = [each[place] for each in made]
                if layout.shared is not None:
                    common, own = own, [each.new_empty(layout.grid(matrices[at], bool(columnwise))) for each in own]
                    self._spread += [(o, c, bool(columnwise), matrices[at]) for o, c in zip(own, common, strict=True)]
                self._pairs[columnwise][at] = own[0], data[usage]
                self._held += job.output.places(scales[usage] if usage in scales else scales["both"], own[-1])
        # After a call that raised nothing the same arguments are not looked at again.
        self._seen, self._cast = False, False

    def amaxes(self) -> torch.Tensor:
        amaxes = kernels.grid_multi_amax(*self._places, checked=self._seen)
        self._seen = True
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        factors, stored = self._scales(self.jobs, amaxes)
        self._made[0].copy_(factors)
        self._made[-1].copy_(stored)
        for spread, common, columnwise, matrix in self._spread:
            spread.copy_(for_blocks(common, self._layout, columnwise, matrix))
        if self._held:
            foreach_copy_(*map(list, zip(*self._held, strict=True)))
        kernels.grid_multi_cast(*self._places, *self._pairs, checked=self._cast)
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
        # A range of the weight is no range of transposed columns that have scales of their own.
        scattered = quantizer.columnwise_usage and quantizer.layout.transposed and not quantizer.layout.square
        return None if scattered else self.batch

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
