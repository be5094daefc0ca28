"""The rule by which one class of quantizers quantizes shards.

Quantizing all shards gives the data and scales of the whole weight::

    ShardRule   declared by a class of quantizers: do amaxes suffice, do rows suffice?
    ShardBatch  many shards of one class, where amaxes suffice:
                amaxes of the shards ── one all-reduce(MAX) ──> amaxes of the weights ──> cast

:class:`GridShards` is the rule of quantizers with a layout, and :class:`GridBatch` its batch.
:mod:`ottava.distributed.batches` quantizes shards of any mix of classes by their rules.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from ottava import kernels
from ottava.distributed.row_batch import RowBatch
from ottava.distributed.shards import ShardBatch, ShardJob
from ottava.errors import DTypeError
from ottava.kernels.backends import backend_module
from ottava.kernels.checks import Shards
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout, Size, as_matrix_shape
from ottava.tensors import GridQuantizer
from ottava.tensors.declaration import InnerTensor
from ottava.tensors.packed import needs_packing
from ottava.tensors.quantizer import Quantizer
from ottava.torch_private import foreach_copy_


class ShardRule:
    """How the shards of a weight are quantized: the attribute ``shards`` of a class of quantizers.

    This base class serves every quantizer whose result depends on the values alone: the shards of
    master weights are gathered, and FSDP2 gathers high precision.

    Args:
        options: names of options that all quantizers of a batch must have in common.
        rows: a multiple of this number of rows gives the same bytes alone as in the whole matrix,
            such as 32 for MXFP8. FSDP2 then gathers bytes, and nothing is reduced. None: there is
            no such number, as for one scale of the whole matrix.
    """

    #: The class that quantizes many shards from their amaxes; None where values are gathered.
    batch: ClassVar[type[ShardBatch] | None] = None

    def __init__(self, *, options: Sequence[str] = (), rows: int | None = None) -> None:
        self.options = tuple(options)
        self._rows = rows

    def batch_for(self, quantizer: Quantizer) -> type[ShardBatch] | None:
        """:attr:`batch` for this quantizer of the class."""
        return self.batch

    def batch_of_rows(self, quantizer: Quantizer) -> type[ShardBatch] | None:
        """The class that quantizes many shards of whole rows, which cut no blocks, from numbers
        that are reduced by MAX. None where values are gathered."""
        return self.batch_for(quantizer)

    def for_whole(self, quantizer: Quantizer) -> Quantizer:
        """The quantizer that quantizes a whole weight, of which ``quantizer`` may expect rows."""
        return quantizer

    def one_amax(self, quantizer: Quantizer) -> bool:
        """Whether one amax, reduced over all shards, suffices to quantize a shard like a whole
        weight."""
        return False

    def independent_rows(self, quantizer: Quantizer) -> int | None:
        """Shards of a multiple of this number of rows can be quantized without the other shards,
        because their scales depend on nothing else. None: scales depend on all shards."""
        return self._rows

    def rows_of_blocks(self, quantizer: Quantizer) -> int:
        """The rows of a shard must be a multiple of this number, so that it cuts no block."""
        return self.independent_rows(quantizer) or 1


_DEFAULT_RULE = ShardRule()


def rule_of(quantizer: Quantizer) -> ShardRule:
    """The rule that the class of ``quantizer`` declares.

    A declaration of a base class counts only if no later class overrides ``quantize_impl``, because
    it describes the base class's ``quantize_impl``. Without a declaration the rule is a plain
    :class:`ShardRule`.

    Raises:
        DTypeError: the class declares something else than a rule.
    """
    for cls in type(quantizer).__mro__:
        rule = vars(cls).get("shards")
        if isinstance(rule, str):
            rule = _RULES_BY_NAME.get(rule, rule)
        if isinstance(rule, ShardRule):
            return rule
        if rule is not None:
            raise DTypeError(
                f"{cls.__name__}.shards is a {type(rule).__name__}",
                "an ottava.distributed.ShardRule",
            )
        if "quantize_impl" in vars(cls):
            break
    return _DEFAULT_RULE


#: A function from shards and their reduced amaxes to the factors that multiply elements and the
#: scales that are stored, both of the shape of the amaxes.
Scales = Callable[[Sequence[ShardJob], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def layout_of(quantizer: Quantizer) -> Layout:
    """The attribute ``layout`` of a quantizer.

    Raises:
        DTypeError: the quantizer has no layout.
    """
    layout = getattr(quantizer, "layout", None)
    if not isinstance(layout, Layout):
        raise DTypeError(
            f"a {type(quantizer).__name__} has no layout", "an ottava.Layout, for GridShards"
        )
    return layout


def scales_of_layout(
    jobs: Sequence[ShardJob], amaxes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(factors, stored): the factors that multiply elements, and the scales that are stored.

    Both follow from the layout of the jobs, and have the shape of ``amaxes``.
    """
    scale, stored = kernels.grid_scales(amaxes, layout_of(jobs[0].quantizer), jobs[0].dtype)
    if scale is None:
        return stored, stored
    return scale, stored


#: (factors, data) of one cast: the factors that multiply elements, one for each block, and the
#: memory that the elements are written into.
_CastTensors = tuple[torch.Tensor, torch.Tensor]


class _SharedScale(NamedTuple):
    """The scales of one usage of a weight whose layout shares scales between blocks.

    Attributes:
        blocks: the scale of each block, which is written.
        areas: the scale of each area of blocks.
        columnwise: the usage.
        matrix: rows and columns of the weight.
    """

    blocks: torch.Tensor
    areas: torch.Tensor
    columnwise: bool
    matrix: Size


class GridBatch(ShardBatch):
    """Shards of one layout.

    The amaxes of each weight are those of the blocks of rowwise data, then of columnwise data where
    its blocks differ.
    """

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        quantizer = jobs[0].quantizer
        self._scales: Scales = getattr(rule_of(quantizer), "scales", scales_of_layout)
        self._layout = layout_of(quantizer)
        self._matrices = [as_matrix_shape(job.shape) for job in jobs]
        self._shards = Shards(
            [job.shard for job in jobs],
            [job.dtype for job in jobs],
            self._matrices,
            [job.start_offset for job in jobs],
        )
        self._layout_texts = [self._layout.text] * len(jobs)
        self._scale_buffers: list[torch.Tensor] = []
        self._scale_views = self._allocate_scales()
        self._shared_scales: list[_SharedScale] = []
        # For each job its casts of rowwise and of columnwise data; None where it has no such data.
        self._rowwise_casts: list[_CastTensors | None] = [None] * len(jobs)
        self._columnwise_casts: list[_CastTensors | None] = [None] * len(jobs)
        # The holders' tensors of scales, and the stored scale that each of them gets.
        self._scale_targets: list[torch.Tensor] = []
        self._scale_values: list[torch.Tensor] = []
        for number in range(len(jobs)):
            self._plan_writes(number)

    def _allocate_scales(self) -> dict[tuple[int, bool], list[torch.Tensor]]:
        """Buffers for the scales of all weights.

        The first buffer has the factors that multiply elements, the last one the stored scales;
        they are one buffer for E8M0. Each cast writes into them, because creating a view of them
        for each weight takes longer than casting a small weight.

        Returns:
            For each job and usage, its view of each buffer. Blocks that are squares have views for
            the rowwise usage alone.
        """
        layout = self._layout
        usages = (False,) if layout.square else (False, True)
        keys = [(number, usage) for number in range(len(self.jobs)) for usage in usages]
        grids = [layout.grid(self._matrices[number], usage, shared=True) for number, usage in keys]
        lengths = [math.prod(grid) for grid in grids]
        count = 2 if layout.scale is torch.float32 else 1
        views: dict[tuple[int, bool], list[torch.Tensor]] = {key: [] for key in keys}
        for _ in range(count):
            buffer = self.jobs[0].shard.new_empty(sum(lengths), dtype=layout.stored_scale)
            self._scale_buffers.append(buffer)
            for key, flat, grid in zip(keys, buffer.split(lengths), grids, strict=True):
                views[key].append(flat.view(grid))
        return views

    def _plan_writes(self, number: int) -> None:
        """Note which tensors the cast of a job reads and writes."""
        output = self.jobs[number].output
        data = {
            inner.usage: memory
            for inner, memory in zip(output.holder.raw_inner(), output.data, strict=True)
        }
        scales: dict[str, InnerTensor] = {
            inner.usage: inner
            for inner in output.holder.inner_tensors
            if inner.argument.endswith("scale_inv")
        }
        casts = {"rowwise": self._rowwise_casts, "columnwise": self._columnwise_casts}
        for usage, casts_of_usage in casts.items():
            if usage not in data:
                continue
            factors, stored = self._block_scales(number, usage == "columnwise")
            casts_of_usage[number] = factors, data[usage]
            for target, values in output.places(scales.get(usage) or scales["both"], stored):
                self._scale_targets.append(target)
                self._scale_values.append(values)

    def _block_scales(self, number: int, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(factors, stored) for one usage of a job: the factors that multiply elements and the
        scales that are stored, one for each block."""
        views = self._scale_views[number, columnwise and not self._layout.square]
        if self._layout.shared is None:
            return views[0], views[-1]
        matrix = self._matrices[number]
        grid = self._layout.grid(matrix, columnwise)
        blocks = [view.new_empty(grid) for view in views]
        self._shared_scales += [
            _SharedScale(scale, view, columnwise, matrix)
            for scale, view in zip(blocks, views, strict=True)
        ]
        return blocks[0], blocks[-1]

    def amaxes(self) -> torch.Tensor:
        amaxes = torch.zeros_like(self._scale_buffers[0], dtype=torch.float32)
        backend = backend_module(amaxes.device.type)
        backend.grid_multi_amax(self._shards, self._layout_texts, amaxes)
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        factors, stored = self._scales(self.jobs, amaxes)
        self._scale_buffers[0].copy_(factors)
        self._scale_buffers[-1].copy_(stored)
        for scale in self._shared_scales:
            scale.blocks.copy_(
                for_blocks(scale.areas, self._layout, scale.columnwise, scale.matrix)
            )
        if self._scale_targets:
            foreach_copy_(self._scale_targets, self._scale_values)
        backend = backend_module(amaxes.device.type)
        backend.grid_multi_cast(
            self._shards, self._layout_texts, self._rowwise_casts, self._columnwise_casts
        )
        self.written()


class GridShards(ShardRule):
    """The rule of quantizers with a layout.

    Scales follow from the amaxes of blocks, and rows that make whole blocks are quantized alone.
    The quantizers have the attribute ``layout``, as those that derive from
    :class:`ottava.tensors.GridQuantizer` or :class:`ottava.tensors.Float8QuantizerBase` do.

    Args:
        scales: ``scales(jobs, amaxes)`` returns the factors that multiply elements and the scales
            that are stored, for the reduced amaxes of many weights of one layout, one after the
            other. By default both follow from the layout. A quantizer with known scales returns
            these, and records the amaxes.
        options: see :class:`ShardRule`.
    """

    batch: ClassVar[type[ShardBatch]] = GridBatch

    def __init__(self, scales: Scales = scales_of_layout, *, options: Sequence[str] = ()) -> None:
        super().__init__(options=options)
        self.scales = scales

    def batch_for(self, quantizer: Quantizer) -> type[ShardBatch] | None:
        layout = layout_of(quantizer)
        if needs_packing(layout) or layout.candidates or layout.stochastic:
            # Amaxes of blocks do not suffice, or a range of elements is no range of bytes.
            return None
        if quantizer.columnwise_usage and layout.transposed and not layout.square:
            # Transposed columns with their own scales cannot be written shard by shard, because a
            # range of the weight is scattered over them.
            return None
        return self.batch

    def batch_of_rows(self, quantizer: Quantizer) -> type[ShardBatch] | None:
        batch = self.batch_for(quantizer)
        if batch is not None:
            return batch
        if not isinstance(quantizer, GridQuantizer) or self.scales is not scales_of_layout:
            return None
        if quantizer.layout.candidates and None in self._heights(quantizer):
            # The errors that choose among candidates are those of all rows.
            return None
        return RowBatch

    def for_whole(self, quantizer: Quantizer) -> Quantizer:
        whole = quantizer.copy()
        if isinstance(whole, GridQuantizer):
            whole.amax_reduction_group = None
        return whole

    def one_amax(self, quantizer: Quantizer) -> bool:
        one_scale = layout_of(quantizer).block == (None, None)
        return one_scale and self.batch_for(quantizer) is not None

    def _heights(self, quantizer: Quantizer) -> list[int | None]:
        """The number of rows that share a scale, in each direction; None for all rows."""
        layout = layout_of(quantizer)
        usages = (False, True) if quantizer.columnwise_usage else (False,)
        return [layout.block_of(columnwise, shared=True)[0] for columnwise in usages]

    def independent_rows(self, quantizer: Quantizer) -> int | None:
        layout = layout_of(quantizer)
        if None in self._heights(quantizer) or layout.second_level != "none" or layout.stochastic:
            # Random numbers depend on the place in the whole weight.
            return None
        return self.rows_of_blocks(quantizer)

    def rows_of_blocks(self, quantizer: Quantizer) -> int:
        heights = [rows for rows in self._heights(quantizer) if rows is not None]
        layout = layout_of(quantizer)
        if quantizer.columnwise_usage:
            heights.append(layout.elements_per_byte)
            if layout.rotation is not None and layout.rotation.turns(True):
                heights.append(layout.rotation.size)
        return math.lcm(*heights)


# The rules that classes of lower packages name, because these cannot import this module.
_RULES_BY_NAME: dict[str, ShardRule] = {"GridShards": GridShards()}
