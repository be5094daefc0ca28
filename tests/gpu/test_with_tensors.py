"""Quantized tensors on the GPU: the memory that they show, and what others save and load of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ottava
from benchmarks.on_gpu.runner import Gpu

pytestmark = pytest.mark.gpu
RECIPES = [spec.name for spec in ottava.list_recipes() if spec.quantized_weights]


def primary_model(place: Gpu, recipe: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).to(place.device)
    return ottava.convert(model, recipe, primary=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_addresses_are_those_of_the_data(place: Gpu, recipe: str) -> None:
    weights = [layer.weight for layer in primary_model(place, recipe)]
    assert len({weight.data_ptr() for weight in weights} - {0}) == 3
    for weight in weights:
        memory = weight.untyped_storage()
        assert memory.device == place.device
        assert memory.data_ptr() == weight.data_ptr()
        assert weight.detach().data_ptr() == weight.data_ptr()


@pytest.mark.filterwarnings("ignore:.*written in high precision")
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_go_to_the_cpu_and_to_files(place: Gpu, recipe: str, tmp_path: Path) -> None:
    model = primary_model(place, recipe)
    moved = copy.deepcopy(model).to("cpu")
    for there, here in zip(model, moved, strict=True):
        assert torch.equal(there.weight.dequantize().cpu(), here.weight.dequantize())
        assert here.weight.untyped_storage().device.type == "cpu"
    safetensors.torch.save_file(model.state_dict(), tmp_path / "others.safetensors")
    values = safetensors.torch.load_file(tmp_path / "others.safetensors")
    assert torch.equal(values["0.weight"], moved[0].weight.dequantize())
    ottava.checkpoint.save_model(model, tmp_path / "own.safetensors")
    loaded = primary_model(place, recipe)
    with torch.no_grad():
        loaded[0].weight.zero_()
    ottava.checkpoint.load_model(loaded, tmp_path / "own.safetensors")
    assert torch.equal(loaded[0].weight.dequantize(), model[0].weight.dequantize())
