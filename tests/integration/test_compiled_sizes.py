"""torch.compile(dynamic=True): layers that run twice, and options of quantizers that are
numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ottava
from ottava_current import Float8CurrentScaling
from ottava_custom import CurrentScalingQuantizerRef, CustomRecipe, HybridQuantizer


def hybrid(role: Any) -> HybridQuantizer:
    sides = [CurrentScalingQuantizerRef(torch.float8_e4m3fn, eps=eps) for eps in (1e-3, 1e-2)]
    return HybridQuantizer(*sides)


RECIPES = {
    "current": lambda: Float8CurrentScaling(amax_epsilon=1e-3),
    "reference": lambda: CustomRecipe("current-ref"),
    "hybrid": lambda: CustomRecipe(hybrid),
}


class Tied(torch.nn.Module):
    """One layer, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).relu())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_that_runs_twice_compiles_for_all_sizes(name: str) -> None:
    model = ottava.convert(torch.nn.Sequential(Tied(), torch.nn.Linear(32, 16)), RECIPES[name]())
    eager = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (8, 5):
        x = torch.randn(rows, 32)
        found, expected = compiled(x), eager(x)
        assert torch.equal(found, expected)
        for net, y in ((model, found), (eager, expected)):
            net.zero_grad()
            y.square().sum().backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
