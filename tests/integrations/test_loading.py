"""Published checkpoints, written by hand from the table of formats, as layers that train."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ottava
from ottava.checkpoint import load_model, save_model
from ottava.errors import CheckpointError, OptionError, OttavaError, UsageError
from ottava_integrations import ServedRecipe, load_quantized, quantized_from
from ottava_integrations.formats import SCHEMES, Scheme, published_tensors, scheme_of
from ottava_integrations.formats.configurations import other_files, quantization_config
from ottava_integrations.formats.schemes import Library
from tests.comparing import assert_same, unchanged
from tests.integrations.files import Net, published_parts

_SIDE = 128
#: The schemes that a configuration, and not the header of a file, describes.
WRITTEN = [scheme for scheme in SCHEMES if scheme.library is not Library.TORCHAO]


def checkpoint(folder: Path, scheme: Scheme, activations: str | None = None) -> dict[str, Any]:
    """Write a checkpoint of a scheme; its tensors."""
    net = Net().bfloat16()
    tensors: dict[str, torch.Tensor] = {}
    for name in ("up", "down"):
        for suffix, tensor in published_parts(net.get_submodule(name).weight, scheme).items():
            tensors[f"{name}.{suffix}"] = tensor.contiguous()
    for name in ("up.bias", "norm.weight", "norm.bias", "embed.weight"):
        tensors[name] = net.get_parameter(name).detach() + 1
    tensors["shift"] = torch.tensor(0.25, dtype=torch.bfloat16)
    write(folder, tensors, scheme, activations)
    return tensors


def write(
    folder: Path, tensors: dict[str, Any], scheme: Scheme, activations: str | None = None
) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    schemes = {"up": scheme, "down": scheme}
    words = activations or scheme.activations
    options = quantization_config(schemes, ["lm_head"], words, False)
    files = {"config.json": {"quantization_config": options}}
    for name, value in (files | other_files(schemes, ["lm_head"], words)).items():
        (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("scheme", WRITTEN, ids=str)
def test_layers_have_the_published_bytes(scheme: Scheme, meta: bool, tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path / "a", scheme)
    with torch.device("meta" if meta else "cpu"):
        net = Net().bfloat16()
    net.lm_head.weight = net.embed.weight
    net.norm.requires_grad_(False)
    report = load_quantized(net, tmp_path / "a")
    assert set(report.layers) == {"up", "down"}
    assert (net.norm.weight.requires_grad, net.up.bias.requires_grad) == (False, True)
    for name in ("up", "down"):
        layer = net.get_submodule(name)
        assert isinstance(layer, ottava.nn.Linear)
        assert layer.recipe == report.layers[name]
        returned = published_tensors(layer.weight, scheme, torch.bfloat16)
        for suffix, tensor in returned.items():
            assert_same(tensor, tensors[f"{name}.{suffix}"])
        assert not layer.weight.requires_grad
    assert torch.equal(net.up.bias, tensors["up.bias"])
    assert torch.equal(net.norm.weight, tensors["norm.weight"])
    assert torch.equal(net.embed.weight, tensors["embed.weight"])
    assert net.lm_head.weight is net.embed.weight
    if not meta:
        assert torch.equal(net.shift, tensors["shift"])
    # The file may change later.
    (tmp_path / "a" / "model.safetensors").write_bytes(b"")
    net(torch.randn(3, _SIDE).bfloat16())
    assert str(report).count("\n") >= 2


@pytest.mark.parametrize("activations", [None, "none"])
@pytest.mark.parametrize("scheme", WRITTEN, ids=str)
def test_the_gradient_of_an_input_is_that_of_the_decoded_weight(
    scheme: Scheme, activations: str | None, tmp_path: Path
) -> None:
    if activations == "none" and scheme.format.startswith(("fp8", "modelopt-fp8")):
        pytest.skip("the configuration of this format always quantizes inputs")
    checkpoint(tmp_path / "a", scheme, activations)
    net = Net().bfloat16()
    load_quantized(net, tmp_path / "a")
    weight = net.up.weight.dequantize(dtype=torch.float32).double()
    x = torch.randn(9, _SIDE).bfloat16().requires_grad_()
    gradient = torch.randn(9, 2 * _SIDE).bfloat16()
    net.up(x).backward(gradient)
    expected = gradient.double() @ weight
    assert x.grad is not None
    assert (x.grad.double() - expected).norm() < 4e-3 * expected.norm()
    assert net.up.weight.grad is None


def test_other_runs_have_the_same_gradients(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", WRITTEN[0])
    x = torch.randn(8, _SIDE, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = []
    for run in ("eager", "compiled", "recomputed"):
        net = Net().bfloat16()
        load_quantized(net, tmp_path / "a")
        own = x.clone().requires_grad_()
        if run == "compiled":
            # Other tests of this process may have reached the compiler's limit for layers.
            torch.compiler.reset()
            y = torch.compile(net, fullgraph=True, backend="aot_eager")(own)
        elif run == "recomputed":
            y = torch.utils.checkpoint.checkpoint(net, own, use_reentrant=False)
        else:
            y = net(own)
        y.float().square().mean().backward()
        assert own.grad is not None
        gradients.append(own.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("scheme", [WRITTEN[0], *WRITTEN[-2:]], ids=str)
def test_primary_weights_train(scheme: Scheme, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", scheme, "none" if scheme.is_packed else None)
    net = Net().bfloat16()
    load_quantized(net, tmp_path / "a", trainable=True)
    first = net.up.weight.dequantize().clone()
    net(torch.randn(64, _SIDE).bfloat16()).float().square().mean().backward()
    torch.optim.SGD(net.parameters(), 10.0).step()
    assert isinstance(net.up.weight, ottava.QuantizedTensor)
    assert not torch.equal(net.up.weight.dequantize(), first)


def test_the_backward_pass_of_another_recipe(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", WRITTEN[0])
    high = ottava.get_recipe("current", backward="high_precision")
    net = Net().bfloat16()
    report = load_quantized(net, tmp_path / "a", training=high)
    assert report.layers["up"].backward == "high_precision"
    with pytest.raises(OptionError, match="reads columns of the weight"):
        load_quantized(Net().bfloat16(), tmp_path / "a", training="mxfp8")
    # The forward pass stays that of the file.
    checkpoint(tmp_path / "b", scheme_of("float-quantized", "tensor"), "token")
    report = load_quantized(Net().bfloat16(), tmp_path / "b", training=high)
    assert report.layers["up"] == ServedRecipe("float-quantized", "tensor", "token", high)
    with pytest.raises(OptionError, match="trainable is 1"):
        load_quantized(Net(), tmp_path / "b", trainable=1)  # type: ignore[arg-type]


def test_a_loaded_model_is_saved_and_loaded(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", WRITTEN[0])
    net, other = Net().bfloat16(), Net().bfloat16()
    load_quantized(net, tmp_path / "a")
    load_quantized(other, tmp_path / "a", trainable=True)
    save_model(net, tmp_path / "saved.safetensors")
    with torch.no_grad():
        other.up.weight.mul_(2)
    load_model(other, tmp_path / "saved.safetensors")
    assert torch.equal(other.up.weight.dequantize(), net.up.weight.dequantize())
    copied = copy.deepcopy(net)
    x = torch.randn(3, _SIDE).bfloat16()
    assert torch.equal(copied(x), net(x))
    with pytest.raises(UsageError, match="quantized already"):
        load_quantized(net, tmp_path / "a")


def test_what_is_published_is_said(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", WRITTEN[0])
    published = quantized_from(tmp_path / "a")
    assert published.library is Library.COMPRESSED_TENSORS
    assert set(published.layers) == {"up", "down"}
    assert published.layers["up"].recipe == ServedRecipe("float-quantized")
    assert "2 layers: float-quantized, channel; inputs with a scale for each token" in str(
        published
    )
    assert set(published.high_precision) == {
        "up.bias",
        "norm.weight",
        "norm.bias",
        "embed.weight",
        "shift",
    }


#: A change of a valid checkpoint, and words of the error.
FAULTS: tuple[tuple[Callable[[dict[str, Any]], object], str], ...] = (
    (lambda t: t.pop("up.weight"), "'up.weight' is missing"),
    (lambda t: t.pop("up.weight_scale"), "'up.weight_scale' is missing"),
    (lambda t: t.pop("norm.bias"), "'norm.bias' of the model is missing"),
    (lambda t: t.update(extra=torch.zeros(2)), "'extra' of the file is not in the model"),
    (lambda t: t.update({"up.bias": torch.zeros(3)}), "'up.bias' has shape"),
    (lambda t: t.update({"up.bias": torch.zeros(256, dtype=torch.int32)}), "is torch.int32"),
    (lambda t: t.update({"up.input_scale": torch.ones(2)}), "'up.input_scale' has shape"),
    (lambda t: t.update({"up.weight": t["up.weight"][:3].clone()}), "'up.weight_scale' has sha"),
    (lambda t: t.update({"up.weight": t["up.weight"].float()}), "has dtype torch.float32"),
    (lambda t: t.update({"up.weight_scale": -t["up.weight_scale"]}), "has a scale that is neg"),
    (lambda t: t.update({"lm_head.weight": t["embed.weight"] + 1}), "'lm_head.weight' of the file"),
    (
        lambda t: t.update({f"q.{n}": t[f"up.{n}"].clone() for n in ("weight", "weight_scale")}),
        "layer 'q' of the file is not in the model",
    ),
)


@pytest.mark.parametrize(("change", "words"), FAULTS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    tensors = checkpoint(tmp_path / "a", WRITTEN[0])
    change(tensors)
    write(tmp_path / "a", tensors, WRITTEN[0])
    net = Net().bfloat16()
    with unchanged(net), pytest.raises(CheckpointError, match=words):
        load_quantized(net, tmp_path / "a")
    assert type(net.up) is torch.nn.Linear


# -- forged checkpoints --


def _forge_json(value: Any, rng: random.Random) -> Any:
    """A value of JSON with one random change somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return value | {key: _forge_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], _forge_json(value[place], rng), *value[place + 1 :]]
    values = [None, True, -1, 0, 3.5, 1e400, "", "Linear", "re:(", "re:.*", "fp8"]
    return rng.choice([*values, [], [[]], {}, {"a": 1}])


def _load_forged(folder: Path) -> None:
    """Load a checkpoint; a refused one changes neither the model nor the folder."""
    net = Net().bfloat16()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    names = sorted(path.name for path in folder.iterdir())
    try:
        load_quantized(net, folder)
    except OttavaError:
        state = net.state_dict()
        assert type(net.up) is type(net.down) is torch.nn.Linear
        for name, value in before.items():
            assert torch.equal(state[name], value), name
    else:
        # Only values differ: the result computes.
        with torch.no_grad():
            assert net(torch.zeros(2, _SIDE).bfloat16()).shape == (2, 16)
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", WRITTEN, ids=str)
def test_forged_configurations_are_refused_with_typed_errors(
    scheme: Scheme, rounds: int, tmp_path: Path
) -> None:
    rng = random.Random(rounds)
    checkpoint(tmp_path / "a", scheme)
    files = {path: path.read_text() for path in (tmp_path / "a").glob("*.json")}
    for _ in range(rounds):
        for path, text in files.items():
            path.write_text(text)
        path = rng.choice(sorted(files))
        path.write_text(json.dumps(_forge_json(json.loads(files[path]), rng)))
        _load_forged(tmp_path / "a")


def test_fused_parameters_get_values(tmp_path: Path) -> None:
    """A parameter that no layer computes with has the decoded values."""
    scheme = WRITTEN[0]
    tensors = checkpoint(tmp_path / "a", scheme)

    class Own(torch.nn.Linear):
        """Its behaviour would be lost in another class."""

    net = Net().bfloat16()
    net.up = Own(_SIDE, 2 * _SIDE).bfloat16()
    report = load_quantized(net, tmp_path / "a")
    assert report.values == ("up.weight",)
    assert type(net.up) is Own
    scale = tensors["up.weight_scale"].float()
    expected = (tensors["up.weight"].float() * scale).bfloat16()
    assert torch.equal(net.up.weight, expected)


def test_modules_that_share_a_quantized_weight_share_its_values(tmp_path: Path) -> None:
    """A layer with the bytes would leave the other module with the former values."""
    tensors = checkpoint(tmp_path / "a", WRITTEN[0])
    net = Net().bfloat16()
    net.other = torch.nn.Linear(_SIDE, 2 * _SIDE, bias=False)
    net.other.weight = net.up.weight
    report = load_quantized(net, tmp_path / "a")
    assert report.values == ("up.weight",)
    assert set(report.layers) == {"down"}
    assert net.other.weight is net.up.weight
    expected = tensors["up.weight"].float() * tensors["up.weight_scale"].float()
    assert torch.equal(net.other.weight, expected.bfloat16())


def test_a_tied_weight_may_be_in_the_file_under_each_name(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path / "a", WRITTEN[0])
    tensors["lm_head.weight"] = tensors["embed.weight"].clone()
    write(tmp_path / "a", tensors, WRITTEN[0])
    net = Net().bfloat16()
    load_quantized(net, tmp_path / "a")
    assert net.lm_head.weight is net.embed.weight
    assert torch.equal(net.embed.weight, tensors["embed.weight"])


def test_buffers_that_the_file_lacks(tmp_path: Path) -> None:
    """They keep their values, and those without values are refused."""
    checkpoint(tmp_path / "a", WRITTEN[0])
    net = Net().bfloat16()
    net.register_buffer("more", torch.ones(2))
    report = load_quantized(net, tmp_path / "a")
    assert report.kept == ("more",)
    assert torch.equal(net.more, torch.ones(2))
    assert "lacks, unchanged: 'more'" in str(report)

    empty = Net().bfloat16()
    empty.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(UsageError, match="'table'"):
        load_quantized(empty, tmp_path / "a")
    assert type(empty.up) is torch.nn.Linear


@pytest.mark.parametrize("words", ["float", "ue8m0"])
def test_the_last_rows_of_blocks_may_be_part_of_one(words: str, tmp_path: Path) -> None:
    """So are files of DeepSeek-V3; those of V3.1 say ``ue8m0``, and hold scales as numbers."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(192, 256, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [0.5, 0.25]])
    options = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": words}
    tensors = {"up.weight": data, "up.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": options}))
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(256, 192, bias=False).bfloat16()})
    report = load_quantized(model, tmp_path)
    assert str(report.published.layers["up"].scheme) == "fp8, block"
    values = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1) * data.float()
    weight = model["up"].weight
    assert torch.equal(weight.dequantize(dtype=torch.float32), values)
    x = torch.randn(3, 256, generator=generator).bfloat16().requires_grad_()
    gradient = torch.randn(3, 192, generator=generator).bfloat16()
    model["up"](x).backward(gradient)
    assert x.grad is not None
    expected = gradient.double() @ values.double()
    assert float((x.grad.double() - expected).norm() / expected.norm()) < 4e-3
