"""``verify``: a function or a checkpoint compared with contracts, or two checkpoints."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ottava.contract.steps import Usage, takes_scale
from ottava.errors import OptionError, UsageError, named
from ottava.filesystem import AnyPath
from ottava_verify.checkpoints import Quantized, quantized_tensors, source_tensors
from ottava_verify.contracts import AnyContract, Named, contracts_of_recipes, resolve_contract
from ottava_verify.finding import Finding, Report, finding, finding_of_function
from ottava_verify.functions import Input, cases_of, golden_inputs
from ottava_verify.output import example_line, sentences
from ottava_verify.search import Agreement, Case, Cases, Explanation, Result, compare, match
from ottava_verify.stored import Stored

# Larger matrices are compared in a part of them first.
_LARGE = 1 << 15
# How many tensors are searched together, and how many by themselves.
_TOGETHER, _ALONE = 4, 8


# What is compared -> the arguments that say more of it; and the one that it needs.
_TAKES = {
    "a function": {"contract", "role", "usage", "options", "as_numpy", "inputs", "name"},
    "a checkpoint": {"source", "contract", "role", "options"},
    "two checkpoints": set(),
}
_NEEDS = {"a function": "contract", "a checkpoint": "source"}


def verify(
    subject: Callable[..., Any] | AnyPath, other: AnyPath | None = None, **options: Any
) -> Report:
    """Compare a function, a checkpoint, or two checkpoints.

    - ``verify(function, contract="nvfp4")`` is :func:`verify_function`;
    - ``verify("quantized.safetensors", source="bf16/")`` is :func:`verify_checkpoint`;
    - ``verify("a.safetensors", "b.safetensors")`` is :func:`verify_checkpoints`.

    Args:
        subject: a function, or the path of a checkpoint.
        other: another checkpoint.
        options: arguments of these functions. None, False and empty ones count as left out.

    Raises:
        UsageError, OptionError: the arguments do not go together.
    """
    kind = "a checkpoint" if other is None else "two checkpoints"
    if callable(subject):
        kind, options = "a function", options | {"other": other}
    given = {name: value for name, value in options.items() if value}
    expected = "a function and a contract, a checkpoint and its source, or two checkpoints"
    for name in given.keys() - _TAKES[kind]:
        raise OptionError(f"{kind}, with {name}", expected=expected)
    if _NEEDS.get(kind, kind) not in (*given, kind):
        raise UsageError(f"{kind} without {_NEEDS[kind]}", expected=expected)
    if "options" in given and "contract" not in given:
        raise OptionError("options without a contract", expected="the recipe that has the options")
    if callable(subject):
        return verify_function(subject, **given)
    if other is not None:
        return verify_checkpoints(subject, other)
    return verify_checkpoint(subject, **given)


def assert_contract(function: Callable[..., Any], contract: AnyContract, **options: Any) -> None:
    """Fail a test unless a function has the bytes of a contract on all golden inputs.

    Args:
        function, contract, options: see :func:`verify_function`.

    Raises:
        AssertionError: it departs, or cannot be compared. The message says where, and why.
    """
    report = verify_function(function, contract, **options)
    if report.status != "equal":
        lines = [*sentences(report), *map(example_line, report.findings[0].examples)]
        raise AssertionError("\n".join(lines))


def verify_function(
    function: Callable[..., Any],
    contract: AnyContract,
    *,
    role: str = "input",
    usage: Usage = "rowwise",
    options: Mapping[str, object] | None = None,
    as_numpy: bool = False,
    inputs: Iterable[Input] | None = None,
    name: str = "",
) -> Report:
    """Compare what a function makes of golden inputs with a contract.

    Args:
        function: ``fn(x)``, of a matrix. It returns ``(data, scales)``, ``(data, scales, amax)``, a
            mapping, or a quantized tensor. Where the contract takes a scale from outside, or rounds
            at random, it is called as ``fn(x, scale)`` or ``fn(x, seed)``.
        contract: a contract, a recipe or its name, a quantizer, or a file with a contract as JSON.
        role: for which a recipe makes a quantizer.
        usage: which data it makes.
        options: of the recipe that is named.
        as_numpy: call it with arrays of numpy.
        inputs: other inputs than those of the golden vectors.
        name: for the report.

    Raises:
        OptionError, RecipeNotFoundError: the contract cannot be had.
    """
    expected = resolve_contract(contract, role=role, usage=usage, options=options)
    title = name or getattr(function, "__qualname__", type(function).__name__)
    inputs = inputs or golden_inputs(expected)
    cases, errors, fails = cases_of(function, inputs, expected, as_numpy=as_numpy)
    if cases:
        others = [each for each in contracts_of_recipes() if each.usage == usage]
        found = finding_of_function(title, Cases(cases), expected, others)
    else:
        found = Finding(title, "not compared", expected.name, expected.citation)
    if cases and fails:
        found = replace(found, status="departs")
    return Report(title, expected.name, (replace(found, errors=errors),))


def verify_checkpoint(
    checkpoint: AnyPath,
    source: AnyPath,
    *,
    contract: AnyContract | None = None,
    role: str = "weight",
    options: Mapping[str, object] | None = None,
) -> Report:
    """Find the contract that reproduces the bytes of each quantized tensor.

    Args:
        checkpoint: of Ottava, compressed-tensors, Hugging Face's FP8, ModelOpt or torchao.
        source: the checkpoint in high precision that it was made of.
        contract: that which all tensors should have; by default any of an installed recipe.
        role, options: see :func:`verify_function`.

    Raises:
        CheckpointError: a checkpoint is damaged, or cannot be read.
    """
    tensors, sources = quantized_tensors(checkpoint), source_tensors(source)
    known = [each for each in contracts_of_recipes() if each.steps.random is None]
    searches: list[_Search | Finding] = []
    for tensor in tensors:
        x = sources.get(tensor.name)
        if tensor.stored is None or x is None or x.dim() != 2:
            note = tensor.problem or _problem(tensor.name, x)
            searches.append(Finding(tensor.title, "not compared", tensor.format, note=note))
            continue
        stated = None
        if contract is not None:
            stated = resolve_contract(contract, role=role, usage=tensor.usage, options=options)
        elif tensor.contract is not None and tensor.contract.is_stated:
            name = f"the contract in the file, {tensor.usage}"
            stated = Named(name, tensor.contract, tensor.usage)
        of_usage = [each for each in known if each.usage == tensor.usage]
        case = Case("", x, tensor.stored, scale=_given(tensor.stored))
        searches.append(_Search(tensor, case, stated, of_usage))
    _search([each for each in searches if isinstance(each, _Search)])
    findings = (each if isinstance(each, Finding) else each.finding() for each in searches)
    return Report(str(checkpoint), str(source), tuple(findings))


def _problem(name: str, source: Tensor | None) -> str:
    """Why a tensor cannot be compared with its source."""
    if source is None:
        return f"the source has no {name!r} in high precision"
    return f"the source has shape {tuple(source.shape)}, and is no matrix"


def _given(stored: Stored) -> float | None:
    """The scale that a stored one is the inverse of, where there is one."""
    if stored.scales.numel() != 1 or not stored.scales.is_floating_point():
        return None
    return float(1 / stored.scales.reshape(()))


# The search for what the tensors of a checkpoint were made with.


@dataclass(eq=False)
class _Search:
    """The search for what one tensor was made with.

    Attributes:
        case: the tensor, with its source.
        stated: the contract that it should have; None where none is stated.
        known: contracts that it may have.
        result: what was found so far.
    """

    tensor: Quantized
    case: Case
    stated: Named | None
    known: Sequence[Named]
    result: Result = field(default_factory=lambda: Result(()))

    @cached_property
    def part(self) -> Case:
        """The case, where a part stands for a large tensor."""
        return replace(self.case, in_window=self.case.x.numel() > _LARGE)

    @cached_property
    def of_part(self) -> Cases:
        """The part, alone."""
        return Cases([self.part])

    @cached_property
    def of_whole(self) -> Cases:
        """The whole tensor, alone."""
        return Cases([self.case]) if self.part.in_window else self.of_part

    @property
    def starts(self) -> list[Explanation]:
        """The contracts that turns are added to."""
        contracts = [self.stated] if self.stated else self.known
        return [Explanation(each) for each in contracts if not takes_scale(each.steps)]

    @property
    def kind(self) -> object:
        """Equal for tensors that were probably made alike."""
        stored = self.case.stored
        fits = tuple(compare(start, self.part) is not None for start in self.starts)
        forms = stored.scales.dtype, stored.level is None, self.stated
        return self.tensor.format, self.tensor.usage, forms, fits

    def take(self, starts: Iterable[Explanation]) -> None:
        """Take what reproduces all bytes of the whole tensor, if anything does."""
        found = match(self.of_part, starts, most_turns=0)
        if self.part.in_window:
            # What does not reproduce a part does not reproduce the whole.
            found = match(self.of_whole, found.best, most_turns=0)
        if found.exact or not self.result.exact:
            self.result = found

    def look(self, starts: Iterable[Explanation], most_turns: int) -> None:
        """Search with turns, unless something explains the tensor already."""
        if not self.result.exact:
            self.take(match(self.of_part, starts, most_turns=most_turns).best)

    def finding(self) -> Finding:
        """What was found."""
        tensor, exact = self.tensor, self.result.exact
        expected = self.stated or next((each.named for each in self.result.best), None)
        if expected is None:
            note = f"{tensor.format}: no contract of an installed recipe has its shapes and dtypes"
            return Finding(tensor.title, "not compared", tensor.format, note=note)
        found = finding(tensor.title, self.of_whole, self.result, expected)
        notes = [f"format: {tensor.format}", *filter(None, [found.note])]
        same = [e.named.name for e in exact if not e.turns and e.named != expected]
        if same and found.status == "equal":
            notes.append(f"so are those of {'; '.join(same)}, which these data do not tell apart")
        return replace(found, note="; ".join(notes))


def _search(searches: Sequence[_Search]) -> None:
    """Look for contracts that reproduce all bytes, the stated one first, and for turns where none
    does.

    Tensors that were probably made alike are searched together, so that no turn is named that
    explains one of them by chance.
    """
    groups: dict[object, list[_Search]] = {}
    for search in searches:
        if search.stated is not None:
            search.take([Explanation(search.stated)])
        if not search.result.exact:
            plain = [each for each in search.known if not takes_scale(each.steps)]
            search.take(map(Explanation, plain))
        if all(each.turns for each in search.result.exact):
            groups.setdefault(search.kind, []).append(search)
    for group in groups.values():
        _search_together(group)


def _search_together(group: Sequence[_Search]) -> None:
    """Look for turns of tensors that no contract reproduces."""
    sample = group[:: -(-len(group) // _TOGETHER)]
    of_sample = match(Cases(search.part for search in sample), group[0].starts)
    for search in group:
        search.take(of_sample.best)
    if len(group) > 1:
        # They may have been made in different ways. All of a large model would take hours.
        unexplained = [search for search in group if not search.result.exact]
        for search in unexplained[:_ALONE]:
            search.look(search.starts, most_turns=2)
    # Of what explains one tensor, keep what explains all of them together, if anything does.
    learned = {each.key: each for search in group for each in search.result.exact}
    turns = {turn: None for each in learned.values() for turn in each.turns}
    parts = Cases(search.part for search in group)
    common = match(parts, learned.values(), most_turns=2, table=[*turns]).exact
    for search in group:
        known = match(search.of_part, common or learned.values(), most_turns=0)
        if known.exact and (common or not search.result.exact):
            search.take(known.exact)
        # A scale from outside explains any scale, and so comes last.
        from_outside = [Explanation(e) for e in search.known if takes_scale(e.steps)]
        is_known = any(not each.takes("scales") for each in search.result.exact)
        if from_outside and search.stated is None and not is_known:
            scaled = match(search.of_whole, from_outside, most_turns=1)
            if scaled.exact:
                search.result = scaled


# Two checkpoints.


def verify_checkpoints(one: AnyPath, other: AnyPath) -> Report:
    """Compare the quantized tensors of two checkpoints, in bytes and decoded.

    Of a tensor that one of them has for both usages, the one that both have is compared.

    Raises:
        CheckpointError: a checkpoint is damaged, or cannot be read.
    """
    sides = [
        {(tensor.name, tensor.usage): tensor for tensor in quantized_tensors(path)}
        for path in (one, other)
    ]
    findings = []
    names = [{name for name, _ in side} for side in sides]
    for key in dict.fromkeys((*sides[0], *sides[1])):
        pair = [side[key] for side in sides if key in side]
        if len(pair) == 2:
            findings.append(_of_pair(*pair))
        elif key[0] not in names[0] & names[1]:
            missing = other if key in sides[0] else one
            note = f"{missing} has no such quantized tensor"
            findings.append(Finding(pair[0].title, "not compared", note=note))
    return Report(str(one), str(other), tuple(findings))


def _of_pair(one: Quantized, other: Quantized) -> Finding:
    """The finding of a tensor of two checkpoints."""
    formats = f"formats: {one.format}; {other.format}"
    found = Finding(one.title, "not compared", note=formats)
    if one.stored is None or other.stored is None:
        return replace(found, note=one.problem or other.problem)
    with named(one.title):
        values = [tensor.decode().double() for tensor in (one, other)]
    if values[0].shape != values[1].shape:
        shapes = " and ".join(str(tuple(value.shape)) for value in values)
        return replace(found, note=f"shapes are {shapes}")
    agreement = _agreement(one.stored, other.stored)
    same = _same(*values)
    found = replace(found, status="departs", agreement=agreement, error=_error(*values))
    if agreement is not None and agreement.is_exact and bool(same.all()):
        return replace(found, status="equal")
    notes = [f"{int((~same).sum())} of {same.numel()} decoded values differ", formats]
    if agreement is None:
        notes.insert(0, "data or scales have other shapes or dtypes")
    return replace(found, note="; ".join(notes))


def _agreement(one: Stored, other: Stored) -> Agreement | None:
    """How many bytes and scales agree; None where shapes or dtypes differ."""
    if one.data.shape != other.data.shape or one.scales.shape != other.scales.shape:
        return None
    if one.scales.dtype != other.scales.dtype or (one.level is None) != (other.level is None):
        return None
    pairs = [(one.data, other.data), (one.scales, other.scales)]
    if one.level is not None and other.level is not None:
        pairs.append((one.level.reshape(-1), other.level.reshape(-1)))
    counts = []
    for a, b in pairs:
        counts += [a.numel(), int(_same(a, b).sum())]
    return Agreement(*counts)


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Where numbers are equal; any NaN is like any other."""
    same = one == other
    return same | (one.isnan() & other.isnan())


def _error(one: Tensor, other: Tensor) -> float | None:
    """The root of the mean square of the difference, relative to that of the first."""
    usual = one.isfinite() & other.isfinite()
    whole = one[usual].square().sum()
    return math.sqrt(float((other - one)[usual].square().sum() / whole)) if whole else None
