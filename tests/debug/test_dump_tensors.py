"""``DumpTensors`` writes what products take, in files that any tool for safetensors reads."""

import math
import re

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from eight_layers import GOOD
from safetensors.torch import load_file as load_plain

import ottava
from ottava.checkpoint import load_file
from ottava.errors import OptionError
from ottava.tensors import QuantizedTensorStorage

FILE = """
it:
  enabled: True
  layers: {{layer_types: [all]}}
  transformer_engine:
    DumpTensors:
      enabled: True
      tensors: [activation, weight, gradient, output]
      {options}
"""
EVERYTHING = (
    "{high_precision_tensor: True, quantized_tensor: True, dump_quantized_internals: True, freq: 2}"
)


def file_of(options):
    return FILE.format(options=options.strip("{}").replace(", ", "\n      "))


def train(initialize, options, *, recipe="current", name="a/b", steps=1, batches=1):
    """What a layer took, by step and batch, and where the files are."""
    path = initialize(file_of(options))
    layer, seen = ottava.nn.Linear(64, 32, recipe=recipe, name=name), {}
    for step in range(steps):
        for batch in range(batches):
            # All tensors are multiplied by their rows, the gradient too.
            x = torch.randn(8, 64, requires_grad=True)
            y = layer(x)
            dy = torch.randn_like(y)
            y.backward(dy)
            seen[step, batch] = {
                "activation": x.detach(),
                "weight": layer.weight.detach(),
                "gradient": dy,
                "output": y,
            }
        debug_api.step()
    return seen, layer, path.parent / "tensor_dumps"


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "blockwise"])
def test_files_have_what_products_take(recipe, initialize):
    with pytest.warns(UserWarning, match="output of layer 'layer' is not quantized"):
        seen, layer, folder = train(
            initialize, EVERYTHING, recipe=recipe, name="layer", steps=3, batches=2
        )
    names = {path.name for path in folder.glob("rank-00000/*")}
    tensors = [("activation", 2), ("gradient", 2), ("output", 2), ("weight", 1)]
    expected = {
        (tensor, step, number)
        for tensor, count in tensors
        for step in (0, 2)
        for number in range(count)
    }
    assert names == {
        f"layer.{t}.step-{step:06d}.{number}.safetensors" for t, step, number in expected
    }
    for tensor, step, number in expected:
        path = folder / "rank-00000" / f"layer.{tensor}.step-{step:06d}.{number}.safetensors"
        found, plain = load_file(path), load_plain(path)
        values = seen[step, number][tensor].detach()
        assert torch.equal(found["high_precision"], values)
        if tensor == "output":
            assert set(found) == {"high_precision"}
            continue
        role = {"activation": "input", "weight": "weight", "gradient": "grad_output"}[tensor]
        quantizer = layer._binding.state.quantizer(role, rowwise=True, columnwise=True)
        made = quantizer.quantize(values).dequantize(torch.float32)
        assert torch.equal(plain["quantized"], made)
        assert isinstance(found["internals"], QuantizedTensorStorage)
        assert torch.equal(found["internals"].dequantize(torch.float32), made)
        assert any(name.startswith("internals.") and "scale_inv" in name for name in plain)


CHOICES = [
    ("{high_precision_tensor: True}", {"high_precision"}),
    ("{quantized_tensor: True}", {"quantized"}),
    ("{high_precision_tensor: True, quantized_tensor: True}", {"high_precision", "quantized"}),
]


@pytest.mark.parametrize(("options", "expected"), CHOICES)
@pytest.mark.filterwarnings("ignore:output of layer")
def test_what_is_written_is_chosen(options, expected, initialize):
    _, _, folder = train(initialize, options)
    (path,) = folder.glob("*/*.activation.*")
    assert set(load_file(path)) == expected


# A layer's name, and how its files' names begin.
LAYER_NAMES = [
    ("model.blocks.0.fc1", r"model\.blocks\.0\.fc1"),
    ("a/../../b", r"a_\.\._\.\._b-[0-9a-f]{12}"),
    ("..", "-[0-9a-f]{12}"),
    ("/etc/passwd", "_etc_passwd-[0-9a-f]{12}"),
    ("é" * 300, "_{100}-[0-9a-f]{12}"),
    ("", "-[0-9a-f]{12}"),
]


@pytest.mark.parametrize(("name", "expected"), LAYER_NAMES, ids=lambda text: ascii(text)[:20])
def test_names_of_files_are_safe(name, expected):
    from ottava_debug.features.dump import file_name

    found = file_name(name, "weight", 12, 3)
    assert re.fullmatch(expected + r"\.weight\.step-000012\.3\.safetensors", found)


def test_layers_that_would_have_one_name_have_files_of_their_own(initialize):
    folder = initialize(file_of("{high_precision_tensor: True}")).parent / "tensor_dumps"
    for name in ("a/b", "a_b", "a:b"):
        ottava.nn.Linear(16, 16, recipe="current", name=name)(torch.randn(4, 16))
    assert len(list(folder.glob("*/a_b*.weight.*"))) == 3


def test_ranks_have_folders_of_their_own(initialize, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *group: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 1)
    _, _, folder = train(initialize, "{high_precision_tensor: True}")
    assert {path.parent.name for path in folder.glob("*/*")} == {"rank-00003"}


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(initialize):
    folder = initialize(file_of("{high_precision_tensor: True}")).parent / "tensor_dumps"
    folder.write_text("")
    layer = ottava.nn.Linear(16, 16, recipe="current", name="layer")
    with pytest.warns(
        UserWarning, match=r"DumpTensors: inspect_tensor failed in layer 'layer'.*switched off"
    ):
        y = layer(torch.randn(4, 16))
    assert math.isfinite(y.sum().item())


WRONG = [
    ("{freq: 2}", "nothing of activation is to be written.*high_precision_tensor: True"),
    ("{high_precision_tensor: False}", "nothing of activation"),
    ("{high_precision_tensor: True, dump_quantized_internals: True}", "without quantized_tensor"),
    ("{quantized_tensor: 1}", "quantized_tensor is 1. Expected: True or False"),
    ("{quantised_tensor: True}", "use 'quantized_tensor'"),
]


@pytest.mark.parametrize(("options", "told"), WRONG)
def test_options_that_are_wrong(options, told, initialize):
    with pytest.raises(OptionError, match=told):
        initialize(file_of(options))
    initialize(GOOD)
