"""Weights in and out, with the released libraries on the other side."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ottava
from benchmarks import published
from ottava.cli.main import app
from ottava_integrations import (
    ServedRecipe,
    check_export,
    export_model,
    load_quantized,
    quantized_from,
)
from ottava_integrations.formats import FORMATS, published_tensors, quantized_weight, scheme_of
from ottava_integrations.names import named_tensors

_SIZES = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
_MOE = _SIZES | {"num_key_value_heads": 2, "vocab_size": 64}
TOKENS = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(0))


def _llama() -> Any:
    config = transformers.LlamaConfig(
        **_SIZES, intermediate_size=256, vocab_size=64, tie_word_embeddings=True
    )
    return transformers.LlamaForCausalLM(config)


def _mixtral() -> Any:
    config = transformers.MixtralConfig(**_MOE, intermediate_size=256, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def _qwen() -> Any:
    config = transformers.Qwen2MoeConfig(
        **_MOE,
        intermediate_size=128,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=4,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _vit() -> Any:
    config = transformers.ViTConfig(**_SIZES, intermediate_size=256, image_size=32, patch_size=16)
    return transformers.ViTForImageClassification(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


#: Model, and its numbers of quantized layers, and of parameters that hold fused experts.
MODELS = {
    "llama": (_llama, 7, 0),
    "mixtral": (_mixtral, 16, 2),
    "qwen": (_qwen, 20, 2),
    "vit": (_vit, 6, 0),
}
#: What Transformers 5.24 does not read of experts in one parameter.
UNREAD = {"mxfp8-quantized", "nvfp4-pack-quantized"}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name][0]().bfloat16()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_round_trips(name: str, format: str, tmp_path: Path) -> None:
    """The other library decodes the same values, and what returns has the same bytes."""
    model = made(name)
    amaxes = {layer: 3.0 for layer, _ in model.named_modules()}
    report = export_model(
        model, tmp_path / "out", format, input_amaxes=amaxes if format == "modelopt-fp8" else None
    )
    _, layers, fused = MODELS[name]
    # Blocks of 128 x 128 do not divide the gate of the shared expert, which has one row.
    gate = name == "qwen" and format.startswith("fp8")
    assert len(report.layers) == layers - gate
    check = check_export(model, tmp_path / "out")
    assert check.is_equal, check
    assert check.weights == len(report.layers)
    if not format.startswith("modelopt") and not (fused and format in UNREAD):
        assert check.logits is not None, check.reason
        assert check.logits < 0.25

    loaded = made(name)
    done = load_quantized(loaded, tmp_path / "out")
    assert len(done.values) == fused
    file = load_file(tmp_path / "out" / "model.safetensors")
    scheme = scheme_of(format)
    if not fused:
        returned = {}
        for layer in done.layers:
            weight = loaded.get_submodule(layer).weight
            returned[layer] = published_tensors(weight, scheme, torch.bfloat16)
        data = [name for name in file if name.endswith(scheme.names.data)]
        found = {as_bytes(t[scheme.names.data]).numpy().tobytes() for t in returned.values()}
        assert {as_bytes(file[name]).numpy().tobytes() for name in data} >= found
    values = dict(iter_values(model, loaded))
    for key, (ours, theirs) in values.items():
        assert torch.equal(ours, theirs), key


def iter_values(model: Any, loaded: Any) -> Any:
    """What is in high precision, of both models; and fused experts, up to their quantization."""
    others = {name: tensor for name, tensor, _ in named_tensors(loaded)}
    for name, tensor, _ in named_tensors(model):
        if not isinstance(others[name], ottava.QuantizedTensor) and "experts" not in name:
            yield name, (tensor, others[name])


@pytest.mark.parametrize("format", FORMATS)
def test_gpt2_stores_its_weights_transposed(format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(ottava.errors.OptionError, match="c_attn: its weight is stored transposed"):
        export_model(_gpt2().bfloat16(), tmp_path / "out", format)


WRITERS = {f"{library}: {title}": (library, write) for library, title, write in published.writers()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    published.model().save_pretrained(path)
    return path


def loaded_as_transformers_does(source: Path, folder: Path | None) -> Any:
    """The model of a folder, with the weights of another one."""
    model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if folder is not None:
        load_quantized(model, folder)
    return model


def _logits_of_the_library(title: str, model: Any, source: Path, folder: Path) -> torch.Tensor:
    """Those of the library where it runs on a CPU; of the decoded values otherwise."""
    library, _ = WRITERS[title]
    # This preset has constant scales of inputs, which its writer does not calibrate.
    if library == "compressed-tensors" and not title.endswith(": FP8"):
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    elif library == "torchao":
        theirs = loaded_as_transformers_does(source, None)
        quantize = importlib.import_module("torchao.quantization").quantize_
        quantize(theirs.model.layers, published.TORCHAO[title.removeprefix("torchao: ")]())
    else:
        theirs = loaded_as_transformers_does(source, None)
        for name in quantized_from(folder).layers:
            value = model.get_submodule(name).weight.dequantize()
            theirs.get_submodule(name).weight.data.copy_(value)
    with torch.no_grad():
        logits: torch.Tensor = theirs(TOKENS).logits
    return logits.double()


@pytest.mark.parametrize("title", WRITERS)
def test_files_of_the_libraries_load_train_and_merge(
    title: str, source: Path, tmp_path: Path
) -> None:
    library, write = WRITERS[title]
    write(source, tmp_path / "out")
    said = quantized_from(tmp_path / "out")
    model = published.model()
    report = load_quantized(model, tmp_path / "out")
    assert len(report.layers) == len(said.layers) == 7
    file = load_file(tmp_path / "out" / "model.safetensors")
    for name, kind in said.layers.items():
        layer = model.get_submodule(name)
        stored = file[f"{name}.{kind.scheme.names.data}"]
        mine = published_tensors(layer.weight, kind.scheme, torch.bfloat16)[kind.scheme.names.data]
        assert torch.equal(as_bytes(mine), as_bytes(stored)), name
    assert {layer.activations for layer in said.layers.values()} == {
        recipe.activations for recipe in report.layers.values()
    }

    # The library decodes the same values.
    if library != "torchao":
        check = check_export(model, tmp_path / "out")
        assert check.is_equal, check
        assert check.weights == 7

    # Weights of the library are rounded to BF16 before it multiplies, which changes those of MX not
    # at all. It rounds the scales of inputs to BF16, too.
    theirs = _logits_of_the_library(title, model, source, tmp_path / "out")
    with torch.no_grad():
        ours = loaded_as_transformers_does(source, tmp_path / "out")(TOKENS).logits.double()
    activations = report.layers[name].activations
    bound = 0.01 if activations == "none" else 0.08
    if title.endswith(("MXFP8A16", "MXFP4A16")):
        bound = 0.0
    assert float((ours - theirs).norm() / theirs.norm()) <= bound

    # LoRA over the frozen bytes: gradients of the adapters, against float64.
    target = "q_proj"
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=[target], lora_dropout=0.0))
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    down, across = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(across, std=0.1)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    gradient = torch.randn(9, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    layer(x).backward(gradient)
    weight = layer.base_layer.weight.dequantize(dtype=torch.float32).double()
    scaling = layer.scaling["default"]
    exact = gradient.double() @ weight
    exact += scaling * gradient.double() @ across.detach().double() @ down.detach().double()
    expected_across = (
        scaling * gradient.double().T @ (x.detach().double() @ down.detach().double().T)
    )
    assert x.grad is not None
    assert float((x.grad.double() - exact).norm() / exact.norm()) < 1e-2
    error = (across.grad.double() - expected_across).norm() / expected_across.norm()
    assert float(error) < 1e-2

    # Merged, the weight is quantized again, and leaves.
    merged = adapted.merge_and_unload()
    weight = merged.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, ottava.QuantizedTensor)


def _mx(element: torch.dtype, **options: Any) -> Callable[[torch.Tensor], Any]:
    module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    return lambda weight: module.MXTensor.to_mx(weight, element, 32, **options)


def _nvfp4(with_level: bool, **options: Any) -> Callable[[torch.Tensor], Any]:
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def quantize(weight: torch.Tensor) -> Any:
        level = weight.abs().amax().float() / 2688 if with_level else None
        return module.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=level, **options)

    return quantize


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(
    "quantize",
    [
        partial(_mx, torch.float8_e4m3fn),
        partial(_mx, torch.float4_e2m1fn_x2),
        partial(_nvfp4, True),
        partial(_nvfp4, False),
    ],
)
def test_tensors_of_torchao_load(quantize: Any, swizzled: bool, tmp_path: Path) -> None:
    """Also those whose scales are padded, and in the order of products of GPUs."""
    support = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(192, 288, generator=generator).bfloat16()
    theirs = quantize(is_swizzled_scales=swizzled)(plain)
    tensors, header = support.flatten_tensor_state_dict({"up.weight": theirs})
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "model.safetensors", {"format": "pt", **header})
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(288, 192, bias=False).bfloat16()})
    load_quantized(model, tmp_path)
    assert torch.equal(model["up"].weight.dequantize(), theirs.dequantize())


@pytest.mark.parametrize("title", [t for t in WRITERS if not t.startswith("torchao")])
def test_merged_adapters_leave_and_are_verified(title: str, source: Path, tmp_path: Path) -> None:
    _, write = WRITERS[title]
    write(source, tmp_path / "in")
    model = published.model()
    load_quantized(model, tmp_path / "in")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    merged = adapted.merge_and_unload()
    kind = next(iter(quantized_from(tmp_path / "in").layers.values()))
    report = export_model(
        merged, tmp_path / "out", kind.scheme.format, activations=kind.activations
    )
    assert {(each.scheme, each.recipe) for each in report.layers.values()} == {(kind.scheme, "")}
    check = check_export(merged, tmp_path / "out")
    if kind.scheme.names.level:
        # No amax may have exactly the global scale of the file: the last bit of float32 then moves
        # some values to a neighbour in BF16.
        assert all(count < 0.1 * 512 * 256 for count in check.different.values())
    else:
        assert check.is_equal, check
    assert check.weights == 7
    # What no adapter changed has the bytes that it came with.
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("in", "out"))
    name = f"model.layers.0.mlp.down_proj.{kind.scheme.names.data}"
    assert torch.equal(as_bytes(before[name]), as_bytes(after[name]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # The converted class is not written.
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_trained_is_what_is_served(format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The logits of the trained model are those of the exported one, bit for bit."""
    recipe = ServedRecipe(format)
    model = ottava.convert(
        made("llama").to(dtype), recipe, include=recipe.holds, exclude=ottava.HEADS
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # Files of modelopt-fp8 hold a constant scale of inputs; both sides scale each batch.
    amaxes = {name: 3.0 for name, _ in model.named_modules()}
    export_model(model, tmp_path / "out", format, input_amaxes=amaxes)
    server = made("llama").to(dtype)
    load_quantized(server, tmp_path / "out")
    with torch.no_grad():
        ours, theirs = (each.eval()(TOKENS).logits for each in (model, server))
    assert torch.equal(ours, theirs)
    assert check_export(model, tmp_path / "out").is_equal


def test_the_command_exports_and_verifies_a_folder(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    arguments = [str(source), str(tmp_path / "out"), "--to", "fp8", "--verify"]
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    assert "decodes 7 of 7 weights to the same values" in done.output
    assert "ottava verify recognizes 7 of 7 weights" in done.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 256
    assert config["quantization_config"]["quant_method"] == "fp8"


def test_experts_in_one_parameter_get_values(tmp_path: Path) -> None:
    model = made("mixtral")
    export_model(model, tmp_path / "out", "mxfp8-quantized")
    loaded = made("mixtral")
    report = load_quantized(loaded, tmp_path / "out")
    assert report.values == (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    )
    file = load_file(tmp_path / "out" / "model.safetensors")
    scheme = scheme_of("mxfp8-quantized")
    experts = loaded.model.layers[0].mlp.experts
    for number in range(4):
        name = f"model.layers.0.block_sparse_moe.experts.{number}"
        for part, expected in (
            ("w1", experts.gate_up_proj[number, :256]),
            ("w3", experts.gate_up_proj[number, 256:]),
            ("w2", experts.down_proj[number]),
        ):
            parts = {n: file[f"{name}.{part}.{n}"] for n in ("weight", "weight_scale")}
            weight = quantized_weight(parts, scheme, torch.bfloat16)
            assert torch.equal(weight.dequantize(), expected)
