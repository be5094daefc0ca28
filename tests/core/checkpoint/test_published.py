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
from tests.core.checkpoint.files import contents, module_of
from tests.other_formats import FORMATS, model, state_of, write

FP8 = "Hugging Face FP8"
READERS = {
    "float-quantized, block": "ottava_integrations.load_quantized",
    FP8: "ottava_integrations.load_quantized",
    "MXFP4 of experts": "Mxfp4Config(dequantize=True)",
    "ModelOpt FP8": "ottava_integrations.load_quantized",
}


def refusal(file: Path, *, strict: bool, net: Any = None) -> CheckpointError:
    """The error of loading, which has left the model as it was."""
    net = net or model()
    before = contents(net)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_model(net, file, strict=strict)
    assert contents(net) == before
    return caught.value


@pytest.mark.parametrize("config", [True, False], ids=["configuration", "names"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_refused_by_name(name: str, config: bool, tmp_path: Path) -> None:
    file = write(name, tmp_path, config=config)
    title = FORMATS[name].title if config else FORMATS[name].title_by_names
    for strict in (True, False):
        error = refusal(file, strict=strict)
        assert "model.safetensors holds data of quantized weights" in error.what
        assert f"format {title}, where values are expected: '0.weight" in error.what
        assert "checkpoint in high precision" in error.remedy
        assert READERS.get(name, "") in error.remedy or not config
        assert "strict" not in str(error)


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
HERE = {"quantization_config": FORMATS[FP8].config}
#: A format; texts of files beside the file, and whether the scales are in another file.
BESIDE: dict[str, tuple[str, dict[str, Any], bool]] = {
    "modelopt": ("ModelOpt FP8", {"hf_quant_config.json": MODELOPT}, False),
    "index": (FP8, {"model.safetensors.index.json": None}, True),
    "configuration": (FP8, {"config.json": HERE}, True),
}
BESIDE |= {
    f"beside {text[:9]!r}": (FP8, dict.fromkeys(names, text), False)
    for names in [("config.json", "hf_quant_config.json", "model.safetensors.index.json")]
    for text in (b"\xff", b"{", b"[]", b"[" * 100_000, b'{"quantization_config": 1}')
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_beside_the_file(name: str, tmp_path: Path) -> None:
    title, texts, in_two_files = BESIDE[name]
    file = write(title, tmp_path, config=False)
    if in_two_files:
        state = state_of(title)
        scales = {"0.weight_scale_inv": state.pop("0.weight_scale_inv")}
        safetensors.torch.save_file(scales, tmp_path / "b")
        safetensors.torch.save_file(state, file)
        where = dict.fromkeys(state, file.name) | dict.fromkeys(scales, "b")
        texts = {key: text or {"weight_map": where} for key, text in texts.items()}
    for key, text in texts.items():
        raw = text if isinstance(text, bytes) else json.dumps(text).encode()
        (tmp_path / key).write_bytes(raw)
    assert (
        f"format {title}, where values are expected: '0.weight'" in refusal(file, strict=True).what
    )


def test_a_file_of_ours_that_another_tool_has_rewritten(recipe: Any, tmp_path: Path) -> None:
    weight = recipe.quantizer("weight")(torch.randn(16, 8))
    tensors, _ = checkpoint.flatten_state_dict({"weight": weight})
    safetensors.torch.save_file(tensors, tmp_path / "x")
    error = refusal(tmp_path / "x", strict=False, net=torch.nn.Linear(8, 16, bias=False))
    assert "Ottava's own, without its metadata" in error.what


def test_names_that_only_look_like_scales(tmp_path: Path) -> None:
    """A pattern that is as good as any: a file of which nothing is known."""
    tensors = {"0.qweight": torch.ones(4, 4, dtype=torch.int32), "0.weight_absmax": torch.ones(1)}
    safetensors.torch.save_file(tensors, tmp_path / "x")
    error = refusal(tmp_path / "x", strict=False)
    assert "none that Ottava knows, where values are expected: '0.qweight' of int32" in error.what


def test_elements_without_scales_are_values(tmp_path: Path) -> None:
    """Checkpoints that were cast; names of scales of other tensors do not matter."""
    values = torch.randn(4, 8).to(torch.float8_e4m3fn)
    net = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))
    net.register_buffer("logit_scale", torch.ones(()))
    safetensors.torch.save_file({"0.weight": values, "logit_scale": torch.ones(())}, tmp_path / "x")
    checkpoint.load_model(net, tmp_path / "x")
    assert torch.equal(net[0].weight, values.float())


def test_a_model_that_has_data_and_scales_itself_loads_them(tmp_path: Path) -> None:
    weight = torch.randn(4, 8).to(torch.float8_e4m3fn)
    net = module_of({"weight": weight, "weight_scale": torch.ones(1)})
    checkpoint.save_model(net, tmp_path / "x")
    net.weight = torch.zeros_like(weight)
    assert checkpoint.load_model(net, tmp_path / "x") == ([], [])
    assert contents(net.weight) == contents(weight)


def test_what_is_in_high_precision_beside_data_loads(tmp_path: Path) -> None:
    file = write(FP8, tmp_path, config=True)
    part = torch.nn.ModuleDict({"1": torch.nn.Linear(256, 64)})
    missing, unexpected = checkpoint.load_model(part, file, strict=False)
    assert (missing, len(unexpected)) == ([], 3)
    assert torch.equal(part["1"].weight, torch.ones(64, 256))
    assert "format Hugging Face FP8" in refusal(file, strict=True, net=part).what
