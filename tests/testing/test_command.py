"""``ottava check-recipe``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from ottava.cli.main import app
from ottava_testing import list_checks
from tests.published import published

PLUGIN = """
from ottava import hookimpl
import dataclasses, row_recipe as rows

@hookimpl
def ottava_recipes():
    broken = dataclasses.replace(rows.SPEC, name="rows-broken", factory="rows_plugin:broken")
    return [rows.SPEC, broken]

def broken(fraction: float = 0.5):
    import broken_tensors
    return rows.Rows(broken_tensors.AliasedScaleQuantizer)
"""


@pytest.fixture(scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The recipes of row_recipe.py, as a package has them."""
    with published(tmp_path_factory.mktemp("package"), "rows-plugin", rows_plugin=PLUGIN):
        yield


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check-recipe", *arguments], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("_installed")
def test_a_good_recipe() -> None:
    done = run("rows", "--fast", "--check", "copy", "--check", "compile")
    assert done.exit_code == 0, done.output
    assert "rows: conforms (1 passed)" in done.output
    assert "left out: compile" in done.output


@pytest.mark.usefixtures("_installed")
def test_a_broken_recipe() -> None:
    names = ["--check", "clone-shares-nothing", "--check", "copy"]
    done = run("rows-broken", *names, "--json", "--option", "fraction=0.25")
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert (told["recipe"], told["ok"], told["left_out"]) == ("rows-broken", False, [])
    assert {r["name"]: r["outcome"] for r in told["results"]} == {
        "clone-shares-nothing": "failed",
        "copy": "passed",
    }
    assert "shares memory" in next(
        r["message"] for r in told["results"] if r["outcome"] == "failed"
    )
    expected = run(
        "rows-broken", *names, "--expect-failure", "clone-shares-nothing=it is the point"
    )
    assert expected.exit_code == 0, expected.output
    assert "expected clone-shares-nothing: it is the point (" in expected.output


@pytest.mark.usefixtures("_installed")
def test_a_layer_by_name() -> None:
    names = ["--check", "clone-shares-nothing", "--layer", "encoder.0", "--layer", "head"]
    done = run("rows-broken", *names)
    assert done.exit_code == 1, done.output
    assert "failed clone-shares-nothing: layer 'encoder.0': " in done.output


MISTAKES = {
    "layers is ['a', 'a']": ("current", "--layer", "a", "--layer", "a"),
    "no recipe is named": (),
    "no installed package provides recipe 'nowhere'": ("nowhere",),
    "only 'copi' is no check": ("current", "--check", "copi"),
    "the expected failure of 'copy' has no reason": ("current", "--expect-failure", "copy="),
    "--expect-failure 'copy'": ("current", "--expect-failure", "copy"),
    "--option 'x'": ("current", "--option", "x"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_told_with_exit_code_2(message: str) -> None:
    done = run(*MISTAKES[message])
    assert done.exit_code == 2
    assert done.output.startswith(f"error: {message}")


def test_the_list_has_every_check() -> None:
    done = run("--list", "--json")
    assert done.exit_code == 0
    assert [row["name"] for row in json.loads(done.output)["checks"]] == [
        check.name for check in list_checks()
    ]
    table = CliRunner().invoke(app, ["check-recipe", "--list"], env={"COLUMNS": "300"}).output
    assert all(check.name in table for check in list_checks())


def test_listing_the_commands_imports_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from ottava.cli.main import app\n"
        "done = CliRunner().invoke(app, ['--help']); assert 'Run the conformance kit' in "
        "done.output, done.output\n"
        "assert 'ottava_testing.command' in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
