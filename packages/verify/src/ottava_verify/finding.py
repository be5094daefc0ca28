"""Makes findings: which contract reproduces given bytes, where others depart, and of which kind."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ottava_verify.arrays import below, magnitudes_of, middles_of
from ottava_verify.matching import (
    Agreement,
    Case,
    Difference,
    Explanation,
    Named,
    Result,
    agreement,
    difference,
    match,
)
from ottava_verify.numbers import format_of
from ottava_verify.report import Example, Finding
from ottava_verify.steps import Grid, Steps
from ottava_verify.stored import numbers_of, power_of_two, shapes_of, spread

Tensor = torch.Tensor
#: How many examples a finding has.
EXAMPLES = 10
#: Inputs without NaN and infinities, zeros and extreme magnitudes.
USUAL = "usual inputs: without NaN, infinities, zeros and extreme magnitudes"
_RANDOM = "elements go to either neighbour, as if rounded at random, not to the nearest one"


def finding(
    name: str,
    cases: Sequence[Case],
    result: Result,
    expected: Named,
    citation: str = "",
    *,
    examples: int = EXAMPLES,
) -> Finding:
    """The finding of cases for which a match was looked for.

    Args:
        name: of the function or the tensor.
        expected: the contract that the bytes should have.
        citation: of this contract.
    """
    agrees = agreement(expected, (), cases)
    found = Finding(name, "departs", expected.name, citation, agrees)
    exact = [e for e in result.exact if e.named == expected] or list(result.exact)
    if agrees is not None and agrees.is_exact:
        return replace(found, status="equal")
    return replace(
        found,
        causes=tuple(_clauses(explanation, expected) for explanation in exact),
        **_nearest(result.nearest, agrees, cases),
        **_departures(expected, cases, examples),
        note="" if exact or agrees is not None else _shapes(expected, cases),
    )


def _clauses(explanation: Explanation, expected: Named) -> tuple[str, ...]:
    clauses = tuple(explanation.causes)
    if explanation.named.choices != expected.choices:
        return (f"bytes are those of {explanation.named.name}", *clauses)
    return clauses


def _nearest(
    nearest: Explanation | None, agrees: Agreement | None, cases: Sequence[Case]
) -> dict[str, Any]:
    """What reproduces more than the contract, if there is anything."""
    if nearest is None or nearest.agreement is None:
        return {}
    clauses = tuple(nearest.causes)
    if _is_random(nearest, cases):
        clauses += (_RANDOM,)
    elif agrees is not None and sum(nearest.agreement.shares) <= sum(agrees.shares):
        return {}
    return {"nearest": clauses, "nearest_agreement": nearest.agreement}


def _is_random(nearest: Explanation, cases: Sequence[Case]) -> bool:
    """Whether scales agree, and each element is one of the two neighbours of its value, and both
    kinds of wrong neighbours occur."""
    agrees = nearest.agreement
    if agrees is None or agrees.shares[0] < 1 or agrees.is_exact:
        return False
    up = down = 0
    for case in cases:
        found = difference(nearest.named, nearest.turns, case)
        changed = nearest.named.changed(nearest.turns)
        if found is None or changed is None or changed.random is not None:
            return False
        fmt = format_of(changed.element.format)
        if fmt.twos_complement:
            return False
        scaled = found.made.scaled
        places = _codes(found.stored.data, changed, scaled.shape[1]) & ((1 << (fmt.bits - 1)) - 1)
        limit = magnitudes_of(changed.element.format)[-1]
        usual = scaled.isfinite() & (scaled.abs() < limit)
        low = below(scaled.abs().nan_to_num(0.0), changed.element.format)
        steps = (places.long() - low)[usual & found.elements]
        if not bool(((steps == 0) | (steps == 1)).all()) or bool((found.elements & ~usual).any()):
            return False
        up, down = up + int((steps == 1).sum()), down + int((steps == 0).sum())
    return up > 0 and down > 0


def _held(choices: Steps, block: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """A block of the held matrix."""
    return block[::-1] if choices.storage.held == "transpose" else block


def _codes(data: Tensor, choices: Steps, width: int) -> Tensor:
    """The codes of stored data, one for each element of the held matrix."""
    step, bits = choices.storage, choices.element.bits
    if step.per_byte == 1:
        return data
    halves = [data & ((1 << bits) - 1), data >> bits]
    if step.first == "high":
        halves.reverse()
    return torch.stack(halves, -1).flatten(-2)[:, :width]


# Where bytes depart.


def _departures(named: Named, cases: Sequence[Case], most: int) -> dict[str, Any]:
    """The kinds of elements that depart, the first ones, and the error of decoded values."""
    kinds: Counter[str] = Counter()
    examples: list[Example] = []
    squares = [0.0, 0.0]
    for case in cases:
        found = difference(named, (), case)
        if found is None:
            return {}
        kinds.update(_kinds(found, named))
        examples += _examples(found, named, case.name, most - len(examples))
        for i, part in enumerate(_squares(found, named)):
            squares[i] += part
    error = math.sqrt(squares[0] / squares[1]) if squares[1] else None
    return {"kinds": dict(kinds), "examples": tuple(examples), "error": error}


def _kinds(found: Difference, named: Named) -> Counter[str]:
    """How many elements depart, by what their inputs are."""
    values, scaled = found.made.values[found.elements], found.made.scaled[found.elements]
    element = named.choices.element.format
    wrong = spread(found.scales, _grid(found, named))[found.elements]
    tests = {
        "NaN": values.isnan(),
        "infinite": values.isinf(),
        "zero": values == 0,
        "in a block whose scale departs": wrong,
        "beyond the largest element": scaled.abs() > magnitudes_of(element)[-1],
        "a tie": torch.isin(scaled.abs(), middles_of(element)),
    }
    rest = torch.ones_like(wrong)
    counts: Counter[str] = Counter()
    for name, holds in tests.items():
        counts[name] = int((rest & holds).sum())
        rest &= ~holds
    counts["other"] = int(rest.sum())
    # Without kinds that do not occur.
    return +counts


def _examples(found: Difference, named: Named, case: str, most: int) -> list[Example]:
    """The first scales and elements that depart, half of each where there are both."""
    examples: list[Example] = []
    block = _held(named.choices, named.choices.amax.block)
    shape = found.made.values.shape[0], found.made.values.shape[1]
    room = most - min(int(found.elements.sum()), most // 2)
    for down, across in _first(found.scales, room):
        row = down * (block[0] or 0)
        column = across * (block[1] or 0)
        values = found.made.values[
            row : row + (block[0] or shape[0]), column : column + (block[1] or shape[1])
        ]
        amax = float(values.abs().nan_to_num(0.0, math.inf).max()) if values.numel() else 0.0
        texts = [_text(part[down, across]) for part in (found.made.scales, found.stored.scales)]
        examples.append(Example("scale", case, row, column, amax, *texts))
    codes = _codes(found.stored.data, named.choices, shape[1])
    for row, column in _first(found.elements, most - len(examples)):
        value = float(found.made.values[row, column])
        texts = [
            _element(int(part[row, column]), named.choices.element.format)
            for part in (found.made.codes, codes)
        ]
        examples.append(Example("element", case, row, column, value, *texts))
    return examples


def _first(where: Tensor, most: int) -> list[list[int]]:
    places: list[list[int]] = where.nonzero()[: max(most, 0)].tolist()
    return places


def _text(scale: Tensor) -> str:
    """A scale as text."""
    if scale.dtype == torch.uint8:
        return f"0x{int(scale):02x}"
    return f"{float(scale):.9g}"


def _element(code: int, name: str) -> str:
    """An element as text."""
    fmt = format_of(name)
    return f"0x{code:02x} ({fmt.number(code):g})"


def _squares(found: Difference, named: Named) -> tuple[float, float]:
    """The sums of squares of the difference of decoded values, and of those that are expected."""
    numbers = numbers_of(named.choices.element.format)
    decoded = []
    for codes, scales in (
        (found.made.codes, found.made.scales),
        (_codes(found.stored.data, named.choices, found.made.codes.shape[1]), found.stored.scales),
    ):
        factors = scale_numbers(scales, named.choices.scale.format)
        factors = spread(factors, _grid(found, named))
        decoded.append(numbers[codes.long()] * factors.double())
    usual = decoded[0].isfinite() & decoded[1].isfinite()
    difference = torch.where(usual, decoded[1] - decoded[0], 0.0)
    return float(difference.square().sum()), float(
        torch.where(usual, decoded[0], 0.0).square().sum()
    )


def _grid(found: Difference, named: Named) -> Grid:
    """The blocks of the held matrix."""
    shape = found.made.values.shape[0], found.made.values.shape[1]
    return Grid(_held(named.choices, named.choices.amax.block), shape)


def scale_numbers(scales: Tensor, format: str) -> Tensor:
    """The numbers of stored scales."""
    if scales.dtype != torch.uint8:
        return scales
    if format == "E8M0":
        return power_of_two(scales.int() - 127)
    table = magnitudes_of(format)
    return table[scales.long().clamp(max=len(table) - 1)]


def _shapes(named: Named, cases: Sequence[Case]) -> str:
    """The shapes and dtypes that differ from those of the contract."""
    for case in cases:
        if difference(named, (), case) is None:
            shape = case.x.shape[0], case.x.shape[1]
            expected = shapes_of(named.choices, named.usage, shape)
            kind = named.choices.scale.format
            dtype = str(case.stored.scales.dtype).removeprefix("torch.")
            return (
                f"{case.name or 'the tensor'} of {shape}: data have shape "
                f"{tuple(case.stored.data.shape)} and scales {tuple(case.stored.scales.shape)} as "
                f"{dtype}; the contract has {expected.data} bytes, and scales {expected.scales} in "
                f"{kind}{_numbers_of_levels(named.choices, case)}"
            )
    return ""


def _numbers_of_levels(choices: Steps, case: Case) -> str:
    """How many numbers a second level has, and how many the contract's has."""
    level, step = case.stored.level, choices.second_level
    if level is None and step is None:
        return ""
    expected = 0
    if step is not None:
        expected = math.prod(Grid(step.over, (case.x.shape[0], case.x.shape[1])).counts)
    stored = 0 if level is None else level.numel()
    return f"; the second level has {stored} numbers, and the contract's {expected}"


def compared(
    name: str, cases: Sequence[Case], expected: Named, citation: str, others: Sequence[Named] = ()
) -> Finding:
    """The finding of cases that should have the bytes of a contract.

    Usual cases are explained first, and all cases by more turns from there.

    Args:
        others: contracts that they may have instead.
    """
    usual = [case for case in cases if case.is_usual] or cases
    plain = match(cases, [expected], most_turns=0)
    if plain.exact:
        return finding(name, cases, plain, expected, citation)
    result = match(usual, [expected], most_turns=1)
    if not result.exact:
        result = match(usual, others, most_turns=0)
    if not result.exact:
        result = match(usual, [expected])
    if not result.exact or len(usual) == len(cases):
        return finding(name, cases, result, expected, citation)
    everything = match(cases, result.exact, most_turns=2)
    if everything.exact:
        return finding(name, cases, everything, expected, citation)
    return replace(finding(name, cases, result, expected, citation), scope=USUAL)
