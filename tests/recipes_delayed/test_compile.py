"""Steps whose region is inside the graph, or around it, have the bytes of eager ones. (The
conformance kit compiles converted models.)"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_delayed import DelayedScaling
from tests.comparing import assert_same

# The process that compiles for the conformance kit has imported the compiler.
pytestmark = pytest.mark.xdist_group("ranks")
RECIPE = DelayedScaling(amax_history_len=3)


def compiled(run: Any) -> Any:
    return torch.compile(run, fullgraph=True, backend="aot_eager")


def in_a_region(call: Any) -> Any:
    def run(x: torch.Tensor) -> Any:
        with ottava.autocast(RECIPE):
            return call(x)

    return run


def recomputed(call: Any) -> Any:
    return lambda x: checkpoint(call, x, use_reentrant=False)


def train(net: Any, run: Any) -> list[torch.Tensor]:
    """Outputs and gradients of some steps, and the final state."""
    optimizer, results = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(4):
        random = torch.Generator().manual_seed(step)
        x = (torch.randn(24, 16, generator=random).bfloat16() * (step + 1)).requires_grad_()
        y = run(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [y, x.grad]
    # The state is cloned, because a region of another model with the recipe begins its next step.
    return [*results, *(value.clone() for value in net.state_dict().values())]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(lambda net, part: part(in_a_region(net)), id="a region inside"),
        pytest.param(
            lambda net, part: in_a_region(recomputed(part(net))),
            id="a region and a checkpoint outside",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_have_the_bytes_of_eager_ones(
    way: Callable[[Any, Callable[[Any], Any]], Any],
) -> None:
    """Of the steps ``way`` compiles a part."""
    torch._dynamo.reset()
    net = ottava.convert(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU()), RECIPE)
    net = net.bfloat16()
    twin: Any = copy.deepcopy(net)
    eager, traced = way(net, lambda run: run), way(twin, compiled)
    assert_same(train(twin, traced), train(net, eager))
    assert (twin[0].recipe_state.scale != 1).all()


def test_a_layer_without_a_state_is_named() -> None:
    torch._dynamo.reset()
    run = compiled(in_a_region(ottava.nn.Linear(16, 8)))
    with pytest.raises(Exception, match=r"UsageError|compiled code cannot make one"):
        run(torch.randn(2, 16))
