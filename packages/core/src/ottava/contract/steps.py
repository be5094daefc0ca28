"""What an interpretation reads of a contract: its steps, all stated, and grids of blocks."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ottava.contract import choices as parts
from ottava.contract.choices import Direction
from ottava.contract.contract import Contract
from ottava.contract.numbers import format_of
from ottava.errors import DTypeError, OptionError

Usage = Literal["rowwise", "columnwise"]
USAGES: tuple[Usage, Usage] = ("rowwise", "columnwise")
Size = tuple[int, int]
#: Rows and columns of a block; None for all.
Sides = tuple[int | None, int | None]


class Steps(NamedTuple):
    """The steps of a usage whose choices are all stated."""

    source: parts.Source
    transform: parts.Transform | None
    amax: parts.Amax
    second_level: parts.SecondLevel | None
    scale: parts.Scale
    candidates: parts.Candidates | None
    element: parts.Element
    random: parts.Random | None
    storage: parts.Storage


def steps_of(contract: Contract, usage: Usage) -> Steps:
    """The steps of a usage.

    Raises:
        DTypeError: the contract is none.
        OptionError: a choice is not stated, or the values are kept as they come; the usage or the
            bits of elements are none that there are.
    """
    if not isinstance(contract, Contract):
        raise DTypeError(f"the contract is a {type(contract).__name__}", "an ottava.Contract")
    if usage not in USAGES:
        raise OptionError(f"the usage is {usage!r}", expected="rowwise or columnwise")
    choices = getattr(contract, usage)
    if choices == "identity":
        raise OptionError(
            f"{usage} keeps values as they come", expected="a contract of elements and scales"
        )
    if not isinstance(choices, Direction):
        raise _unstated(usage, choices)
    for name, step in vars(choices).items():
        if isinstance(step, str):
            raise _unstated(f"{usage}.{name}", step)
    steps = Steps(**vars(choices))
    if steps.scale.rule.startswith("own:"):
        raise _unstated(f"{usage}.scale.rule", steps.scale.rule)
    if steps.element.bits != format_of(steps.element.format).bits:
        bits = format_of(steps.element.format).bits
        raise OptionError(f"element.bits is {steps.element.bits}", expected=str(bits))
    return steps


def check_given(steps: Steps, seed: int | None, scale: float | None) -> None:
    """Refuse to quantize without what the steps take from outside.

    Raises:
        OptionError: the seed or the scale is missing.
    """
    if steps.random is not None and (seed is None or not 0 <= seed < 1 << 64):
        raise OptionError(f"seed is {seed}", expected="the seed of the random words, of 64 bits")
    if takes_scale(steps) and scale is None:
        raise OptionError("scale is None", expected="the scale, which comes from outside")


def takes_scale(steps: Steps) -> bool:
    """Whether the scale comes from outside."""
    return steps.scale.rule.startswith("given")


def _unstated(name: str, word: str) -> OptionError:
    return OptionError(
        f"the contract's {name} is {word!r}, so no bytes follow from it",
        expected="a contract that states every choice between values and bytes",
        remedy="the author of the quantizer defines its property `contract`",
    )


@dataclass(frozen=True)
class Grid:
    """A matrix in blocks. The last ones of a row and of a column may be smaller.

    Attributes:
        block: rows and columns of a block; None for all, which are one block even if there are
            none.
        shape: rows and columns of the matrix.
    """

    block: Sides
    shape: Size

    @property
    def counts(self) -> Size:
        """How many blocks a column and a row of the matrix have."""
        down, across = (
            1 if side is None else -(-size // side)
            for size, side in zip(self.shape, self.block, strict=True)
        )
        return down, across

    @property
    def _sides(self) -> Size:
        """Rows and columns of a block that is whole."""
        height, width = (
            size if side is None else side
            for side, size in zip(self.block, self.shape, strict=True)
        )
        return height, width

    def blocks_of(self, places: Tensor, dim: int) -> Tensor:
        """The blocks of rows (``dim`` 0) or columns (1), by their places."""
        side = self.block[dim]
        return places // side if side is not None else torch.zeros_like(places)

    def spread(self, numbers: Tensor) -> Tensor:
        """The number of each element's block; more numbers than blocks are left out."""
        (down, across), (height, width) = self.counts, self._sides
        of_blocks = numbers[:down, :across][:, None, :, None]
        each = of_blocks.expand(down, height, across, width)
        return each.reshape(down * height, across * width)[: self.shape[0], : self.shape[1]]

    def on(self, blocks: "Grid", numbers: Tensor) -> Tensor:
        """The number of each block of another grid, which is that of its first element."""
        if blocks == self:
            return numbers
        rows, columns = (
            self.blocks_of(torch.arange(blocks.counts[dim]) * (blocks.block[dim] or 0), dim)
            for dim in (0, 1)
        )
        return numbers[rows][:, columns]

    def in_blocks(self, numbers: Tensor) -> Tensor:
        """Numbers >= 0 as ``[blocks down, rows, blocks across, columns]``, with zeros at ragged
        edges."""
        (down, across), (height, width) = self.counts, self._sides
        missing = [0, across * width - self.shape[1], 0, down * height - self.shape[0]]
        padded = torch.nn.functional.pad(numbers, missing)
        return padded.reshape(down, height, across, width)

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest of the numbers of each block, which are >= 0; 0 for an empty one."""
        blocks = self.in_blocks(numbers)
        return blocks.amax((1, 3)) if blocks.numel() else torch.zeros(self.counts)

    def transposed(self) -> "Grid":
        """The grid of the transpose."""
        return Grid(self.block[::-1], self.shape[::-1])
