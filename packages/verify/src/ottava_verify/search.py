"""Finds the contract, and the wrong turns, that reproduce given bytes.

Bytes are compared exactly. A cause is named only if it reproduces all of them; where several do,
all are named. Where none does, the nearest one is reported, with how much of it agrees.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.contract import Contract, Direction
from ottava.contract.interpretation import Interpretation
from ottava.contract.steps import Grid, Sides, Steps, takes_scale
from ottava_verify.contracts import Named
from ottava_verify.stored import LEVELS, MISSING, Shapes, Stored, fitted, levels_of, shapes_of
from ottava_verify.turns import TURNS, Turn, interpreted

#: How many wrong turns an explanation has at most.
MOST_TURNS = 3
# How many explanations of each kind are carried on to the next turn.
_BEAM = 6
_VIEWS = [turn for turn in TURNS if turn.view is not None]
# How many cases explanations are compared by.
_PROBED = 7
# Rows and columns of the part of a large matrix that is compared first: multiples of all blocks.
_WINDOW = 128, 256


@dataclass(frozen=True, eq=False)
class Case:
    """A matrix, and what an implementation stored of it.

    Attributes:
        name: for people.
        x: float32, bfloat16 or float16.
        stored: what was stored.
        scale, seed: from outside, where the contract takes them.
        in_window: whether a part that stands for the whole is compared.
        is_usual: whether it has neither NaN nor infinities, zeros or extreme magnitudes.
    """

    name: str
    x: Tensor
    stored: Stored
    scale: float | None = None
    seed: int | None = None
    in_window: bool = False
    is_usual: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.x.shape[0], self.x.shape[1]

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The row and the column of the largest magnitude."""
        return divmod(int(self.x.float().abs().nan_to_num(0.0, math.inf).argmax()), self.shape[1])

    def has(self, steps: Steps) -> bool:
        """Whether it has what the steps take from outside."""
        has_seed = steps.random is None or self.seed is not None
        return has_seed and (self.scale is not None or not takes_scale(steps))


@dataclass(frozen=True)
class Agreement:
    """How much agrees: numbers of elements, of scales, of second levels, and of whole cases."""

    elements: int = 0
    equal_elements: int = 0
    scales: int = 0
    equal_scales: int = 0
    levels: int = 0
    equal_levels: int = 0
    cases: int = 0
    equal_cases: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(*map(add, self.counts, other.counts))

    @property
    def counts(self) -> tuple[int, ...]:
        """All numbers: each total, and after it the number of equal ones."""
        # `dataclasses.astuple` copies each number, which took a tenth of a search.
        return tuple(vars(self).values())

    @property
    def is_exact(self) -> bool:
        """Whether all bytes agree."""
        return self.counts[0::2] == self.counts[1::2]

    @property
    def all_scales(self) -> tuple[int, int]:
        """How many scales and second levels there are, and how many of them are equal."""
        return self.scales + self.levels, self.equal_scales + self.equal_levels

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of equal scales, second levels among them, and of equal elements."""
        scales, equal = self.all_scales
        return equal / max(scales, 1), self.equal_elements / max(self.elements, 1)


@dataclass(frozen=True)
class Explanation:
    """A contract with wrong turns, and how much of given bytes it reproduces; None where shapes or
    dtypes differ."""

    named: Named
    turns: tuple[Turn, ...] = ()
    agreement: Agreement | None = None

    @property
    def key(self) -> object:
        """Equal for the same turns of the same contract."""
        return frozenset(self.turns), self.named

    @cached_property
    def steps(self) -> Steps | None:
        """The steps of the contract with the edits of all turns; None where one does not apply."""
        steps: Steps | None = self.named.steps
        for turn in self.turns:
            if steps is not None:
                steps = turn.edited(steps)
        return steps

    @property
    def quantization(self) -> object:
        """Equal for explanations that compute the same from any matrix."""
        beside = [turn for turn in self.turns if turn.ways or turn.view or turn.takes_stored]
        return self.steps, self.named.usage, *beside

    @property
    def is_exact(self) -> bool:
        """Whether it reproduces all bytes."""
        return self.agreement is not None and self.agreement.is_exact

    def takes(self, *parts: str) -> bool:
        """Whether a turn takes one of these parts for right as it was stored, and so explains too
        much."""
        return any(turn.takes_stored in parts for turn in self.turns)

    @property
    def causes(self) -> tuple[str, ...]:
        """What the bytes were made with, other than the contract says."""
        return tuple(turn.says for turn in self.turns)

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of equal scales and of equal elements."""
        return self.agreement.shares if self.agreement else (0.0, 0.0)

    @property
    def score(self) -> tuple[float, int]:
        """The larger, the nearer."""
        return sum(self.shares), -len(self.turns)

    def of(self, cases: "Cases") -> "Explanation":
        """With how much of some cases it reproduces."""
        return replace(self, agreement=cases.agreement(self))

    def turned(self, cases: "Cases", table: Sequence[Turn] = TURNS) -> Iterator["Explanation"]:
        """The explanation with one more turn, wherever that changes what agrees."""
        taken = {turn.step for turn in self.turns}
        for turn in table:
            if turn.step not in taken:
                more = Explanation(self.named, (*self.turns, turn)).of(cases)
                if more.is_exact or more.agreement != self.agreement:
                    yield more


class Cases(tuple[Case, ...]):
    """Matrices that explanations are compared by.

    What several explanations compute alike is compared once: the same edits of a contract in
    another order, or a turn that is an option of another recipe.
    """

    @property
    def probe(self) -> "Cases":
        """Some of many cases, by which explanations are compared first."""
        return self if len(self) <= _PROBED else self._some

    @cached_property
    def _some(self) -> "Cases":
        return Cases(self[:: -(-len(self) // _PROBED)])

    @cached_property
    def _known(self) -> dict[object, Agreement | None]:
        return {}

    def agreement(self, explanation: Explanation) -> Agreement | None:
        """How much of the matrices an explanation reproduces; None where shapes or dtypes of one
        differ."""
        key = explanation.quantization
        if key not in self._known:
            self._known[key] = self._compared(explanation)
        return self._known[key]

    def _compared(self, explanation: Explanation) -> Agreement | None:
        total = Agreement()
        for case in self:
            compared = compare(explanation, case)
            if compared is None:
                return None
            total += compared.agreement
        return total


# One comparison.


class Comparison:
    """What a contract with some turns makes of a case, beside what was stored.

    Matrices of elements are those of the held matrix, which is the tensor or its transpose.

    Args:
        case: the name of the case.
        made: the interpretation of the case, or of its window.
        stored: of the same rows and columns, as the contract would store it.
    """

    def __init__(self, case: str, made: Interpretation, stored: Stored) -> None:
        self.case = case
        self.made = made
        self.stored = stored
        self.steps = made.steps

    def held(self, numbers: Tensor) -> Tensor:
        """Numbers of elements, in the order of the held matrix."""
        return numbers.t() if self.steps.storage.held == "transpose" else numbers

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """What the contract stores."""
        return self.made.parts

    @property
    def codes(self) -> Tensor:
        """The codes that the contract stores."""
        return self.held(self.made.chosen.codes)

    @cached_property
    def stored_codes(self) -> Tensor:
        """The codes that were stored, each by itself."""
        data, bits = self.stored.data.long(), self.steps.element.bits
        if self.steps.storage.per_byte == 1:
            return data
        halves = [data & ((1 << bits) - 1), data >> bits]
        if self.steps.storage.first == "high":
            halves.reverse()
        return torch.stack(halves, -1).flatten(-2)[:, : self.codes.shape[1]]

    @property
    def grid(self) -> Grid:
        """The blocks of the held matrix."""
        is_turned = self.steps.storage.held == "transpose"
        return self.made.blocks.transposed() if is_turned else self.made.blocks

    @cached_property
    def elements(self) -> Tensor:
        """Where elements depart."""
        return self.codes != self.stored_codes

    @cached_property
    def scales(self) -> Tensor:
        """Where scales depart."""
        return _differs(self.parts["scales"], self.stored.scales)

    @cached_property
    def levels(self) -> Tensor:
        """Where second levels depart, under the form in which the most agree."""
        has_own = self.steps.second_level is not None and self.made.levels is None
        if self.stored.level is None or not has_own:
            return torch.zeros(0, dtype=torch.bool)
        seen = self.stored.level.reshape(-1)
        forms = self.stored.level_is or tuple(LEVELS)
        results = [_differs(LEVELS[form](self.made).reshape(-1), seen) for form in forms]
        return min(results, key=lambda differs: int(differs.sum()))

    @property
    def agreement(self) -> Agreement:
        """How much agrees."""
        counts = []
        for differs in (self.elements, self.scales, self.levels):
            counts += [differs.numel(), differs.numel() - int(differs.sum())]
        counts += [1, int(counts[0::2] == counts[1::2])]
        return Agreement(*counts)


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """Where the bits differ; any NaN is like any other."""
    if one.dtype != torch.float32:
        return one != other
    differs = one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)
    return differs & ~(one.isnan() & other.isnan())


def compare(explanation: Explanation, case: Case) -> Comparison | None:
    """A contract with some turns beside a case; None where shapes or dtypes differ.

    Bytes are computed when they are read.
    """
    named, turns, steps = explanation.named, explanation.turns, explanation.steps
    if steps is None or not case.has(steps):
        return None
    stored = _laid_out(case.stored, turns, steps, shapes_of(steps, named.usage, case.shape))
    if stored is None:
        return None
    has_codes = stored.scales.dtype == torch.uint8
    if has_codes != (steps.scale.format != "float32"):
        return None
    x = case.x
    window = window_of(case, steps) if case.in_window else None
    if window is not None:
        x, stored = x[window], cut(stored, steps, window)
    choices = Direction(**steps._asdict())
    contract = Contract(choices, choices)
    made = interpreted(turns)(contract, named.usage, x, seed=case.seed, scale=case.scale)
    if steps.second_level is not None:
        levels = levels_of(stored, made)
        if levels is None and stored.level_is != (MISSING,):
            return None
        if explanation.takes("level"):
            made.levels = levels
    if explanation.takes("scales"):
        if steps.amax.area is not None:
            return None
        scales = stored.scales.t() if steps.storage.held == "transpose" else stored.scales
        made.take_scales(scales)
    return Comparison(case.name, made, stored)


def _laid_out(
    stored: Stored, turns: tuple[Turn, ...], steps: Steps, shapes: Shapes
) -> Stored | None:
    """What was stored as the contract would lay it out; None where it has other shapes."""
    seen: Stored | None = stored
    for turn in turns:
        if turn.view is not None and seen is not None:
            seen = turn.view(seen, shapes, steps.scale.format)
    return None if seen is None else fitted(seen, shapes)


# Parts of large matrices.


def window_of(case: Case, steps: Steps) -> tuple[slice, slice] | None:
    """Rows and columns of a large matrix that have the same bytes by themselves: whole blocks, and
    the largest magnitude of all. None for the whole matrix."""
    over = steps.second_level.over if steps.second_level else None
    spans = [span for span in (steps.amax.block, steps.amax.area, over) if span is not None]
    by_column = any(rows is None and columns is not None for rows, columns in spans)
    by_row = any(rows is not None and columns is None for rows, columns in spans)
    if by_row and by_column:
        return None
    lengths = [case.x.shape[0] if by_column else _WINDOW[0]]
    lengths.append(case.x.shape[1] if by_row else _WINDOW[1])
    starts = [
        0 if length >= size else place // _WINDOW[0] * _WINDOW[0]
        for place, length, size in zip(case.peak, lengths, case.x.shape, strict=True)
    ]
    rows, columns = (
        slice(start, min(start + length, size))
        for start, length, size in zip(starts, lengths, case.x.shape, strict=True)
    )
    return rows, columns


def cut(stored: Stored, steps: Steps, window: tuple[slice, slice]) -> Stored:
    """The stored tensors of a window."""
    scales, level = _in_blocks(window, steps.amax.block), stored.level
    if level is not None and steps.second_level is not None and level.numel() > 1:
        rows, columns = _in_blocks(window, steps.second_level.over)
        level = level.reshape(-1)[columns if steps.second_level.over[0] is None else rows]
    if steps.storage.held == "transpose":
        window, scales = window[::-1], scales[::-1]
    data = _in_blocks(window, (1, steps.storage.per_byte))
    return replace(stored, data=stored.data[data], scales=stored.scales[scales], level=level)


def _in_blocks(window: tuple[slice, slice], block: Sides) -> tuple[slice, slice]:
    """A window of the matrix in blocks."""
    down, across = (
        slice(0, 1) if side is None else slice(part.start // side, -(-part.stop // side))
        for part, side in zip(window, block, strict=True)
    )
    return down, across


# The search.


class Result(NamedTuple):
    """What was found of given bytes.

    Attributes:
        exact: explanations that reproduce all bytes, those with the fewest turns, which these data
            do not tell apart; empty if there is none.
        nearest: without an exact one, that which reproduces the most; None if nothing has these
            shapes.
    """

    exact: tuple[Explanation, ...]
    nearest: Explanation | None = None

    @property
    def best(self) -> tuple[Explanation, ...]:
        """The exact ones, or the nearest one."""
        return self.exact or ((self.nearest,) if self.nearest else ())


def match(
    cases: Cases,
    starts: Iterable[Explanation],
    *,
    most_turns: int = MOST_TURNS,
    table: Sequence[Turn] = TURNS,
) -> Result:
    """The contracts and turns that reproduce all bytes of all cases.

    Args:
        cases: matrices with what was stored of them.
        starts: contracts, or what explains some of the cases, the most likely one first.
        most_turns: how many more wrong turns are tried together.
        table: the turns that are tried.
    """
    probe = cases.probe
    beam = [start.of(probe) for start in starts]
    if exact := _exact(beam, cases):
        return Result(exact)
    # How tensors are laid out follows from their shapes, and is not counted as a turn.
    viewed = [each for start in beam if not start.agreement for each in start.turned(probe, _VIEWS)]
    if most_turns and (exact := _exact(viewed, cases)):
        return Result(exact)
    beam = [each for each in beam if each.agreement or not viewed] + viewed
    tried = list(beam)
    too_much: tuple[Explanation, ...] = ()
    for _ in range(most_turns):
        found = [more for explanation in beam for more in explanation.turned(probe, table)]
        # What takes something as it was stored explains too much: one more turn may do without.
        right = [each for each in found if not each.takes("level", "scales")]
        exact = _exact(right, cases) or too_much
        if exact:
            return Result(exact)
        too_much = _exact(found, cases)
        found = right if too_much else [each for each in found if not each.takes("scales")]
        tried += found
        beam = _most_promising(found)
    nearest = max((each for each in tried if each.agreement), key=lambda e: e.score, default=None)
    return Result(too_much, nearest.of(cases) if nearest and not too_much else None)


def _exact(found: Sequence[Explanation], cases: Cases) -> tuple[Explanation, ...]:
    """Those that reproduce all bytes, each set of turns once: of the first contract that has any,
    or of all contracts if they need no turn."""
    exact: dict[object, Explanation] = {}
    for explanation in found:
        if not explanation.is_exact:
            continue
        first = next(iter(exact.values()), explanation)
        if explanation.turns and explanation.named != first.named:
            continue
        whole = explanation.of(cases)
        if whole.is_exact:
            exact.setdefault(whole.key, whole)
    return tuple(exact.values())


def _most_promising(found: Sequence[Explanation]) -> list[Explanation]:
    """Those with the most equal scales, elements and whole cases, and with the most of all."""
    keys: list[Callable[[Explanation], Any]] = [
        lambda each: each.shares,
        lambda each: each.shares[::-1],
        lambda each: each.agreement.equal_cases if each.agreement else 0,
        lambda each: each.score,
    ]
    best = (each for key in keys for each in sorted(found, key=key, reverse=True)[:_BEAM])
    return list({each.key: each for each in best}.values())
