"""What both interpreters of a contract read of it: its steps, all stated, and its grids."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from ottava.contract import (
    Amax,
    Candidates,
    Contract,
    Direction,
    Element,
    Random,
    Scale,
    SecondLevel,
    Source,
    Storage,
    Transform,
)
from ottava.errors import OptionError

Usage = Literal["rowwise", "columnwise"]
Place = tuple[int, int]


class Steps(NamedTuple):
    """The steps of a usage whose choices are all stated."""

    source: Source
    transform: Transform | None
    amax: Amax
    second_level: SecondLevel | None
    scale: Scale
    candidates: Candidates | None
    element: Element
    random: Random | None
    storage: Storage


def steps_of(contract: Contract, usage: Usage) -> Steps:
    """The steps of a usage.

    Raises:
        OptionError: a choice is not stated, or the values are kept as they come.
    """
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
    return steps


def check_given(steps: Steps, seed: int | None, scale: float | None) -> None:
    """Refuse to quantize without what the steps take from outside.

    Raises:
        OptionError: the seed or the scale is missing.
    """
    if steps.random is not None and seed is None:
        raise OptionError("seed is None", expected="the seed of the random words")
    if steps.scale.rule.startswith("given") and scale is None:
        raise OptionError("scale is None", expected="the scale, which comes from outside")


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

    block: tuple[int | None, int | None]
    shape: tuple[int, int]

    @property
    def counts(self) -> Place:
        """How many blocks a column and a row of the matrix have."""
        sides = zip(self.shape, self.block, strict=True)
        return cast(Place, tuple(1 if side is None else -(-size // side) for size, side in sides))

    def place(self, row: int, column: int) -> Place:
        """The block of an element."""
        sides = zip((row, column), self.block, strict=True)
        return cast(Place, tuple(0 if side is None else index // side for index, side in sides))

    def spans(self, place: Place) -> tuple[range, range]:
        """The rows and columns of a block."""
        spans = []
        for index, size, side in zip(place, self.shape, self.block, strict=True):
            length = size if side is None else side
            spans.append(range(index * length, min(index * length + length, size)))
        return spans[0], spans[1]

    def place_of_first(self, spans: tuple[range, range]) -> Place:
        """The block of the first element of some rows and columns."""
        return self.place(spans[0].start, spans[1].start)

    def places(self) -> Iterator[Place]:
        """All blocks, row by row."""
        down, across = self.counts
        return ((row, column) for row in range(down) for column in range(across))

    def matrix(self, number: Callable[[Place], float]) -> list[list[float]]:
        """A number for each block."""
        down, across = self.counts
        return [[number((row, column)) for column in range(across)] for row in range(down)]
