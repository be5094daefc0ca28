"""Products and layers on the GPU: against float64 and the CPU, without waiting, in graphs, compiled."""

from __future__ import annotations

import pytest
import torch

import ottava
from benchmarks.on_gpu import kernel_cases, model_cases, runner
from benchmarks.on_gpu.runner import Gpu, Rehearsal

pytestmark = pytest.mark.gpu
PRODUCTS = kernel_cases.exact_cases() | model_cases.product_cases()
# The names: what they run is made for the GPU.
LAYERS = sorted(model_cases.layer_cases(Rehearsal()))


def _assert_passed(outcome: runner.Outcome) -> None:
    assert outcome.passed, "\n".join([f"{outcome.name}: {outcome.failed} of {outcome.cases}", *outcome.failures])


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_and_products_against_float64(place: Gpu, name: str) -> None:
    _assert_passed(runner.check(name, PRODUCTS[name], place))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(place: Gpu, name: str) -> None:
    _assert_passed(runner.check(name, model_cases.layer_cases(place)[name], place))


@pytest.mark.parametrize("recipe", model_cases.OWN)
def test_compiled_passes_agree_with_eager_ones(place: Gpu, recipe: str) -> None:
    torch.compiler.reset()
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
        assert runner.distance(made, eager) < 1e-3
