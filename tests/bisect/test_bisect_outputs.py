"""The files that ``ottava bisect`` writes: what is there is not lost by it."""

import os

import pytest
from bisect_steps import Stack, outlier, stored
from typer.testing import CliRunner

from ottava.cli.main import app

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUTS = {"--html": "page.html", "--recipe-file": "kept.yaml"}
STEP = "step.safetensors"


@pytest.fixture(autouse=True)
def step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored(outlier(Stack(2), 1), STEP)


def run(*arguments):
    return CliRunner().invoke(app, ["bisect", STEP, *arguments])


def refused(folder, *arguments):
    """What the command says that changes nothing, in one line."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert len(done.output.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return done.output


@pytest.mark.parametrize("option", OUTPUTS)
def test_another_file_is_replaced_by_force_alone(option, tmp_path):
    name = OUTPUTS[option]
    for text in ("", "mine", "default: current\n", "<!doctype html><title>x</title>"):
        (tmp_path / name).write_text(text)
        assert f"{name} exists" in refused(tmp_path, option, name)
    assert run(option, name, "--force").exit_code == 0
    assert (tmp_path / name).read_text() not in ("", text)
    assert sorted(os.listdir()) == sorted([STEP, name])


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_page_is_replaced_and_a_recipe_file_is_not(option, tmp_path):
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
    name = OUTPUTS[option]
    os.symlink(STEP, name)
    assert f"{option} is {name}, which is read" in refused(tmp_path, option, name, "--force")
    os.remove(name)
    (tmp_path / "own.yaml").write_text("default: current\n")
    arguments = ("--recipe", "own.yaml", "--recipe-file", "own.yaml", "--force")
    assert "which is read" in refused(tmp_path, *arguments)


def test_two_outputs_in_one_file_are_refused(tmp_path):
    names = ("--recipe-file", "same.yaml", "--html", "./same.yaml")
    assert "--recipe-file and --html are both" in refused(tmp_path, *names, "--force")
