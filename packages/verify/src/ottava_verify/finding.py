"""What is found of given bytes: where they depart from a contract, of which kind, and why."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ottava.formats import IntegerFormat
from ottava_verify.contracts import Named
from ottava_verify.formats import (
    below,
    format_of,
    magnitudes,
    middles,
    numbers_of_codes,
    numbers_of_scales,
)
from ottava_verify.report import Example, Finding
from ottava_verify.search import (
    Agreement,
    Case,
    Comparison,
    Explanation,
    Result,
    agreement,
    compare,
    match,
)
from ottava_verify.steps import Grid
from ottava_verify.stored import shapes_of

#: How many examples a finding has.
EXAMPLES = 10
#: Inputs without NaN and infinities, zeros and extreme magnitudes.
USUAL = "usual inputs: without NaN, infinities, zeros and extreme magnitudes"
_RANDOM = "elements go to either neighbour, as if rounded at random, not to the nearest one"


def finding_of_function(
    name: str, cases: Sequence[Case], expected: Named, others: Sequence[Named]
) -> Finding:
    """The finding of cases that should have the bytes of a contract.

    Usual cases are explained first, and all cases by more turns from there.

    Args:
        others: contracts that they may have instead.
    """
    usual = [case for case in cases if case.is_usual] or cases
    stated = [Explanation(expected)]
    result = match(cases, stated, most_turns=0)
    if result.exact:
        return finding(name, cases, result, expected)
    result = match(usual, stated, most_turns=1)
    if not result.exact:
        result = match(usual, map(Explanation, others), most_turns=0)
    if not result.exact:
        result = match(usual, stated)
    if not result.exact or len(usual) == len(cases):
        return finding(name, cases, result, expected)
    everything = match(cases, result.exact, most_turns=2)
    if everything.exact:
        return finding(name, cases, everything, expected)
    return replace(finding(name, cases, result, expected), scope=USUAL)


def finding(name: str, cases: Sequence[Case], result: Result, expected: Named) -> Finding:
    """The finding of cases for which a match was looked for.

    Args:
        name: of the function or the tensor.
        expected: the contract that the bytes should have.
    """
    agrees = agreement(expected, (), cases)
    found = Finding(name, "departs", expected.name, expected.citation, agrees)
    if agrees is None and not result.exact:
        found = replace(found, note=_shapes(expected, cases))
    if agrees is not None:
        if agrees.is_exact:
            return replace(found, status="equal")
        found = replace(found, **_departures([_compared(expected, case) for case in cases]))
    exact = [each for each in result.exact if each.named == expected] or result.exact
    causes = tuple(_clauses(explanation, expected) for explanation in exact)
    return replace(found, causes=causes, **_nearest(result.nearest, agrees, cases))


def _compared(named: Named, case: Case) -> tuple[str, Comparison]:
    compared = compare(named, (), case)
    assert compared is not None
    return case.name, compared


def _clauses(explanation: Explanation, expected: Named) -> tuple[str, ...]:
    if explanation.named.steps == expected.steps:
        return explanation.causes
    return (f"bytes are those of {explanation.named.name}", *explanation.causes)


def _nearest(
    nearest: Explanation | None, agrees: Agreement | None, cases: Sequence[Case]
) -> dict[str, Any]:
    """What reproduces more than the contract, if there is anything."""
    if nearest is None or nearest.agreement is None:
        return {}
    clauses = nearest.causes
    other_turns = tuple(turn for turn in nearest.turns if turn.step != "rounding")
    unrounded = replace(nearest, turns=other_turns)
    if _is_random(unrounded, cases):
        clauses = (*unrounded.causes, _RANDOM)
    elif agrees is not None and sum(nearest.shares) <= sum(agrees.shares):
        return {}
    return {"nearest": clauses, "nearest_agreement": nearest.agreement}


def _is_random(nearest: Explanation, cases: Sequence[Case]) -> bool:
    """Whether scales agree, and each element is one of the two neighbours of its value, and both
    kinds of wrong neighbours occur."""
    if nearest.shares[0] < 1:
        return False
    steps: list[Tensor] = []
    for case in cases:
        compared = compare(nearest.named, nearest.turns, case)
        assert compared is not None
        element = compared.steps.element
        if compared.steps.random is not None or isinstance(
            format_of(element.format), IntegerFormat
        ):
            return False
        scaled = compared.held(compared.made.chosen.scaled).abs()
        places = compared.stored_codes & ((1 << (element.bits - 1)) - 1)
        if not bool((scaled[compared.elements] < element.maximum).all()):
            return False
        low = below(scaled.nan_to_num(0.0), element.format)
        steps.append((places - low)[compared.elements])
    return set(torch.cat(steps).tolist()) == {0, 1}


# Where bytes depart.


def _departures(compared: Sequence[tuple[str, Comparison]]) -> dict[str, Any]:
    """The kinds of elements that depart, the first ones, and the error of decoded values."""
    kinds: Counter[str] = Counter()
    examples: list[Example] = []
    errors, values = 0.0, 0.0
    for case, each in compared:
        kinds.update(_kinds(each))
        examples += _examples(each, case, EXAMPLES - len(examples))
        expected, stored = _decoded(each)
        usual = expected.isfinite() & stored.isfinite()
        errors += float((stored - expected)[usual].square().sum())
        values += float(expected[usual].square().sum())
    error = math.sqrt(errors / values) if values else None
    # Without kinds that do not occur.
    return {"kinds": dict(+kinds), "examples": tuple(examples), "error": error}


def _kinds(compared: Comparison) -> Counter[str]:
    """How many elements depart, by what their inputs are."""
    name, made = compared.steps.element.format, compared.made
    values, scaled = compared.held(made.values), compared.held(made.chosen.scaled).abs()
    tests = {
        "NaN": values.isnan(),
        "infinite": values.isinf(),
        "zero": values == 0,
        "in a block whose scale departs": compared.grid.spread(compared.scales),
        "beyond the largest element": scaled > magnitudes(name)[-1],
        "a tie": torch.isin(scaled, middles(name)),
        "other": torch.ones_like(compared.elements),
    }
    rest = compared.elements
    counts: Counter[str] = Counter()
    for kind, holds in tests.items():
        counts[kind] = int((rest & holds).sum())
        rest = rest & ~holds
    return counts


def _examples(compared: Comparison, case: str, most: int) -> Iterator[Example]:
    """The first scales and elements that depart, half of each where there are both."""
    values = compared.held(compared.made.values)
    grid, name = compared.grid, compared.steps.element.format
    elements = compared.elements.nonzero()[:most].tolist()
    scales = compared.scales.nonzero()[: most - min(len(elements), most // 2)].tolist()
    amaxes = grid.largest(values.abs().nan_to_num(0.0, math.inf))
    for place in scales:
        row, column = (at * (side or 0) for at, side in zip(place, grid.block, strict=True))
        at = tuple(place)
        texts = [_scale(part[at]) for part in (compared.parts["scales"], compared.stored.scales)]
        yield Example("scale", case, row, column, float(amaxes[at]), *texts)
    for row, column in elements[: most - len(scales)]:
        texts = [
            _element(int(codes[row, column]), name)
            for codes in (compared.codes, compared.stored_codes)
        ]
        yield Example("element", case, row, column, float(values[row, column]), *texts)


def _scale(scale: Tensor) -> str:
    if scale.dtype == torch.uint8:
        return f"0x{int(scale):02x}"
    return f"{float(scale):.9g}"


def _element(code: int, name: str) -> str:
    return f"0x{code:02x} ({numbers_of_codes(name)[code]:g})"


def _decoded(compared: Comparison) -> list[Tensor]:
    """The values of the contract's bytes and of those that were stored, without a second level."""
    numbers = numbers_of_codes(compared.steps.element.format).double()
    pairs = (
        (compared.codes, compared.parts["scales"]),
        (compared.stored_codes, compared.stored.scales),
    )
    return [
        numbers[codes]
        * compared.grid.spread(numbers_of_scales(scales, compared.steps.scale.format)).double()
        for codes, scales in pairs
    ]


def _shapes(named: Named, cases: Sequence[Case]) -> str:
    """The shapes and dtypes of the first case that differ from those of the contract."""
    case = next(case for case in cases if compare(named, (), case) is None)
    steps, stored = named.steps, case.stored
    expected = shapes_of(steps, named.usage, case.shape)
    dtype = str(stored.scales.dtype).removeprefix("torch.")
    text = (
        f"{case.name or 'the tensor'} of {case.shape}: data have shape {tuple(stored.data.shape)} "
        f"and scales {tuple(stored.scales.shape)} as {dtype}; the contract has {expected.data} "
        f"bytes, and scales {expected.scales} in {steps.scale.format}"
    )
    level, step = stored.level, steps.second_level
    if level is None and step is None:
        return text
    has = 0 if level is None else level.numel()
    needs = 0 if step is None else math.prod(Grid(step.over, case.shape).counts)
    return f"{text}; the second level has {has} numbers, and the contract's {needs}"
