"""What is found of given bytes: where they depart from a contract, of which kind, and why."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ottava.contract.numbers import (
    below,
    format_of,
    magnitudes,
    middles,
    numbers_of_codes,
    numbers_of_scales,
)
from ottava.contract.steps import Grid
from ottava.formats import IntegerFormat
from ottava_verify.contracts import Named
from ottava_verify.search import (
    MOST_TURNS,
    Agreement,
    Case,
    Cases,
    Comparison,
    Explanation,
    Result,
    compare,
    match,
)
from ottava_verify.stored import shapes_of

#: In the order of exit statuses of the command.
Status = Literal["equal", "departs", "not compared"]


@dataclass(frozen=True)
class Example:
    """One element or scale that departs.

    Attributes:
        kind: ``"element"`` or ``"scale"``.
        case: the input, or empty.
        row, column: of the matrix; of a scale's block, its first element.
        value: the input there; of a scale, the amax of its block.
        expected, found: bytes or numbers, as texts.
    """

    kind: str
    case: str
    row: int
    column: int
    value: float
    expected: str
    found: str


@dataclass(frozen=True)
class Finding:
    """What was found of one function, of one input of it, or of one tensor.

    Attributes:
        name: of the function or the tensor.
        status: whether all bytes are those of the contract.
        contract: what it was compared with, in words.
        citation: of that contract; empty where it is none of a recipe.
        agreement: how much agrees with the contract; None where shapes or dtypes differ.
        causes: each explains all bytes, as clauses that hold together. Several of them cannot be
            told apart on these data.
        nearest: without causes, the clauses of what reproduces the most bytes, if that is more than
            the contract does.
        nearest_agreement: how much that reproduces.
        kinds: how many elements depart, by what their inputs are; without any, how many scales.
        examples: the first ones that depart.
        error: of decoded values, the root of the mean square relative to that of the values that
            the contract gives; None where it is not known.
        scope: which inputs the causes explain, where they do not explain all.
        errors: inputs on which the function failed, with its errors. Of those that are made of
            whole blocks each makes the function depart; others may be refused.
        note: why it cannot be compared, or what else is to be known.
    """

    name: str
    status: Status
    contract: str = ""
    citation: str = ""
    agreement: Agreement | None = None
    causes: tuple[tuple[str, ...], ...] = ()
    nearest: tuple[str, ...] = ()
    nearest_agreement: Agreement | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    error: float | None = None
    scope: str = ""
    errors: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The findings of one comparison.

    Attributes:
        subject: what was looked at.
        against: what it was compared with.
        findings: one for each function or tensor.
    """

    subject: str
    against: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """``"departs"`` if anything does, else ``"not compared"`` if anything was not, or nothing
        was found."""
        found = {finding.status for finding in self.findings}
        if "departs" in found:
            return "departs"
        return "equal" if found == {"equal"} else "not compared"

    @property
    def exit_status(self) -> int:
        """0 equal, 1 departs, 2 cannot be compared."""
        return get_args(Status).index(self.status)

    def groups(self) -> dict[tuple[object, ...], list[Finding]]:
        """Findings that say the same of tensors with other names."""
        groups: dict[tuple[object, ...], list[Finding]] = {}
        for finding in self.findings:
            key = finding.status, finding.contract, finding.causes, finding.nearest, finding.note
            groups.setdefault(key, []).append(finding)
        return groups

    def value(self) -> dict[str, Any]:
        """The report as a JSON value."""
        return asdict(self) | {"status": self.status}


# How findings are made.

#: How many examples a finding has.
EXAMPLES = 10
#: Inputs without NaN and infinities, zeros and extreme magnitudes.
USUAL = "usual inputs: without NaN, infinities, zeros and extreme magnitudes"
# How many explanations of the same bytes are reported.
_MOST_CAUSES = 6
# What has fewer equal scales, and fewer equal elements, is near nothing.
_LEAST_SHARE = 0.5
_RANDOM = "elements go to either neighbour, as if rounded at random, not to the nearest one"


def finding_of_function(
    name: str, cases: Cases, expected: Named, others: Sequence[Named]
) -> Finding:
    """The finding of cases that should have the bytes of a contract.

    Usual cases are explained first, and all cases by more turns from there.

    Args:
        others: contracts that they may have instead.
    """
    usual = Cases(case for case in cases if case.is_usual) or cases
    stated, known = [Explanation(expected)], [Explanation(each) for each in others]
    result = match(cases, stated, most_turns=0)
    for starts, most_turns in ((stated, 1), (known, 0), (stated, MOST_TURNS)):
        if not result.exact:
            result = match(usual, starts, most_turns=most_turns)
    if not result.exact:
        return finding(name, cases, result, expected)
    everything = match(cases, result.exact, most_turns=2)
    if everything.exact:
        return finding(name, cases, everything, expected)
    return replace(finding(name, cases, result, expected), scope=USUAL)


def finding(name: str, cases: Cases, result: Result, expected: Named) -> Finding:
    """The finding of cases for which a match was looked for.

    Args:
        name: of the function or the tensor.
        expected: the contract that the bytes should have.
    """
    stated = Explanation(expected)
    agrees = stated.of(cases).agreement
    found = Finding(name, "departs", expected.name, expected.citation, agrees)
    if agrees is None and not result.exact:
        found = replace(found, note=_shapes(expected, cases))
    if agrees is not None:
        if agrees.is_exact:
            return replace(found, status="equal")
        found = replace(found, **_departures([_compared(stated, case) for case in cases]))
    causes = tuple(_clauses(each, expected) for each in result.exact[:_MOST_CAUSES])
    return replace(found, causes=causes, **_nearest(result.nearest, agrees, cases))


def _compared(explanation: Explanation, case: Case) -> Comparison:
    compared = compare(explanation, case)
    assert compared is not None
    return compared


def _clauses(explanation: Explanation, expected: Named) -> tuple[str, ...]:
    if explanation.named.steps == expected.steps:
        return explanation.causes
    return (f"bytes are those of {explanation.named.name}", *explanation.causes)


def _nearest(
    nearest: Explanation | None, agrees: Agreement | None, cases: Sequence[Case]
) -> dict[str, Any]:
    """What reproduces more than the contract, if there is anything."""
    if nearest is None or nearest.agreement is None or max(nearest.shares) < _LEAST_SHARE:
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
        compared = _compared(nearest, case)
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


def _departures(compared: Sequence[Comparison]) -> dict[str, Any]:
    """The kinds of elements that depart, the first ones, and the error of decoded values."""
    kinds: Counter[str] = Counter()
    examples: list[Example] = []
    errors, values = 0.0, 0.0
    for each in compared:
        kinds.update(_kinds(each))
        examples += _examples(each, EXAMPLES - len(examples))
        expected, stored = _decoded(each)
        usual = expected.isfinite() & stored.isfinite()
        errors += float((stored - expected)[usual].square().sum())
        values += float(expected[usual].square().sum())
    error = math.sqrt(errors / values) if values else None
    # Without kinds that do not occur.
    return {"kinds": dict(+kinds), "examples": tuple(examples), "error": error}


def _kinds(compared: Comparison) -> Counter[str]:
    """How many elements depart, or else how many scales, by what their inputs are."""
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
    if bool(compared.elements.any()):
        return _counted(compared.elements, tests)
    blocks = compared.grid.largest
    return _counted(
        compared.scales,
        {
            "in a block with NaN": blocks(values.isnan().float()) > 0,
            "in a block with an infinite value": blocks(values.isinf().float()) > 0,
            "in a block of zeros": blocks((values != 0).float()) == 0,
            "other": torch.ones_like(compared.scales),
        },
    )


def _counted(rest: Tensor, tests: Mapping[str, Tensor]) -> Counter[str]:
    """How often the first test holds that does."""
    counts: Counter[str] = Counter()
    for kind, holds in tests.items():
        counts[kind] = int((rest & holds).sum())
        rest = rest & ~holds
    return counts


def _examples(compared: Comparison, most: int) -> Iterator[Example]:
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
        yield Example("scale", compared.case, row, column, float(amaxes[at]), *texts)
    for row, column in elements[: most - len(scales)]:
        texts = [
            _element(int(codes[row, column]), name)
            for codes in (compared.codes, compared.stored_codes)
        ]
        yield Example("element", compared.case, row, column, float(values[row, column]), *texts)


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
    case = next(case for case in cases if compare(Explanation(named), case) is None)
    steps, stored = named.steps, case.stored
    expected = shapes_of(steps, named.usage, case.shape)
    dtype = str(stored.scales.dtype).removeprefix("torch.")
    text = (
        f"{case.name or 'the tensor'} of {case.shape}: data have shape {tuple(stored.data.shape)} "
        f"and scales {tuple(stored.scales.shape)} as {dtype}; the contract has {expected.data} "
        f"bytes, and scales {expected.scales} in {steps.scale.format}"
    )
    if stored.level is not None and steps.second_level is not None:
        needs = math.prod(Grid(steps.second_level.over, case.shape).counts)
        text += f"; the second level has {stored.level.numel()} numbers, and the contract's {needs}"
    return text
