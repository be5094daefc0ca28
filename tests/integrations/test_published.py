"""Checkpoints that other tools have quantized are neither converted nor analyzed as if data were
values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import ottava_debug
from ottava.checkpoint import save_sharded
from ottava.cli.main import app
from ottava.errors import CheckpointError
from ottava_integrations import convert_file
from tests.other_formats import FORMATS, model, state_of, write


def in_shards(name: str, folder: Path) -> Path:
    """One tensor in each file, and the index."""
    folder.mkdir()
    where = {}
    for number, (key, tensor) in enumerate(state_of(name).items()):
        where[key] = f"model-{number}.safetensors"
        safetensors.torch.save_file({key: tensor}, folder / where[key])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def pickled(name: str, folder: Path) -> Path:
    folder.mkdir()
    torch.save(state_of(name), folder / "x.pt")
    return folder / "x.pt"


def sharded(name: str, folder: Path) -> Path:
    save_sharded(state_of(name), folder)
    return folder


SOURCES: dict[str, Callable[[str, Path], Path]] = {
    "file": lambda name, folder: write(name, folder, config=True),
    "file alone": lambda name, folder: write(name, folder, config=False),
    "folder": lambda name, folder: write(name, folder, config=True).parent,
    "index": in_shards,
    "torch.save": pickled,
    "sharded": sharded,
}


#: Every format from a file, and one from every source.
CASES = [(name, "file") for name in FORMATS] + [("ModelOpt FP8", source) for source in SOURCES]


@pytest.mark.parametrize(("name", "source"), CASES)
def test_every_source_and_format_is_refused(name: str, source: str, tmp_path: Path) -> None:
    place, published = SOURCES[source](name, tmp_path / "in"), FORMATS[name]
    title = published.title if source in ("file", "folder") else published.title_by_names
    for recipe in ("bf16", "current"):
        with pytest.raises(CheckpointError) as caught:
            convert_file(place, tmp_path / "out", recipe)
        assert f"{place} holds data" in caught.value.what
        assert f"format {title}, where values are expected: '0.weight" in caught.value.what
    with pytest.raises(CheckpointError, match="holds data"):
        ottava_debug.analyze(place, model=model(), recipes=["current"])
    assert os.listdir(tmp_path) == ["in"]


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
