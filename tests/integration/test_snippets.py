"""The root's and the docs' snippets run as printed, page by page; CI runs the README's test
command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottava.cli.main import app
from tests.pages import DOCS, OF_LIBRARIES, ROOT, name_of, run_snippets, snippets

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts and p not in OF_LIBRARIES),
]
SHELL = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
QUICKSTART = DOCS / "quickstart.md"
COMMANDS = [line for block in SHELL.findall(QUICKSTART.read_text()) for line in block.splitlines()]


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=name_of)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets(page)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("ottava ")])
def test_the_quickstarts_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Tests of the demo train every recipe.
    arguments = command.replace("--steps 20", "--steps 1 --recipe current").split()
    done = CliRunner().invoke(app, arguments[1:])
    assert done.exit_code == 0, done.output


def test_ci_runs_the_readmes_test_command() -> None:
    commands = re.findall(r"^```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.M | re.S)
    tests = next(command for command in commands if command.endswith("nox -s tests"))
    assert tests in (ROOT / ".ci" / "run").read_text()
