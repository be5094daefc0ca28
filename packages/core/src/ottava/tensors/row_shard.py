"""``RowShard``: rows of a tensor that are quantized as they are in the whole tensor.

Two things may depend on the other rows. A scale may follow from the amax of all rows, and random
numbers follow from a seed and the places of the elements in the whole tensor. Ranks that have the
rows of one tensor learn both in one reduction::

    shared amaxes ──────────────────┐
    the first rank's seed ──────────┼── one all-reduce(MAX) ──> RowShard.quantize
    the number of each rank's rows ─┘

Seeds and numbers of rows travel as words of 16 bits, which float32 holds exactly.
"""

import torch

from ottava.collectives import Group, Ranks, all_reduce_max
from ottava.kernels import draw_seed
from ottava.kernels.for_layers import LevelTensors, grid_quantize_levels
from ottava.kernels.reference import Amaxes, amaxes_of, quantize_direction
from ottava.layout import Layout, as_matrix_shape

#: How many words of 16 bits an integer of 64 bits has.
WORDS = 4
#: Data, scales and amaxes of rows and of columns; None for a direction that is not made.
Sides = tuple[LevelTensors | None, LevelTensors | None]


def to_words(numbers: torch.Tensor) -> torch.Tensor:
    """The words of integers, which are not negative: float32, with a last dimension more."""
    shifts = 16 * torch.arange(WORDS, device=numbers.device)
    return ((numbers.unsqueeze(-1) >> shifts) & 0xFFFF).to(torch.float32)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """The integers with these words: int64, without the last dimension."""
    shifts = 16 * torch.arange(WORDS, device=words.device)
    return (words.to(torch.int64) << shifts).sum(-1)


class RowShard:
    """Rows of a tensor whose other rows may lie on other ranks.

    Args:
        rows: the values, in the dtype that the quantizer gets.
        layout: of the elements.
        rowwise, columnwise: which directions are made.
    """

    def __init__(self, rows: torch.Tensor, layout: Layout, rowwise: bool, columnwise: bool) -> None:
        self._rows = rows
        self._layout = layout
        self._requested = rowwise, columnwise
        self._amaxes = [
            amaxes_of(rows, layout, bool(side)) if is_requested else None
            for side, is_requested in enumerate(self._requested)
        ]
        self._shared = [
            tensor
            for side, amaxes in enumerate(self._amaxes)
            if amaxes is not None
            for tensor in _shared(amaxes, layout, bool(side))
        ]

    @property
    def is_random(self) -> bool:
        """Whether elements are rounded at random, and so depend on their places."""
        return self._layout.stochastic

    @property
    def row_count(self) -> int:
        """The number of rows, as a matrix has them."""
        return as_matrix_shape(self._rows.shape)[0]

    @property
    def number_count(self) -> int:
        """How many :meth:`numbers` there are, which does not depend on the rows."""
        return sum(self._number_sizes())

    def _number_sizes(self) -> list[int]:
        """Of the amaxes, then of the words of the seed."""
        words = WORDS if self._layout.stochastic else 0
        return [*(tensor.numel() for tensor in self._shared), words]

    def numbers(self, *, is_first: bool) -> torch.Tensor:
        """What these rows contribute to the numbers that MAX reduces: flat, float32.

        They are the amaxes that span the rows of the tensor, then the words of a seed, if elements
        are rounded at random. The seed is drawn for all rows, so that the generators of ranks stay
        alike, and is 0 for all but the first ones.

        Args:
            is_first: whether the rows are the first ones of the tensor.
        """
        parts = [torch.empty(0, dtype=torch.float32, device=self._rows.device)]
        parts += [tensor.reshape(-1) for tensor in self._shared]
        if self._layout.stochastic:
            seed = draw_seed(self._rows.device)
            parts.append(to_words(seed if is_first else torch.zeros_like(seed)))
        return torch.cat(parts)

    def quantize(self, numbers: torch.Tensor, first_row: int) -> Sides:
        """The data of the rows.

        Args:
            numbers: :meth:`numbers`, reduced by MAX over all rows of the tensor.
            first_row: the row of the tensor that is the first one here.
        """
        *shared, words = numbers.split(self._number_sizes())
        seed = from_words(words) if self._layout.stochastic else None
        if not self._shared:
            return grid_quantize_levels(
                self._rows, self._layout.text, *self._requested, seed, first_row
            )
        for tensor, reduced in zip(self._shared, shared, strict=True):
            tensor.copy_(reduced.view(tensor.shape))
        rows, columns = (
            None if amaxes is None else self._direction(bool(side), amaxes, seed, first_row)
            for side, amaxes in enumerate(self._amaxes)
        )
        return rows, columns

    def _direction(
        self, columnwise: bool, amaxes: Amaxes, seed: torch.Tensor | None, first_row: int
    ) -> LevelTensors:
        data, scales, largest = quantize_direction(
            self._rows, self._layout, columnwise, amaxes, seed, first_row
        )
        has_level = self._layout.second_level != "none"
        return data.contiguous(), scales.contiguous(), largest if has_level else None


def _shared(amaxes: Amaxes, layout: Layout, columnwise: bool) -> list[torch.Tensor]:
    """Those of the amaxes of a direction that span the rows of the tensor."""
    shared = []
    if layout.block_of(columnwise)[0] is None:
        shared.append(amaxes.areas)
    if amaxes.largest is not None and (columnwise or layout.second_level == "tensor"):
        shared.append(amaxes.largest)
    return shared


def quantize_over_ranks(shard: RowShard, group: Group) -> Sides:
    """The data of this rank's rows, of a tensor whose rows lie on the ranks in their order.

    All ranks call this together, with the same layout and directions.

    Args:
        shard: this rank's rows.
        group: the ranks.
    """
    ranks = Ranks(group)
    numbers = shard.numbers(is_first=ranks.rank == 0)
    if not shard.is_random:
        return shard.quantize(all_reduce_max(numbers, group), 0)
    row_counts = torch.zeros(ranks.world, dtype=torch.int64, device=numbers.device)
    row_counts[ranks.rank] = shard.row_count
    message = torch.cat([numbers, to_words(row_counts).reshape(-1)])
    reduced = all_reduce_max(message, group)
    row_counts = from_words(reduced[numbers.numel() :].view(-1, WORDS))
    return shard.quantize(reduced[: numbers.numel()], int(row_counts[: ranks.rank].sum()))
