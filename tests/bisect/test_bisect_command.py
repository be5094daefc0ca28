"""The command ``ottava bisect``, its output and its page."""

import json
import re
import sys

import pytest
from bisect_steps import Stack, outlier, stored
from typer.testing import CliRunner

import ottava_bisect
from ottava.cli.main import app
from ottava_bisect import Bundle, bisect, capture

pytestmark = pytest.mark.usefixtures("one_thread")


MODULE = """
import torch
torch.manual_seed(0)
def make():
    from bisect_steps import Stack
    return Stack(6)
def loss(output, targets):
    return torch.nn.functional.mse_loss(output, targets)
def words(output, targets):
    return output + "text"
def fails():
    raise ValueError("no model today")
"""


@pytest.fixture
def run(path, tmp_path, monkeypatch):
    stored(outlier(Stack(6), 2), path, loss=None)
    (tmp_path / "of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["bisect", str(path), *arguments])


def test_the_command(run, tmp_path) -> None:
    done = run("--model", "of_a_user:make", "--recipe-file", "fixed.yaml", "--html", "page.html")
    assert done.exit_code == 0, done.output
    assert "layers.2" in done.output
    assert "weight in fprop" in done.output
    text = (tmp_path / "fixed.yaml").read_text()
    assert "match: layers.2" in text
    fixed = run("--model", "of_a_user:make", "--recipe", "fixed.yaml")
    assert fixed.exit_code == 0
    assert "Nothing to find" in fixed.output
    page = (tmp_path / "page.html").read_text()
    assert "layers.2" in page
    assert not re.search(r"<script|<link|src=|https?:|@import|url\(", page)


def test_the_command_in_json(run) -> None:
    done = run(
        "--model",
        "of_a_user:make",
        "--loss",
        "of_a_user:loss",
        "--measure",
        "loss",
        "--tolerance",
        "1e-3",
        "--json",
    )
    told = json.loads(done.stdout)
    assert told["solved"] is True
    assert told["findings"][0]["layers"] == ["layers.2"]
    assert told["findings"][0]["statistics"]["underflow"] > 90
    assert run("--json").exit_code == 0


def test_the_command_with_what_is_wrong(run, path) -> None:
    for arguments, told in (
        (["--model", "nowhere:make"], "--model 'nowhere:make' cannot be had"),
        (["--model", "of_a_user:fails"], "no model today"),
        (["--measure", "beauty", "--model", "of_a_user:make"], "measure is 'beauty'"),
        (["--recipe-file", "fixed.txt"], "ends in .yaml"),
        (["--html", "nowhere/page.html"], "cannot be written"),
        (["--recipe", "nonesuch"], "nonesuch"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert told in done.output
    path.write_bytes(b"nothing")
    done = run()
    assert done.exit_code == 2
    assert "safetensors" in done.output


def test_a_step_that_is_not_explained_is_an_exit_code(run) -> None:
    assert run("--model", "of_a_user:make", "--tolerance", "1e-5").exit_code == 1


def test_names_are_escaped_in_the_page(path) -> None:
    from ottava_bisect.search.page import page

    report = bisect(stored(outlier(Stack(2), 1), path))
    finding = report.findings[0]
    report.findings = [
        type(finding)(("<script>alert(1)</script>",), *list(vars(finding).values())[1:])
    ]
    report.notes.append("<img src=x>")
    text = page(report, "<b>")
    assert "<script>" not in text
    assert "<img" not in text
    assert "<b>" not in text


def test_public_names() -> None:
    assert ottava_bisect.capture is capture
    assert ottava_bisect.bisect is bisect
    assert ottava_bisect.Bundle is Bundle


@pytest.mark.parametrize(
    "arguments",
    [("--loss", "cross_entropy"), ("--loss", "of_a_user:fails"), ("--loss", "of_a_user:words")],
)
def test_the_command_with_a_loss_that_fails(arguments, run, path) -> None:
    done = run("--model", "of_a_user:make", *arguments)
    assert done.exit_code == 2
    assert "the step cannot be replayed" in done.output
    assert "Traceback" not in done.output
