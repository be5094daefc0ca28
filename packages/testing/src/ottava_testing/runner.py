"""``check_recipe``: the checks as a function."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ottava.errors import DTypeError, OptionError
from ottava.recipes.spec import RecipeSpec
from ottava_testing.checks import list_checks
from ottava_testing.compare import CheckFailed, describe
from ottava_testing.subject import LAYER, Given, Subject
from ottava_testing.table import Check

Outcome = Literal["passed", "failed", "expected", "not applicable"]


@dataclass(frozen=True)
class Result:
    """What became of one check.

    Attributes:
        name: of the check.
        outcome: ``"passed"``, ``"failed"``, ``"expected"`` (it failed, for a reason that was given)
            or ``"not applicable"``.
        message: what is wrong, or why it does not apply.
        seconds: how long it took.
    """

    name: str
    outcome: Outcome
    message: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """What became of all checks of a recipe.

    Attributes:
        recipe: its name.
        results: in the order of the table.
        left_out: names of the slow checks that were left out.
    """

    recipe: str
    results: tuple[Result, ...]
    left_out: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Result, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.outcome == "failed")

    @property
    def ok(self) -> bool:
        """Whether none failed."""
        return not self.failures

    def count(self, outcome: Outcome) -> int:
        """How many checks came out so."""
        return sum(result.outcome == outcome for result in self.results)

    def __str__(self) -> str:
        counts = ", ".join(
            f"{self.count(outcome)} {outcome}" for outcome in OUTCOMES if self.count(outcome)
        )
        lines = [f"{self.recipe}: {'conforms' if self.ok else 'does not conform'} ({counts})"]
        lines += [
            f"  {r.outcome} {r.name}: {r.message}"
            for r in self.results
            if r.outcome in ("failed", "expected")
        ]
        if self.left_out:
            lines.append(f"  left out: {', '.join(self.left_out)}")
        return "\n".join(lines)


OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "expected", "not applicable")


def run_check(check: Check, subject: Subject) -> None:
    """Run one check that applies. The global random state is the same before and after it.

    Raises:
        CheckFailed: the recipe does not pass; any other exception of its code becomes one that says
            where.
    """
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # The tensors are small: threads would only wait for each other.
        torch.set_num_threads(1)
        try:
            with torch.enable_grad():
                check.run(subject)
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(f"{check.name} ({check.promise}): {describe(error)}") from error
        finally:
            torch.set_grad_enabled(grad)
            torch.set_num_threads(threads)


def subjects_of(
    given: Given, options: Mapping[str, Any], spec: RecipeSpec | None, layers: Any
) -> list[Subject]:
    """A recipe as the layers of these names have it, one subject for each name.

    Raises:
        DTypeError: ``layers`` is no sequence of texts.
        OptionError: it is empty, or a name stands there twice.
    """
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise DTypeError(
            f"layers is a {type(layers).__name__}",
            expected='a list of names, ["encoder.0", "head"]',
        )
    names = list(layers)
    if not all(isinstance(name, str) for name in names):
        raise DTypeError(f"layers is {names!r}", expected='a list of names, ["encoder.0", "head"]')
    if not names or len(set(names)) != len(names):
        raise OptionError(f"layers is {names!r}", expected="names of layers, each once")
    return [Subject(given, options, spec, name) for name in names]  # type: ignore[arg-type]


def why_not(check: Check, subjects: Sequence[Subject]) -> str | None:
    """Why a check applies to none of the layers; None where it applies to one."""
    reasons = [check.why_not(subject.spec) for subject in subjects]
    return reasons[0] if None not in reasons else None


def run_for_layers(check: Check, subjects: Sequence[Subject]) -> None:
    """Run a check for each of the layers that it applies to, up to the first that does not pass.

    Raises:
        CheckFailed: as :func:`run_check`; the message has the name of the layer, unless that is the
            kit's own.
    """
    for subject in subjects:
        if check.why_not(subject.spec) is not None:
            continue
        try:
            run_check(check, subject)
        except CheckFailed as error:
            if subject.layer_name == LAYER:
                raise
            raise CheckFailed(f"layer {subject.layer_name!r}: {error}") from error.__cause__


def find_checks(names: Iterable[str], what: str) -> list[Check]:
    """Checks by name.

    Raises:
        OptionError: there is none of that name; the message has the nearest ones.
    """
    known = {check.name: check for check in list_checks()}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
            expected = f"a name such as {', '.join(near)}" if near else "the name of a check"
            raise OptionError(
                f"{what} {name!r} is no check",
                expected=expected,
                remedy="`ottava check-recipe --list` has all names",
            )
    return [known[name] for name in names]


def checked_failures(expected: Mapping[str, str] | None) -> dict[str, str]:
    """Expected failures: the name of a check, and why it fails.

    Raises:
        DTypeError: they are no mapping.
        OptionError: there is no check of that name, with the nearest ones; or a failure has no
            reason.
    """
    if expected is not None and not isinstance(expected, Mapping):
        what = f"expected_failures is a {type(expected).__name__}"
        raise DTypeError(what, expected="a mapping, {check: why it fails}")
    found = dict(expected or {})
    find_checks(found, "the expected failure")
    for name, reason in found.items():
        if not isinstance(reason, str) or not reason.strip():
            raise OptionError(
                f"the expected failure of {name!r} has no reason",
                expected="why it fails",
                remedy=f"{name}=REASON",
            )
    return found


def check_recipe(
    recipe: Given,
    *,
    options: Mapping[str, Any] | None = None,
    spec: RecipeSpec | None = None,
    only: Iterable[str] | None = None,
    skip_slow: bool = False,
    expected_failures: Mapping[str, str] | None = None,
    layers: Sequence[str] = (LAYER,),
) -> Report:
    """Run the checks that apply to a recipe.

    Args:
        recipe: the name of an installed recipe, the path of a recipe file, a recipe, or a function
            that makes one.
        options: the recipe's options, with a name or a file.
        spec: what the recipe says of itself; by default that of the installed one, else the
            defaults of every flag.
        only: names of the checks to run; by default all.
        skip_slow: leave out the checks that compile or start processes.
        expected_failures: name -> reason. Such a check has to fail.
        layers: names of layers. A recipe that goes by them is checked as each of these layers has
            it.

    Raises:
        OptionError: an unknown check, with the nearest ones, or an expected failure without a
            reason.
        RecipeNotFoundError, PluginError, DTypeError: ``recipe`` gives no recipe.
    """
    expected = checked_failures(expected_failures)
    chosen = list_checks() if only is None else find_checks(list(only), "only")
    subjects = subjects_of(recipe, options or {}, spec, layers)
    for subject in subjects:
        subject.recipe()
        subject.wanted = frozenset(check.name for check in chosen)
    left_out = tuple(check.name for check in chosen if skip_slow and check.slow)
    results = [
        _result(check, subjects, expected.get(check.name))
        for check in chosen
        if check.name not in left_out
    ]
    return Report(subjects[0].label, tuple(results), left_out)


def _result(check: Check, subjects: Sequence[Subject], reason: str | None) -> Result:
    no = why_not(check, subjects)
    if no is not None and reason is None:
        return Result(check.name, "not applicable", no, 0.0)
    start = time.perf_counter()
    try:
        if no is not None:
            raise CheckFailed(
                f"it is expected to fail, and does not apply: {no}; remove the expected failure"
            )
        run_for_layers(check, subjects)
        failure = ""
    except CheckFailed as error:
        failure = str(error)
    seconds = time.perf_counter() - start
    if reason is None or no is not None:
        return Result(check.name, "failed" if failure else "passed", failure, seconds)
    if failure:
        return Result(check.name, "expected", f"{reason} ({failure})", seconds)
    return Result(
        check.name,
        "failed",
        f"it passes, and was expected to fail ({reason}): remove that",
        seconds,
    )
