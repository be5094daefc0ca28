"""``convert(primary=True)`` gives the weights, and the training, of layers that were made with
quantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.errors import UsageError
from ottava_custom import CustomRecipe, current_scaling_ref_quantizer_factory
from tests import ranks

RECIPES = ["blockwise", "current", "delayed", "mxfp8", "rowwise"]
CUSTOM = CustomRecipe(current_scaling_ref_quantizer_factory)


def net(layer: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(layer(64, 96), torch.nn.GELU(), layer(96, 32))


def losses(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for step in range(3):
        loss = (
            model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step)))
            .square()
            .mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_a_model_that_was_made_so(recipe: str) -> None:
    with ottava.quantized_model_init(recipe):
        made = net(ottava.nn.Linear)
    ottava.convert(made, recipe)
    existing = ottava.convert(net(torch.nn.Linear), recipe, primary=True, keep_initial_values=True)
    for one, other in ((made[0].weight, existing[0].weight), (made[2].weight, existing[2].weight)):
        assert type(one) is type(other)
        assert torch.equal(one.dequantize(), other.dequantize())
        assert torch.equal(one.get_high_precision_init_val(), other.get_high_precision_init_val())
    assert losses(existing) == losses(made)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_embedding_may_share_the_weight(recipe: str) -> None:
    head = torch.nn.Linear(64, 128, bias=False)
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(128, 64), "head": head})
    model.table.weight = head.weight
    ottava.convert(model, recipe, primary=True)
    weight = model.head.weight
    assert weight is model.table.weight
    assert isinstance(weight, ottava.QuantizedTensor)
    tokens = torch.arange(32)
    rows = model.table(tokens)
    assert torch.equal(rows, weight.dequantize()[:32])
    model.head(rows).square().mean().backward()
    assert weight.grad.shape == (128, 64)


def on_meta(recipe: str) -> torch.nn.Sequential:
    with torch.device("meta"):
        return ottava.convert(
            net(torch.nn.Linear), CUSTOM if recipe == "custom" else recipe, primary=True
        )


@pytest.mark.parametrize("recipe", [*RECIPES, "custom"])
@pytest.mark.filterwarnings("ignore:the state dict has no scaling state")
def test_a_model_on_meta_gets_its_values_later(recipe: str) -> None:
    plain = net(torch.nn.Linear)
    expected = ottava.convert(
        net(torch.nn.Linear), CUSTOM if recipe == "custom" else recipe, primary=True
    )
    with torch.no_grad():
        expected(torch.zeros(1, 64))
    # Delayed scaling counts what a weight is given among what it saw of it.
    expected.load_state_dict(plain.state_dict())
    outside = ottava.convert(net(torch.nn.Linear).to("meta"), expected[0].recipe, primary=True)
    for model in (on_meta(recipe), outside):
        assert all(
            isinstance(model[i].weight, ottava.QuantizedTensor) and model[i].weight.is_meta
            for i in (0, 2)
        )
        assert model(torch.empty(3, 64, device="meta")).shape == (3, 32)
        model.to_empty(device="cpu").load_state_dict(plain.state_dict())
        for mine, its in ((model[0], expected[0]), (model[2], expected[2])):
            assert type(mine.weight) is type(its.weight)
            assert torch.equal(mine.weight.dequantize(), its.weight.dequantize())
    seen = losses(expected)
    assert losses(outside) == seen
    initialized = on_meta(recipe).to_empty(device="cpu")
    torch.manual_seed(0)
    for i in (0, 2):
        initialized[i].reset_parameters()
    assert losses(initialized) == seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_made_on_meta_without_a_recipe_gets_its_values_later(recipe: str) -> None:
    with ottava.quantized_model_init(recipe):
        layer = ottava.nn.Linear(64, 32, device="meta")
    values = torch.randn(32, 64)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(values)
        layer.bias.zero_()
    assert (layer.weight - values).abs().max() <= values.abs().max() / 8
    with ottava.autocast(recipe):
        layer(torch.randn(8, 64)).sum().backward()
    assert layer.weight.grad.shape == (32, 64)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_converted_under_no_grad_trains(recipe: str) -> None:
    with torch.no_grad():
        quiet = ottava.convert(net(torch.nn.Linear), recipe, primary=True)
        with ottava.quantized_model_init(recipe):
            on_meta = ottava.nn.Linear(64, 32, recipe=recipe, device="meta")
    assert losses(quiet) == losses(ottava.convert(net(torch.nn.Linear), recipe, primary=True))
    on_meta.to_empty(device="cpu").reset_parameters()
    on_meta(torch.randn(8, 64, requires_grad=True)).sum().backward()
    before = quiet[0].weight.nbytes
    quiet[0].weight.update_usage(columnwise_usage=False)
    with torch.no_grad():
        assert quiet(torch.randn(8, 64)).shape == (8, 32)
    assert quiet[0].weight.nbytes < before or recipe in ("current", "delayed")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_and_its_hooks_are_the_new_parameters(recipe: str) -> None:
    model, x, seen = net(torch.nn.Linear), torch.randn(32, 64), []
    model(x).sum().backward()
    before = model[0].weight

    def zero(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad)
        return grad * 0

    handles = [before.register_hook(zero)]
    handles.append(before.register_post_accumulate_grad_hook(seen.append))
    grad = before.grad.clone()
    ottava.convert(model, recipe, primary=True)
    weight = model[0].weight
    assert weight is not before
    assert before.grad is None
    assert torch.equal(weight.grad, grad)
    model(x).sum().backward()
    assert torch.equal(weight.grad, grad), "the hook made the second one 0"
    assert len(seen) == 2
    assert seen[1] is weight
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    assert len(seen) == 2
    assert not torch.equal(weight.grad, grad)


def sharded(mesh: Any) -> None:
    model = ottava.convert(net(torch.nn.Linear), "current")
    fully_shard(model, mesh=mesh)
    with pytest.raises(
        UsageError, match=r"the weight of '0' is a DTensor.*before gather_quantized"
    ):
        ottava.convert(model, "current", primary=True)
    first = ottava.convert(net(torch.nn.Linear), "current", primary=True)
    expected = losses(ottava.convert(net(torch.nn.Linear), "current", primary=True))
    fully_shard(first, mesh=mesh)
    assert losses(first) == expected
    assert "the weight is kept quantized" in str(ottava.conversion_report(first))


def test_it_comes_before_fully_shard() -> None:
    assert ranks.failures(__name__, ["sharded"]) == {"sharded": None}


def test_initial_values_are_copies() -> None:
    plain = torch.nn.Linear(16, 16)
    weight = plain.weight.detach()
    before = weight.clone()
    model = ottava.convert(
        torch.nn.Sequential(plain), "current", primary=True, keep_initial_values=True
    )
    weight.zero_()
    assert torch.equal(model[0].weight.get_high_precision_init_val(), before)
