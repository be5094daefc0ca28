"""Training steps of every installed recipe, compiled whole: the bytes of eager code, and one
compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ottava
from benchmarks.installed import recipes
from tests.comparing import assert_same


def train(net: torch.nn.Module, run: Any) -> list[torch.Tensor]:
    """The outputs of all steps, the gradients of the last one, and what the model then holds."""
    optimizer, random = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    outputs = []
    for step in range(4):
        x = torch.randn(32, 64, generator=random).bfloat16() * (step + 1)
        optimizer.zero_grad()
        outputs.append(run(x))
        outputs[-1].float().square().mean().backward()
        optimizer.step()
    return [*outputs, *(p.grad for p in net.parameters()), *net.state_dict().values()]


# The conformance kit compiles each recipe.
@pytest.mark.parametrize(
    "recipe",
    ["delayed"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in recipes() if name != "delayed"],
)
def test_compiled_steps_have_the_bytes_of_eager_ones(recipe: str) -> None:
    torch._dynamo.reset()
    layers = torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)
    eager = ottava.convert(torch.nn.Sequential(*layers).bfloat16(), recipe)
    twin = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    assert_same(train(twin, compiled), train(eager, eager))
    assert counter.frame_count == 1
