"""``ottava check-recipe``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottava.cli.main import app
from ottava_testing import list_checks

HERE = Path(__file__).parent
PLUGIN = """
from ottava import hookimpl
import dataclasses, row_recipe as rows

@hookimpl
def ottava_recipes():
    return [rows.SPEC, dataclasses.replace(rows.SPEC, name="rows-broken", factory="rows_plugin:broken")]

def broken(fraction: float = 0.5):
    import broken_tensors
    return rows.Rows(broken_tensors.AliasedScaleQuantizer)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which the recipes of row_recipe.py are installed."""
    (tmp_path / "rows_plugin.py").write_text(PLUGIN)
    info = tmp_path / "rows_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rows-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ottava]\nmain = rows_plugin\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE)]), "COLUMNS": "200"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from ottava.cli.main import app; app()", "check-recipe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_good_recipe(environment: dict[str, str]) -> None:
    done = run(environment, "rows", "--fast")
    assert done.returncode == 0, done.stderr
    assert "rows: conforms (" in done.stdout
    assert "left out: compile" in done.stdout


def test_a_broken_recipe(environment: dict[str, str]) -> None:
    names = ["--check", "clone-shares-nothing", "--check", "copy"]
    done = run(environment, "rows-broken", *names, "--json", "--option", "fraction=0.25")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["recipe"], told["ok"], told["left_out"]) == ("rows-broken", False, [])
    assert {r["name"]: r["outcome"] for r in told["results"]} == {"clone-shares-nothing": "failed", "copy": "passed"}
    assert "shares memory" in next(r["message"] for r in told["results"] if r["outcome"] == "failed")
    expected = run(environment, "rows-broken", *names, "--expect-failure", "clone-shares-nothing=it is the point")
    assert expected.returncode == 0, expected.stdout
    assert "expected clone-shares-nothing: it is the point (" in expected.stdout


def test_a_layer_by_name(environment: dict[str, str]) -> None:
    names = ["--check", "clone-shares-nothing", "--layer", "encoder.0", "--layer", "head"]
    done = run(environment, "rows-broken", *names)
    assert done.returncode == 1, done.stderr
    assert "failed clone-shares-nothing: layer 'encoder.0': " in done.stdout


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
    done = CliRunner().invoke(app, ["check-recipe", *MISTAKES[message]])
    assert done.exit_code == 2
    assert done.output.startswith(f"error: {message}")


def test_the_list_has_every_check() -> None:
    done = CliRunner().invoke(app, ["check-recipe", "--list", "--json"])
    assert done.exit_code == 0
    assert [row["name"] for row in json.loads(done.output)["checks"]] == [check.name for check in list_checks()]
    table = CliRunner().invoke(app, ["check-recipe", "--list"], env={"COLUMNS": "300"}).output
    assert all(check.name in table for check in list_checks())


def test_without_the_kit_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ottava_testing", None)
    done = CliRunner().invoke(app, ["check-recipe", "current"])
    assert done.exit_code == 2
    assert "pip install ottava-testing" in done.output
