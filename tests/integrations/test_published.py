"""Checkpoints that other tools have quantized are neither converted nor analyzed as if data were
values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
from typer.testing import CliRunner

import ottava_debug
from ottava.cli.main import app
from ottava.errors import CheckpointError
from ottava_integrations import convert_file
from tests.integrations.files import sources_of
from tests.other_formats import FORMATS, model, state_of, write


def assert_refused(place: Path, title: str, folder: Path) -> None:
    for recipe in ("bf16", "current"):
        with pytest.raises(CheckpointError) as caught:
            convert_file(place, folder / "out", recipe)
        assert f"{place} holds data" in caught.value.what
        assert f"format {title}, where values are expected: '0.weight" in caught.value.what
    with pytest.raises(CheckpointError, match="holds data"):
        ottava_debug.analyze(place, model=model(), recipes=["current"])
    assert os.listdir(folder) == ["in"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_refused(name: str, tmp_path: Path) -> None:
    file = write(name, tmp_path / "in", config=True)
    for place in (file, file.parent):
        assert_refused(place, FORMATS[name].title, tmp_path)


def test_every_source_is_refused(tmp_path: Path) -> None:
    """Without a configuration, names tell the format."""
    for place in sources_of(state_of("ModelOpt FP8"), tmp_path / "in"):
        assert_refused(place, FORMATS["ModelOpt FP8"].title_by_names, tmp_path)


def test_the_command_says_so_in_a_line(tmp_path: Path) -> None:
    """And what is outside of the prefix does not matter."""
    file = write("Hugging Face FP8", tmp_path, config=True)
    arguments = ["export", str(file), str(tmp_path / "out"), "--recipe", "bf16"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "Hugging Face FP8" in done.output
    assert "Converted" not in done.output
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, [*arguments, "--prefix", "1."]).exit_code == 0
    assert {*safetensors.torch.load_file(tmp_path / "out")} == {"bias", "weight"}
