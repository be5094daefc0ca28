"""The command ``ottava bisect``, its page, and its files."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ottava.cli.main import app
from ottava_bisect import bisect
from ottava_bisect.search.page import page
from tests.bisect.steps import Stack, captured, outlier

pytestmark = pytest.mark.usefixtures("one_thread")
MODULE = """
import torch
from tests.bisect.steps import Stack

def loss(output, targets):
    return torch.nn.functional.mse_loss(output, targets)

def text(output, targets):
    return output + "text"

def fails():
    raise ValueError("no model today")
"""
STEP = "step.safetensors"
MODEL = ("--model", "of_a_user:Stack")
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in a folder with a captured step and a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    captured(outlier(Stack()), STEP, loss=None)
    Path("of_a_user.py").write_text(MODULE)
    return lambda *arguments: CliRunner().invoke(app, ["bisect", STEP, *arguments])


def test_the_command(run: Run) -> None:
    done = run(*MODEL, "--recipe-file", "fixed.yaml", "--html", "page.html")
    assert done.exit_code == 0, done.output
    for words in ("layers.2", "weight in fprop", "Written: fixed.yaml", "Written: page.html"):
        assert words in done.output
    assert "match: layers.2" in Path("fixed.yaml").read_text()
    text = Path("page.html").read_text()
    assert "layers.2" in text
    assert not re.search(r"<script|<link|src=|https?:|@import|url\(", text)
    # The page is replaced; the recipe file is not, because users may have edited it.
    assert run(*MODEL, "--html", "page.html").exit_code == 0
    assert "fixed.yaml exists" in run(*MODEL, "--recipe-file", "fixed.yaml").output
    fixed = run(*MODEL, "--recipe", "fixed.yaml")
    assert fixed.exit_code == 0
    assert "Nothing to find" in fixed.output
    # A step that is not explained has an exit code of its own.
    assert run(*MODEL, "--tolerance", "1e-5", "--max-replays", "20").exit_code == 1


def test_the_command_in_json(run: Run) -> None:
    loss = ("--loss", "of_a_user:loss", "--measure", "loss", "--tolerance", "1e-3")
    done = run(*MODEL, *loss, "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0
    assert told["solved"] is True
    assert told["findings"][0]["layers"] == ["layers.2"]
    assert told["findings"][0]["statistics"]["underflow"] > 90
    products = json.loads(run("--json").stdout)
    assert products["measure"] == "products"


def test_what_is_refused_changes_no_file(run: Run) -> None:
    Path("mine.html").write_text("<!doctype html><title>x</title>")
    Path("own.yaml").write_text("default: current\n")
    os.symlink(STEP, "link.html")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    for arguments, words in (
        (("--model", "nowhere:make"), "--model 'nowhere:make' cannot be had"),
        (("--model", "of_a_user:fails"), "no model today"),
        ((*MODEL, "--measure", "beauty"), "measure is 'beauty'"),
        ((*MODEL, "--loss", "cross_entropy"), "the step cannot be replayed"),
        ((*MODEL, "--loss", "of_a_user:fails"), "the step cannot be replayed"),
        ((*MODEL, "--loss", "of_a_user:text"), "the step cannot be replayed"),
        (("--recipe-file", "fixed.txt"), "ends in .yaml"),
        (("--recipe", "nonesuch"), "nonesuch"),
        (("--html", "mine.html"), "mine.html exists"),
        (("--html", "link.html", "--force"), "--html is link.html, which is read"),
        (("--recipe", "own.yaml", "--recipe-file", "own.yaml", "--force"), "which is read"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert words in " ".join(done.output.split())
        assert "Traceback" not in done.output
        files = {path for path in Path().iterdir() if path.name != "__pycache__"}
        assert {path: path.read_bytes() for path in files} == before
    Path(STEP).write_bytes(b"nothing")
    assert "safetensors" in run().output


def test_texts_are_escaped_in_the_page(tmp_path: Path) -> None:
    report = bisect(captured(outlier(Stack(2), 1), tmp_path / "step"))
    report.findings = [replace(report.findings[0], layers=("<script>alert(1)</script>",))]
    report.notes.append("<img src=x>")
    text = page(report, "<b>")
    assert not re.search("<script>|<img|<b>", text)
    assert report.sentence().startswith("1 operand moves the result of its product")
