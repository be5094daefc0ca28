"""The base class in pytest: a good recipe passes, and only an expected failure with a reason leaves
a test out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

# What the classes under test import: pytester forgets what it imported itself, and torch cannot be
# imported twice.
import broken_tensors  # noqa: F401
import hypothesis.strategies  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401

import ottava_testing.conformance  # noqa: F401

HERE = str(Path(__file__).parent)
pytest_plugins = ["pytester"]

GOOD = """
import pytest
import row_recipe as rows
from ottava_testing import RecipeConformance

class TestRows(RecipeConformance):
    recipe = rows.Rows()
    spec = rows.SPEC
"""
BROKEN = """
import pytest
import broken_tensors  # noqa: F401
from ottava_testing import RecipeConformance
from row_recipe import SPEC, Rows

class TestBroken(RecipeConformance):
    spec = SPEC

    def make_recipe(self):
        return Rows(broken_tensors.AliasedScaleQuantizer)
"""
XFAIL = """
    @pytest.mark.xfail(reason="its clone shares its scale")
    def test_clone_shares_nothing(self):
        super().test_clone_shares_nothing()
"""
# What runs fast; the whole class is run in test_a_good_class_passes.
SOME = "test_roles or test_equality or test_clone_shares_nothing or test_zeros"


def run(pytester: pytest.Pytester, source: str, *options: str, conftest: str = "") -> Any:
    pytester.makepyfile(source)
    pytester.makeconftest(f"import sys\nsys.path.insert(0, {HERE!r})\n{conftest}")
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *(options or ("-k", SOME)))


def test_a_good_class_passes(pytester: pytest.Pytester) -> None:
    result = run(pytester, GOOD, "-m", "not ottava_slow", "-v", "--strict-markers")
    outcomes = result.parseoutcomes()
    assert result.ret == 0
    assert outcomes["passed"] > 65
    assert "failed" not in outcomes
    assert outcomes["deselected"] == 8
    result.stdout.fnmatch_lines(["*::TestRows::test_clone_shares_nothing PASSED*"])


def test_a_broken_recipe_fails_with_the_name_of_its_defect(pytester: pytest.Pytester) -> None:
    result = run(pytester, BROKEN)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["*shares memory: writing to the clone's '_scale_inv' changed the original's*"]
    )


def test_an_expected_failure_with_a_reason_is_one(pytester: pytest.Pytester) -> None:
    run(pytester, BROKEN + XFAIL).assert_outcomes(passed=3, xfailed=1)


def test_an_expected_failure_that_passes_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, GOOD + XFAIL)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*its clone shares its scale*"])


def test_an_expected_failure_of_what_does_not_apply_fails(pytester: pytest.Pytester) -> None:
    override = XFAIL.replace("clone_shares_nothing", "state_moves")
    result = run(pytester, GOOD + override, "-k", "test_state_moves")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*does not apply, and is expected to fail: remove the override*"])


def test_a_class_names_its_expected_failures(pytester: pytest.Pytester) -> None:
    names = {
        "clone-shares-nothing": "its clone shares its scale",
        "zeros": "no idea",
        "state-moves": "no state",
    }
    source = f"{BROKEN}\n    expected_failures = {names!r}\n"
    chosen = f"{SOME} or test_state_moves"
    result = run(pytester, source, "-k", chosen, "-rx")
    result.assert_outcomes(passed=2, xfailed=1, failed=2)
    result.stdout.fnmatch_lines(["*its clone shares its scale (*"])
    text = result.stdout.str()
    assert "it passes, and was expected to fail (no idea): remove that" in text
    assert "it is expected to fail, and does not apply" in text


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (
            {"zeroes": "x"},
            "OptionError: the expected failure 'zeroes' is no check. Expected: a name such as "
            "zeros",
        ),
        ({"zeros": " "}, "OptionError: the expected failure of 'zeros' has no reason"),
        (["zeros"], "DTypeError: expected_failures is a list"),
    ],
)
def test_expected_failures_that_say_something_wrong(
    names: Any, error: str, pytester: pytest.Pytester
) -> None:
    result = run(pytester, f"{GOOD}\n    expected_failures = {names!r}\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*{error}*"])


def test_a_class_names_the_layers_that_it_checks(pytester: pytest.Pytester) -> None:
    result = run(
        pytester, BROKEN.replace("spec = SPEC", "spec, layers = SPEC, ('encoder.0', 'head')")
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*layer 'encoder.0': *shares memory*"])


REFUSED = {
    "an override": "    def test_roles(self):\n        pass",
    "None": "    test_roles = None",
    "no reason": "    @pytest.mark.xfail\n    def test_roles(self):\n        assert False",
    "an empty reason": "    @pytest.mark.xfail(reason=' ')\n    def test_roles(self):\n        "
    "assert False",
    "not strict": "    @pytest.mark.xfail(reason='x', strict=False)\n    def test_roles(self):\n  "
    "      assert False",
    "not run": "    @pytest.mark.xfail(reason='x', run=False)\n    def test_roles(self):\n        "
    "assert False",
    "a condition": "    @pytest.mark.xfail(False, reason='x')\n    def test_roles(self):\n        "
    "pass",
    "a skip beside": "    @pytest.mark.skip\n    @pytest.mark.xfail(reason='x')\n    def "
    "test_roles(self): pass",
    "a skip on the class": "\nTestRows = pytest.mark.skip(TestRows)",
    "a skipif on the class": "\nTestRows = pytest.mark.skipif(True, reason='x')(TestRows)",
    "an xfail on the class": "\nTestRows = pytest.mark.xfail(reason='x')(TestRows)",
    "a skip on the module": "\npytestmark = pytest.mark.skip",
    "a mark in the class": "    pytestmark = pytest.mark.skip",
    "__test__ of the class": "    __test__ = False",
    "__init__": "    def __init__(self): pass",
    "a class between": (
        "\nclass Mixin:\n    def test_roles(self): pass\n"
        "class TestMixed(Mixin, RecipeConformance):\n    recipe, spec = rows.Rows(), rows.SPEC"
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_class_that_leaves_a_test_out_fails(what: str, pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{GOOD}\n{REFUSED[what]}\n")
    assert result.ret != 0
    assert result.parseoutcomes().get("errors") == 1
    result.stdout.fnmatch_lines(["*overridden only with @pytest.mark.xfail(reason=*"])


CONFTESTS = {
    "a mark from a conftest": (
        "import pytest\ndef pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.skip) if 'roles' in item.name else None"
    ),
    "an xfail from a conftest": (
        "import pytest\ndef pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.xfail(reason='x')) if 'roles' in "
        "item.name else None"
    ),
    "a fixture that expects a failure": (
        "import pytest\n@pytest.fixture(autouse=True)\ndef away(request):\n"
        "    if 'roles' in request.node.name: pytest.xfail('later')"
    ),
    "a fixture that skips": (
        "import pytest\n@pytest.fixture(autouse=True)\ndef away(request):\n"
        "    if 'roles' in request.node.name: pytest.skip('no')"
    ),
}


@pytest.mark.parametrize("what", CONFTESTS)
def test_a_test_that_something_else_leaves_out_fails(what: str, pytester: pytest.Pytester) -> None:
    result = run(pytester, GOOD, conftest=CONFTESTS[what])
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) + outcomes.get("errors", 0) == 1, outcomes
    assert outcomes["passed"] == 3


def test_an_override_that_skips_fails(pytester: pytest.Pytester) -> None:
    override = (
        "\n    @pytest.mark.xfail(reason='x')\n    def test_roles(self):\n        pytest.skip('no')"
    )
    run(pytester, GOOD + override).assert_outcomes(passed=3, failed=1)


EXPECTED = {
    "setup_method": "    def setup_method(self, method): pytest.xfail('later')",
    "make_recipe": "    def make_recipe(self): pytest.xfail('later')",
    "a fixture": "    @pytest.fixture(autouse=True)\n    def away(self): pytest.xfail('later')",
    "a fixture that skips": "    @pytest.fixture(autouse=True)\n    def away(self): "
    "pytest.skip('later')",
}


@pytest.mark.parametrize("where", EXPECTED)
def test_expecting_all_tests_to_fail_fails(where: str, pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{GOOD}\n{EXPECTED[where]}\n")
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) + outcomes.get("errors", 0) == 4, outcomes
    assert set(outcomes) <= {"failed", "errors", "deselected"}
    result.stdout.fnmatch_lines(["*overridden only with @pytest.mark.xfail(reason=*"])


NO_CHECK = {
    "another failure": "assert 0",
    "another failure after a check that passes": "super().test_roles(); assert 0",
    "an xfail": "pytest.xfail('later')",
    "another check": "super().test_clone_shares_nothing()",
}


@pytest.mark.parametrize("body", NO_CHECK)
def test_an_expected_failure_is_one_of_the_standard_check(
    body: str, pytester: pytest.Pytester
) -> None:
    override = (
        f"\n    @pytest.mark.xfail(reason='x')\n    def test_roles(self):\n        {NO_CHECK[body]}"
    )
    result = run(pytester, BROKEN + override, "-k", "test_roles")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*TestBroken: test_roles: *overridden only with*"])


def test_a_setup_that_fails_is_no_expected_failure(pytester: pytest.Pytester) -> None:
    setup = "\n    def setup_method(self, method): raise OSError('no disk')"
    result = run(pytester, BROKEN + XFAIL + setup, "-k", "test_clone_shares_nothing")
    assert result.ret != 0
    assert "xfailed" not in result.parseoutcomes()


def test_a_base_class_without_a_recipe_may_be_hidden(pytester: pytest.Pytester) -> None:
    base = "class TestBase(RecipeConformance):\n    __test__ = False\n\nclass TestRows(TestBase)"
    source = GOOD.replace("class TestRows(RecipeConformance)", base)
    source = source.replace("recipe =", "__test__ = True\n    recipe =")
    run(pytester, source).assert_outcomes(passed=4)


def test_other_classes_are_left_alone(pytester: pytest.Pytester) -> None:
    other = (
        "\nclass TestOther:\n    @pytest.mark.skip\n    def test_roles(self): pass\n    def "
        "test_zeros(self): pass"
    )
    run(pytester, GOOD + other).assert_outcomes(passed=5, skipped=1)


def test_a_class_without_a_recipe_says_so(pytester: pytest.Pytester) -> None:
    source = "from ottava_testing import RecipeConformance\nclass TestNone(RecipeConformance): pass"
    result = run(pytester, source, "-k", "test_roles")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*TestNone names no recipe*"])


def test_loading_the_plugin_imports_no_torch() -> None:
    code = "import sys, ottava_testing.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
