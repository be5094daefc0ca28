"""``RecipeConformance`` has the checks as a class of tests."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
from _pytest.outcomes import Skipped

import ottava
from ottava.errors import OptionError, OttavaError
from ottava.recipes.spec import RecipeSpec
from ottava_testing.checks import list_checks
from ottava_testing.compare import CheckFailed
from ottava_testing.runner import checked_failures, outcome_of, subjects_of
from ottava_testing.subject import LAYER, Subject
from ottava_testing.table import Check

# The attribute of its instance in which a standard test notes its outcome.
_OUTCOME = "_ottava_outcome"
_RULE = (
    'a standard test may be overridden only with @pytest.mark.xfail(reason="why it fails") on the '
    "method, which calls it by super(); or name the check in expected_failures"
)


class ConformanceError(OttavaError, TypeError):
    """A class of conformance tests leaves out standard tests."""


class NotApplicable(Skipped):
    """A standard test is skipped, because the recipe's spec does not promise what it tests."""


class RecipeConformance:
    """Base class of a recipe's conformance tests: one test for each check of the kit.

    .. code-block:: python

        class TestMine(RecipeConformance):
            recipe = "mine"

    A subclass that expects checks to fail names them with the reasons, or overrides their standard
    tests with an xfail mark.

    Attributes:
        recipe: the name of an installed recipe, the path of a recipe file, or a recipe.
        options: the recipe's options, if ``recipe`` is a name or a file.
        spec: the spec whose promises are checked; by default that of the installed recipe, or else
            one with the default of every flag.
        layers: names of layers. A recipe that depends on the layer's name is checked under each.
        expected_failures: name of a check -> reason. Such a check has to fail.

    Raises:
        ConformanceError: pytest would not collect a standard test of the subclass.
        OptionError: a subclass expects an unknown check to fail (the message has the nearest
            names), or gives no reason.
        DTypeError: ``expected_failures`` is no mapping.
    """

    recipe: ClassVar[str | Path | ottava.Recipe | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    spec: ClassVar[RecipeSpec | None] = None
    layers: ClassVar[Sequence[str]] = (LAYER,)
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def make_recipe(self) -> ottava.Recipe:
        """The recipe to test; a subclass overrides this if ``recipe`` cannot name it.

        Raises:
            OptionError: the class names no recipe.
        """
        if self.recipe is None:
            raise OptionError(
                f"{type(self).__name__} names no recipe",
                expected='recipe = "name", or a method make_recipe()',
            )
        if isinstance(self.recipe, ottava.Recipe):
            return self.recipe
        return ottava.get_recipe(str(self.recipe), **self.options)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked_failures(cls.expected_failures)
        wrong = _uncollected(cls)
        if wrong:
            raise ConformanceError(f"{cls.__name__}: {'; '.join(wrong)}", remedy=_RULE)


_subjects: WeakKeyDictionary[type[RecipeConformance], list[Subject]] = WeakKeyDictionary()
# The names of the checks that pytest has selected.
_selected: WeakKeyDictionary[type[RecipeConformance], set[str]] = WeakKeyDictionary()
_STANDARD: dict[str, Callable[..., None]] = {}


def _has_recipe(cls: type[RecipeConformance]) -> bool:
    return cls.recipe is not None or cls.make_recipe is not RecipeConformance.make_recipe


def _uncollected(cls: type[RecipeConformance]) -> list[str]:
    """What keeps pytest from collecting a class, or a standard test of it."""
    wrong = [
        f"{name} is defined: pytest does not collect such a class"
        for name in ("__init__", "__new__")
        if getattr(cls, name) is not getattr(object, name)
    ]
    if _has_recipe(cls) and not getattr(cls, "__test__", True):
        wrong.append("__test__ is false: a base class that is not to be run names no recipe")
    for name in _STANDARD:
        test = getattr(cls, name)
        if not isinstance(test, types.FunctionType) or not getattr(test, "__test__", True):
            wrong.append(f"{name} is replaced by {test!r}")
    return wrong


def _subjects_of_class(cls: type[RecipeConformance]) -> list[Subject]:
    """The recipe that a class tests, for each of its layers; made once for all its tests."""
    if cls not in _subjects:
        by_name = isinstance(cls.recipe, (str, Path))
        if by_name and cls.make_recipe is RecipeConformance.make_recipe:
            _subjects[cls] = subjects_of(cls.recipe, cls.options, cls.spec, cls.layers)  # type: ignore[arg-type]
        else:
            _subjects[cls] = subjects_of(cls().make_recipe, {}, cls.spec, cls.layers)
        for subject in _subjects[cls]:
            subject.check_names = frozenset(_selected.get(cls, ()))
    return _subjects[cls]


def select(items: Sequence[Any]) -> None:
    """Note which checks are among the tests that pytest is going to run."""
    names = {check.method: check.name for check in list_checks()}
    for item in items:
        cls = getattr(item, "cls", None)
        name = names.get(getattr(item, "originalname", ""))
        if name is not None and isinstance(cls, type) and issubclass(cls, RecipeConformance):
            _selected.setdefault(cls, set()).add(name)


def _standard_test(check: Check) -> Callable[..., None]:
    def test(self: RecipeConformance) -> None:
        __tracebackhide__ = True
        reason = self.expected_failures.get(check.name)
        outcome, message, cause = outcome_of(check, _subjects_of_class(type(self)), reason)
        vars(self)[_OUTCOME] = (check.method, outcome)
        if outcome == "not applicable":
            raise NotApplicable(f"does not apply: {message}")
        if outcome == "expected":
            pytest.xfail(message)
        if cause is not None:
            # The traceback of the recipe's own code says more than the message.
            raise CheckFailed(message) from cause
        if outcome == "failed":
            pytest.fail(message, pytrace=False)

    test.__name__ = check.method
    test.__qualname__ = f"RecipeConformance.{check.method}"
    test.__doc__ = check.promise
    return pytest.mark.ottava_slow(test) if check.slow else test


for _check in list_checks():
    _STANDARD[_check.method] = _standard_test(_check)
    setattr(RecipeConformance, _check.method, _STANDARD[_check.method])


def violation(item: Any, report: Any) -> str | None:
    """A message about a report that hides a standard test's outcome; None where it is allowed.

    A standard test that is not overridden has to pass or fail by its own check, or is skipped
    because the check does not apply. An override has to fail by that check, as is expected for a
    reason.

    Args:
        item: the test.
        report: pytest's report of a phase of the test.
    """
    cls: Any = getattr(item, "cls", None)
    name = getattr(item, "originalname", "")
    is_standard = isinstance(cls, type) and issubclass(cls, RecipeConformance) and name in _STANDARD
    if not is_standard or report.failed or (report.when != "call" and not report.skipped):
        return None
    method, outcome = vars(item.instance).get(_OUTCOME, ("", "")) if item.instance else ("", "")
    outcome = outcome if method == name and report.when == "call" else "not run"
    reason = getattr(report, "wasxfail", None)
    if getattr(cls, name) is not _STANDARD[name]:
        allowed = outcome == "failed" and report.skipped and (reason or "").strip()
    elif outcome == "expected":
        allowed = reason is not None
    else:
        allowed = outcome == ("not applicable" if report.skipped else "passed") and reason is None
    if allowed:
        return None
    words = {"passed": "passes", "skipped": "is skipped or expected to fail"}[report.outcome]
    return (
        f"{cls.__name__}: {name} {words} in its {report.when}, and its check is "
        f"{outcome}. Remedy: {_RULE}."
    )
