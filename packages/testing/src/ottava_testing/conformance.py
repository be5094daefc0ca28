"""``RecipeConformance``: the checks as a class of tests."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
from _pytest.outcomes import Skipped

import ottava
from ottava.errors import OptionError, OttavaError
from ottava.recipes.spec import RecipeSpec
from ottava_testing.compare import CheckFailed
from ottava_testing.runner import run_check
from ottava_testing.subject import Subject
from ottava_testing.table import Check, list_checks

_RULE = 'a standard test may be overridden only with @pytest.mark.xfail(reason="why it fails") on the method, strict'


class ConformanceError(OttavaError, TypeError):
    """A class of conformance tests leaves standard tests out."""


class NotApplicable(Skipped):
    """A standard test is about something that the recipe's spec does not promise."""


class RecipeConformance:
    """Base class of a recipe's conformance tests: one test for each check of the kit.

    .. code-block:: python

        class TestMine(RecipeConformance):
            recipe = "mine"

    A subclass may override a standard test only as one that is expected to fail, for a reason.

    Attributes:
        recipe: the name of an installed recipe, the path of a recipe file, or a recipe.
        options: the recipe's options, with a name or a file.
        spec: what the recipe says of itself; by default that of the installed one, else the defaults of every flag.

    Raises:
        ConformanceError: when a subclass is made that overrides a standard test in another way.
    """

    recipe: ClassVar[str | Path | ottava.Recipe | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    spec: ClassVar[RecipeSpec | None] = None

    def make_recipe(self) -> ottava.Recipe:
        """The recipe; to be overridden where it has no name."""
        if self.recipe is None:
            raise OptionError(
                f"{type(self).__name__} names no recipe", expected='recipe = "name", or a method make_recipe()'
            )
        if isinstance(self.recipe, ottava.Recipe):
            return self.recipe
        return ottava.get_recipe(str(self.recipe), **self.options)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrong = overrides_wrongly(cls)
        if wrong:
            raise ConformanceError(f"{cls.__name__}: {'; '.join(wrong)}", remedy=_RULE)


_subjects: WeakKeyDictionary[type[RecipeConformance], Subject] = WeakKeyDictionary()
_STANDARD: dict[str, Callable[..., None]] = {}


def subject_of(cls: type[RecipeConformance]) -> Subject:
    """The recipe that a class tests; made once for all its tests."""
    if cls not in _subjects:
        overridden = cls.make_recipe is not RecipeConformance.make_recipe
        if overridden or isinstance(cls.recipe, ottava.Recipe) or cls.recipe is None:
            _subjects[cls] = Subject(cls().make_recipe, {}, cls.spec)  # type: ignore[arg-type]
        else:
            _subjects[cls] = Subject(cls.recipe, cls.options, cls.spec)  # type: ignore[arg-type]
    return _subjects[cls]


def _standard_test(check: Check) -> Callable[..., None]:
    def test(self: RecipeConformance) -> None:
        __tracebackhide__ = True
        subject = subject_of(type(self))
        why_not = check.why_not(subject.spec)
        if why_not is not None:
            raise NotApplicable(f"does not apply: {why_not}")
        failure = ""
        try:
            run_check(check, subject)
        except CheckFailed as error:
            if error.__cause__ is not None:
                # The traceback of the recipe's own code says more.
                raise
            failure = str(error)
        if failure:
            pytest.fail(failure, pytrace=False)

    test.__name__ = check.method
    test.__qualname__ = f"RecipeConformance.{check.method}"
    test.__doc__ = check.promise
    return pytest.mark.ottava_slow(test) if check.slow else test


for _check in list_checks():
    _STANDARD[_check.method] = _standard_test(_check)
    setattr(RecipeConformance, _check.method, _STANDARD[_check.method])


# -- the rule --


def is_override(cls: type, name: str) -> bool:
    """Whether a class has another function in the place of a standard test."""
    return name in _STANDARD and getattr(cls, name, None) is not _STANDARD[name]


def _marks(thing: Any) -> list[pytest.Mark]:
    given = vars(thing).get("pytestmark", [])
    marks: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    return [getattr(mark, "mark", mark) for mark in marks]


def _wrong_xfail(mark: pytest.Mark) -> str | None:
    reason = mark.kwargs.get("reason")
    if mark.args:
        return "its xfail has a condition"
    if not isinstance(reason, str) or not reason.strip():
        return "its xfail has no reason"
    if mark.kwargs.get("strict", True) is not True:
        return "its xfail is not strict"
    if mark.kwargs.get("run", True) is not True:
        return "its xfail does not run it"
    return None


def overrides_wrongly(cls: type) -> list[str]:
    """What is wrong with the standard tests that a class overrides."""
    wrong = []
    for name in _STANDARD:
        if not is_override(cls, name):
            continue
        given = getattr(cls, name, None)
        if not isinstance(given, types.FunctionType):
            wrong.append(f"{name} is replaced by {given!r}")
            continue
        xfails = [mark for mark in _marks(given) if mark.name == "xfail"]
        if not xfails:
            wrong.append(f"{name} is overridden, and not expected to fail")
        wrong += [f"{name}: {problem}" for mark in xfails if (problem := _wrong_xfail(mark))]
        wrong += [f"{name}: {problem}" for problem in _skips(_marks(given))]
    return wrong


def _skips(marks: Iterable[pytest.Mark]) -> list[str]:
    return [f"a {mark.name} mark leaves it out" for mark in marks if mark.name in ("skip", "skipif")]


def class_violations(cls: type, around: Iterable[pytest.Mark]) -> list[str]:
    """What leaves standard tests of a class out: overrides, and marks on it, its bases or its module.

    Args:
        cls: a class of tests.
        around: the marks of what it stands in.
    """
    wrong = overrides_wrongly(cls)
    marks = [mark for base in cls.__mro__ for mark in _marks(base)] + list(around)
    for name in dict.fromkeys(mark.name for mark in marks):
        if name in ("skip", "skipif", "xfail"):
            wrong.append(f"a {name} mark on the class or its module is for all standard tests at once")
    return wrong


def item_violations(item: Any) -> list[str]:
    """What leaves one standard test out that was collected: marks that something added to it."""
    name = getattr(item, "originalname", item.name)
    if name not in _STANDARD:
        return []
    wrong = _skips(item.iter_markers())
    if not is_override(item.cls, name):
        wrong += ["an xfail mark on a test that is not overridden" for _ in item.iter_markers("xfail")]
    return wrong


def is_standard(item: Any) -> bool:
    """Whether a pytest item is a standard test of a conformance class, overridden or not."""
    cls = getattr(item, "cls", None)
    standard = isinstance(cls, type) and issubclass(cls, RecipeConformance)
    return standard and getattr(item, "originalname", "") in _STANDARD


def violation(cls: type, wrong: Iterable[str]) -> str:
    """The words for a class that breaks the rule."""
    return f"{cls.__name__}: {'; '.join(wrong)}. Remedy: {_RULE}."
