"""The rule by which a class of quantizers quantizes shards, and batches of shards that follow it.

Quantizing all shards gives the data and scales of the whole weight. Where scales follow from
amaxes, each rank computes the amaxes of its shard, one all-reduce(MAX) turns them into those of the
whole weight, and each rank casts its shard. For every other quantizer one all-gather brings the
shards to every rank, and each rank quantizes the whole weight.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch

from ottava import kernels
from ottava.collectives import all_gather, all_reduce_max, process_groups_ready
from ottava.distributed.shards import ShardJob, shard_output
from ottava.errors import DTypeError
from ottava.kernels.backends import backend_module
from ottava.kernels.checks import Shards
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout, Size, as_matrix_shape
from ottava.tensors.quantizer import Quantizer
from ottava.torch_private import foreach_copy_


class ShardBatch(ABC):
    """Shards whose quantizers are of one class, quantized together from their amaxes.

    A batch may be quantized many times.
    """

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)
        self._written = [tensor for job in jobs for tensor in job.output.written_tensors()]

    @abstractmethod
    def amaxes(self) -> torch.Tensor:
        """The amaxes of this rank's shards, one shard after the other: flat, float32, the same
        number on every rank."""

    @abstractmethod
    def cast(self, amaxes: torch.Tensor) -> None:
        """Write data and scales from :meth:`amaxes` that were reduced over all ranks, of this batch
        or an equal one."""

    def written(self) -> None:
        """Raise the versions of the written tensors, and mark their holders as written."""
        torch.autograd.graph.increment_version(self._written)
        for job in self.jobs:
            job.output.holder.mark_written()


class ShardRule:
    """How the shards of a weight are quantized: the attribute ``shards`` of a class of quantizers.

    This base class serves every quantizer whose result depends on the values alone: the shards of
    master weights are gathered, and FSDP2 gathers high precision.

    Args:
        options: names of options that all quantizers of a batch must have in common.
        rows: this many rows of a matrix, or a multiple, are quantized the same alone as in the
            whole matrix. FSDP2 then gathers bytes, and nothing is reduced. None: no such number.
    """

    #: The class that quantizes many shards from their amaxes; None where values are gathered.
    batch: ClassVar[type[ShardBatch] | None] = None

    def __init__(self, *, options: Sequence[str] = (), rows: int | None = None) -> None:
        self.options = tuple(options)
        self._rows = rows

    def batch_for(self, quantizer: Any) -> type[ShardBatch] | None:
        """:attr:`batch` for this quantizer of the class."""
        return self.batch

    def one_amax(self, quantizer: Any) -> bool:
        """Whether one amax, reduced over all shards, suffices to quantize a shard like a whole
        weight."""
        return False

    def independent_rows(self, quantizer: Any) -> int | None:
        """The number of rows that ``quantizer`` quantizes the same alone as in the whole matrix;
        None if there is no such number."""
        return self._rows

    def rows_of_blocks(self, quantizer: Any) -> int:
        """The number of rows that the rows of a quantized shard must be a multiple of."""
        return self.independent_rows(quantizer) or 1


_UNDECLARED = ShardRule()


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
            # Classes of lower packages cannot import this module, so they name a rule of it.
            rule = cls.shards = globals()[rule]()  # type: ignore[attr-defined]
        if isinstance(rule, ShardRule):
            return rule
        if rule is not None:
            raise DTypeError(
                f"{cls.__name__}.shards is a {type(rule).__name__}",
                "an ottava.distributed.ShardRule",
            )
        if "quantize_impl" in vars(cls):
            break
    return _UNDECLARED


Scales = Callable[[Sequence[ShardJob], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def scales_of_layout(
    jobs: Sequence[ShardJob], amaxes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(factors, stored): the factors that multiply elements, and the scales that are stored.

    Both follow from the layout of the jobs, and have the shape of ``amaxes``.
    """
    quantizer: Any = jobs[0].quantizer
    scale, stored = kernels.grid_scales(amaxes, quantizer.layout, jobs[0].dtype)
    return stored if scale is None else scale, stored


class GridBatch(ShardBatch):
    """Shards of one layout.

    The amaxes of each weight are those of the blocks of rowwise data, then of columnwise data where
    its blocks differ.
    """

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        quantizer: Any = jobs[0].quantizer
        rule: Any = rule_of(quantizer)
        self._scales: Scales = rule.scales
        self._layout: Layout = quantizer.layout
        layout = self._layout
        matrices = [as_matrix_shape(job.shape) for job in jobs]
        self._shards = (
            Shards(
                [job.shard for job in jobs],
                [job.dtype for job in jobs],
                matrices,
                [job.start_offset for job in jobs],
            ),
            [layout.text] * len(jobs),
        )
        sides = (False,) if layout.square else (False, True)
        grids = [layout.grid(matrix, side, shared=True) for matrix in matrices for side in sides]
        lengths = [math.prod(grid) for grid in grids]
        # The buffers of the factors that multiply elements and of the stored scales; one buffer
        # serves both for E8M0. Each cast writes into them, because creating a view of them for each
        # weight takes longer than casting a small weight.
        count = 2 if layout.scale is torch.float32 else 1
        self._scale_buffers = [
            jobs[0].shard.new_empty(sum(lengths), dtype=layout.stored_scale) for _ in range(count)
        ]
        views = [
            [flat.view(grid) for flat, grid in zip(buffer.split(lengths), grids, strict=True)]
            for buffer in self._scale_buffers
        ]
        # For a layout whose blocks share scales: the scales of blocks, the shared scales, whether
        # they are columnwise, and the matrix.
        self._spread: list[tuple[torch.Tensor, torch.Tensor, bool, Size]] = []
        # For each usage and job, the factors and the data that the cast writes.
        self._pairs: tuple[list[Any], list[Any]] = [None] * len(jobs), [None] * len(jobs)
        # The holders' tensors of scales, and the values for each.
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at, job in enumerate(jobs):
            holder = job.output.holder
            data = {
                inner.usage: own
                for inner, own in zip(holder.raw_inner(), job.output.data, strict=True)
            }
            scales = {
                inner.usage: inner
                for inner in holder.inner_tensors
                if inner.argument.endswith("scale_inv")
            }
            for columnwise, usage in enumerate(("rowwise", "columnwise")):
                if usage not in data:
                    continue
                own = [view[len(sides) * at + columnwise * (len(sides) - 1)] for view in views]
                if layout.shared is not None:
                    common = own
                    grid = layout.grid(matrices[at], bool(columnwise))
                    own = [each.new_empty(grid) for each in common]
                    self._spread += [
                        (o, c, bool(columnwise), matrices[at])
                        for o, c in zip(own, common, strict=True)
                    ]
                self._pairs[columnwise][at] = own[0], data[usage]
                inner = scales[usage] if usage in scales else scales["both"]
                self._stored += job.output.places(inner, own[-1])

    def amaxes(self) -> torch.Tensor:
        amaxes = torch.zeros_like(self._scale_buffers[0], dtype=torch.float32)
        backend_module(amaxes.device.type).grid_multi_amax(*self._shards, amaxes)
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        factors, stored = self._scales(self.jobs, amaxes)
        self._scale_buffers[0].copy_(factors)
        self._scale_buffers[-1].copy_(stored)
        for spread, common, columnwise, matrix in self._spread:
            spread.copy_(for_blocks(common, self._layout, columnwise, matrix))
        if self._stored:
            foreach_copy_(*map(list, zip(*self._stored, strict=True)))
        backend_module(amaxes.device.type).grid_multi_cast(*self._shards, *self._pairs)
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

    def batch_for(self, quantizer: Any) -> type[ShardBatch] | None:
        # Transposed columns with their own scales cannot be written shard by shard, because a range
        # of the weight is scattered over them.
        scattered = (
            quantizer.columnwise_usage
            and quantizer.layout.transposed
            and not quantizer.layout.square
        )
        return None if scattered else self.batch

    def one_amax(self, quantizer: Any) -> bool:
        return bool(quantizer.layout.block == (None, None))

    def _heights(self, quantizer: Any) -> list[int | None]:
        """The number of rows that share a scale, in each direction; None for all rows."""
        sides = (False, True) if quantizer.columnwise_usage else (False,)
        return [quantizer.layout.block_of(columnwise, shared=True)[0] for columnwise in sides]

    def independent_rows(self, quantizer: Any) -> int | None:
        return None if None in self._heights(quantizer) else self.rows_of_blocks(quantizer)

    def rows_of_blocks(self, quantizer: Any) -> int:
        return math.lcm(*(rows for rows in self._heights(quantizer) if rows is not None))


#: The rule of quantizers with one scale for a tensor, which their own function computes.
PerTensorShards = GridShards


class GatheredBatch:
    """Shards whose values every rank needs, because amaxes do not suffice for their quantizers."""

    #: Ranks pad what they send to a multiple of this many bytes. The number of such units is
    #: reduced as a float32, which counts them exactly.
    UNIT: ClassVar[int] = 4096

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)

    def values(self) -> torch.Tensor:
        """This rank's shards as uint8.

        Two int64 for each job say where its shard begins and how many elements it has; the values
        of all shards follow.
        """
        places = [number for job in self.jobs for number in (job.start_offset, job.shard.numel())]
        header = torch.tensor(places, device=self.jobs[0].shard.device)
        tensors = [header, *(job.rounded() for job in self.jobs)]
        # The tensors are cloned, because contiguous() leaves a tensor of one element with strides
        # that a view as bytes refuses.
        return torch.cat(
            [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in tensors]
        )

    def cast(self, ranks: Sequence[torch.Tensor]) -> None:
        """Quantize the weights from the :meth:`values` of all ranks; an element that no rank has
        counts as 0."""
        wholes = [
            torch.zeros(math.prod(j.shape), dtype=j.dtype, device=j.shard.device) for j in self.jobs
        ]
        for values in ranks:
            at = 16 * len(wholes)
            places = values[:at].view(torch.int64).tolist()
            for whole, start, count in zip(wholes, places[::2], places[1::2], strict=True):
                end = at + count * whole.element_size()
                # The bytes are copied, because they may begin at an address that is not aligned for
                # a wider dtype.
                whole[start : start + count] = values[at:end].clone().view(whole.dtype)
                at = end
        for job, whole in zip(self.jobs, wholes, strict=True):
            quantizer = job.quantizer.with_usage(**job.output.holder.get_usages())
            job.output.write(
                quantizer.quantize_impl(whole.view(job.shape), job.dtype), job.start_offset
            )


class ShardBatches(NamedTuple):
    """Shards of any mix of quantizers, in batches.

    Where amaxes suffice, the shards of one class of quantizers are a batch; all others are one
    gathered batch.
    """

    reduced: tuple[ShardBatch, ...]
    gathered: GatheredBatch | None

    @classmethod
    def of(cls, jobs: Sequence[ShardJob]) -> Self:
        """The batches of ``jobs``; the jobs of a batch agree in the options that their rule
        names."""
        together: dict[Any, list[ShardJob]] = {}
        for job in jobs:
            quantizer: Any = job.quantizer
            rule = rule_of(quantizer)
            batch = rule.batch_for(quantizer)
            options = (getattr(quantizer, name) for name in rule.options)
            layout = getattr(quantizer, "layout", None)
            key = batch and (batch, type(quantizer), job.dtype, layout, *options)
            together.setdefault(key, []).append(job)
        others = together.pop(None, None)
        reduced = tuple(batch(own) for (batch, *_), own in together.items())
        return cls(reduced, None if others is None else GatheredBatch(others))

    def quantize(self, group: Any) -> None:
        """Quantize all shards.

        One all-reduce over ``group`` serves all amaxes, and one all-gather all values that are
        needed.
        """
        if self.gathered is None:
            self.cast(self.amaxes(group))
            return
        # Ranks send different amounts, so the all-reduce of the amaxes also finds the largest one.
        values = self.gathered.values()
        unit = self.gathered.UNIT
        own_units = torch.tensor([math.ceil(values.numel() / unit)], device=values.device).float()
        *amaxes, units = self.amaxes(group, own_units)
        self.cast(amaxes)
        padded = torch.nn.functional.pad(values, [0, int(units.item()) * unit - values.numel()])
        self.gathered.cast(list(all_gather(padded, group)) if process_groups_ready() else [padded])

    def amaxes(self, group: Any, *more: torch.Tensor) -> list[torch.Tensor]:
        """The amaxes of each batch, and ``more``, reduced over ``group`` in one
        all-reduce(MAX)."""
        own = [*(batch.amaxes() for batch in self.reduced), *more]
        if not own or not process_groups_ready():
            return own
        packed = all_reduce_max(own[0] if len(own) == 1 else torch.cat(own), group)
        return list(packed.split([amaxes.numel() for amaxes in own]))

    def cast(self, amaxes: Sequence[torch.Tensor]) -> None:
        """Write the shards of the reduced batches from ``amaxes``, one tensor for each batch."""
        for batch, own in zip(self.reduced, amaxes, strict=True):
            batch.cast(own)


def requantize(written: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Quantize new values into tensors, given as (tensor, values).

    Shards that share a scale are reduced together, once for each group.
    """
    together: dict[Any, list[ShardJob]] = {}
    for target, values in written:
        group, quantizer = target._shard_group, target._quantizer
        if group is None or quantizer is None or not rule_of(quantizer).one_amax(quantizer):
            target.quantize_(values)
            continue
        quantizer = quantizer.with_usage(**target.get_usages())
        # One amax gives the scale, so the shard can be treated as a whole weight.
        shape, flat = tuple(target.shape), values.detach().reshape(-1)
        output = shard_output(target, shape, 0, flat.numel(), "a shard")
        together.setdefault(group, []).append(
            ShardJob(quantizer, flat, shape, values.dtype, 0, output)
        )
    for group, jobs in together.items():
        with torch.no_grad():
            ShardBatches.of(jobs).quantize(group)
