"""``check_recipe`` runs the checks from a program."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ottava.errors import DTypeError, OptionError
from ottava.recipes.spec import RecipeSpec
from ottava_testing import launch
from ottava_testing.checks import list_checks
from ottava_testing.compare import CheckFailed, about, describe
from ottava_testing.subject import LAYER, RecipeLike, Subject
from ottava_testing.table import RANK_BODIES, Check

Outcome = Literal["passed", "failed", "expected", "not applicable"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Attributes:
        name: the name of the check.
        outcome: ``"passed"``, ``"failed"``, ``"expected"`` (the check failed, as was expected) or
            ``"not applicable"``.
        message: the defect, or the reason why the check does not apply.
        seconds: how long the check took.
    """

    name: str
    outcome: Outcome
    message: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """The results of all checks of a recipe.

    Attributes:
        recipe: the name of the recipe.
        results: the results in the order of the table of checks.
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
        """Whether no check failed."""
        return not self.failures

    def count(self, outcome: Outcome) -> int:
        """The number of checks with an outcome."""
        return sum(result.outcome == outcome for result in self.results)

    def __str__(self) -> str:
        counts = {outcome: self.count(outcome) for outcome in OUTCOMES}
        words = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        lines = [f"{self.recipe}: {'conforms' if self.ok else 'does not conform'} ({words})"]
        lines += [
            f"  {result.outcome} {result.name}: {result.message}"
            for result in self.results
            if result.outcome in ("failed", "expected")
        ]
        if self.left_out:
            lines.append(f"  left out: {', '.join(self.left_out)}")
        return "\n".join(lines)


def run_check(check: Check, subject: Subject) -> None:
    """Run one check that applies.

    The global random state and the number of threads are the same afterwards as before.

    Raises:
        CheckFailed: the recipe does not pass. Any other exception of its code becomes a
            CheckFailed whose message has the place that raised it.
    """
    grad = torch.is_grad_enabled()
    threads = torch.get_num_threads()
    has_ranks = not RANK_BODIES.keys().isdisjoint(subject.check_names or RANK_BODIES)
    # A fork is made early, because it should know nothing of what the recipe does here. A new
    # process imports for seconds, in which other slow checks compile.
    if has_ranks and (check.slow or launch.may_fork()):
        launch.start_server()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # The tensors are so small that threads would only wait for each other.
        torch.set_num_threads(1)
        try:
            with torch.enable_grad(), check.seeds(subject.spec):
                check.run(subject)
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(f"{check.name} ({check.promise}): {describe(error)}") from error
        finally:
            torch.set_grad_enabled(grad)
            torch.set_num_threads(threads)


def subjects_of(
    recipe: RecipeLike,
    options: Mapping[str, Any],
    spec: RecipeSpec | None,
    layers: Any,
    promises: Mapping[str, Any] | None = None,
) -> list[Subject]:
    """One subject for each name in ``layers``, with the recipe as a layer of that name gets it.

    Raises:
        DTypeError: ``layers`` is no sequence of texts.
        OptionError: ``layers`` is empty, or has a name twice.
    """
    names = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [None]
    if not all(isinstance(name, str) for name in names):
        raise DTypeError(f"layers is {layers!r}", expected='a list of names, ["encoder.0", "head"]')
    if not names or len(set(names)) != len(names):
        raise OptionError(f"layers is {names!r}", expected="names of layers, each once")
    own = promises or {}
    return [Subject(recipe, options, spec, name, own) for name in names]  # type: ignore[arg-type]


def outcome_of(
    check: Check, subjects: Sequence[Subject], reason: str | None = None
) -> tuple[Outcome, str, Exception | None]:
    """Run a check for each of the layers that it applies to, up to the first that does not pass.

    Args:
        check: the check.
        subjects: the recipe as each of the layers gets it.
        reason: why the check has to fail, if that is expected.

    Returns:
        The outcome, its message, and the exception of the recipe's own code that caused it, if one
        did. The message has the name of the layer, unless that is the kit's own default.
    """
    obstacles = [check.why_not(subject.spec) for subject in subjects]
    if None not in obstacles:
        if reason is None:
            return "not applicable", str(obstacles[0]), None
        words = f"it is expected to fail, and does not apply: {obstacles[0]}; remove that"
        return "failed", words, None
    for subject, obstacle in zip(subjects, obstacles, strict=True):
        if obstacle is not None:
            continue
        try:
            if subject.layer_name == LAYER:
                run_check(check, subject)
            else:
                with about(f"layer {subject.layer_name!r}"):
                    run_check(check, subject)
        except CheckFailed as error:
            if reason is not None:
                return "expected", f"{reason} ({error})", None
            cause = error.__cause__
            return "failed", str(error), cause if isinstance(cause, Exception) else None
    if reason is not None:
        return "failed", f"it passes, and was expected to fail ({reason}): remove that", None
    return "passed", "", None


def find_checks(names: Iterable[str], source: str) -> list[Check]:
    """The checks of these names; ``source`` says in messages where the names come from.

    Raises:
        OptionError: no check has that name; the message has the nearest names.
    """
    checks = {check.name: check for check in list_checks()}
    for name in names:
        if name not in checks:
            near = difflib.get_close_matches(str(name), checks, n=3, cutoff=0.4)
            raise OptionError(
                f"{source} {name!r} is no check",
                expected=f"a name such as {', '.join(near)}" if near else "the name of a check",
                remedy="`ottava check-recipe --list` has all names",
            )
    return [checks[name] for name in names]


def checked_failures(expected: Mapping[str, str] | None) -> dict[str, str]:
    """Expected failures after checks: the reason of each, by the name of the check.

    Raises:
        DTypeError: ``expected`` is no mapping.
        OptionError: no check has that name (the message has the nearest names), or a failure has
            no reason.
    """
    if expected is not None and not isinstance(expected, Mapping):
        raise DTypeError(
            f"expected_failures is a {type(expected).__name__}",
            expected="a mapping, {check: why it fails}",
        )
    reasons = dict(expected or {})
    find_checks(reasons, "the expected failure")
    for name, reason in reasons.items():
        if not isinstance(reason, str) or not reason.strip():
            raise OptionError(
                f"the expected failure of {name!r} has no reason",
                expected="why it fails",
                remedy=f"{name}=REASON",
            )
    return reasons


def check_recipe(
    recipe: RecipeLike,
    *,
    options: Mapping[str, Any] | None = None,
    spec: RecipeSpec | None = None,
    only: Iterable[str] | None = None,
    skip_slow: bool = False,
    expected_failures: Mapping[str, str] | None = None,
    layers: Sequence[str] = (LAYER,),
    promises: Mapping[str, Any] | None = None,
) -> Report:
    """Run the checks that apply to a recipe.

    Args:
        recipe: the name of an installed recipe, the path of a recipe file, a recipe, or a function
            that makes one.
        options: the recipe's options, if ``recipe`` is a name or a file.
        spec: the spec whose promises are checked; by default that of the installed recipe, or else
            one with the default of every flag.
        only: names of the checks to run; by default all.
        skip_slow: leave out the checks that compile or start processes.
        expected_failures: name of a check -> reason. Such a check has to fail.
        layers: names of layers. A recipe that depends on the layer's name is checked under each.
        promises: fields of the spec, in the place of those that it has.

    Raises:
        OptionError: a check is unknown (the message has the nearest names), an expected failure has
            no reason, or a promise is no field of a spec.
        RecipeNotFoundError, PluginError, DTypeError: ``recipe`` gives no recipe.
    """
    reasons = checked_failures(expected_failures)
    checks = list_checks() if only is None else find_checks(list(only), "only")
    subjects = subjects_of(recipe, options or {}, spec, layers, promises)
    for subject in subjects:
        subject.recipe()
        subject.check_names = frozenset(check.name for check in checks)
    results, left_out = [], []
    for check in checks:
        if skip_slow and check.slow:
            left_out.append(check.name)
            continue
        start = time.perf_counter()
        outcome, message, _ = outcome_of(check, subjects, reasons.get(check.name))
        results.append(Result(check.name, outcome, message, time.perf_counter() - start))
    return Report(subjects[0].label, tuple(results), tuple(left_out))
