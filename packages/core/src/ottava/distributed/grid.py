"""Shards of weights with scales on a grid: amaxes of blocks are reduced, whatever shards cut; one call casts all."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ottava import kernels
from ottava.distributed.rules import ShardBatch, ShardRule, rule_of
from ottava.distributed.shards import ShardJob
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout
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


class _Side(NamedTuple):
    """What is written of one shard in one direction.

    Attributes:
        at, columnwise: which shard and direction.
        part, grid: where the amaxes of the weight are among all, and as what grid.
        data: the elements of the shard.
        inner, held: the scales; all of the weight, if they are held.
    """

    at: int
    columnwise: bool
    part: int
    grid: tuple[int, int]
    data: torch.Tensor
    inner: InnerTensor
    held: torch.Tensor | None


class GridBatch(ShardBatch):
    """Shards of one layout.

    The amaxes of each weight are those of the blocks of rowwise data, then of columnwise data that are others.
    """

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        quantizer, rule = jobs[0].quantizer, rule_of(jobs[0].quantizer)
        self._layout: Layout = quantizer.layout  # type: ignore[attr-defined]
        self._scales: Scales = rule.scales  # type: ignore[attr-defined]
        self._places = (
            [job.shard for job in jobs],
            [job.dtype for job in jobs],
            [job.matrix for job in jobs],
            [job.start_offset for job in jobs],
            [self._layout] * len(jobs),
        )
        self._lengths: list[int] = []
        self._sides: list[_Side] = []
        for at in range(len(jobs)):
            self._look(at)
        self._held = [side.held for side in self._sides if side.held is not None]
        # After a call that raised nothing the same arguments are not looked at again.
        self._seen, self._cast = False, False

    def _look(self, at: int) -> None:
        """Take down where the scales of a weight are among all, and where its data and scales go."""
        layout, output, matrix, first = self._layout, self.jobs[at].output, self.jobs[at].matrix, len(self._lengths)
        by_row, by_column = (layout.grid(matrix, columnwise, shared=True) for columnwise in (False, True))
        self._lengths += [math.prod(by_row)] if layout.square else [math.prod(by_row), math.prod(by_column)]
        data = {inner.usage: own for inner, own in zip(output.holder.raw_inner(), output.data, strict=True)}
        scales = {inner.usage: inner for inner in output.holder.inner_tensors if inner.argument.endswith("scale_inv")}
        for columnwise, usage in enumerate(("rowwise", "columnwise")):
            if usage not in data:
                continue
            inner = scales[usage] if usage in scales else scales["both"]
            held: torch.Tensor | None = getattr(output.holder, inner.attribute)
            if held is not None and held.numel() != math.prod(layout.grid(matrix, bool(columnwise))):
                held = None
            part, grid = (first, by_row) if layout.square or not columnwise else (first + 1, by_column)
            self._sides.append(_Side(at, bool(columnwise), part, grid, data[usage], inner, held))

    def amaxes(self) -> torch.Tensor:
        amaxes = kernels.grid_multi_amax(*self._places, checked=self._seen)
        self._seen = True
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        factors, stored = (values.split(self._lengths) for values in self._scales(self.jobs, amaxes))
        pairs: tuple[list[Any], list[Any]] = [None] * len(self.jobs), [None] * len(self.jobs)
        found: list[torch.Tensor] = []
        for side in self._sides:
            pairs[side.columnwise][side.at] = self._of_blocks(factors[side.part], side), side.data
            if side.held is None:
                self.jobs[side.at].output.write_inner(side.inner, self._of_blocks(stored[side.part], side))
            else:
                found.append(self._of_blocks(stored[side.part], side, side.held.shape))
        if found:
            foreach_copy_(self._held, found)
        kernels.grid_multi_cast(*self._places, *pairs, checked=self._cast)
        self._cast = True
        self.written()

    def _of_blocks(self, values: torch.Tensor, side: _Side, shape: Sequence[int] | None = None) -> torch.Tensor:
        """One entry for each block, as the grid or of ``shape``, from one for each of what has a scale in common."""
        if self._layout.shared is None:
            return values.view(side.grid if shape is None else shape)
        spread = for_blocks(values.view(side.grid), self._layout, side.columnwise, self.jobs[side.at].matrix)
        return spread.contiguous() if shape is None else spread


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

    def independent_rows(self, quantizer: Any) -> int | None:
        sides = (False, True) if quantizer.columnwise_usage else (False,)
        rows = [quantizer.layout.block_of(columnwise, shared=True)[0] for columnwise in sides]
        return None if None in rows else math.lcm(*rows)


#: The rule of quantizers with one scale a tensor that a function of their own gives.
PerTensorShards = GridShards
