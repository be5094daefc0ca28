"""Layers whose weight is kept quantized only: how it is made and moved, and models that are given
such weights. What they compute, optimizers and state dicts are those of all layouts."""

from __future__ import annotations

import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, OptionError, UsageError
from ottava.nn import Linear, TransposedLinear, converters, quantized_model_init
from ottava.tensors import Float8Tensor, GridQuantizer


def layer_of(recipe: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    with quantized_model_init(recipe):
        return Linear(16, 24, recipe=recipe, **options)


def rows_of(recipe: Any) -> Any:
    """The recipe with quantizers of another class, a scale for each row."""
    recipe.set_quantizer_factory(
        lambda role: GridQuantizer(ottava.Layout(torch.float8_e4m3fn, (1, None)))
    )
    return recipe


MOVES: dict[str, Any] = {
    "cpu": lambda m: m.cpu(),
    "to float16": lambda m: m.to(torch.float16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "half and back": lambda m: m.half().float(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
}


@pytest.mark.parametrize("name", MOVES)
def test_attributes_and_hooks_survive_as_on_a_plain_layer(recipe: Any, name: str) -> None:
    def events(layer: torch.nn.Linear) -> list[Any]:
        weight, calls = layer.weight, []
        weight.my_attribute = calls
        weight.register_hook(lambda grad: calls.append(("hook", grad.dtype)))
        weight.register_post_accumulate_grad_hook(
            lambda p: calls.append(("post", p is weight, p.grad.dtype))
        )
        alive = weakref.ref(weight)
        layer(torch.randn(3, 16)).sum().backward()
        # Between a forward and a backward pass, too.
        pending = layer(torch.randn(3, 16)).sum()
        MOVES[name](layer)
        calls.append([layer.weight.dtype, layer.weight.grad.dtype])
        calls.append([n for n, _ in layer.named_parameters()])
        if layer.weight.dtype == torch.float32:
            pending.backward()
        layer(torch.randn(3, 16, dtype=layer.weight.dtype)).sum().backward()
        same = layer.weight is alive() is weight, vars(layer.weight).get("my_attribute") is calls
        return [*calls, same]

    layer = layer_of(recipe)
    codes, initial = layer.weight._data.clone(), layer.weight.get_high_precision_init_val()
    assert events(layer) == events(torch.nn.Linear(16, 24))
    assert isinstance(layer.weight, Float8Tensor)
    assert layer.weight.get_high_precision_init_val() is initial
    if name != "to_empty":
        assert torch.equal(layer.weight._data, codes)
    if name == "share_memory":
        assert layer.weight.is_shared()


def test_a_layer_made_on_meta_moves_and_is_filled_later(recipe: Any) -> None:
    for move in (lambda m: m, lambda m: m.half().float(), lambda m: m.to(torch.float32)):
        layer = layer_of(recipe, device="meta")
        kinds = [(t.dtype, t.shape) for t in layer.weight.inner_list() if t is not None]
        assert layer.weight.get_high_precision_init_val() is None
        move(layer)
        assert layer.weight.is_meta
        assert [(t.dtype, t.shape) for t in layer.weight.inner_list() if t is not None] == kinds
    # A weight of any class, and without a quantizer, has memory for bytes that are loaded.
    full, empty = layer_of(rows_of(recipe)), layer_of(recipe, device="meta")
    empty.weight.update_quantizer(None)
    empty.to_empty(device="cpu").load_state_dict(full.state_dict())
    assert type(empty.weight) is type(full.weight)
    assert torch.equal(empty.weight.dequantize(), full.weight.dequantize())


def test_a_move_that_fails_loses_no_weight(recipe: Any) -> None:
    layer = layer_of(recipe)
    weight = layer.weight
    layer.bias = torch.nn.Parameter(torch.empty(24, device="meta"))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        layer.cpu()
    assert layer.weight is weight


def test_weights_of_both_kinds_take_turns_in_a_layer(recipe: Any) -> None:
    layer, x = layer_of(recipe), torch.randn(3, 16)
    kept = layer.weight
    plain = torch.nn.Parameter(kept.dequantize())
    results = []
    for layer.weight in (kept, plain, kept):
        y = layer(x)
        y.square().sum().backward()
        results.append([y, layer.weight.grad])
        layer.weight.grad = None
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_a_parametrized_layer_quantizes_what_is_computed(recipe: Any) -> None:
    layer, expected, x = Linear(16, 8, recipe=recipe), Linear(16, 8, recipe=recipe), torch.randn(16)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with torch.no_grad():
        expected.weight.copy_(layer.weight)
        expected.bias.copy_(layer.bias)
    y = layer(x)
    assert torch.equal(y, expected(x))
    y.sum().backward()
    assert layer.parametrizations.weight.original1.grad is not None


# -- blocks of quantized_model_init --


def test_a_block_is_of_its_thread_and_says_what_it_did_not_do(recipe: Any) -> None:
    with quantized_model_init(recipe), ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(lambda: Linear(4, 4)).result()
        assert isinstance(Linear(4, 4).weight, Float8Tensor)
    assert not isinstance(elsewhere.weight, Float8Tensor)
    with pytest.warns(UserWarning, match=r"quantized nothing: .* no ottava\.nn\.Linear") as caught:
        with quantized_model_init(recipe):
            torch.nn.Linear(4, 4)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quantized_model_init(recipe), quantized_model_init(recipe):
            Linear(4, 4)
        with quantized_model_init(recipe):
            Linear(4, 4)
            with quantized_model_init(recipe, enabled=False):
                assert not isinstance(Linear(4, 4).weight, Float8Tensor)
        with pytest.raises(KeyError), quantized_model_init(recipe):
            raise KeyError
    assert not isinstance(Linear(4, 4).weight, Float8Tensor)
    for enabled in (1, None, "yes"):
        with pytest.raises(OptionError, match=f"enabled is {enabled!r}"):
            quantized_model_init(recipe, enabled=enabled).__enter__()  # type: ignore[arg-type]


# -- convert(primary=True) --


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(24, 16)
        self.inner, self.other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.other.weight = self.inner.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.other(self.inner(self.embedding(tokens))))


def test_an_existing_model_is_given_quantized_weights(recipe: Any) -> None:
    net: Any = Tied()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    names, bias = [name for name, _ in net.named_parameters()], net.inner.bias
    net.inner.weight.sequence_parallel = True
    net.head.weight.requires_grad_(False)
    ottava.convert(net, recipe, primary=True)
    for weight, name in ((net.head.weight, "head.weight"), (net.inner.weight, "inner.weight")):
        assert isinstance(weight, Float8Tensor)
        assert weight.get_high_precision_init_val() is None
        assert torch.equal(weight.dequantize(), weight._quantizer(before[name]).dequantize())
    assert net.head.weight is net.embedding.weight
    assert net.other.weight is net.inner.weight
    assert (net.inner.weight.sequence_parallel, net.inner.bias) == (True, bias)
    assert not net.head.weight.requires_grad
    assert [name for name, _ in net.named_parameters()] == names
    net(torch.arange(5)).sum().backward()
    assert net.inner.weight.grad.shape == (16, 16)
    weight = net.inner.weight
    assert ottava.convert(net, recipe, primary=True).inner.weight is weight


def test_initial_values_are_those_of_the_conversion(recipe: Any) -> None:
    plain = torch.nn.Linear(4, 4)
    before, values = plain.weight, plain.weight.detach().clone()
    layer: Any = ottava.convert(plain, recipe, primary=True, keep_initial_values=True)
    with torch.no_grad():
        before.zero_()
    assert torch.equal(layer.weight.get_high_precision_init_val(), values)


class Turned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16))


def test_weights_that_cannot_be_primary_stay_with_a_warning(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converters, "_CONVERTERS", dict(converters._CONVERTERS))
    ottava.register_converter(Turned, TransposedLinear.from_linear)
    parts = {"conv": Turned(), "tied": Tied(), "plain": torch.nn.Linear(16, 4)}
    net: Any = torch.nn.ModuleDict(parts)
    net.weighted = torch.nn.utils.parametrizations.weight_norm(Linear(4, 4))
    head, conv = net.tied.head.weight, net.conv.weight
    with pytest.warns(UserWarning, match="'conv', 'tied.inner', 'weighted' stay in high precision"):
        ottava.convert(net, recipe, primary=True, exclude="tied.other")
    assert net.conv.weight is conv
    assert type(net.tied.inner.weight) is torch.nn.Parameter
    assert net.tied.other.weight is net.tied.inner.weight
    assert net.tied.head.weight is not head
    assert isinstance(net.plain.weight, Float8Tensor)


def test_what_cannot_be_quantized_leaves_the_model_alone(recipe: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 8))
    weights, original = [layer.weight for layer in net], recipe.make_quantizer

    def without_a_tensor(role: Any) -> Any:
        quantizer = original(role)
        if role.name == "1" and role.tensor_type == "weight":
            quantizer.quantize_impl = lambda tensor, dtype: tensor
            quantizer.copy = lambda: quantizer
        return quantizer

    recipe.set_quantizer_factory(without_a_tensor)
    with pytest.raises(DTypeError):
        ottava.convert(net, recipe, primary=True)
    assert [type(layer) for layer in net] == [torch.nn.Linear] * 2
    assert [layer.weight for layer in net] == weights
    recipe.set_quantizer_factory(None)
    ottava.distributed.gather_quantized(ottava.convert(net, recipe))
    with pytest.raises(UsageError, match=r"HighPrecisionWeight.*before gather_quantized"):
        ottava.convert(net, recipe, primary=True)
