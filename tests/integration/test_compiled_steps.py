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
from tests.combinations import slow

STEPS = 6


def train(net: torch.nn.Module, run: Any) -> list[torch.Tensor]:
    """The outputs of all steps, the gradients of the last one, and what the model then holds."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    random, seen = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        x = torch.randn(32, 64, generator=random).bfloat16() * (step + 1)
        optimizer.zero_grad()
        y = run(x)
        y.float().square().mean().backward()
        optimizer.step()
        seen.append(y.detach())
    gradients = [
        parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None
    ]
    return [*seen, *gradients, *(value.clone() for value in net.state_dict().values())]


# The conformance kit compiles each of the others.
NOT_SLOW = ("delayed", "mxfp8")


@pytest.mark.parametrize(
    "recipe", [*NOT_SLOW, *slow(*(name for name in recipes() if name not in NOT_SLOW))]
)
def test_compiled_steps_have_the_bytes_of_eager_ones(recipe: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)
    ).bfloat16()
    eager = ottava.convert(net, recipe)
    twin = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    mine, theirs = train(eager, eager), train(twin, compiled)
    assert counter.frame_count == 1
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
