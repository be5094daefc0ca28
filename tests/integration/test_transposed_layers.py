"""Layers whose weight is stored transposed compute, under every recipe, what a layer with the other
weight does."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.nn import Linear, TransposedLinear
from ottava_integrations import convert_file
from tests import ranks
from tests.combinations import slow

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]


class Conv1D(torch.nn.Module):
    """As in GPT-2: ``x · weight + bias``."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


ottava.register_converter(Conv1D, TransposedLinear.from_linear)


def twins(recipe: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Two layers in a row with weights stored transposed, and the same in the usual way."""
    torch.manual_seed(0)
    stored = torch.nn.Sequential(Conv1D(96, 64), torch.nn.GELU(), Conv1D(32, 96)).to(dtype)
    usual = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)
    ).to(dtype)
    with torch.no_grad():
        for ours, theirs in ((stored[0], usual[0]), (stored[2], usual[2])):
            theirs.weight.copy_(ours.weight.t())
            theirs.bias.copy_(ours.bias)
    return ottava.convert(stored, recipe), ottava.convert(usual, recipe)


def inputs(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_weights(stored: Any, usual: Any, what: str) -> bool:
    return all(
        torch.equal(getattr(stored[i].weight, what).t(), getattr(usual[i].weight, what))
        for i in (0, 2)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_has_the_same_bytes(recipe: str, dtype: torch.dtype) -> None:
    stored, usual = twins(recipe, dtype)
    assert type(stored[0]) is TransposedLinear
    assert type(usual[0]) is Linear
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (stored, usual)]
    for step in range(3):
        grads = []
        outputs = []
        for net in (stored, usual):
            x = inputs(step, dtype).requires_grad_()
            outputs.append(net(x))
            outputs[-1].square().mean().backward()
            grads.append(x.grad)
        assert torch.equal(*outputs)
        assert torch.equal(*grads)
        assert stored[0].weight.grad.shape == (64, 96)
        assert same_weights(stored, usual, "grad")
        assert torch.equal(stored[2].bias.grad, usual[2].bias.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(stored(inputs(9, dtype)), usual(inputs(9, dtype)))


@pytest.mark.parametrize("high_precision", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad_and_microbatches(recipe: str, high_precision: bool) -> None:
    nets = twins(recipe)
    for net in nets:
        for layer in (net[0], net[2]):
            layer.fuse_wgrad_accumulation = True
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
            layer.weight.grad_added_to_main_grad = False
        for first in (True, False):
            with ottava.autocast(enabled=not high_precision):
                hidden = torch.nn.functional.gelu(
                    net[0](inputs(int(first)), is_first_microbatch=first)
                )
                net[2](hidden, is_first_microbatch=first).square().mean().backward()
    assert same_weights(*nets, "main_grad")
    assert nets[0][0].weight.main_grad.abs().sum() > 0
    assert nets[0][0].weight.grad is None
    assert nets[0][0].weight.grad_added_to_main_grad is True


@pytest.mark.parametrize("recipe", ["delayed", *slow(*(r for r in RECIPES if r != "delayed"))])
def test_compiled_whole(recipe: str) -> None:
    torch.compiler.reset()
    stored, _ = twins(recipe)
    twin = copy.deepcopy(stored)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for step in range(2):
        for net in (stored, compiled):
            net(inputs(step)).square().mean().backward()
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(stored.parameters(), twin.parameters(), strict=True)
        )


def test_compiled_with_main_grad() -> None:
    torch.compiler.reset()
    stored, _ = twins("current")
    twin = copy.deepcopy(stored)
    for net, run in (
        (stored, stored),
        (twin, torch.compile(twin, fullgraph=True, backend="aot_eager")),
    ):
        for layer in (net[0], net[2]):
            layer.fuse_wgrad_accumulation = True
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
        run(inputs(0)).square().mean().backward()
    assert torch.equal(stored[0].weight.main_grad, twin[0].weight.main_grad)
    assert twin[0].weight.grad is None


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_it_is_saved_and_loaded_as_the_module_that_it_was(recipe: str, tmp_path: Any) -> None:
    stored, _ = twins(recipe)
    stored(inputs(0)).square().mean().backward()
    plain = torch.nn.Sequential(Conv1D(96, 64), torch.nn.GELU(), Conv1D(32, 96)).bfloat16()
    state = {key: value for key, value in stored.state_dict().items() if "recipe_state" not in key}
    assert {key: value.shape for key, value in state.items()} == {
        k: v.shape for k, v in plain.state_dict().items()
    }
    plain.load_state_dict(state)
    ottava.checkpoint.save_model(stored, tmp_path / "model.safetensors")
    other = ottava.convert(
        torch.nn.Sequential(Conv1D(96, 64), torch.nn.GELU(), Conv1D(32, 96)).bfloat16(), recipe
    )
    ottava.checkpoint.load_model(other, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(other(inputs(1)), stored(inputs(1)))


def test_no_file_is_made_with_a_quantized_weight_that_is_stored_transposed(tmp_path: Any) -> None:
    stored, _ = twins("current")
    mixed = torch.nn.Sequential(stored[0], torch.nn.GELU(), torch.nn.Linear(96, 32).bfloat16())
    ottava.checkpoint.save_model(mixed, tmp_path / "in.safetensors")
    convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "current", model=mixed)
    loaded = ottava.checkpoint.load_file(tmp_path / "out.safetensors")
    assert isinstance(loaded["2.weight"], ottava.QuantizedTensor)
    assert type(loaded["0.weight"]) is torch.Tensor


def losses(net: Any) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    seen = []
    for step in range(3):
        loss = net(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def sharded(mesh: Any) -> None:
    for recipe, gathered in itertools.product(RECIPES, (False, True)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            Conv1D(96, 64), torch.nn.GELU(), torch.nn.Linear(96, 32)
        ).bfloat16()
        weight = ottava.convert(net, recipe)[0].weight
        expected = losses(copy.deepcopy(net))
        if gathered:
            ottava.distributed.gather_quantized(net)
            assert net[0].weight is weight
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        assert losses(net) == expected, (recipe, gathered)
        assert ottava.conversion_report(net).share == 1.0


def test_sharded_by_fsdp2() -> None:
    assert ranks.failures(__name__, ["sharded"]) == {"sharded": None}


def test_gpt2_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    ottava.convert(model, "current")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert isinstance(model.transformer.h[1].mlp.c_fc, TransposedLinear)
    assert ottava.conversion_report(model).share == 1.0
    tokens = torch.randint(0, 128, (2, 16))
    model(tokens, labels=tokens).loss.backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad.shape == (64, 192)
    headless = ottava.convert(transformers.GPT2LMHeadModel(config), "current", exclude=ottava.HEADS)
    assert ottava.conversion_report(headless).skipped == {"lm_head": "in exclude"}


def test_mixtral_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    with pytest.warns(
        UserWarning, match=r"only \d+% .* 5\d% model\.layers\.\*\.mlp\.experts\.gate_up_proj"
    ):
        model = ottava.convert(transformers.MixtralForCausalLM(config), "current")
    report = ottava.conversion_report(model)
    assert len(report.swapped) == len(report.decisions) == 9
    assert report.share < 0.25
    assert "experts.gate_up_proj" in report.left_out[0].name
