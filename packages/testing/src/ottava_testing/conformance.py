"""``RecipeConformance`` has the checks as a class of tests."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ottava_testing.runner import checked_failures, run_for_layers, subjects_of, why_not
from ottava_testing.subject import LAYER, Subject
from ottava_testing.table import Check

# The attribute of its instance in which a standard test notes that its check failed.
_FAILED = "_ottava_failed"
_RULE = (
    'a standard test may be overridden only with @pytest.mark.xfail(reason="why it fails") on the '
    "method, strict; or name the check in expected_failures"
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
        ConformanceError: a subclass overrides a standard test in another way.
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
        wrong = overrides_wrongly(cls)
        if wrong:
            raise ConformanceError(f"{cls.__name__}: {'; '.join(wrong)}", remedy=_RULE)


_subjects: WeakKeyDictionary[type[RecipeConformance], list[Subject]] = WeakKeyDictionary()
_STANDARD: dict[str, Callable[..., None]] = {}


def subjects_of_class(cls: type[RecipeConformance]) -> list[Subject]:
    """The recipe that a class tests, for each of its layers; made once for all its tests."""
    if cls not in _subjects:
        has_own_recipe = cls.make_recipe is not RecipeConformance.make_recipe
        if has_own_recipe or isinstance(cls.recipe, ottava.Recipe) or cls.recipe is None:
            _subjects[cls] = subjects_of(cls().make_recipe, {}, cls.spec, cls.layers)
        else:
            _subjects[cls] = subjects_of(cls.recipe, cls.options, cls.spec, cls.layers)
    return _subjects[cls]


def _standard_test(check: Check) -> Callable[..., None]:
    def test(self: RecipeConformance) -> None:
        __tracebackhide__ = True
        subjects = subjects_of_class(type(self))
        reason = why_not(check, subjects)
        expected = self.expected_failures.get(check.name)
        if reason is not None and expected is not None:
            pytest.fail(
                f"it is expected to fail, and does not apply: {reason}; remove it", pytrace=False
            )
        if reason is not None:
            raise NotApplicable(f"does not apply: {reason}")
        failure = ""
        try:
            run_for_layers(check, subjects)
        except CheckFailed as error:
            vars(self)[_FAILED] = check.method
            if error.__cause__ is not None and expected is None:
                # The traceback of the recipe's own code says more than the message.
                raise
            failure = str(error)
        if failure and expected is not None:
            pytest.xfail(f"{expected} ({failure})")
        if expected is not None:
            failure = f"it passes, and was expected to fail ({expected}): remove that"
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
    """Whether a class has another function in place of a standard test."""
    return name in _STANDARD and getattr(cls, name, None) is not _STANDARD[name]


_MAKERS = ("__init__", "__new__")


def _has_own(cls: type, name: str) -> bool:
    return getattr(cls, name) is not getattr(object, name)


def hidden(cls: Any) -> bool:
    """Whether a class has a recipe to test and yet tells pytest not to collect it."""
    has_recipe = cls.recipe is not None or cls.make_recipe is not RecipeConformance.make_recipe
    return has_recipe and not getattr(cls, "__test__", True)


def _marks(thing: Any) -> list[pytest.Mark]:
    value = vars(thing).get("pytestmark", [])
    marks: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
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
    """Messages about the standard tests that a class overrides in a way that is not allowed."""
    wrong = [
        f"{name} is defined: pytest does not collect such a class"
        for name in _MAKERS
        if _has_own(cls, name)
    ]
    if hidden(cls):
        wrong.append("__test__ is false: a base class that is not to be run names no recipe")
    for name in _STANDARD:
        test = getattr(cls, name, None)
        if not getattr(test, "__test__", True):
            wrong.append(f"{name}.__test__ is false, so that pytest does not collect it")
        if not is_override(cls, name):
            continue
        if not isinstance(test, types.FunctionType):
            wrong.append(f"{name} is replaced by {test!r}")
            continue
        xfails = [mark for mark in _marks(test) if mark.name == "xfail"]
        if not xfails:
            wrong.append(f"{name} is overridden, and not expected to fail")
        wrong += [f"{name}: {problem}" for mark in xfails if (problem := _wrong_xfail(mark))]
        wrong += [f"{name}: {problem}" for problem in _skips(_marks(test))]
    return wrong


def _skips(marks: Iterable[pytest.Mark]) -> list[str]:
    return [
        f"a {mark.name} mark leaves it out" for mark in marks if mark.name in ("skip", "skipif")
    ]


def class_violations(cls: type, around: Iterable[pytest.Mark]) -> list[str]:
    """Messages about what leaves out standard tests of a class.

    That is overrides, and marks on the class, its bases or its module.

    Args:
        cls: a class of tests.
        around: the marks of the module and packages that contain it.
    """
    wrong = overrides_wrongly(cls)
    marks = [mark for base in cls.__mro__ for mark in _marks(base)] + list(around)
    for name in dict.fromkeys(mark.name for mark in marks):
        if name in ("skip", "skipif", "xfail"):
            wrong.append(
                f"a {name} mark on the class or its module is for all standard tests at once"
            )
    return wrong


def item_violations(item: Any) -> list[str]:
    """Messages about marks, added after collection, that leave out a standard test."""
    name = getattr(item, "originalname", item.name)
    if name not in _STANDARD:
        return []
    wrong = _skips(item.iter_markers())
    if not is_override(item.cls, name):
        wrong += [
            "an xfail mark on a test that is not overridden" for _ in item.iter_markers("xfail")
        ]
    return wrong


def wrongly_left_out(item: Any, when: str, excinfo: Any) -> str | None:
    """A message about a standard test that was skipped, or failed as expected, without permission.

    None where that was allowed.

    Args:
        item: the test.
        when: ``"setup"``, ``"call"`` or ``"teardown"``.
        excinfo: pytest's information on the exception that ended the test, or None.
    """
    is_overridden = is_override(item.cls, item.originalname)
    if excinfo is None:
        return f"{when} skips it"
    is_xfail = when == "call" and excinfo.errisinstance(pytest.xfail.Exception)
    if is_xfail and not is_overridden and _is_expected(item) and _failed_in_check(item):
        return None
    if excinfo.errisinstance(NotApplicable):
        if is_overridden:
            return "it does not apply, and is expected to fail: remove the override"
        return None
    is_skip = excinfo.errisinstance((Skipped, pytest.xfail.Exception))
    if when != "call" or not is_overridden or is_skip:
        return f"{when} skips it, by a {excinfo.typename}"
    if not _failed_in_check(item):
        return (
            f"it fails without the standard check: call super().{item.originalname}(), and "
            f"nothing that fails before"
        )
    return None


def _is_expected(item: Any) -> bool:
    """Whether the class of a standard test expects its check to fail."""
    names = item.cls.expected_failures
    return any(check.method == item.originalname for check in list_checks() if check.name in names)


def _failed_in_check(item: Any) -> bool:
    """Whether a standard test has noted that its check failed."""
    return bool(vars(item.instance).get(_FAILED) == item.originalname)


def is_standard(item: Any) -> bool:
    """Whether a pytest item is a standard test of a conformance class, overridden or not."""
    cls = getattr(item, "cls", None)
    standard = isinstance(cls, type) and issubclass(cls, RecipeConformance)
    return standard and getattr(item, "originalname", "") in _STANDARD


def violation(cls: type, wrong: Iterable[str]) -> str:
    """The message about a class that breaks the rule, with the remedy."""
    return f"{cls.__name__}: {'; '.join(wrong)}. Remedy: {_RULE}."
