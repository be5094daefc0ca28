"""Weights that are kept in MXFP8: what they start from, how optimizers step them, state dicts,
conversions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import OttavaError, UsageError
from ottava.nn import Linear
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Quantizer, MXFP8Tensor
from tests.recipes_mxfp8.layers import E4M3, INNER, RECIPES, spread


def primary_net(
    recipe: Any = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.nn.Sequential:
    recipe = recipe or MXFP8BlockScaling()
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe):
        return torch.nn.Sequential(
            Linear(70, 64, dtype=dtype, recipe=recipe),
            torch.nn.ReLU(inplace=True),
            Linear(64, 33, dtype=dtype, recipe=recipe),
        )


def check_bytes(one: Any, two: Any) -> None:
    for name in INNER:
        assert torch.equal(getattr(one, name), getattr(two, name)), name


@pytest.mark.parametrize("name", RECIPES)
def test_primary_weights_hold_the_quantized_initial_values(name: str) -> None:
    recipe = RECIPES[name]
    net = primary_net(recipe)
    for layer in (net[0], net[2]):
        weight = layer.weight
        assert isinstance(weight, MXFP8Tensor)
        assert isinstance(weight, torch.nn.Parameter)
        assert weight.get_usages() == {"rowwise": True, "columnwise": True}
        initial = weight.get_high_precision_init_val()
        assert type(initial) is torch.Tensor
        check_bytes(weight, recipe.quantizer("weight")(initial))
        assert type(layer.bias) is torch.nn.Parameter
    # The same as quantizing the initial values in every step.
    twin = torch.nn.Sequential(
        Linear(70, 64, recipe=recipe), torch.nn.ReLU(), Linear(64, 33, recipe=recipe)
    )
    with torch.no_grad():
        for i in (0, 2):
            twin[i].weight.copy_(net[i].weight.get_high_precision_init_val())
            twin[i].bias.copy_(net[i].bias)
    results = []
    for model in (net, twin):
        x = spread(40, 70).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert type(mine) is type(theirs)
        assert torch.equal(mine, theirs)
    net[0].weight.clear_high_precision_init_val()
    assert net[0].weight.get_high_precision_init_val() is None
    with ottava.autocast(enabled=False):
        assert torch.equal(
            net[0](x), torch.nn.functional.linear(x, net[0].weight.dequantize(), net[0].bias)
        )


def inference_layer(recipe: Any = None) -> Linear:
    torch.manual_seed(0)
    with torch.no_grad(), ottava.quantized_model_init(recipe or MXFP8BlockScaling()):
        return Linear(70, 64, recipe=recipe or MXFP8BlockScaling())


@pytest.mark.parametrize("name", RECIPES)
def test_weights_made_under_no_grad_hold_rows_until_columns_are_asked_for(name: str) -> None:
    layer, full = inference_layer(RECIPES[name]), primary_net(RECIPES[name])[0]
    weight, x = layer.weight, spread(40, 70)
    rows = weight.nbytes
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    assert weight.requires_grad
    assert torch.equal(layer(x), full(x))
    assert weight.nbytes == rows
    weight.update_usage(columnwise_usage=True)
    check_bytes(weight, full.weight)


def test_a_backward_pass_asks_for_columns() -> None:
    gradients = []
    for layer in (inference_layer(), primary_net()[0]):
        x = spread(40, 70).requires_grad_()
        layer(x).square().sum().backward()
        gradients.append((x.grad, layer.weight.grad, layer.bias.grad))
        assert layer.weight.get_usages() == {"rowwise": True, "columnwise": True}
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "without",
    [
        lambda w: w.clear_high_precision_init_val(),
        lambda w: w.mul_(2.0),
        lambda w: w.copy_(torch.ones_like(w)),
    ],
    ids=["given up", "scaled", "loaded"],
)
def test_columns_are_refused_where_the_values_are_gone(without: Any) -> None:
    """Those of the quantized rows would be others."""
    layer = inference_layer()
    with torch.no_grad():
        without(layer.weight)
    y = layer(spread(40, 70).requires_grad_())
    message = r"no columnwise data.*made under no_grad.*update_usage\(columnwise_usage=True\)"
    with pytest.raises(UsageError, match=message):
        y.sum().backward()
    with pytest.raises(UsageError, match=message):
        layer.weight.update_usage(columnwise_usage=True)
    assert layer.weight.get_usages() == {"rowwise": True, "columnwise": False}
    # Squares hold the same values in both directions.
    squares = inference_layer(RECIPES["squares"])
    with torch.no_grad():
        without(squares.weight)
    squares(spread(40, 70).requires_grad_()).sum().backward()


@pytest.mark.parametrize("name", ["default", "squares"])
@pytest.mark.parametrize(
    "options", [{}, {"foreach": False}, {"fused": True}], ids=["foreach", "loop", "fused"]
)
def test_adamw_takes_the_steps_of_plain_weights(name: str, options: dict[str, bool]) -> None:
    """Each step: the update of the dequantized values, quantized."""
    net, x = primary_net(RECIPES[name]), torch.randn(64, 70)
    weight = net[0].weight
    twin = torch.nn.Parameter(weight.dequantize().detach().clone())
    # Weight decay would be an operation of its own, rounded by itself.
    mine, theirs = (
        torch.optim.AdamW([p], lr=0.01, weight_decay=0.0, **options) for p in (weight, twin)
    )
    for _ in range(4):
        mine.zero_grad()
        net(x).pow(2).mean().backward()
        twin.grad = weight.grad.clone()
        mine.step()
        theirs.step()
        expected = RECIPES[name].quantizer("weight")(twin.detach())
        check_bytes(weight, expected)
        with torch.no_grad():
            twin.copy_(expected.dequantize())
        assert type(mine.state[weight]["exp_avg"]) is torch.Tensor
    state = copy.deepcopy(mine.state_dict())
    again = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0, **options)
    again.load_state_dict(state)
    assert torch.equal(again.state[weight]["exp_avg"], mine.state[weight]["exp_avg"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_the_steps_of_plain_weights(momentum: float) -> None:
    net, x = primary_net(), torch.randn(64, 70)
    weight = net[2].weight
    twin = torch.nn.Parameter(weight.dequantize().detach().clone())
    mine, theirs = (torch.optim.SGD([p], lr=0.5, momentum=momentum) for p in (weight, twin))
    for _ in range(3):
        mine.zero_grad()
        net(x).pow(2).mean().backward()
        twin.grad = weight.grad.clone()
        mine.step()
        theirs.step()
        expected = MXFP8Quantizer(E4M3)(twin.detach())
        check_bytes(weight, expected)
        with torch.no_grad():
            twin.copy_(expected.dequantize())
    assert isinstance(net[2].weight, MXFP8Tensor)


def test_a_write_between_forward_and_backward_is_refused() -> None:
    for overwrite in (
        lambda w: w.add_(1.0),
        lambda w: w[32:].zero_(),
        lambda w: w.t().zero_(),
        lambda w: w.quantize_(torch.zeros(64, 70)),
        lambda w: w.copy_(MXFP8Quantizer(E4M3)(torch.zeros(64, 70))),
    ):
        net, x = primary_net(), torch.randn(4, 70, requires_grad=True)
        y = net(x).sum()
        with torch.no_grad():
            overwrite(net[0].weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_state_dicts() -> None:
    """From quantized weights bytes are copied; from others the values are quantized."""
    net, other = primary_net(), primary_net(seed=1)
    state = net.state_dict()
    assert isinstance(state["0.weight"], MXFP8Tensor)
    assert not torch.equal(other[0].weight._rowwise_data, net[0].weight._rowwise_data)
    other.load_state_dict(state, strict=True)
    for i in (0, 2):
        check_bytes(other[i].weight, net[i].weight)
        assert other[i].weight._rowwise_data.data_ptr() != net[i].weight._rowwise_data.data_ptr()
        assert isinstance(other[i].weight, torch.nn.Parameter)
    x = torch.randn(5, 70)
    assert torch.equal(other(x), net(x))
    for dtype in (torch.float32, torch.bfloat16):
        plain = torch.nn.Sequential(
            torch.nn.Linear(70, 64), torch.nn.ReLU(), torch.nn.Linear(64, 33)
        ).to(dtype)
        other.load_state_dict(plain.state_dict())
        check_bytes(other[0].weight, MXFP8Quantizer(E4M3)(plain[0].weight.detach()))
        assert other[0].weight.dtype == torch.float32
        # And back: plain weights take the values.
        plain.load_state_dict(net.state_dict())
        assert torch.equal(plain[0].weight, net[0].weight.dequantize(dtype))
    rows = primary_net(seed=2)
    rows[0].weight.update_usage(columnwise_usage=False)
    expected = rows[0].weight.dequantize().detach()
    other.load_state_dict(rows.state_dict())
    check_bytes(other[0].weight, MXFP8Quantizer(E4M3)(expected))
    squares = primary_net(RECIPES["squares"], seed=3)
    other.load_state_dict(squares.state_dict())
    check_bytes(other[0].weight, squares[0].weight)
    squares.load_state_dict(net.state_dict())
    check_bytes(
        squares[0].weight,
        RECIPES["squares"].quantizer("weight")(net[0].weight.dequantize().detach()),
    )
    assigned = primary_net(seed=4)
    assigned.load_state_dict(net.state_dict(), assign=True)
    assert isinstance(assigned[0].weight, MXFP8Tensor)
    assert torch.equal(assigned(x), net(x))


def test_copies_of_a_model() -> None:
    net = primary_net()
    twin = copy.deepcopy(net)
    check_bytes(twin[0].weight, net[0].weight)
    assert torch.equal(
        twin[0].weight.get_high_precision_init_val(), net[0].weight.get_high_precision_init_val()
    )
    x = torch.randn(5, 70)
    expected = net(x)
    twin(x).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.equal(net(x), expected)
    assert not torch.equal(twin(x), expected)
    assert net[0].weight.grad is None


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float16),
        lambda m: m.to(dtype=torch.bfloat16),
    ],
    ids=["half", "bfloat16", "to half", "to bfloat16"],
)
def test_conversion_keeps_the_codes(convert: Any) -> None:
    net = primary_net()
    before = copy.deepcopy(net[0].weight)
    initial = net[0].weight.get_high_precision_init_val()
    convert(net)
    weight = net[0].weight
    assert isinstance(weight, MXFP8Tensor)
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert weight.dtype == net[0].bias.dtype in (torch.float16, torch.bfloat16)
    check_bytes(weight, before)
    assert weight.get_high_precision_init_val() is initial
    net(torch.randn(3, 70).to(weight.dtype)).sum().backward()
    assert weight.grad.dtype == weight.dtype
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert isinstance(net[0].weight, MXFP8Tensor)


def test_made_on_meta_and_filled() -> None:
    recipe = RECIPES["squares"]
    with ottava.quantized_model_init(recipe):
        layer = Linear(70, 64, device="meta", recipe=recipe)
    assert layer(torch.empty(3, 70, device="meta")).shape == (3, 64)
    assert layer.weight.get_high_precision_init_val() is None
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    plain = torch.nn.Linear(70, 64)
    assert isinstance(layer.weight, MXFP8Tensor)
    check_bytes(layer.weight, recipe.quantizer("weight")(plain.weight.detach()))
    assert layer(torch.randn(2, 70)).shape == (2, 64)


def test_weights_in_one_direction_serve_what_they_can() -> None:
    """An evaluation needs rows only; squares serve both."""
    x = torch.randn(5, 70)
    net = primary_net()
    expected = net(x)
    net[0].weight.update_usage(columnwise_usage=False)
    assert torch.equal(net(x), expected)
    with pytest.raises(OttavaError, match=r"no columnwise data.*columnwise=True"):
        net(x.clone().requires_grad_()).sum().backward()
    net = primary_net(RECIPES["squares"])
    for usages in ({"columnwise_usage": False}, {"rowwise_usage": False, "columnwise_usage": True}):
        results = []
        for model in (primary_net(RECIPES["squares"]), net):
            given = x.clone().requires_grad_()
            model(given).sum().backward()
            results.append(given.grad)
            net[0].weight.update_usage(**usages)
        assert torch.equal(*results)


def test_parametrized_layer() -> None:
    layer = Linear(70, 33, recipe=MXFP8BlockScaling())
    torch.nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(4, 70)
    expected = Linear(70, 33, recipe=MXFP8BlockScaling())
    with torch.no_grad():
        expected.weight.copy_(layer.weight)
        expected.bias.copy_(layer.bias)
    assert torch.equal(layer(x), expected(x))
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original1.grad is not None
