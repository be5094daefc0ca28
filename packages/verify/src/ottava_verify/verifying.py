"""``verify``: a function or a checkpoint compared with contracts, or two checkpoints."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ottava.contract import Contract, Direction
from ottava.errors import OptionError, UsageError, named
from ottava.filesystem import AnyPath, as_path
from ottava.recipes import Recipe, get_recipe
from ottava.tensors import Quantizer
from ottava_verify.catalogue import contracts_of_recipes
from ottava_verify.checkpoints import Quantized, quantized_tensors, source_tensors
from ottava_verify.finding import compared, finding
from ottava_verify.functions import Input, cases_of, golden_inputs
from ottava_verify.matching import Agreement, Case, Explanation, Named, Result, difference, match
from ottava_verify.report import Finding, Report
from ottava_verify.steps import Usage
from ottava_verify.stored import Stored
from ottava_verify.terminal import example_line, sentences

Tensor = torch.Tensor
#: What a contract is given as.
AnyContract = Contract | Recipe | Quantizer | str
_GIVEN = ("given", "given-fitting")
#: Larger matrices are compared in a part of them first.
_LARGE = 1 << 15
# How many tensors are searched together.
_TOGETHER = 4


def verify(
    subject: Callable[..., Any] | AnyPath,
    other: AnyPath | None = None,
    *,
    contract: AnyContract | None = None,
    source: AnyPath | None = None,
    **options: Any,
) -> Report:
    """Compare a function, a checkpoint, or two checkpoints.

    - ``verify(function, contract="nvfp4")`` is :func:`verify_function`;
    - ``verify("quantized.safetensors", source="bf16/")`` is :func:`verify_checkpoint`;
    - ``verify("a.safetensors", "b.safetensors")`` is :func:`verify_checkpoints`.

    Args:
        subject: a function, or the path of a checkpoint.
        other: another checkpoint.
        contract: for a function or a checkpoint.
        source: what a checkpoint was made of.
        options: further arguments of these functions.

    Raises:
        UsageError: the arguments do not go together.
    """
    if callable(subject) and contract is not None and other is None and source is None:
        return verify_function(subject, contract, **options)
    if not callable(subject) and other is None and source is not None:
        return verify_checkpoint(subject, source, contract=contract, **options)
    if not callable(subject) and other is not None and source is None and contract is None:
        return verify_checkpoints(subject, other)
    raise UsageError(
        "these arguments do not go together",
        expected="a function and contract=, a checkpoint and source=, or two checkpoints",
    )


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


def resolve_contract(
    contract: AnyContract,
    *,
    role: str = "input",
    usage: Usage = "rowwise",
    options: Mapping[str, object] | None = None,
) -> tuple[Named, str]:
    """One usage of a contract, and its citation.

    Args:
        contract: a contract, a recipe or its name, a quantizer, or a file with a contract as JSON.
        role: for which a recipe makes a quantizer.
        options: of the recipe that is named.

    Raises:
        OptionError: nothing is stated of the usage.
        RecipeNotFoundError: no package has the recipe.
    """
    title = contract if isinstance(contract, str) else type(contract).__name__
    if isinstance(contract, str) and contract.endswith(".json"):
        contract = Contract.of_json(as_path(contract).read_text())
    if isinstance(contract, str):
        contract = get_recipe(contract, **dict(options or {}))
    if isinstance(contract, Recipe):
        title = f"{title if isinstance(title, str) else contract.name}, {role}"
        contract = contract.quantizer(role)
    stated: Any = getattr(contract, "contract", contract)
    if not isinstance(stated, Contract) or not isinstance(getattr(stated, usage), Direction):
        raise OptionError(
            f"{title} states no bytes of its {usage} data",
            expected="a contract that states every choice",
            remedy="`ottava contract` prints contracts",
        )
    name = title.partition(",")[0].partition("(")[0]
    return Named(f"{title}, {usage}", stated, usage), stated.citation(name)


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
        contract, role, options: see :func:`resolve_contract`.
        usage: which data it makes.
        as_numpy: call it with arrays of numpy.
        inputs: other inputs than those of the golden vectors.
        name: for the report.

    Raises:
        OptionError, RecipeNotFoundError: the contract cannot be had.
    """
    expected, citation = resolve_contract(contract, role=role, usage=usage, options=options)
    title = name or getattr(function, "__qualname__", type(function).__name__)
    cases, errors, fails = cases_of(
        function, inputs or golden_inputs(expected), expected, as_numpy=as_numpy
    )
    if cases:
        others = [entry for entry in contracts_of_recipes() if entry.usage == usage]
        found = compared(title, cases, expected, citation, others)
    else:
        found = Finding(title, "not compared", expected.name, citation)
    if cases and fails:
        found = replace(found, status="departs")
    found = replace(found, errors=errors)
    return Report(title, expected.name, (found,))


def verify_checkpoint(
    checkpoint: AnyPath,
    source: AnyPath,
    *,
    contract: AnyContract | None = None,
    role: str = "weight",
    options: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Find the contract that reproduces the bytes of each quantized tensor.

    Args:
        checkpoint: of Ottava, compressed-tensors, Hugging Face's FP8 or ModelOpt.
        source: the checkpoint in high precision that it was made of.
        contract: that which all tensors should have; by default any of an installed recipe.
        role, options: see :func:`resolve_contract`.
        progress: called with the number of tensors done, and of all.

    Raises:
        CheckpointError: a checkpoint is damaged, or cannot be read.
    """
    tensors = quantized_tensors(checkpoint)
    sources = source_tensors(source)
    known = [entry for entry in contracts_of_recipes() if entry.choices.random is None]
    searches: list[_Search | Finding] = []
    for done, tensor in enumerate(tensors):
        if progress is not None:
            progress(done, len(tensors))
        problem = _problem(tensor, sources.get(tensor.name))
        if problem:
            searches.append(Finding(tensor.title, "not compared", tensor.format, note=problem))
            continue
        stated = None
        if contract is not None:
            stated = resolve_contract(contract, role=role, usage=tensor.usage, options=options)
        elif tensor.contract is not None and tensor.contract.is_stated:
            entry = Named(
                f"the contract in the file, {tensor.usage}", tensor.contract, tensor.usage
            )
            stated = entry, f"ottava:contract/{tensor.contract.hash}"
        search = _Search(tensor, sources[tensor.name], stated, known)
        search.look_for_contracts()
        searches.append(search)
    _explain([each for each in searches if isinstance(each, _Search)])
    findings = (each if isinstance(each, Finding) else each.finding() for each in searches)
    return Report(str(checkpoint), str(source), tuple(findings))


def _problem(tensor: Quantized, source: Tensor | None) -> str:
    """Why a tensor cannot be compared with its source; empty if it can."""
    if tensor.problem:
        return tensor.problem
    if source is None:
        return f"the source has no {tensor.name!r} in high precision"
    if source.dim() != 2:
        return f"the source has shape {tuple(source.shape)}, and is no matrix"
    return ""


class _Search:
    """The search for what one tensor of a checkpoint was made with."""

    def __init__(
        self,
        tensor: Quantized,
        source: Tensor,
        stated: tuple[Named, str] | None,
        known: Sequence[Named],
    ) -> None:
        assert tensor.stored is not None
        self.tensor, self.stated = tensor, stated
        self.case = Case("", source, tensor.stored, scale=_given(tensor.stored))
        # A part of a large tensor stands for it.
        self.part = replace(self.case, in_window=source.numel() > _LARGE)
        self.others = [entry for entry in known if entry.usage == tensor.usage]
        self.result = Result((), None)

    @property
    def starts(self) -> list[Named]:
        """The contracts that it may have, which do not take a scale from outside."""
        starts = [self.stated[0]] if self.stated else self.others
        return [entry for entry in starts if entry.choices.scale.rule not in _GIVEN]

    @property
    def kind(self) -> object:
        """Equal for tensors that were probably made alike."""
        stored, stated = self.tensor.stored, self.stated
        assert stored is not None
        fits = [difference(entry, (), self.part) is not None for entry in self.starts]
        forms = stored.scales.dtype, stored.level is None, stated and stated[0]
        return self.tensor.format, self.tensor.usage, forms, tuple(fits)

    def look_for_contracts(self) -> None:
        """Look for contracts that reproduce all bytes: the stated one first."""
        self.take(self.starts)
        if not self.result.exact and self.stated:
            rule = self.stated[0].choices.scale.rule
            usual = [entry for entry in self.others if entry.choices.scale.rule not in _GIVEN]
            self.take([self.stated[0]] if rule in _GIVEN else usual)

    def take(self, starts: Sequence[Named] | Sequence[Explanation]) -> None:
        """Take what reproduces all bytes of the whole tensor, if anything does."""
        part = self.part
        found = match([part], starts, most_turns=0)
        if part.in_window:
            # What does not reproduce a part does not reproduce the whole.
            likely = found.exact or ((found.nearest,) if found.nearest else ())
            found = match([self.case], likely, most_turns=0)
        if found.exact or not self.result.exact:
            self.result = found

    def look_for_outside_scale(self) -> None:
        """Take a scale from outside, which explains any scale and so comes last."""
        starts = [entry for entry in self.others if entry.choices.scale.rule in _GIVEN]
        if starts and self.case.scale is not None and not self.stated:
            found = match([self.case], starts, most_turns=1)
            if found.exact:
                self.result = found

    def finding(self) -> Finding:
        """What was found."""
        tensor, best = self.tensor, self.result.best
        if self.stated is not None:
            expected, citation = self.stated
        elif best is not None:
            expected = best.named
            citation = expected.contract.citation(expected.recipe)
        else:
            note = f"{tensor.format}: no contract of an installed recipe has its shapes and dtypes"
            return Finding(tensor.title, "not compared", tensor.format, note=note)
        found = finding(tensor.title, [self.case], self.result, expected, citation)
        same = [e.named.name for e in self.result.exact if not e.turns and e.named != expected]
        notes = [f"format: {tensor.format}", *filter(None, [found.note])]
        if same and found.status == "equal":
            notes.append(f"so are those of {'; '.join(same)}, which these data do not tell apart")
        return replace(found, note="; ".join(notes))


def _explain(searches: Sequence[_Search]) -> None:
    """Look for turns that explain what no contract reproduces.

    Tensors that were probably made alike are searched together, so that no turn is named that
    explains one of them by chance. Those that remain are searched one by one.
    """
    groups: dict[object, list[_Search]] = {}
    for search in searches:
        if not search.result.exact:
            groups.setdefault(search.kind, []).append(search)
    for group in groups.values():
        sample = group[:: -(-len(group) // _TOGETHER)]
        found = match([search.part for search in sample], group[0].starts)
        for search in group:
            search.take(found.exact or ([found.nearest] if found.nearest else []))
        _explain_alone(group)
        _narrow(group)
        for search in group:
            if not search.result.exact:
                search.look_for_outside_scale()


def _explain_alone(group: Sequence[_Search]) -> None:
    """Search those that nothing explains together one by one, and then from what explains
    others."""
    for more_turns in (2, 1) if len(group) > 1 else ():
        for search in group:
            if search.result.exact:
                continue
            starts: Any = search.starts if more_turns == 2 else _learned(group)
            found = match([search.part], starts, most_turns=more_turns)
            search.take(found.exact or ([found.nearest] if found.nearest else []))


def _learned(group: Sequence[_Search]) -> list[Explanation]:
    """What explains any of some tensors, each once."""
    return list({e.key: e for search in group for e in search.result.exact}.values())


def _narrow(group: Sequence[_Search]) -> None:
    """Of what explains one tensor, keep what explains all of them, if anything does."""
    learned = _learned(group)
    if len(learned) > 1:
        common = match([search.case for search in group], learned, most_turns=0).exact
        for search in group if common else ():
            search.take(common)


def _given(stored: Stored) -> float | None:
    """The scale that a stored one is the inverse of, where there is one."""
    if stored.scales.numel() != 1 or stored.scales.dtype != torch.float32:
        return None
    return float(1 / stored.scales.reshape(()))


def verify_checkpoints(one: AnyPath, other: AnyPath) -> Report:
    """Compare the quantized tensors of two checkpoints, in bytes and decoded.

    Raises:
        CheckpointError: a checkpoint is damaged, or cannot be read.
    """
    sides = [
        {(tensor.name, tensor.usage): tensor for tensor in quantized_tensors(path)}
        for path in (one, other)
    ]
    findings = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        pair = [side.get(key) for side in sides]
        title = next(tensor.title for tensor in pair if tensor is not None)
        findings.append(_of_pair(title, pair[0], pair[1], (str(one), str(other))))
    return Report(str(one), str(other), tuple(findings))


def _of_pair(
    title: str, one: Quantized | None, other: Quantized | None, paths: tuple[str, str]
) -> Finding:
    """The finding of a tensor of two checkpoints."""
    if one is None or other is None:
        missing = paths[0] if one is None else paths[1]
        return Finding(title, "not compared", note=f"{missing} has no such quantized tensor")
    if one.stored is None or other.stored is None:
        return Finding(title, "not compared", one.format, note=one.problem or other.problem)
    with named(title):
        values = [tensor.decode().double() for tensor in (one, other)]
    if values[0].shape != values[1].shape:
        shapes = " and ".join(str(tuple(value.shape)) for value in values)
        return Finding(title, "not compared", one.format, note=f"shapes are {shapes}")
    counts = _counts(one, other)
    same = _same_values(values[0], values[1])
    error = _error(values[0], values[1])
    text = f"{int((~same).sum())} of {same.numel()} decoded values differ"
    if counts is None:
        text = f"data or scales have other shapes or dtypes ({one.format}; {other.format}); {text}"
    is_equal = counts.is_exact if counts is not None else False
    return Finding(
        title,
        "equal" if is_equal and bool(same.all()) else "departs",
        f"{one.format}; {other.format}" if one.format != other.format else one.format,
        agreement=counts,
        error=error,
        note="" if is_equal else text,
    )


def _counts(one: Quantized, other: Quantized) -> Agreement | None:
    """How many bytes and scales agree; None where shapes or dtypes differ."""
    assert one.stored is not None
    assert other.stored is not None
    pairs = [
        (one.stored.data, other.stored.data),
        (one.stored.scales, other.stored.scales),
    ]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return None
    levels = [stored.level for stored in (one.stored, other.stored)]
    if (levels[0] is None) != (levels[1] is None):
        return None
    if levels[0] is not None and levels[1] is not None:
        pairs.append((levels[0].reshape(-1), levels[1].reshape(-1)))
    numbers = []
    for a, b in pairs:
        numbers += [a.numel(), int(_same_values(a, b).sum()) if a.shape == b.shape else 0]
    return Agreement(*numbers)


def _same_values(one: Tensor, other: Tensor) -> Tensor:
    same = one == other
    return same | (one.isnan() & other.isnan()) if one.is_floating_point() else same


def _error(one: Tensor, other: Tensor) -> float | None:
    """The root of the mean square of the difference, relative to that of the first."""
    usual = one.isfinite() & other.isfinite()
    whole = torch.where(usual, one, 0.0).square().sum()
    if not whole:
        return None
    return math.sqrt(float(torch.where(usual, other - one, 0.0).square().sum() / whole))
