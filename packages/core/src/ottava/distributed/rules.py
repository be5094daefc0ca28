"""What a class of quantizers declares of the shards of a weight, and how the shards of many weights
are quantized.

Quantizing all shards gives the data and scales of the whole weight. Where scales follow from
amaxes, each rank gives those of its shard, one all-reduce(MAX) makes them those of the whole, and
each rank casts its shard. For every other quantizer the shards are gathered, in one all-gather, and
each rank quantizes the whole weight.
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
    """Shards whose quantizers are of one class, to be quantized together from amaxes, once or many
    times."""

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)
        self._written = [tensor for job in jobs for tensor in job.output.written_tensors()]

    @abstractmethod
    def amaxes(self) -> torch.Tensor:
        """What this rank contributes, of all shards one after the other: flat, float32, as many on
        every rank."""

    @abstractmethod
    def cast(self, amaxes: torch.Tensor) -> None:
        """Write data and scales from the :meth:`amaxes` of this or an equal batch, reduced over all
        ranks."""

    def written(self) -> None:
        """Tell all holders that their values changed."""
        torch.autograd.graph.increment_version(self._written)
        for job in self.jobs:
            job.output.holder.mark_written()


class ShardRule:
    """What a class of quantizers declares of the shards of a weight, as its attribute ``shards``.

    This one declares nothing, and serves every quantizer whose result depends on the values alone:
    shards of master weights are gathered, and FSDP2 gathers high precision.

    Args:
        options: names of options that all quantizers of a batch must have in common.
        rows: that many rows of a matrix, or a multiple of them, are quantized the same alone and in
            the whole: FSDP2 then gathers bytes, and nothing is reduced. None: no number.
    """

    #: What quantizes many shards from their amaxes; None: their values are gathered.
    batch: ClassVar[type[ShardBatch] | None] = None

    def __init__(self, *, options: Sequence[str] = (), rows: int | None = None) -> None:
        self.options = tuple(options)
        self._rows = rows

    def batch_for(self, quantizer: Any) -> type[ShardBatch] | None:
        """:attr:`batch` for this quantizer of the class."""
        return self.batch

    def one_amax(self, quantizer: Any) -> bool:
        """Whether the reduced amax of all shards is all that is needed to quantize one, as if it
        were the weight."""
        return False

    def independent_rows(self, quantizer: Any) -> int | None:
        """Rows that are quantized the same alone and in the whole by this quantizer of the
        class."""
        return self._rows

    def rows_of_blocks(self, quantizer: Any) -> int:
        """Shards of which whole quantized ones are made have a multiple of this number of rows."""
        return self.independent_rows(quantizer) or 1


_SILENT = ShardRule()


def rule_of(quantizer: Quantizer) -> ShardRule:
    """What the class of ``quantizer`` declares, if the declaration is of its ``quantize_impl`` and
    not of an older one.

    Raises:
        DTypeError: what it declares is no rule.
    """
    for cls in type(quantizer).__mro__:
        found = vars(cls).get("shards")
        if isinstance(found, str):
            # Classes that stand below this package name a rule of this module.
            found = cls.shards = globals()[found]()  # type: ignore[attr-defined]
        if isinstance(found, ShardRule):
            return found
        if found is not None:
            raise DTypeError(
                f"{cls.__name__}.shards is a {type(found).__name__}",
                "an ottava.distributed.ShardRule",
            )
        if "quantize_impl" in vars(cls):
            break
    return _SILENT


Scales = Callable[[Sequence[ShardJob], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def scales_of_layout(
    jobs: Sequence[ShardJob], amaxes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What elements are multiplied by, and the scales that are stored, as the layout of the jobs
    says."""
    quantizer: Any = jobs[0].quantizer
    scale, stored = kernels.grid_scales(amaxes, quantizer.layout, jobs[0].dtype)
    return stored if scale is None else scale, stored


class GridBatch(ShardBatch):
    """Shards of one layout. The amaxes of each weight are those of the blocks of rowwise data, then
    of columnwise data that are others."""

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        super().__init__(jobs)
        quantizer: Any = jobs[0].quantizer
        rule: Any = rule_of(quantizer)
        self._scales: Scales = rule.scales
        self._layout: Layout = quantizer.layout
        layout, matrices = self._layout, [as_matrix_shape(job.shape) for job in jobs]
        sources, starts = [job.shard for job in jobs], [job.start_offset for job in jobs]
        self._shards = (
            Shards(sources, [job.dtype for job in jobs], matrices, starts),
            [layout.text] * len(jobs),
        )
        sides = (False,) if layout.square else (False, True)
        grids = [layout.grid(matrix, side, shared=True) for matrix in matrices for side in sides]
        lengths = [math.prod(grid) for grid in grids]
        # What elements are multiplied by, and what is stored: of E8M0 one for both. Each cast
        # writes into them, because a view of them for each weight takes longer to make than a small
        # weight to cast.
        count = 2 if layout.scale is torch.float32 else 1
        self._made = [
            jobs[0].shard.new_empty(sum(lengths), dtype=layout.stored_scale) for _ in range(count)
        ]
        made = [
            [part.view(grid) for part, grid in zip(m.split(lengths), grids, strict=True)]
            for m in self._made
        ]
        # Of a layout whose blocks have scales in common: those of blocks, those in common, and
        # which they are.
        self._spread: list[tuple[torch.Tensor, torch.Tensor, bool, Size]] = []
        self._pairs: tuple[list[Any], list[Any]] = [None] * len(jobs), [None] * len(jobs)
        # Where scales go, and those that go there.
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
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
                own = [each[len(sides) * at + columnwise * (len(sides) - 1)] for each in made]
                if layout.shared is not None:
                    common, own = (
                        own,
                        [
                            each.new_empty(layout.grid(matrices[at], bool(columnwise)))
                            for each in own
                        ],
                    )
                    self._spread += [
                        (o, c, bool(columnwise), matrices[at])
                        for o, c in zip(own, common, strict=True)
                    ]
                self._pairs[columnwise][at] = own[0], data[usage]
                self._held += job.output.places(
                    scales[usage] if usage in scales else scales["both"], own[-1]
                )

    def amaxes(self) -> torch.Tensor:
        amaxes = torch.zeros_like(self._made[0], dtype=torch.float32)
        backend_module(amaxes.device.type).grid_multi_amax(*self._shards, amaxes)
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        factors, stored = self._scales(self.jobs, amaxes)
        self._made[0].copy_(factors)
        self._made[-1].copy_(stored)
        for spread, common, columnwise, matrix in self._spread:
            spread.copy_(for_blocks(common, self._layout, columnwise, matrix))
        if self._held:
            foreach_copy_(*map(list, zip(*self._held, strict=True)))
        backend_module(amaxes.device.type).grid_multi_cast(*self._shards, *self._pairs)
        self.written()


class GridShards(ShardRule):
    """Declared by quantizers with a layout: amaxes of blocks say all, and whole blocks of rows are
    quantized alone.

    The quantizers have it as their attribute ``layout``, as those that derive from
    :class:`ottava.tensors.GridQuantizer` or :class:`ottava.tensors.Float8QuantizerBase` do.

    Args:
        scales: ``scales(jobs, amaxes)`` gives what elements are multiplied by, and the scales that
            are stored, for the reduced amaxes of many weights of one layout, one after the other.
            By default the layout says; a quantizer whose scales are known gives others, and records
            the amaxes.
        options: as of :class:`ShardRule`.
    """

    batch: ClassVar[type[ShardBatch]] = GridBatch

    def __init__(self, scales: Scales = scales_of_layout, *, options: Sequence[str] = ()) -> None:
        super().__init__(options=options)
        self.scales = scales

    def batch_for(self, quantizer: Any) -> type[ShardBatch] | None:
        # A range of the weight is no range of transposed columns that have scales of their own.
        scattered = (
            quantizer.columnwise_usage
            and quantizer.layout.transposed
            and not quantizer.layout.square
        )
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


class GatheredBatch:
    """Shards whose values every rank needs, because their quantizers declare nothing that says less
    would do."""

    #: What is sent is padded to multiples of this many bytes, which are counted exactly in a
    #: float32.
    UNIT: ClassVar[int] = 4096

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)

    def values(self) -> torch.Tensor:
        """This rank's shards as bytes: where each begins and how many elements it has, then all of
        them."""
        places = [number for job in self.jobs for number in (job.start_offset, job.shard.numel())]
        sent = [
            torch.tensor(places, device=self.jobs[0].shard.device),
            *(job.rounded() for job in self.jobs),
        ]
        # Cloned, because contiguous() leaves a tensor of one element with strides that a view as
        # bytes refuses.
        return torch.cat(
            [v.clone(memory_format=torch.contiguous_format).view(torch.uint8) for v in sent]
        )

    def cast(self, ranks: Sequence[torch.Tensor]) -> None:
        """Quantize the weights from what all ranks sent; an element that no rank holds counts as
        0."""
        wholes = [
            torch.zeros(math.prod(j.shape), dtype=j.dtype, device=j.shard.device) for j in self.jobs
        ]
        for sent in ranks:
            at = 16 * len(wholes)
            places = sent[:at].view(torch.int64).tolist()
            for whole, start, count in zip(wholes, places[::2], places[1::2], strict=True):
                end = at + count * whole.element_size()
                # Copied, because the bytes may begin at an address that is not aligned for a wider
                # dtype.
                whole[start : start + count] = sent[at:end].clone().view(whole.dtype)
                at = end
        for job, whole in zip(self.jobs, wholes, strict=True):
            quantizer = job.quantizer.with_usage(**job.output.holder.get_usages())
            job.output.write(
                quantizer.quantize_impl(whole.view(job.shape), job.dtype), job.start_offset
            )


class ShardBatches(NamedTuple):
    """Shards of any mix of quantizers: those of a class together where amaxes suffice, all others
    together."""

    reduced: tuple[ShardBatch, ...]
    gathered: GatheredBatch | None

    @classmethod
    def of(cls, jobs: Sequence[ShardJob]) -> Self:
        """The jobs by what their quantizers declare, those with other values of its options
        apart."""
        together: dict[Any, list[ShardJob]] = {}
        for job in jobs:
            quantizer: Any = job.quantizer
            rule = rule_of(quantizer)
            batch = rule.batch_for(quantizer)
            options = (getattr(quantizer, name) for name in rule.options)
            key = batch and (
                batch,
                type(quantizer),
                job.dtype,
                getattr(quantizer, "layout", None),
                *options,
            )
            together.setdefault(key, []).append(job)
        others = together.pop(None, None)
        reduced = tuple(batch(own) for (batch, *_), own in together.items())
        return cls(reduced, None if others is None else GatheredBatch(others))

    def quantize(self, group: Any) -> None:
        """Quantize all shards: one all-reduce over ``group`` for all amaxes, one all-gather for all
        values needed."""
        if self.gathered is None:
            self.cast(self.amaxes(group))
            return
        # Ranks send different amounts, so that the largest is found first, in the all-reduce of the
        # amaxes.
        sent, unit = self.gathered.values(), self.gathered.UNIT
        *amaxes, units = self.amaxes(
            group, torch.tensor([math.ceil(sent.numel() / unit)], device=sent.device).float()
        )
        self.cast(amaxes)
        padded = torch.nn.functional.pad(sent, [0, int(units.item()) * unit - sent.numel()])
        self.gathered.cast(list(all_gather(padded, group)) if process_groups_ready() else [padded])

    def amaxes(self, group: Any, *more: torch.Tensor) -> list[torch.Tensor]:
        """What the ranks of ``group`` contribute to each batch, and ``more``, in one
        all-reduce(MAX)."""
        own = [*(batch.amaxes() for batch in self.reduced), *more]
        if not own or not process_groups_ready():
            return own
        packed = all_reduce_max(own[0] if len(own) == 1 else torch.cat(own), group)
        return list(packed.split([amaxes.numel() for amaxes in own]))

    def cast(self, amaxes: Sequence[torch.Tensor]) -> None:
        """Write the shards whose amaxes these are."""
        for batch, own in zip(self.reduced, amaxes, strict=True):
            batch.cast(own)


def requantize(written: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Quantize new values into tensors; shards whose scales are shared are reduced together, once
    for each group."""
    together: dict[Any, list[ShardJob]] = {}
    for target, values in written:
        group, quantizer = target._shard_group, target._quantizer
        if group is None or quantizer is None or not rule_of(quantizer).one_amax(quantizer):
            target.quantize_(values)
            continue
        quantizer = quantizer.with_usage(**target.get_usages())
        # One amax gives the scale, so that the shard can be treated as a whole weight.
        shape, flat = tuple(target.shape), values.detach().reshape(-1)
        output = shard_output(target, shape, 0, flat.numel(), "a shard")
        together.setdefault(group, []).append(
            ShardJob(quantizer, flat, shape, values.dtype, 0, output)
        )
    for group, jobs in together.items():
        with torch.no_grad():
            ShardBatches.of(jobs).quantize(group)
