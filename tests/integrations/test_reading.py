"""What is converted: folders of files, files of torch.save; and the layers of a checkpoint."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.cli.main import app
from ottava.cli.recipes import checkpoint_layers
from ottava.errors import UsageError
from ottava_integrations import convert_file
from tests.comparing import assert_same
from tests.integrations.files import plain, same_files, sources_of


def test_every_source_gives_the_same_file(tmp_path: Path) -> None:
    state = {f"{n}.weight": torch.full((3, n + 1), float(n)) for n in range(5)}
    first, *others = sources_of(state, tmp_path / "in")
    assert sorted(convert_file(first, tmp_path / "a", "current").quantized) == [*state]
    for source in others:
        convert_file(source, tmp_path / "b", "current")
        same_files(tmp_path / "a", tmp_path / "b")


def test_files_of_torch_save(tmp_path: Path) -> None:
    with ottava.quantized_model_init("current"):
        layer = ottava.nn.Linear(7, 5, recipe="current")
    model = torch.nn.Sequential(OrderedDict(layer=layer, norm=torch.nn.LayerNorm(5)))
    model.register_parameter("tied", model.norm.weight)
    for new in (True, False):
        torch.save(model.state_dict(), tmp_path / "pt", _use_new_zipfile_serialization=new)
        convert_file(tmp_path / "pt", tmp_path / "out", "fp32")
        state: Any = checkpoint.load_file(tmp_path / "out")
        assert_same(state["layer.weight"], layer.weight.dequantize())
        assert state.keys() == model.state_dict().keys()
        assert len(plain(tmp_path / "out")) == len(state) - 1


def test_recipes_explain_asks_about_the_layers_of_a_checkpoint(tmp_path: Path) -> None:
    """Matrices named weight: those that are quantized or share another's values, as well."""
    with ottava.quantized_model_init("current"):
        quantized = ottava.nn.Linear(32, 16, recipe="current")
    first, tied = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)
    tied.weight = first.weight
    body = {"first.up": quantized, "norm": torch.nn.LayerNorm(8), "second": first, "tied": tied}
    states = {name: module.state_dict() for name, module in body.items()}
    state = {f"{name}.{key}": value for name, of in states.items() for key, value in of.items()}
    state |= {"table": torch.zeros(4, 4), "third.weight_scale": torch.zeros(2, 2)}
    checkpoint.save_file(state, tmp_path / "model.safetensors")
    layers = ["first.up", "second", "tied"]
    for place in (tmp_path / "model.safetensors", tmp_path):
        assert sorted(checkpoint_layers(place)) == layers
    command = ["recipes", "--explain", "current", "--json", "--checkpoint"]
    done = CliRunner().invoke(app, [*command, str(tmp_path), "--layer", "more"])
    found = {row["layer"] for row in json.loads(done.stdout)["layers"]}
    assert found == {*layers, "more"}
    checkpoint.save_file({"a.bias": torch.zeros(3)}, tmp_path / "none.safetensors")
    with pytest.raises(UsageError, match=r"none.safetensors has no matrix named \*.weight"):
        checkpoint_layers(tmp_path / "none.safetensors")
    absent = CliRunner().invoke(app, [*command, str(tmp_path / "absent")])
    assert absent.exit_code == 2
    assert "absent cannot be read" in absent.output
