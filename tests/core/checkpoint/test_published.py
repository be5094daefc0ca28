"""What other tools have quantized is refused by name, and never loaded as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ottava import checkpoint
from ottava.errors import CheckpointError
from tests.other_formats import FORMATS, e4m3, model, ones, state_of, write


def refusal(file: Path, net: Any, *, strict: bool) -> CheckpointError:
    """The error of loading, which has left the model as it was."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_model(net, file, strict=strict)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    return caught.value


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_refused_by_name(
    name: str, config: bool, strict: bool, tmp_path: Path
) -> None:
    error = refusal(write(name, tmp_path, config=config), model(), strict=strict)
    title = FORMATS[name].title if config else FORMATS[name].title_by_names
    assert "model.safetensors holds data of quantized weights" in error.what
    assert f"format, {title}: '0.weight" in error.what
    assert "checkpoint in high precision" in error.remedy
    assert "strict" not in str(error)


def test_what_the_remedy_names(tmp_path: Path) -> None:
    for name, said in (
        ("float-quantized, block", "CompressedTensorsConfig(run_compressed=False)"),
        ("Hugging Face FP8", "FineGrainedFP8Config(dequantize=True)"),
        ("MXFP4 of experts", "Mxfp4Config(dequantize=True)"),
        ("ModelOpt FP8", "the tool that wrote it"),
    ):
        file = write(name, tmp_path, config=True)
        assert said in refusal(file, model(), strict=True).remedy


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    file = write("ModelOpt FP8", tmp_path, config=False)
    about = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    assert "format, ModelOpt FP8: '0.weight'" in refusal(file, model(), strict=False).what


@pytest.mark.parametrize(
    "text", [b"\xff", b"{", b"[]", b"[" * 100000, b'{"quantization_config": 1}']
)
def test_a_configuration_that_cannot_be_read_hides_nothing(text: bytes, tmp_path: Path) -> None:
    file = write("Hugging Face FP8", tmp_path, config=False)
    for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(text)
    assert "format, Hugging Face FP8: '0.weight'" in refusal(file, model(), strict=False).what


@pytest.mark.parametrize("known_by", ["index", "configuration"])
def test_scales_in_another_file(known_by: str, tmp_path: Path) -> None:
    state = state_of("Hugging Face FP8")
    scales = {"0.weight_scale_inv": state.pop("0.weight_scale_inv")}
    files = {"model-1.safetensors": state, "model-2.safetensors": scales}
    for file, tensors in files.items():
        safetensors.torch.save_file(tensors, tmp_path / file)
    if known_by == "index":
        where = {name: file for file, tensors in files.items() for name in tensors}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": where}))
    else:
        config = {"quantization_config": FORMATS["Hugging Face FP8"].config}
        (tmp_path / "config.json").write_text(json.dumps(config))
    error = refusal(tmp_path / "model-1.safetensors", model(), strict=True)
    assert "format, Hugging Face FP8: '0.weight'" in error.what


def test_a_file_of_ours_that_another_tool_has_rewritten(recipe: Any, tmp_path: Path) -> None:
    weight = recipe.quantizer("weight")(torch.randn(16, 8))
    tensors, _ = checkpoint.flatten_state_dict({"weight": weight})
    safetensors.torch.save_file(tensors, tmp_path / "x")
    error = refusal(tmp_path / "x", torch.nn.Linear(8, 16, bias=False), strict=False)
    assert "Ottava's own, without its metadata" in error.what


def test_elements_without_scales_are_values(tmp_path: Path) -> None:
    """Checkpoints that were cast; names of scales that belong to other tensors do not matter."""
    values = e4m3(4, 8)
    net = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))
    net.register_buffer("logit_scale", torch.ones(()))
    safetensors.torch.save_file({"0.weight": values, "logit_scale": torch.ones(())}, tmp_path / "x")
    checkpoint.load_model(net, tmp_path / "x")
    assert torch.equal(net[0].weight, values.float())


def test_a_model_that_has_the_data_and_the_scales_itself_loads_them(tmp_path: Path) -> None:
    net = torch.nn.Module()
    net.register_buffer("weight", e4m3(4, 8))
    net.register_buffer("weight_scale", ones(1))
    checkpoint.save_model(net, tmp_path / "x")
    expected, net.weight = net.weight, torch.zeros_like(net.weight)
    assert checkpoint.load_model(net, tmp_path / "x") == ([], [])
    assert torch.equal(net.weight.view(torch.uint8), expected.view(torch.uint8))


def test_what_is_in_high_precision_beside_data_loads(tmp_path: Path) -> None:
    """Where nothing of the model is quantized in the file."""
    file = write("Hugging Face FP8", tmp_path, config=True)
    part = torch.nn.ModuleDict({"1": torch.nn.Linear(256, 64)})
    missing, unexpected = checkpoint.load_model(part, file, strict=False)
    assert (missing, len(unexpected)) == ([], 3)
    assert torch.equal(part["1"].weight, torch.ones(64, 256))
    with pytest.raises(CheckpointError, match="format, Hugging Face FP8"):
        checkpoint.load_model(part, file)
