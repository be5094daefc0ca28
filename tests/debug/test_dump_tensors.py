"""``DumpTensors`` writes what products take, in files that every tool for safetensors reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from safetensors.torch import load_file as load_plain

import ottava
from ottava.checkpoint import load_file
from ottava.tensors import QuantizedTensorStorage
from tests.debug.by_hand import inputs, layer_of, passes, quantized
from tests.debug.yaml_files import section

Initialize = Callable[..., Path]
HIGH, QUANTIZED = "high_precision_tensor: True", "quantized_tensor: True"
INTERNALS = "dump_quantized_internals: True"


def of_all_layers(options: str, tensors: str = "[activation, weight, gradient, output]") -> str:
    return section("DumpTensors", f"tensors: {tensors}, {options}", layers="layer_types: all")


def tensors_of_steps(layer: ottava.nn.Linear) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Step and batch -> the layer's tensors, of three steps with two batches each."""
    seen = {}
    for step in range(3):
        for batch in range(2):
            x, dy = inputs(seed=2 * step + batch)
            seen[step, batch] = {
                "activation": x,
                "gradient": dy,
                "output": passes(layer, x, dy)["output"],
                "weight": layer.weight.detach(),
            }
        debug_api.step()
    return seen


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_files_have_what_products_take(recipe: str, initialize: Initialize) -> None:
    folder = initialize(of_all_layers(f"{HIGH}, {QUANTIZED}, {INTERNALS}, freq: 2"))
    folder = folder / "tensor_dumps" / "rank-00000"
    layer = layer_of(recipe)
    with pytest.warns(UserWarning, match="output of layer 'layer' is not quantized") as caught:
        seen = tensors_of_steps(layer)
    assert len(caught) == 1
    expected = {
        (f"layer.{tensor}.step-{step:06d}.{batch}.safetensors", tensor, step, batch)
        for step in (0, 2)
        for tensor, batches in (("activation", 2), ("gradient", 2), ("output", 2), ("weight", 1))
        for batch in range(batches)
    }
    assert {path.name for path in folder.iterdir()} == {name for name, *_ in expected}
    for name, tensor, step, batch in expected:
        found, plain = load_file(folder / name), load_plain(folder / name)
        values = seen[step, batch][tensor]
        assert torch.equal(plain["high_precision"], values)
        if tensor == "output":
            assert set(found) == {"high_precision"}
            continue
        gemm = "dgrad" if tensor == "gradient" else "fprop"
        decoded = quantized(recipe, gemm, tensor, values).dequantize(torch.float32)
        assert torch.equal(plain["quantized"], decoded)
        assert isinstance(found["internals"], QuantizedTensorStorage)
        assert torch.equal(found["internals"].dequantize(torch.float32), decoded)
        assert any(key.startswith("internals.") and "scale_inv" in key for key in plain)


def test_options_choose_the_entries(initialize: Initialize) -> None:
    for options, entries in (
        (HIGH, {"high_precision"}),
        (QUANTIZED, {"quantized"}),
        (f"{HIGH}, {QUANTIZED}", {"high_precision", "quantized"}),
        (f"{QUANTIZED}, {INTERNALS}", {"quantized", "internals"}),
    ):
        folder = initialize(of_all_layers(options, "activation"))
        layer_of("current")(inputs()[0])
        (path,) = folder.glob("tensor_dumps/*/*")
        assert set(load_file(path)) == entries
        path.unlink()
    # A tensor without an entry has no file.
    initialize(of_all_layers(QUANTIZED, "output"))
    with pytest.warns(UserWarning, match="output of layer 'layer' is not quantized"):
        layer_of("current")(inputs()[0])
    assert list(folder.glob("tensor_dumps/*/*")) == []


def test_names_of_files_are_safe_and_differ_as_those_of_layers(initialize: Initialize) -> None:
    digest = "-[0-9a-f]{12}"
    patterns = {
        "model.blocks.0.fc1": r"model\.blocks\.0\.fc1",
        "a/../../b": rf"a_\.\._\.\._b{digest}",
        "..": digest,
        "/etc/passwd": f"_etc_passwd{digest}",
        "é" * 300: f"_{{100}}{digest}",
        "": digest,
        "a_b": "a_b",
        "a/b": f"a_b{digest}",
        "a:b": f"a_b{digest}",
    }
    folder = initialize(of_all_layers(HIGH, "weight"))
    found: set[str] = set()
    for name, pattern in patterns.items():
        layer_of("current", name)(inputs()[0])
        (file,) = {path.name for path in folder.glob("tensor_dumps/rank-00000/*")} - found
        found.add(file)
        assert re.fullmatch(rf"{pattern}\.weight\.step-000000\.0\.safetensors", file), name
