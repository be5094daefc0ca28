"""Layers whose weight is quantized only: optimizers, dtypes, devices, compilation."""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any

import pytest
import torch
from rows import Rows

import ottava
from ottava.errors import DTypeError, OptionError, UsageError
from ottava.nn import Linear, TransposedLinear, quantized_model_init
from ottava.tensors import Float8Tensor


def model(recipe: Any, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with quantized_model_init(recipe):
        return torch.nn.Sequential(
            Linear(16, 24, dtype=dtype, recipe=recipe),
            torch.nn.ReLU(inplace=True),
            Linear(24, 8, dtype=dtype, recipe=recipe),
        )


@pytest.mark.parametrize(
    "options", [{}, {"foreach": False}, {"fused": True}], ids=["foreach", "loop", "fused"]
)
def test_adam_follows_the_same_steps_on_plain_weights(
    recipe: Any, options: dict[str, bool]
) -> None:
    net, x = model(recipe), torch.randn(64, 16)
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
        # The plain weight is rounded as the quantized one is, so that both start the next step
        # alike.
        with torch.no_grad():
            twin.copy_(weight._quantizer(twin).dequantize())
        assert type(mine.state[weight]["exp_avg"]) is torch.Tensor
        assert torch.equal(weight.dequantize(), twin)


def test_a_step_between_forward_and_backward_is_refused(recipe: Any) -> None:
    net, x = model(recipe), torch.randn(4, 16, requires_grad=True)
    y = net(x).sum()
    with torch.no_grad():
        net[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize(
    "convert", [lambda m: m.half(), lambda m: m.to(torch.float16)], ids=["half", "to"]
)
def test_conversion_keeps_the_codes(recipe: Any, convert: Any) -> None:
    net = model(recipe)
    codes, initial = net[0].weight._data.clone(), net[0].weight.get_high_precision_init_val()
    convert(net)
    weight = net[0].weight
    assert isinstance(weight, Float8Tensor)
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.dtype == net[0].bias.dtype == torch.float16
    assert torch.equal(weight._data, codes)
    assert weight.get_high_precision_init_val() is initial
    assert initial is not None
    net(torch.randn(3, 16).half()).sum().backward()
    assert weight.grad.dtype == torch.float16


CONVERSIONS: dict[str, Any] = {
    "cpu": lambda m: m.cpu(),
    "to": lambda m: m.to(torch.float16),
    "bfloat16": lambda m: m.bfloat16(),
    "half and back": lambda m: m.half().float(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_attributes_and_hooks_survive_as_on_a_plain_layer(recipe: Any, name: str) -> None:
    def seen(layer: torch.nn.Linear) -> list[Any]:
        weight, calls = layer.weight, []
        weight.sequence_parallel, weight.my_attr = True, calls
        weight.register_hook(lambda grad: calls.append(("hook", grad.dtype)))
        weight.register_post_accumulate_grad_hook(
            lambda p: calls.append(("post", p is weight, p.grad.dtype))
        )
        alive = weakref.ref(weight)
        layer(torch.randn(3, 16)).sum().backward()
        # Between a forward and a backward pass, too.
        pending = layer(torch.randn(3, 16)).sum()
        CONVERSIONS[name](layer)
        after = (
            layer.weight.dtype,
            layer.weight.grad.dtype,
            [n for n, _ in layer.named_parameters()],
        )
        if layer.weight.dtype == torch.float32:
            pending.backward()
        layer(torch.randn(3, 16, dtype=layer.weight.dtype)).sum().backward()
        kept = [
            layer.weight is weight,
            alive() is weight,
            vars(layer.weight).get("sequence_parallel"),
        ]
        return [*calls, after, *kept, vars(layer.weight).get("my_attr") is calls]

    with quantized_model_init(recipe):
        layer = Linear(16, 24, recipe=recipe)
    assert seen(layer) == seen(torch.nn.Linear(16, 24))
    assert isinstance(layer.weight, Float8Tensor)


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="2.11's compiler cannot trace how a layer gets its first state",
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("eager", marks=pytest.mark.slow)])
def test_compiled_equals_eager_bitwise(recipe: Any, backend: str) -> None:
    net = model(recipe, torch.bfloat16)
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    for step in range(2):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        for module, value in ((net, one), (compiled, two)):
            module(value).square().sum().backward()
        assert torch.equal(one.grad, two.grad)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        for module in (net, twin):
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert torch.equal(net[0].weight._data, twin[0].weight._data)


def test_made_on_meta_and_filled(recipe: Any) -> None:
    with quantized_model_init(recipe):
        layer = Linear(16, 8, device="meta", recipe=recipe)
    assert layer(torch.empty(3, 16, device="meta")).shape == (3, 8)
    assert layer.weight.get_high_precision_init_val() is None
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    plain = torch.nn.Linear(16, 8)
    assert isinstance(layer.weight, Float8Tensor)
    assert torch.equal(
        layer.weight.dequantize(), layer.weight._quantizer(plain.weight).dequantize()
    )


@pytest.mark.parametrize(
    "convert", [lambda m: m.half(), lambda m: m.to(torch.float16)], ids=["half", "to"]
)
def test_conversion_on_meta_keeps_the_dtypes_of_data_and_scales(recipe: Any, convert: Any) -> None:
    with quantized_model_init(recipe):
        layer = Linear(16, 8, device="meta", recipe=recipe)
    kinds = [(inner.dtype, inner.shape) for inner in layer.weight.inner_list() if inner is not None]
    convert(layer)
    assert isinstance(layer.weight, Float8Tensor)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.float16
    assert [
        (inner.dtype, inner.shape) for inner in layer.weight.inner_list() if inner is not None
    ] == kinds


def test_a_weight_of_any_class_leaves_the_meta_device_without_a_quantizer() -> None:
    """Its data are there for bytes that are loaded."""
    with quantized_model_init(Rows()):
        layer, full = Linear(16, 8, device="meta"), Linear(16, 8)
    layer.weight.update_quantizer(None)
    layer.to_empty(device="cpu").load_state_dict(full.state_dict())
    assert type(layer.weight) is type(full.weight)
    assert torch.equal(layer.weight.dequantize(), full.weight.dequantize())


def test_shared_between_processes(recipe: Any) -> None:
    net = model(recipe)
    net.share_memory()
    assert all(p.is_shared() for p in net.parameters())
    assert net(torch.randn(2, 16)).shape == (2, 8)


def test_init_is_of_its_thread(recipe: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with quantized_model_init(recipe), ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(lambda: Linear(4, 4)).result()
        here = Linear(4, 4)
    assert isinstance(here.weight, Float8Tensor)
    assert not isinstance(elsewhere.weight, Float8Tensor)


def test_state_dict_round_trip(recipe: Any) -> None:
    net, other = model(recipe), model(recipe)
    with torch.no_grad():
        other[0].weight.zero_()
    other.load_state_dict(net.state_dict(), strict=True)
    assert torch.equal(other[0].weight._data, net[0].weight._data)
    assert torch.equal(other[0].weight._scale_inv, net[0].weight._scale_inv)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8))
    other.load_state_dict(plain.state_dict())
    assert torch.equal(
        other[0].weight.dequantize(), other[0].weight._quantizer(plain[0].weight).dequantize()
    )


def test_parametrized_layer(recipe: Any) -> None:
    layer = Linear(16, 8, recipe=recipe)
    torch.nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(4, 16)
    expected = ottava.nn.Linear(16, 8, recipe=recipe)
    with torch.no_grad():
        expected.weight.copy_(layer.weight)
        expected.bias.copy_(layer.bias)
    assert torch.equal(layer(x), expected(x))
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original1.grad is not None


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(24, 16)
        self.inner = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 24, bias=False)
        self.other = torch.nn.Linear(16, 16)
        self.head.weight = self.embedding.weight
        self.other.weight = self.inner.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.other(self.inner(self.embedding(tokens))))


def test_an_existing_model_is_given_quantized_weights(recipe: Any) -> None:
    net = Tied()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    bias = net.inner.bias
    net.inner.weight.sequence_parallel = True
    net.head.weight.requires_grad_(False)
    ottava.convert(net, recipe, primary=True)
    for weight, name in ((net.head.weight, "head.weight"), (net.inner.weight, "inner.weight")):
        assert isinstance(weight, Float8Tensor)
        assert isinstance(weight, torch.nn.Parameter)
        assert weight.get_high_precision_init_val() is None
        assert torch.equal(weight.dequantize(), weight._quantizer(before[name]).dequantize())
    assert net.head.weight is net.embedding.weight
    assert net.other.weight is net.inner.weight
    assert net.inner.weight.sequence_parallel is True
    assert not net.head.weight.requires_grad
    assert net.inner.bias is bias
    assert [name for name, _ in net.named_parameters()] == [
        "embedding.weight",
        "inner.weight",
        "inner.bias",
        "other.bias",
    ]
    net(torch.arange(5)).sum().backward()
    assert net.inner.weight.grad.shape == (16, 16)
    # Quantized weights stay what they are.
    weight = net.inner.weight
    assert ottava.convert(net, recipe, primary=True).inner.weight is weight


def test_initial_values_are_kept_on_request(recipe: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 8))
    before = net[0].weight.detach().clone()
    ottava.convert(net, recipe, primary=True, keep_initial_values=True)
    assert torch.equal(net[0].weight.get_high_precision_init_val(), before)
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(16, 8))
    ottava.convert(empty, recipe, primary=True, keep_initial_values=True)
    assert isinstance(empty[0].weight, Float8Tensor)
    assert empty[0].weight.get_high_precision_init_val() is None


def test_weights_that_cannot_be_primary_stay_with_a_warning(recipe: Any) -> None:
    class Conv1D(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, 16))

    ottava.register_converter(Conv1D, TransposedLinear.from_linear)
    net = torch.nn.ModuleDict({"conv": Conv1D(), "tied": Tied(), "plain": torch.nn.Linear(16, 4)})
    head, conv = net.tied.head.weight, net.conv.weight
    net.weighted = torch.nn.utils.parametrizations.weight_norm(Linear(4, 4))
    with pytest.warns(
        UserWarning, match="of 'conv', 'tied.inner', 'weighted' stay in high precision"
    ):
        ottava.convert(net, recipe, primary=True, exclude="tied.other")
    assert net.conv.weight is conv
    assert type(net.tied.inner.weight) is torch.nn.Parameter
    assert net.tied.head.weight is not head
    assert isinstance(net.plain.weight, Float8Tensor)
    assert net.tied.other.weight is net.tied.inner.weight


def test_what_cannot_be_quantized_leaves_the_model_alone(recipe: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 8))
    weights = [layer.weight for layer in net]
    original = recipe.make_quantizer

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
    assert all(layer.weight is weight for layer, weight in zip(net, weights, strict=True))
    recipe.set_quantizer_factory(None)
    ottava.distributed.gather_quantized(ottava.convert(net, recipe))
    with pytest.raises(UsageError, match=r"HighPrecisionWeight.*before gather_quantized"):
        ottava.convert(net, recipe, primary=True)


def test_initial_values_are_kept_of_primary_weights_alone(recipe: Any) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptionError, match="keep_initial_values without primary"):
        ottava.convert(model, recipe, keep_initial_values=True)


@pytest.mark.parametrize("enabled", [1, None, "yes"])
def test_enabled_is_a_bool(recipe: Any, enabled: Any) -> None:
    with (
        pytest.raises(OptionError, match=f"enabled is {enabled!r}"),
        ottava.quantized_model_init(recipe, enabled=enabled),
    ):
        pytest.fail("it was entered")


def test_a_block_that_quantizes_nothing_says_so(recipe: Any) -> None:
    with pytest.warns(UserWarning, match=r"quantized nothing: .* no ottava\.nn\.Linear") as caught:
        with quantized_model_init(recipe):
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4))
    assert caught[0].filename == __file__


def test_blocks_that_have_nothing_to_say(recipe: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.Linear(4, 4)
        with quantized_model_init(recipe):
            torch.nn.Linear(4, 4)
            Linear(4, 4)
        with quantized_model_init(recipe, enabled=False):
            torch.nn.Linear(4, 4)
        with quantized_model_init(recipe), quantized_model_init(recipe):
            Linear(4, 4)
        with pytest.raises(KeyError), quantized_model_init(recipe):
            torch.nn.Linear(4, 4)
            raise KeyError
