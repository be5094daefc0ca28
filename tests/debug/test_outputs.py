"""The files that ``ottava analyze`` writes: what is there is not lost by it."""

import os

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ottava_debug
from ottava.cli.main import app
from ottava.errors import OptionError
from ottava_debug.output import write_text

pytestmark = pytest.mark.usefixtures("one_thread")
CHECKPOINT = "in.safetensors"
OUTPUTS = {"--json": "report.json", "--html": "page.html", "--recipe-file": "kept.yaml"}


@pytest.fixture(autouse=True)
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.randn(32, 32)}, CHECKPOINT)


def run(*arguments):
    recipe = [] if "--recipe" in arguments else ["--recipe", "current"]
    return CliRunner().invoke(app, ["analyze", CHECKPOINT, *recipe, *arguments])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(folder, *arguments):
    """What the command says that changes nothing, in one line."""
    before = contents(folder)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert len(done.output.splitlines()) == 1
    assert contents(folder) == before
    return done.output


@pytest.mark.parametrize("option", OUTPUTS)
def test_another_file_is_replaced_by_force_alone(option, tmp_path):
    name = OUTPUTS[option]
    for text in (
        "",
        "mine",
        '{"source": "mine"}',
        "default: current\n",
        "<!doctype html><title>x</title>",
    ):
        (tmp_path / name).write_text(text)
        said = refused(tmp_path, option, name)
        assert f"{name} exists" in said
        assert "--force replaces it" in said
    assert run(option, name, "--force").exit_code == 0
    assert (tmp_path / name).read_text() not in ("", text)
    assert sorted(contents(tmp_path)) == sorted([CHECKPOINT, name])


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_report_is_replaced_and_a_recipe_file_is_not(option, tmp_path):
    name = OUTPUTS[option]
    assert run(option, name).exit_code == 0
    if option == "--recipe-file":
        assert f"{name} exists" in refused(tmp_path, option, name)
    else:
        before = (tmp_path / name).stat().st_ino
        assert run(option, name).exit_code == 0
        assert (tmp_path / name).stat().st_ino != before


@pytest.mark.parametrize("option", OUTPUTS)
def test_what_is_read_is_never_replaced(option, tmp_path):
    source, name = CHECKPOINT, OUTPUTS[option]
    os.symlink(source, name)
    said = refused(tmp_path, option, name, "--force")
    assert f"{option} is {name}, which is read" in said
    os.remove(name)
    os.link(source, name)
    assert "which is read" in refused(tmp_path, option, name, "--force")
    os.remove(name)
    (tmp_path / "own.yaml").write_text("default: current\n")
    arguments = ("--recipe", "own.yaml", "--recipe-file", "own.yaml", "--force")
    assert "which is read" in refused(tmp_path, *arguments)


def test_two_outputs_in_one_file_are_refused(tmp_path):
    os.symlink("same.yaml", "link.yaml")
    for one, other in (("--json", "--html"), ("--json", "--recipe-file")):
        for names in (("same.yaml", "./same.yaml"), ("same.yaml", "link.yaml")):
            arguments = [one, names[0], other, names[1], "--force"]
            before = sorted(os.listdir())
            done = run(*arguments)
            assert done.exit_code == 2
            assert f"{one} and {other} are both" in done.output
            assert sorted(os.listdir()) == before


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path, monkeypatch):
    """A disk that is full, for one, and a name that is no file's."""
    report = ottava_debug.analyze(CHECKPOINT, recipes=["current"])
    ottava_debug.write_html(report, "page.html")
    before = contents(tmp_path)

    def full(descriptor):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for write in (ottava_debug.write_html, ottava_debug.write_json):
            with pytest.raises(OptionError, match=r"page\.html cannot be written: no space left"):
                write(report, "page.html")
    assert contents(tmp_path) == before
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    for name in ("folder", "pipe", "nowhere/page.html"):
        with pytest.raises(OptionError, match="cannot be written"):
            write_text(name, "text")
    os.symlink("page.html", "link.html")
    write_text("link.html", "text")
    assert (tmp_path / "page.html").read_text() == "text"
    assert os.path.islink("link.html")
