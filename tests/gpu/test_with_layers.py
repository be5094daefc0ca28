"""Products and layers on the GPU: against float64 and the CPU, without waiting, in graphs,
compiled."""

from __future__ import annotations

import pytest

from benchmarks.on_gpu import model_cases, runner
from benchmarks.on_gpu.runner import Gpu, Rehearsal

pytestmark = pytest.mark.gpu
PRODUCTS = model_cases.product_cases()
# The names: what they run is made for the GPU.
LAYERS = sorted(model_cases.layer_cases(Rehearsal()))


def _assert_passed(outcome: runner.Outcome) -> None:
    assert outcome.passed, "\n".join(
        [f"{outcome.name}: {outcome.failed} of {outcome.cases}", *outcome.failures]
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_against_float64(place: Gpu, name: str) -> None:
    _assert_passed(runner.check(name, PRODUCTS[name], place))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(place: Gpu, name: str) -> None:
    _assert_passed(runner.check(name, model_cases.layer_cases(place)[name], place))
