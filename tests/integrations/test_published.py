"""Checkpoints that other tools have quantized are neither converted nor analyzed as if data were
values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import ottava_debug
from ottava.checkpoint import save_sharded
from ottava.cli.main import app
from ottava.errors import CheckpointError
from ottava_integrations import convert_file
from tests.other_formats import FORMATS, e4m3, model, ones, state_of, write


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


SOURCES = {
    "file": lambda name, folder: write(name, folder, config=True),
    "file alone": lambda name, folder: write(name, folder, config=False),
    "folder": lambda name, folder: write(name, folder, config=True).parent,
    "index": in_shards,
    "torch.save": pickled,
    "sharded": sharded,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_source_of_every_format_is_refused(source: str, name: str, tmp_path: Path) -> None:
    place = SOURCES[source](name, tmp_path / "in")
    found = FORMATS[name]
    title = found.title if source in ("file", "folder") else found.title_by_names
    for recipe in ("bf16", "current"):
        with pytest.raises(CheckpointError) as caught:
            convert_file(place, tmp_path / "out", recipe)
        assert f"{place} holds data" in caught.value.what
        assert f"format, {title}: '0.weight" in caught.value.what
    with pytest.raises(CheckpointError, match="holds data"):
        ottava_debug.analyze(place, model=model(), recipes=["current"])
    assert os.listdir(tmp_path) == ["in"]


def test_the_command_says_so_in_a_line(tmp_path: Path) -> None:
    file = write("Hugging Face FP8", tmp_path / "in", config=True)
    arguments = ["export", str(file), str(tmp_path / "out"), "--recipe", "bf16"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "Hugging Face FP8" in done.output
    assert "Converted" not in done.output
    assert not (tmp_path / "out").exists()


def test_what_is_quantized_outside_of_the_prefix_does_not_matter(tmp_path: Path) -> None:
    file = write("ModelOpt NVFP4", tmp_path / "in", config=True)
    done = convert_file(file, tmp_path / "out", "fp32", prefix="1.")
    assert sorted(done.cast) == ["bias", "weight"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_elements_without_scales_become_high_precision(dtype: Any, tmp_path: Path) -> None:
    """They are values, and a recipe, which quantizes high precision, leaves them as they are."""
    values = {"a.weight": e4m3(8, 16).to(dtype), "b.weight": ones(8, 16)}
    safetensors.torch.save_file(values, tmp_path / "in")
    done = convert_file(tmp_path / "in", tmp_path / "out", "fp32")
    written = safetensors.torch.load_file(tmp_path / "out")
    assert sorted(done.cast) == ["a.weight", "b.weight"]
    assert all(torch.equal(written[name], value.float()) for name, value in values.items())
    done = convert_file(tmp_path / "in", tmp_path / "out", "current")
    assert (done.quantized, done.copied) == (("b.weight",), ("a.weight",))
