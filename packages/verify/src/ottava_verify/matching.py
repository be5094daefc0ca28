"""Finds the contract, and the wrong turns, that reproduce given bytes.

Bytes are compared exactly. A cause is named only if it reproduces all of them; where several do,
all are named. Where none does, the nearest one is reported, with how much of it agrees.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ottava.contract import Contract, Direction
from ottava_verify.arrays import Level
from ottava_verify.steps import Steps, Usage, steps_of
from ottava_verify.stored import LEVELS, Shapes, Stored, fitted, shapes_of
from ottava_verify.turns import OUTSIDE, TURNS, Turn, interpreter

Tensor = torch.Tensor
#: The first and the last row of a part of a matrix, and its columns.
Window = tuple[tuple[int, int], tuple[int, int]]
#: How many wrong turns an explanation has at most.
MOST_TURNS = 3
# How many explanations of each kind are carried on to the next turn, and how many are reported.
_BEAM, _REPORTED = 4, 6
_VIEWS = [turn for turn in TURNS if turn.view is not None]
# How many cases explanations are compared by.
_PROBED = 7
# Rows and columns of the part of a large matrix that is compared first: multiples of all blocks.
_WINDOW = 128, 256


@dataclass(frozen=True)
class Named:
    """One usage of a contract, with a name for people: ``"mxfp8, weight, rowwise"``."""

    name: str
    contract: Contract
    usage: Usage

    @property
    def recipe(self) -> str:
        """The name of the recipe in the name."""
        return re.split(r"[,(]", self.name)[0]

    @functools.cached_property
    def choices(self) -> Steps:
        """The steps of the usage."""
        return steps_of(self.contract, self.usage)

    def changed(self, turns: Sequence[Turn]) -> Steps | None:
        """The steps with the fields of some turns; None where one of them does not apply."""
        choices: Steps | None = self.choices
        for turn in turns:
            if choices is not None:
                choices = turn.changed(choices)
        return choices


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

    @functools.cached_property
    def peak(self) -> int:
        """The place of the largest magnitude."""
        return int(self.x.float().abs().nan_to_num(0.0, math.inf).argmax())


class Agreement(NamedTuple):
    """How much agrees: numbers of elements, of scales, of second levels, and of whole cases."""

    elements: int
    equal_elements: int
    scales: int
    equal_scales: int
    levels: int = 0
    equal_levels: int = 0
    cases: int = 0
    equal_cases: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":  # type: ignore[override]
        return Agreement(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def is_exact(self) -> bool:
        return self[0::2] == self[1::2]

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of equal scales, second levels among them, and of equal elements."""
        scales, equal = self.scales + self.levels, self.equal_scales + self.equal_levels
        return equal / max(scales, 1), self.equal_elements / max(self.elements, 1)


@dataclass(frozen=True)
class Explanation:
    """A contract with wrong turns, and how much of given bytes it reproduces; None where shapes or
    dtypes differ."""

    named: Named
    turns: tuple[Turn, ...]
    agreement: Agreement | None

    @property
    def key(self) -> object:
        """Equal for the same turns of the same contract."""
        return frozenset(turn.name for turn in self.turns), self.named

    @property
    def takes_level(self) -> bool:
        """Whether the second level is not made, but taken as it was stored."""
        return any(turn.name == OUTSIDE for turn in self.turns)

    @property
    def causes(self) -> list[str]:
        """What the bytes were made with, other than the contract says."""
        return [turn.says for turn in self.turns]


class Made(NamedTuple):
    """What an explanation makes of a case, of the held matrix: what is stored, and the codes, the
    values and the scaled values of all elements."""

    data: Tensor
    scales: Tensor
    level: Level
    codes: Tensor
    values: Tensor
    scaled: Tensor


class Difference(NamedTuple):
    """What an explanation makes of a case, beside what was stored: matrices of one shape each."""

    made: Made
    stored: Stored
    elements: Tensor
    scales: Tensor
    levels: Tensor


def difference(named: Named, turns: Sequence[Turn], case: Case) -> Difference | None:
    """The difference for a case; None where shapes or dtypes cannot be compared."""
    choices, shape = named.changed(turns), (case.x.shape[0], case.x.shape[1])
    if choices is None or not _is_complete(choices, case):
        return None
    stored = _viewed(case.stored, shapes_of(choices, named.usage, shape), choices, turns)
    if stored is None:
        return None
    window = window_of(case, choices) if case.in_window else None
    if window is not None:
        stored = cut(stored, choices, window)
    made = _remembered(
        choices, named.usage, tuple(turn for turn in turns if turn.ways), _Seen(case, window)
    )
    if made.scales.dtype != stored.scales.dtype:
        return None
    levels = _levels(choices, made, stored, any(turn.name == OUTSIDE for turn in turns))
    if levels is None:
        return None
    return Difference(
        made,
        stored,
        ~_same_codes(made, stored, choices),
        _differs(made.scales, stored.scales),
        levels,
    )


def _is_complete(choices: Steps, case: Case) -> bool:
    """Whether a case has what the steps take from outside."""
    has_scale = case.scale is not None or not choices.scale.rule.startswith("given")
    return has_scale and (case.seed is not None or choices.random is None)


def _viewed(stored: Stored, shapes: Shapes, choices: Steps, turns: Sequence[Turn]) -> Stored | None:
    seen: Stored | None = stored
    for turn in turns:
        if turn.view is not None and seen is not None:
            seen = turn.view(seen, shapes, choices.scale.format)
    return None if seen is None else fitted(seen, shapes)


class _Seen(NamedTuple):
    """What the interpreter reads of a case: of two with the same tensor it makes the same."""

    case: Case
    window: Window | None

    def values(self) -> Tensor:
        if self.window is None:
            return self.case.x
        rows, columns = self.window
        return self.case.x[slice(*rows), slice(*columns)]

    def __hash__(self) -> int:
        return hash((id(self.case.x), self.window))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Seen)
            and self.case.x is other.case.x
            and self.window == other.window
            and (self.case.scale, self.case.seed) == (other.case.scale, other.case.seed)
        )


@functools.lru_cache(maxsize=64)
def _remembered(choices: Steps, usage: Usage, turns: tuple[Turn, ...], seen: _Seen) -> Made:
    """What a direction makes of a case, which several views of stored tensors share."""
    direction = Direction(**choices._asdict())
    contract = Contract(direction, direction)
    made: Any = interpreter(turns)(contract, usage, seed=seen.case.seed, scale=seen.case.scale)
    made.level_outside = seen.case.stored.level, seen.case.stored.level_is[:1]
    parts = made.quantize(seen.values())
    matrices = [made.chosen.codes, made.chosen.values, made.chosen.scaled]
    if choices.storage.held == "transpose":
        matrices = [matrix.t() for matrix in matrices]
    return Made(parts["data"], parts["scales"], made.level, *matrices)


def window_of(case: Case, choices: Steps) -> Window | None:
    """Rows and columns of a large matrix that have the same bytes by themselves: whole blocks, and
    the largest magnitude of all. None for the whole matrix."""
    over = choices.second_level.over if choices.second_level else None
    spans = [span for span in (choices.amax.block, choices.amax.area, over) if span is not None]
    by_column = any(side[0] is None and side[1] is not None for side in spans)
    by_row = any(side[1] is None and side[0] is not None for side in spans)
    if by_row and by_column:
        return None
    peak = divmod(case.peak, case.x.shape[1])
    lengths = (
        case.x.shape[0] if by_column else _WINDOW[0],
        case.x.shape[1] if by_row else _WINDOW[1],
    )
    limits = []
    for at, length, size in zip(peak, lengths, case.x.shape, strict=True):
        start = 0 if length >= size else at // _WINDOW[0] * _WINDOW[0]
        limits.append((start, min(start + length, size)))
    return limits[0], limits[1]


def cut(stored: Stored, choices: Steps, window: Window) -> Stored:
    """The stored tensors of a window."""
    level, step = stored.level, choices.second_level
    grid = _divided_window(window, choices.amax.block)
    if level is not None and step is not None and level.numel() > 1:
        over = _divided_window(window, step.over)
        level = level.reshape(-1)[slice(*(over[0] if step.over[0] is not None else over[1]))]
    if choices.storage.held == "transpose":
        window, grid = window[::-1], grid[::-1]
    (top, bottom), (left, right) = window
    per_byte = choices.storage.per_byte
    data = stored.data[top:bottom, left // per_byte : -(-right // per_byte)]
    scales = stored.scales[slice(*grid[0]), slice(*grid[1])]
    return replace(stored, data=data, scales=scales, level=level)


def _divided_window(window: Window, block: tuple[int | None, int | None]) -> Window:
    """A window of the matrix in blocks."""
    down, across = (
        (0, 1) if side is None else (start // side, -(-end // side))
        for (start, end), side in zip(window, block, strict=True)
    )
    return down, across


def _same_codes(made: Made, stored: Stored, choices: Steps) -> Tensor:
    """Whether each element is the same."""
    if choices.storage.per_byte == 1:
        return made.data == stored.data
    bits = choices.element.bits
    low = (1 << bits) - 1
    halves = [
        (made.data & low) == (stored.data & low),
        (made.data >> bits) == (stored.data >> bits),
    ]
    if choices.storage.first == "high":
        halves.reverse()
    return torch.stack(halves, -1).flatten(-2)[:, : made.codes.shape[1]]


def _differs(made: Tensor, stored: Tensor) -> Tensor:
    """Where the bits differ; any NaN is like any other."""
    if made.dtype != torch.float32:
        return made != stored
    differs = made.contiguous().view(torch.int32) != stored.contiguous().view(torch.int32)
    return differs & ~(made.isnan() & stored.isnan())


def _levels(choices: Steps, made: Made, stored: Stored, taken: bool) -> Tensor | None:
    """Where second levels differ, under the form in which the most agree; None if there is one on
    one side alone, or their numbers differ. ``taken``: it was not made, but taken as stored."""
    if made.level.amax is None:
        return torch.zeros(0, dtype=torch.bool)
    if stored.level is None or stored.level.numel() != made.level.amax.numel():
        return None
    if taken:
        return torch.zeros(0, dtype=torch.bool)
    step = choices.second_level
    assert step is not None
    whole = torch.tensor(step.bound * step.maximum)
    seen = stored.level.reshape(-1)
    forms = stored.level_is or tuple(LEVELS)
    numbers = [LEVELS[form](made.level, whole) for form in forms]
    results = [_differs(each.reshape(-1), seen) for each in numbers if each is not None]
    return min(results, key=lambda differs: int(differs.sum()))


def agreement(named: Named, turns: Sequence[Turn], cases: Iterable[Case]) -> Agreement | None:
    """How much of all cases agrees; None where one of them cannot be compared."""
    total = Agreement(0, 0, 0, 0)
    for case in cases:
        found = difference(named, turns, case)
        if found is None:
            return None
        counts = []
        for differs in (found.elements, found.scales, found.levels):
            counts += [differs.numel(), differs.numel() - int(differs.sum())]
        counts += [1, int(counts[0::2] == counts[1::2])]
        total += Agreement(*counts)
    return total


@dataclass(frozen=True)
class Result:
    """What was found of given bytes.

    Attributes:
        exact: explanations that reproduce all bytes, those with the fewest turns, which these data
            do not tell apart; empty if there is none.
        nearest: without an exact one, that which reproduces the most; None if nothing has these
            shapes.
    """

    exact: tuple[Explanation, ...]
    nearest: Explanation | None

    @property
    def best(self) -> Explanation | None:
        return self.exact[0] if self.exact else self.nearest


def match(
    cases: Sequence[Case],
    starts: Sequence[Named] | Sequence[Explanation],
    *,
    most_turns: int = MOST_TURNS,
) -> Result:
    """The contracts and turns that reproduce all bytes of all cases.

    Args:
        cases: matrices with what was stored of them.
        starts: contracts, or what explains some of the cases, the most likely one first.
        most_turns: how many more wrong turns are tried together.
    """
    probe = _probe(cases)
    pairs = [(e.named, e.turns) if isinstance(e, Explanation) else (e, ()) for e in starts]
    beam = [Explanation(*pair, agreement(*pair, probe)) for pair in pairs]
    if exact := _exact(beam, cases):
        return Result(exact, None)
    # How tensors are laid out follows from their shapes, and is not counted as a turn.
    viewed = [
        each for start in beam if not start.agreement for each in _turned(start, probe, _VIEWS)
    ]
    if most_turns and (exact := _exact(viewed, cases)):
        return Result(exact, None)
    beam = [each for each in beam if each.agreement or not viewed] + viewed
    everything = list(beam)
    taken: tuple[Explanation, ...] = ()
    for _ in range(most_turns):
        found = [turned for explanation in beam for turned in _turned(explanation, probe)]
        exact = _exact(found, cases)
        # A level that is taken as it was stored explains too much: one more turn may do without.
        made = tuple(explanation for explanation in exact if not explanation.takes_level)
        if made or taken:
            return Result(made or taken, None)
        taken = exact
        everything += found
        beam = _most_promising([each for each in found if not taken or not each.takes_level])
    if taken:
        return Result(taken, None)
    nearest = max((e for e in everything if e.agreement is not None), key=_score, default=None)
    if nearest is not None:
        nearest = replace(nearest, agreement=agreement(nearest.named, nearest.turns, cases))
    return Result((), nearest)


def _probe(cases: Sequence[Case]) -> list[Case]:
    """Some of many cases, by which explanations are compared before all cases are looked at."""
    return list(cases[:: -(-len(cases) // _PROBED)])


def _turned(
    explanation: Explanation, cases: Sequence[Case], table: Sequence[Turn] = TURNS
) -> Iterator[Explanation]:
    """The explanation with one more turn, wherever that changes what agrees."""
    taken = {turn.step for turn in explanation.turns}
    for turn in table:
        if turn.step in taken:
            continue
        turns = (*explanation.turns, turn)
        agrees = agreement(explanation.named, turns, cases)
        if agrees != explanation.agreement or (agrees and agrees.is_exact):
            yield Explanation(explanation.named, turns, agrees)


def _exact(found: Sequence[Explanation], cases: Sequence[Case]) -> tuple[Explanation, ...]:
    """Those that reproduce all bytes, each set of turns once: of the first contract that has any,
    or of all contracts if they need no turn."""
    exact: dict[object, Explanation] = {}
    for explanation in found:
        if explanation.agreement is None or not explanation.agreement.is_exact:
            continue
        first = next(iter(exact.values()), explanation)
        if explanation.turns and explanation.named != first.named:
            continue
        agrees = agreement(explanation.named, explanation.turns, cases)
        if agrees is not None and agrees.is_exact:
            exact.setdefault(explanation.key, replace(explanation, agreement=agrees))
    return tuple(exact.values())[:_REPORTED]


def _shares(explanation: Explanation) -> tuple[float, float]:
    return explanation.agreement.shares if explanation.agreement else (0.0, 0.0)


def _score(explanation: Explanation) -> tuple[float, int]:
    return sum(_shares(explanation)), -len(explanation.turns)


def _most_promising(found: Sequence[Explanation]) -> list[Explanation]:
    """Those with the most equal scales, elements and whole cases, and with the most of all."""
    keys: list[Callable[[Explanation], Any]] = [
        _shares,
        lambda e: _shares(e)[::-1],
        lambda e: e.agreement.equal_cases if e.agreement else 0,
        _score,
    ]
    chosen: dict[object, Explanation] = {}
    for key in keys:
        for explanation in sorted(found, key=key, reverse=True)[:_BEAM]:
            chosen.setdefault(explanation.key, explanation)
    return list(chosen.values())
