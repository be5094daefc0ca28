"""Steps compiled whole, with the update of the state inside the graph, have the bytes of eager
ones. (The conformance kit compiles converted models.)"""

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

SHORT, LATEST = DelayedScaling(amax_history_len=3), DelayedScaling(amax_compute_algo="most_recent")


def compiled(run: Any) -> Any:
    return torch.compile(run, fullgraph=True, backend="aot_eager")


def train(net: Any, run: Callable[[torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
    """Outputs and gradients of some steps, and the final state."""
    optimizer, results = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(4):
        random = torch.Generator().manual_seed(step)
        x = (torch.randn(24, 16, generator=random).bfloat16() * (step + 1)).requires_grad_()
        y = run(x, step)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [y, x.grad]
    # The state is cloned, because a block of another model with the recipe begins its next step.
    return [*results, *(value.clone() for value in net.state_dict().values())]


def in_a_block(call: Any, recipe: Any) -> Any:
    def run(x: torch.Tensor) -> Any:
        with ottava.autocast(recipe):
            return call(x)

    return run


def recomputed(call: Any) -> Any:
    return lambda x: checkpoint(call, x, use_reentrant=False)


#: Of a model and its recipe: a step in eager mode, and the same one compiled.
WAYS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "a block inside": (SHORT, in_a_block, lambda net, recipe: compiled(in_a_block(net, recipe))),
    "a block outside": (
        LATEST,
        in_a_block,
        lambda net, recipe: in_a_block(compiled(net), recipe),
    ),
    "recomputed": (
        SHORT,
        lambda net, recipe: recomputed(net),
        lambda net, recipe: recomputed(compiled(net)),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_have_the_bytes_of_eager_ones(way: str) -> None:
    torch._dynamo.reset()
    recipe, eager, traced = WAYS[way]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    net = ottava.convert(net.bfloat16(), recipe)
    twin: Any = copy.deepcopy(net)
    runs = [eager(net, recipe), traced(twin, recipe)]
    mine, theirs = (
        train(model, lambda x, step, run=run: run(x))
        for model, run in zip((net, twin), runs, strict=True)
    )
    assert_same(theirs, mine)
    assert (twin[0].recipe_state.scale != 1).all()


def test_microbatches_have_the_bytes_of_eager_ones() -> None:
    torch._dynamo.reset()
    layer = ottava.nn.Linear(16, 8, dtype=torch.bfloat16, recipe=SHORT)
    twin = copy.deepcopy(layer)
    results = [
        train(net, lambda x, step, run=run: run(x, is_first_microbatch=step % 2 == 0))
        for net, run in ((layer, layer), (twin, compiled(twin)))
    ]
    assert_same(*results)


def test_a_layer_without_a_state_is_named() -> None:
    torch._dynamo.reset()
    layer = ottava.nn.Linear(16, 8)
    run = in_a_block(layer, "delayed")
    with pytest.raises(Exception, match=r"UsageError|compiled code cannot make one"):
        compiled(run)(torch.randn(2, 16))
    run(torch.randn(2, 16))
    torch._dynamo.reset()
    assert compiled(run)(torch.randn(2, 16)).shape == (2, 8)
