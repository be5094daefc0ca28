"""The files that ``ottava analyze`` writes: no other file is lost by them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import Result

import ottava_debug
from ottava.errors import OptionError
from tests.debug.analyses import command

CHECKPOINT = "in.safetensors"
OUTPUTS = {"--json": "report.json", "--html": "page.html", "--recipe-file": "kept.yaml"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.randn(32, 32)}, CHECKPOINT)
    return tmp_path


def run(*arguments: str) -> Result:
    recipe = [] if "--recipe" in arguments else ["--recipe", "current"]
    return command(CHECKPOINT, *recipe, *arguments)


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}


def refused(*arguments: str) -> str:
    """The one line that the command says; it changes nothing."""
    before = contents()
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert len(done.output.splitlines()) == 1
    assert contents() == before
    return done.output


OTHERS = ["", '{"source": "mine"}', "<!doctype html><title>x</title>"]


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_file_of_another_kind_is_replaced_by_force_alone(option: str) -> None:
    name = OUTPUTS[option]
    for text in OTHERS:
        Path(name).write_text(text)
        words = refused(option, name)
        assert f"{name} exists" in words
        assert "--force replaces it" in words
    assert run(option, name, "--force").exit_code == 0
    assert Path(name).read_text() not in OTHERS
    # A report is replaced; a recipe file is not, because users may have edited it.
    if option == "--recipe-file":
        assert f"{name} exists" in refused(option, name)
    else:
        before = os.stat(name).st_ino
        assert run(option, name).exit_code == 0
        assert os.stat(name).st_ino != before
    assert sorted(contents()) == sorted([CHECKPOINT, name])
    os.remove(name)
    # A file that is read is never replaced.
    for link in (os.symlink, os.link):
        link(CHECKPOINT, name)
        assert f"{option} is {name}, which is read" in refused(option, name, "--force")
        os.remove(name)
    Path("own.yaml").write_text("default: current\n")
    read = ("--recipe", "own.yaml", option, "own.yaml", "--force")
    assert "which is read" in refused(*read)
    if option != "--recipe-file":
        assert "which is read" in refused("--served", "x", "--model", "x:y", "--data", "x", *read)


@pytest.mark.parametrize(
    "other",
    [("--loss", "mse"), ("--recipe-file", "kept.yaml"), ("--base", "a"), ("--threshold", "3")],
    ids=lambda words: words[0],
)
def test_what_a_comparison_does_not_use_is_refused(other: tuple[str, str]) -> None:
    served = ("--served", "x", "--model", "x:y", "--data", "x")
    assert f"--served with {other[0]}" in refused(*served, *other)


def test_two_outputs_in_one_file_are_refused() -> None:
    os.symlink("same.yaml", "link.yaml")
    for one, other in (("--json", "--html"), ("--json", "--recipe-file")):
        for name in ("./same.yaml", "link.yaml"):
            words = refused(one, "same.yaml", other, name, "--force")
            assert f"{one} and {other} are both" in words


def test_a_file_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ottava_debug.analyze(CHECKPOINT, recipes=["current"])
    Path("page.html").write_text("before")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for write in (ottava_debug.write_html, ottava_debug.write_json):
            with pytest.raises(OptionError, match=r"page\.html cannot be written: no space left"):
                write(report, "page.html")
    assert Path("page.html").read_text() == "before"
    os.mkfifo("pipe")
    for name in ("pipe", "nowhere/page.html"):
        with pytest.raises(OptionError, match="cannot be written"):
            ottava_debug.write_html(report, name)
    os.symlink("page.html", "link.html")
    ottava_debug.write_html(report, "link.html")
    assert os.path.islink("link.html")
    assert Path("page.html").read_text() != "before"
