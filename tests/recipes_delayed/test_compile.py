"""Training steps compiled whole, with the update of the state inside the graph: bitwise equal to
eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_delayed import DelayedScaling


def train(
    net: torch.nn.Module, run: Any, steps: int = 5
) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x = torch.randn(24, 16, generator=random).bfloat16() * (step + 1)
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


SHORT, LATEST = DelayedScaling(amax_history_len=3), DelayedScaling(amax_compute_algo="most_recent")


@pytest.mark.parametrize(
    ("where", "recipe"),
    [
        ("region inside", SHORT),
        ("region outside", LATEST),
        pytest.param("converted", LATEST, marks=pytest.mark.slow),
        pytest.param("converted", SHORT, marks=pytest.mark.slow),
        pytest.param("region inside", LATEST, marks=pytest.mark.slow),
        pytest.param("region outside", SHORT, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_eager(where: str, recipe: DelayedScaling) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    ).bfloat16()
    eager = ottava.convert(net, recipe)
    twin = copy.deepcopy(eager)

    def inside(module: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with ottava.autocast(recipe):
                return module(x)

        return run

    def compiled(module: Any) -> Any:
        return torch.compile(module, fullgraph=True, backend="aot_eager")

    runs = {
        "converted": (eager, compiled(twin)),
        "region inside": (inside(eager), compiled(inside(twin))),
        "region outside": (inside(eager), inside(compiled(twin))),
    }
    mine, theirs = train(eager, runs[where][0]), train(twin, runs[where][1])
    assert mine[0] == theirs[0]
    assert mine[1].keys() == theirs[1].keys()
    assert all(torch.equal(mine[1][name], theirs[1][name]) for name in mine[1])
    assert (mine[1]["0.recipe_state.scale"] != 1).all()


@pytest.mark.parametrize(
    "recipe",
    ["delayed", pytest.param(DelayedScaling(amax_history_len=2), marks=pytest.mark.slow)],
    ids=["named", "object"],
)
def test_a_layer_without_state_is_named(recipe: Any) -> None:
    torch._dynamo.reset()
    layer = ottava.nn.Linear(16, 8)

    def run(x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast(recipe):
            return layer(x)

    with pytest.raises(Exception, match=r"UsageError|compiled code cannot make one"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(torch.randn(2, 16))
    run(torch.randn(2, 16))
    torch._dynamo.reset()
    assert torch.compile(run, fullgraph=True, backend="aot_eager")(torch.randn(2, 16)).shape == (
        2,
        8,
    )


def test_compiled_code_that_is_recomputed_begins_no_step() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = ottava.convert(
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8)), DelayedScaling()
    )
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for step in range(4):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        eager(x).square().sum().backward()
        checkpoint(compiled, x, use_reentrant=False).square().sum().backward()
        for name in ("scale", "amax_history"):
            assert torch.equal(
                getattr(eager[0].recipe_state, name), getattr(twin[0].recipe_state, name)
            ), (step, name)
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(eager.parameters(), twin.parameters(), strict=True)
    )


def test_microbatches() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = ottava.nn.Linear(16, 8, recipe=DelayedScaling(amax_history_len=3))
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for step in range(4):
        gradients = []
        for layer in (eager, compiled):
            x = torch.randn(6, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
            layer(x, is_first_microbatch=step % 2 == 0).square().sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
    assert torch.equal(eager.weight.grad, twin.weight.grad)
    assert torch.equal(eager.recipe_state.scale, twin.recipe_state.scale)
