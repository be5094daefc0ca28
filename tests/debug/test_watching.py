"""Layers that are watched compute what other layers compute, bit for bit, and inspections see what
products take and give."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
import ottava_debug
from benchmarks.installed import recipes
from ottava_debug import Inspection, Watch
from tests.comparing import assert_same
from tests.debug.by_hand import TENSORS, inputs, layer_of, passes

RECIPES = [name for name in recipes() if name != "custom"]
SAMPLE = [("mxfp8", torch.float32), ("delayed", torch.bfloat16), (None, torch.bfloat16)]
Layer = ottava.nn.Linear
OPERANDS = [(gemm, tensor) for gemm, tensors in TENSORS.items() for tensor in tensors[:2]]
EVERY = [(gemm, tensor) for gemm, tensors in TENSORS.items() for tensor in tensors]


class Looks(Inspection):
    """Keeps what passes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, torch.Tensor, Any]] = []

    def observe(self, gemm: str, tensor: str, values: torch.Tensor, quantized: Any) -> None:
        self.seen.append((gemm, tensor, values.clone(), quantized))


class Plain(Inspection):
    """No product takes a quantized operand, or not these."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs = pairs or OPERANDS

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return (gemm, tensor) not in self.pairs


class Doubles(Inspection):
    """Doubles some tensors of products."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs = pairs

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        return values * 2 if (gemm, tensor) in self.pairs else values


# -- ways to call a layer --


def into_main_grad(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer.weight, "main_grad"):
        layer.weight.main_grad = torch.full((48, 32), 0.1)
        layer.weight.grad_added_to_main_grad = False
        layer.fuse_wgrad_accumulation = True
    y = layer(x)
    # Keep what the last pass has added, so that it is compared.
    y.register_hook(lambda _: layer.register_buffer("added", layer.weight.main_grad.clone()))
    return y


def under_autocast(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def in_microbatches(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer(x, is_first_microbatch=True)
    return layer(x, is_first_microbatch=False)


def frozen(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.weight.requires_grad_(False)
    return layer(x)


def without_grad(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x[:2])


CALLS: dict[str, Callable[[Layer, torch.Tensor], torch.Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "three dimensions": lambda layer, x: layer(x.view(2, -1, 32)),
    "main_grad": into_main_grad,
    "autocast": under_autocast,
    "microbatches": in_microbatches,
    "frozen weight": frozen,
    "input without gradient": lambda layer, x: layer(x.detach()),
    "no grad": without_grad,
    "changed in place": lambda layer, x: torch.nn.functional.relu(layer(x), inplace=True),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


def steps(layer: Layer, call: Any, count: int = 2) -> tuple[list[torch.Tensor], Any]:
    """Outputs and gradients of a few steps, and the state of the layer after them."""
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(count):
        x = torch.randn(8, 32, dtype=layer.weight.dtype, requires_grad=True)
        y = call(layer, x)
        found.append(y.detach().clone())
        if y.requires_grad:
            y.float().square().sum().backward()
            found += [x.grad, *(p.grad for p in layer.parameters())]
    return [t.clone() for t in found if t is not None], layer.state_dict()


# Every recipe is in the long run: the recipes share the code that is watched.
SHORT = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow)
    for case in product([*RECIPES, None], (torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("recipe", "dtype"), SHORT)
def test_watching_changes_nothing(recipe: str | None, dtype: torch.dtype) -> None:
    """Where no product takes a quantized operand, a layer is one in high precision."""
    for name, call in CALLS.items():
        expected, state = steps(layer_of(recipe, dtype=dtype), call)
        layer, looks = layer_of(recipe, dtype=dtype), Looks()
        with Watch(lambda layer, looks=looks: looks):
            found, own_state = steps(layer, call)
        assert_same(found, expected)
        assert_same(list(own_state.values()), list(state.values()))
        assert ("fprop", "weight") in {seen[:2] for seen in looks.seen}, name
        expected, _ = steps(layer_of(None, dtype=dtype), call)
        with Watch(lambda layer: Plain()):
            found, _ = steps(layer_of(recipe, dtype=dtype), call)
        assert_same(found, expected)


@pytest.mark.parametrize("recipe", [*RECIPES, None])
def test_each_tensor_of_each_product_is_seen_once(recipe: str | None) -> None:
    for name in ("plain", "checkpoint", "reentrant checkpoint", "autocast"):
        layer, looks = layer_of(recipe), Looks()
        with Watch(lambda layer, looks=looks: looks):
            steps(layer, CALLS[name], count=1)
        assert sorted(seen[:2] for seen in looks.seen) == sorted(EVERY)
        taken = {}
        for gemm, tensor, values, quantized in looks.seen:
            is_quantized = recipe is not None and (gemm, tensor) in OPERANDS
            assert (quantized is not None) is is_quantized, (gemm, tensor)
            taken[gemm, tensor] = values.float()
        for gemm, names in TENSORS.items():
            a, b, result = (taken[gemm, tensor] for tensor in names)
            a, b = a.t() if gemm == "wgrad" else a, b.t() if gemm == "fprop" else b
            exact = a @ b + (layer.bias.detach() if gemm == "fprop" else 0)
            # The product is that of the rotated values where both operands are rotated.
            bound = 0.3 if recipe in ("mx", "nvfp4") else 0.1
            assert (result - exact).norm() < bound * exact.norm(), gemm


# -- what is modified --


def test_a_modified_tensor_is_the_one_that_is_multiplied() -> None:
    x, dy = inputs()
    layer = layer_of("current", bias=False)
    expected = passes(layer, x, dy)
    # Each operand of a product, and its result, has to reach it; no other product changes.
    for gemm, tensor in EVERY:
        with Watch(lambda layer, pair=(gemm, tensor): Doubles(pair)):
            found = passes(layer, x, dy)
        for name, values in expected.items():
            factor = 2 if name == TENSORS[gemm][2] else 1
            torch.testing.assert_close(found[name], factor * values, rtol=1e-5, atol=1e-5)
    # The second one gets what the first one made.
    with Watch(lambda layer: Doubles(EVERY[0])), Watch(lambda layer: Doubles(EVERY[0])):
        found = passes(layer, x, dy)
    torch.testing.assert_close(found["output"], 4 * expected["output"], rtol=1e-5, atol=1e-5)


def test_an_operand_in_high_precision_meets_the_values_of_a_rotated_one() -> None:
    x, dy = inputs()
    layer, expected = layer_of("nvfp4"), passes(layer_of(None), x, dy)
    for gemm, tensor in OPERANDS:
        with Watch(lambda layer, pair=(gemm, tensor): Plain(pair)):
            found = passes(layer, x, dy)
        for name, values in expected.items():
            assert (found[name] - values).norm() < 0.3 * values.norm(), (gemm, tensor, name)


def test_modified_operands_are_not_recorded_by_a_recipe_with_state() -> None:
    layer = layer_of("delayed")
    other = deepcopy(layer)
    operands = [pair for pair in OPERANDS if pair != ("dgrad", "gradient")]
    x, dy = inputs()
    for _ in range(2):
        with Watch(lambda layer: Doubles(*operands)):
            modified = passes(layer, x, dy)
        assert not torch.equal(modified["output"], passes(other, x, dy)["output"])
    assert_same(list(layer.state_dict().values()), list(other.state_dict().values()))


def test_a_modified_gradient_of_the_weight_is_added_to_main_grad() -> None:
    layer = layer_of("current")
    x, dy = inputs()
    expected = 0.1 + 2 * passes(layer, x, dy)["wgrad"]
    with Watch(lambda layer: Doubles(("wgrad", "wgrad"))):
        into_main_grad(layer, x).backward(dy)
    assert layer.weight.grad_added_to_main_grad
    torch.testing.assert_close(layer.weight.main_grad, expected, rtol=1e-4, atol=1e-4)


# -- watches --


def test_watches_end() -> None:
    calls = []
    watch = Watch(calls.append)
    layer = layer_of("current")
    x, _ = inputs()
    layer(x)
    watch.close()
    watch.close()
    layer(x)
    assert calls == [layer]
    assert ottava.nn.function.inspector is None


def test_compiled_layers_follow_the_steps_and_others_stay_in_one_graph() -> None:
    torch.compiler.reset()
    layers = torch.nn.ModuleList([layer_of("current", "watched"), layer_of("current", "other")])
    watched, other = layers
    x, _ = inputs()
    whole = torch.compile(other, backend="eager", fullgraph=True)
    parts = torch.compile(watched, backend="eager")
    with torch.no_grad():
        expected, plain = other(x), layer_of(None)(x)
        with ottava_debug.high_precision(layers, layers="0", start_step=1, end_step=1) as run:
            assert torch.equal(whole(x), expected)
            found = []
            for _ in range(3):
                found.append(parts(x))
                run.step()
        for y, right in zip(found, (expected, plain, expected), strict=True):
            assert torch.equal(y, right)
        assert torch.equal(parts(x), expected)
