"""Layers that are watched compute what others compute, bit for bit, and inspections see what
products take and give."""

from copy import deepcopy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from benchmarks.installed import recipes
from ottava_debug.operands import OPERANDS, TENSORS
from ottava_debug.products import Inspection, Watch

RECIPES = [name for name in recipes() if name != "custom"]


class Looks(Inspection):
    """What passed, and how often."""

    def __init__(self):
        self.seen = []

    def observe(self, gemm, tensor, values, quantized):
        self.seen.append((gemm, tensor, values.clone(), quantized))


class Plain(Inspection):
    """No product takes anything quantized."""

    def quantizes(self, gemm, tensor):
        return False


def layer_of(recipe, dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    return ottava.nn.Linear(32, 48, dtype=dtype, recipe=recipe, name="it", **options)


def steps(layer, call=lambda layer, x: layer(x), shape=(8, 32), count=3, dtype=None):
    """Outputs, gradients and state of a few steps."""
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(shape, dtype=dtype or layer.weight.dtype, requires_grad=True)
        y = call(layer, x)
        found.append(y.detach().clone())
        if y.requires_grad:
            y.float().square().sum().backward()
            found += [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return [t.clone() for t in found if t is not None] + [
        t.clone() for t in layer.state_dict().values()
    ]


def same(a, b):
    assert len(a) == len(b)
    return all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def with_main_grad(layer, x):
    if not hasattr(layer.weight, "main_grad"):
        layer.weight.main_grad, layer.weight.grad_added_to_main_grad = (
            torch.full((48, 32), 0.1),
            False,
        )
    layer.fuse_wgrad_accumulation = True
    y = layer(x)
    # What the last pass has added is part of what is compared.
    y.register_hook(lambda _: layer.register_buffer("added", layer.weight.main_grad.clone()))
    return y


def under_autocast(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def in_microbatches(layer, x):
    layer(x, is_first_microbatch=True)
    return layer(x, is_first_microbatch=False)


def frozen(layer, x):
    layer.weight.requires_grad_(False)
    return layer(x)


def without_grad(layer, x):
    with torch.no_grad():
        return layer(x[:2])


def in_place(layer, x):
    return torch.nn.functional.relu(layer(x), inplace=True)


CALLS = {
    "plain": lambda layer, x: layer(x),
    "three dimensions": lambda layer, x: layer(x.view(2, -1, 32)),
    "main_grad": with_main_grad,
    "autocast": under_autocast,
    "microbatches": in_microbatches,
    "frozen weight": frozen,
    "input without gradient": lambda layer, x: layer(x.detach()),
    "no grad": without_grad,
    "in place after it": in_place,
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", [*RECIPES, None])
def test_observing_changes_nothing(recipe, call):
    for dtype in (torch.bfloat16, torch.float32):
        layer = layer_of(recipe, dtype)
        expected = steps(deepcopy(layer), CALLS[call])
        looks = Looks()
        with Watch(lambda layer, looks=looks: looks):
            found = steps(layer, CALLS[call])
        assert same(found, expected)
        assert ("fprop", "weight") in {name[:2] for name in looks.seen}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_of_which_nothing_is_quantized_is_one_in_high_precision(recipe, call):
    layer = layer_of(recipe, torch.bfloat16)
    layer.weight.data.div_(3)
    other = layer_of(None, torch.bfloat16)
    other.weight.data.div_(3)
    expected = steps(other, CALLS[call])
    with Watch(lambda layer: Plain()):
        found = steps(layer, CALLS[call])
    assert same(found[: len(expected) - 2], expected[:-2])


@pytest.mark.parametrize("call", ["plain", "checkpoint", "reentrant checkpoint", "autocast"])
@pytest.mark.parametrize("recipe", [*RECIPES, None])
def test_each_tensor_of_each_product_is_seen_once(recipe, call):
    looks, layer = Looks(), layer_of(recipe)
    with Watch(lambda layer: looks):
        steps(layer, CALLS[call], count=1)
    expected = [(gemm, tensor) for gemm, tensors in TENSORS.items() for tensor in tensors]
    assert sorted((gemm, tensor) for gemm, tensor, _, _ in looks.seen) == sorted(expected)
    for gemm, tensor, values, quantized in looks.seen:
        assert (quantized is None) == (recipe is None or tensor in ("output", "dgrad", "wgrad")), (
            gemm,
            tensor,
        )
        assert values.dim() == 2
    taken = {(gemm, tensor): values.float() for gemm, tensor, values, _ in looks.seen}
    for gemm, names in TENSORS.items():
        left, right, result = (taken[gemm, name] for name in names)
        left, right = left.t() if gemm == "wgrad" else left, right.t() if gemm == "fprop" else right
        exact = left @ right + (layer.bias.detach() if gemm == "fprop" else 0)
        assert (result - exact).norm() < 0.1 * exact.norm(), gemm


def test_what_is_modified_is_what_is_multiplied():
    layer = layer_of("current")
    expected = steps(deepcopy(layer), count=1)
    with Watch(lambda layer: Doubles(("fprop", "weight"), ("wgrad", "wgrad"))):
        found = steps(layer, lambda layer, x: layer(x), count=1)
    bias = layer.bias.detach()
    assert torch.allclose(found[0] - bias, 2 * (expected[0] - bias), rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[2], expected[2])


def test_an_operand_may_be_quantized_by_an_inspection():
    layer, x = layer_of("current"), torch.randn(8, 32)

    class Replaces(Inspection):
        def modify(self, gemm, tensor, values):
            quantizer = self.call.state.quantizer(
                "weight", rowwise=True, columnwise=False, recording=False
            )
            return (
                quantizer.quantize(values * 2) if (gemm, tensor) == ("fprop", "weight") else values
            )

    bias = layer.bias.detach()
    expected = layer(x).detach() - bias
    with Watch(lambda layer: Replaces()):
        found = layer(x).detach() - bias
    # A power of two times the scale is all that changes.
    assert torch.allclose(found, 2 * expected, rtol=1e-5, atol=1e-5)


class Doubles(Inspection):
    def __init__(self, *pairs):
        self.pairs = pairs

    def modify(self, gemm, tensor, values):
        return values * 2 if (gemm, tensor) in self.pairs else values


def test_what_is_modified_is_not_recorded():
    layer = layer_of("delayed")
    other, operands = deepcopy(layer), [pair for pair in OPERANDS if pair != ("dgrad", "gradient")]
    x, dy = torch.randn(8, 32, requires_grad=True), torch.randn(8, 48)
    for _ in range(2):
        with Watch(lambda layer: Doubles(*operands)):
            modified = layer(x)
            modified.backward(dy)
        plain = other(x)
        plain.backward(dy)
        assert not torch.equal(modified, plain)
    states = layer.state_dict(), other.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert any("amax" in key or "extra" in key for key in states[1])


def test_a_modified_gradient_of_the_weight_is_added_to_main_grad():
    layer, dy = layer_of("current"), torch.ones(8, 48)
    x, added = torch.randn(8, 32), []
    for pairs in ([], [("wgrad", "wgrad")]):
        layer.weight.main_grad, layer.weight.grad_added_to_main_grad = (
            torch.full((48, 32), 0.5),
            False,
        )
        layer.fuse_wgrad_accumulation = True
        with Watch(lambda layer, pairs=pairs: Doubles(*pairs)):
            layer(x).backward(dy)
        assert layer.weight.grad_added_to_main_grad
        added.append(layer.weight.main_grad - 0.5)
    assert torch.allclose(added[1], 2 * added[0], rtol=1e-4, atol=1e-4)
    assert added[0].any()


def test_backward_passes_are_noted(monkeypatch):
    layer, noted = layer_of("delayed"), []
    state = type(layer._binding.state)
    monkeypatch.setattr(state, "note_backward", lambda self: noted.append(self))
    steps(layer)
    count = len(noted)
    with Watch(lambda layer: Looks()):
        steps(layer)
    assert len(noted) == 2 * count > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_of_which_nothing_is_quantized_is_one_in_high_precision_under_autocast(recipe):
    expected = steps(layer_of(None), under_autocast)
    with Watch(lambda layer: Plain()):
        found = steps(layer_of(recipe), under_autocast)
    assert same(found[: len(expected) - 2], expected[:-2])


def test_watches_end():
    calls = []
    watch = Watch(lambda layer: calls.append(layer))
    layer = layer_of("current")
    layer(torch.randn(4, 32))
    watch.close()
    watch.close()
    layer(torch.randn(4, 32))
    assert calls == [layer]


def test_compiled_layers_that_nobody_selects_stay_in_one_graph():
    torch.compiler.reset()
    model = ottava.convert(
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32)),
        "current",
    )
    x, looks = torch.randn(8, 32), Looks()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = whole(x)
    with Watch(
        lambda layer: looks if layer.name == "other" else None, lambda name: name == "other"
    ):
        assert torch.equal(whole(x), expected)
    assert looks.seen == []
    parts = torch.compile(model, backend="aot_eager")
    with Watch(lambda layer: looks if layer.name == "0" else None, lambda name: name == "0"):
        assert torch.equal(parts(x), expected)
        assert {name[1] for name in looks.seen} == set(TENSORS["fprop"])
    count = len(looks.seen)
    assert torch.equal(parts(x), expected)
    assert len(looks.seen) == count
