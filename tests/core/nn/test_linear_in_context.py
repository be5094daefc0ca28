"""``Linear`` among what surrounds it in a training script."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ottava
from ottava.errors import UsageError
from ottava.nn import Linear
from ottava.recipes.region import current_region


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
def test_the_output_may_be_modified_in_place(recipe: Any, lead: tuple[int, ...]) -> None:
    layer, x = Linear(8, 8, recipe=recipe), torch.randn(*lead, 8)
    y = torch.nn.ReLU(inplace=True)(layer(x))
    y.sum().backward()
    assert torch.equal(y, torch.relu(layer(x)))
    z = layer(x)
    z += 1
    z.sum().backward()
    assert torch.equal(z, layer(x) + 1)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_empty_features(recipe: Any, sizes: tuple[int, int]) -> None:
    k, n = sizes
    with pytest.warns(UserWarning, match="zero-element") if 0 in sizes else nullcontext():
        layer = Linear(k, n, recipe=recipe)
    x = torch.randn(3, k, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (3, n)
    assert x.grad.shape == (3, k)
    assert layer.weight.grad.shape == (n, k)
    assert torch.equal(y, layer.bias.expand(3, n))


def test_second_derivatives_are_refused(recipe: Any) -> None:
    layer, x = Linear(8, 4, recipe=recipe), torch.randn(3, 8, requires_grad=True)
    # Of the second the incoming gradient is a constant, which its own gradient does not need.
    for loss in (layer(x).pow(2).sum(), layer(x).sum()):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(UsageError, match="differentiated again"):
            gradient.sum().backward()
    # What is not differentiated again is as it was.
    layer(x).sum().backward(create_graph=True)
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_repeats_the_forward(recipe: Any, use_reentrant: bool) -> None:
    layer, x = Linear(16, 16, recipe=recipe), torch.randn(4, 16, requires_grad=True)
    layer(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    y = checkpoint(layer, x, use_reentrant=use_reentrant).sum()
    layer.eval()
    with torch.no_grad(), ottava.autocast(enabled=False):
        layer(x)
    layer.train()
    with ottava.autocast(enabled=False):
        y.backward()
    assert torch.equal(x.grad, expected)


def test_first_use_inside_a_backward(recipe: Any) -> None:
    layer, x = Linear(16, 16, recipe=recipe), torch.randn(4, 16, requires_grad=True)
    seen = []
    x.register_hook(lambda grad: seen.append(layer(grad).detach()))
    (2 * x).sum().backward()
    assert torch.equal(seen[0], layer(torch.full((4, 16), 2.0)))
    assert not torch.equal(
        seen[0], torch.nn.functional.linear(torch.full((4, 16), 2.0), layer.weight, layer.bias)
    )


def test_one_region_object_serves_threads(recipe: Any) -> None:
    region = ottava.autocast(recipe)

    def inside(_: int) -> bool:
        with region:
            entered = current_region()
        return entered is not None and current_region() is None

    with ThreadPoolExecutor(4) as pool, region:
        assert all(pool.map(inside, range(200)))
        assert current_region() is not None
    assert current_region() is None


def test_a_region_as_decorator(recipe: Any) -> None:
    layer, x = Linear(8, 4), torch.randn(2, 8)

    @ottava.autocast(recipe)
    def run() -> torch.Tensor:
        return layer(x)

    with ottava.autocast(recipe):
        assert torch.equal(run(), layer(x))
    assert not torch.equal(run(), layer(x))


def test_a_model_is_pickled_without_its_process_group(recipe: Any) -> None:
    class Group:
        group_name = "some group"

        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle a process group")

    layer = Linear(8, 4, recipe=recipe)
    with ottava.autocast(amax_reduction_group=Group()):
        layer(torch.randn(2, 8))
    x = torch.randn(2, 8)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_meta_tensors_have_shapes(recipe: Any) -> None:
    layer = Linear(8, 4, device="meta", recipe=recipe)
    assert layer(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 4)


def test_flops_are_counted(recipe: Any) -> None:
    counts = []
    for layer in (Linear(16, 8, recipe=recipe), torch.nn.Linear(16, 8)):
        x = torch.randn(4, 16, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 4 * 16 * 8
