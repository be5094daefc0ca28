"""Products and layers on the GPU: against float64 and the CPU, without waiting, in graphs, compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ottava
from benchmarks.installed import recipes
from benchmarks.on_gpu import exact, layers, products
from benchmarks.on_gpu.checks import Outcome
from benchmarks.on_gpu.place import Gpu

pytestmark = pytest.mark.gpu


def _assert_passed(outcome: Outcome) -> None:
    assert outcome.passed, "\n".join([f"{outcome.name}: {outcome.failed} of {outcome.cases}", *outcome.failures])


def test_kernels_against_float64(place: Gpu) -> None:
    _assert_passed(exact.check(place))


@pytest.mark.parametrize("recipe", products.QUANTIZERS)
def test_products_against_float64(place: Gpu, recipe: str) -> None:
    _assert_passed(products.check(place, recipe))


@pytest.mark.parametrize("check", [products.check_integers, products.check_far_blocks])
def test_exact_products(place: Gpu, check: Callable[[Gpu], Outcome]) -> None:
    _assert_passed(check(place))


@pytest.mark.parametrize("recipe", recipes())
@pytest.mark.parametrize("check", [layers.check_passes, layers.check_training])
def test_follows_the_cpu(place: Gpu, check: Callable[[Gpu, str], Outcome], recipe: str) -> None:
    _assert_passed(check(place, recipe))


@pytest.mark.parametrize("recipe", layers.OWN)
@pytest.mark.parametrize(
    "check", [layers.check_no_waiting, layers.check_graph, layers.check_memory, layers.check_compiled]
)
def test_is_fit_for_training(place: Gpu, check: Callable[[Gpu, str], Outcome], recipe: str) -> None:
    _assert_passed(check(place, recipe))


@pytest.mark.parametrize("recipe", layers.OWN)
def test_compiled_passes_agree_with_eager_ones(place: Gpu, recipe: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(64, 128, device=place.device).bfloat16()
    dy = torch.randn(64, 256, device=place.device).bfloat16()
    results = []
    for compiled in (False, True):
        torch.manual_seed(1)
        module = ottava.nn.Linear(128, 256, device=place.device, dtype=torch.bfloat16, recipe=recipe)
        run = torch.compile(module, fullgraph=True) if compiled else module
        own = x.clone().requires_grad_()
        y = run(own)
        y.backward(dy)
        results.append([y.detach(), own.grad, *(p.grad for p in module.parameters())])
    for eager, made in zip(*results, strict=True):
        assert products.distance(made, eager) < 1e-3
