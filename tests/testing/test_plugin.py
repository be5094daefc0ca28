"""The base class in pytest: a sound recipe passes, and only an expected failure with a reason
leaves a test out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# What the classes under test import: pytester forgets what it imported itself, and torch cannot be
# imported twice.
import hypothesis.strategies  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401

import ottava_testing.conformance  # noqa: F401
import tests.testing.defects  # noqa: F401
from ottava.errors import OttavaError
from ottava_testing import RecipeConformance, list_checks
from tests.testing.row_recipe import SPEC, Rows

pytest_plugins = ["pytester"]

HEADER = """
import pytest
from ottava_testing import RecipeConformance
from tests.testing.defects import DEFECTS
from tests.testing.row_recipe import SPEC, Rows
BROKEN = next(d for d in DEFECTS if d.check == "clone-shares-nothing").recipe()

class Sound(RecipeConformance):
    recipe, spec = Rows(), SPEC

class Broken(Sound):
    recipe = BROKEN
"""
# Of each class these tests run: two quick ones, the one that fails if the recipe is broken, and one
# that does not apply.
CHOSEN = "zeros or roles or clone_shares_nothing or state_moves"
XFAIL = (
    "    @pytest.mark.xfail(reason='its scale')\n    def test_clone_shares_nothing(self):\n        "
)
SUPER = XFAIL + "super().test_clone_shares_nothing()"
ROLES = "    @pytest.mark.xfail(reason='x')\n    def test_roles(self): "
FIXTURE = "    @pytest.fixture(autouse=True)\n    def away(self): "

#: The body of a class that inherits from Sound or Broken -> its outcomes: passed, failed, xfailed,
#: skipped.
CLASSES: dict[str, tuple[str, str, tuple[int, int, int, int]]] = {
    "sound": ("Sound", "    pass", (3, 0, 0, 1)),
    "broken": ("Broken", "    pass", (2, 1, 0, 1)),
    "an override that calls the check": ("Broken", SUPER, (2, 0, 1, 1)),
    "an override that passes": ("Sound", SUPER, (2, 1, 0, 1)),
    "an override of what does not apply": (
        "Sound", SUPER.replace("clone_shares_nothing", "state_moves"), (3, 1, 0, 0)
    ),
    "expected failures": (
        "Broken",
        "    expected_failures = {'clone-shares-nothing': 'x', 'zeros': 'y', 'state-moves': 'z'}",
        (1, 2, 1, 0),
    ),
    "layers": ("Broken", "    layers = ('encoder.0', 'head')", (2, 1, 0, 1)),
    "no recipe": ("Sound", "    recipe = None", (0, 3, 0, 1)),
    "an override without a mark": ("Sound", "    def test_roles(self): pass", (2, 1, 0, 1)),
    "no reason": ("Broken", SUPER.replace("reason='its scale'", ""), (2, 1, 0, 1)),
    "not strict": ("Sound", SUPER.replace("scale'", "scale', strict=False"), (2, 1, 0, 1)),
    "not run": ("Broken", SUPER.replace("scale'", "scale', run=False"), (2, 1, 0, 1)),
    "a condition": ("Sound", SUPER.replace("reason", "condition=False, reason"), (2, 1, 0, 1)),
    "a skip beside": ("Broken", "    @pytest.mark.skip\n" + SUPER, (2, 1, 0, 1)),
    "a mark in the class": ("Sound", "    pytestmark = pytest.mark.skip", (0, 4, 0, 0)),
    "an override that skips": ("Sound", ROLES + "pytest.skip('no')", (2, 1, 0, 1)),
    "an override that fails": ("Sound", ROLES + "assert 0", (2, 1, 0, 1)),
    "one that fails after its check": (
        "Sound", ROLES + "super().test_roles(); assert 0", (2, 1, 0, 1)
    ),
    "one that calls another check": (
        "Broken", ROLES + "super().test_clone_shares_nothing()", (1, 2, 0, 1)
    ),
    "setup_method that fails": (
        "Broken", SUPER + "\n    def setup_method(self, method): raise OSError", (0, 4, 0, 0)
    ),
    "make_recipe that expects failures": (
        "Sound", "    def make_recipe(self): pytest.xfail('later')", (0, 3, 0, 1)
    ),
    "a fixture that expects failures": ("Sound", FIXTURE + "pytest.xfail('later')", (0, 4, 0, 0)),
    "other tests follow pytest's rules": (
        "Sound", "    def test_zeros_too(self): pytest.skip('no')", (3, 0, 0, 2)
    ),
}  # fmt: skip


def outcomes(pytester: pytest.Pytester, source: str, conftest: str = "") -> Any:
    pytester.makepyfile(source)
    pytester.makeconftest(conftest)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v", "-rA", "-k", CHOSEN)


def test_each_class_has_the_outcomes_of_its_checks(pytester: pytest.Pytester) -> None:
    """Errors of a setup count as failures."""
    classes = [
        f"class Test{number}({base}):\n{body}\n"
        for number, (base, body, _) in enumerate(CLASSES.values())
    ]
    text = outcomes(pytester, HEADER + "\n".join(classes)).stdout.str()
    found = re.findall(r"::Test(\d+)::test_\w+ (PASSED|FAILED|ERROR|XFAIL|SKIPPED)", text)
    for number, (name, (_, _, expected)) in enumerate(CLASSES.items()):
        words = [word.replace("ERROR", "FAILED") for n, word in found if int(n) == number]
        kinds = ("PASSED", "FAILED", "XFAIL", "SKIPPED")
        assert tuple(words.count(kind) for kind in kinds) == expected, name
    for words in (
        "shares memory: writing to the clone's '_scale_inv' changed the original's",
        "layer 'encoder.0': the ",
        "names no recipe",
        "it passes, and was expected to fail (y): remove that",
        "it is expected to fail, and does not apply: the spec says stateful=False",
        "x (the ",
        "overridden only with @pytest.mark.xfail(reason=",
    ):
        assert words in text, words


CONFTESTS = {
    "a mark that skips": "item.add_marker(pytest.mark.skip)",
    "a mark that expects a failure": "item.add_marker(pytest.mark.xfail(reason='x'))",
}


@pytest.mark.parametrize("name", CONFTESTS)
def test_a_test_that_a_conftest_leaves_out_fails(name: str, pytester: pytest.Pytester) -> None:
    conftest = (
        "import pytest\ndef pytest_collection_modifyitems(items):\n"
        f"    for item in items:\n        if 'roles' in item.name: {CONFTESTS[name]}"
    )
    source = HEADER + "\nclass TestRows(Sound): pass\nclass TestOther:\n    def test_zeros(self): 0"
    result = outcomes(pytester, source, conftest).parseoutcomes()
    assert result.get("failed", 0) + result.get("errors", 0) == 1, result
    assert result["passed"] == 3


UNCOLLECTED: dict[str, tuple[dict[str, Any], str]] = {
    "a test that is none": ({"test_roles": None}, "test_roles is replaced by None"),
    "__test__": ({"__test__": False}, "__test__ is false"),
    "__init__": ({"__init__": lambda self: None}, "__init__ is defined"),
    "an unknown check": ({"expected_failures": {"zeroes": "x"}}, "a name such as zeros"),
    "no reason": ({"expected_failures": {"zeros": " "}}, "'zeros' has no reason"),
    "a list": ({"expected_failures": ["zeros"]}, "expected_failures is a list"),
}


@pytest.mark.parametrize("name", UNCOLLECTED)
def test_a_class_that_pytest_would_not_collect_is_refused(name: str) -> None:
    attributes, message = UNCOLLECTED[name]
    with pytest.raises(OttavaError, match=message):
        type("TestRows", (RecipeConformance,), {"recipe": Rows(), "spec": SPEC} | attributes)


def test_a_base_class_without_a_recipe_may_be_hidden() -> None:
    assert not type("TestBase", (RecipeConformance,), {"__test__": False}).__test__


def test_each_check_is_a_test_and_the_slow_ones_are_marked() -> None:
    for check in list_checks():
        test = getattr(RecipeConformance, check.method)
        assert test.__doc__ == check.promise
        marks = [mark.name for mark in getattr(test, "pytestmark", [])]
        assert marks == (["ottava_slow"] if check.slow else [])


def test_only_checks_import_torch(tmp_path: Path) -> None:
    """The plugin, the list of commands and ``new-recipe`` do without."""
    code = (
        "import sys, ottava_testing.plugin\n"
        "from typer.testing import CliRunner\n"
        "from ottava.cli.main import app\n"
        "from ottava_testing.new_recipe.command import new_recipe\n"
        "new_recipe('acme-rows', None)\n"
        "done = CliRunner().invoke(app, ['--help'])\n"
        "assert 'Run the conformance kit' in done.output, done.output\n"
        "assert 'ottava_testing.command' in sys.modules and 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
