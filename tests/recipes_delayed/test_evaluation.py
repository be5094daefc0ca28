"""What evaluation clamps is counted, and warned of once for each operand of a layer; it moves
nothing."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_delayed import DelayedScaling, scaling_statistics

RECIPE = DelayedScaling(amax_history_len=4)
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(7))


@contextmanager
def clamps() -> Iterator[list[str]]:
    """What is warned of inside: the operands, in the order of the warnings, and nothing else."""
    operands: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield operands
    for warning in caught:
        said = str(warning.message)
        assert said.startswith("evaluation clamps the "), said
        assert "ottava.autocast(calibrating=True)" in said
        operands.append(said.removeprefix("evaluation clamps the ").partition(",")[0])


def trained(recipe: Any = RECIPE) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    net = ottava.convert(net, recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(4):
        net(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def evaluated(net: Any, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        return net(x)  # type: ignore[no-any-return]


def counts(net: Any, layer: str = "2", tensor: str = "weight") -> int:
    return scaling_statistics(net)[layer][tensor].saturated_in_evaluation


def error_of(net: Any) -> float:
    exact = copy.deepcopy(net)
    with ottava.autocast(enabled=False):
        expected = evaluated(exact)
    return ((evaluated(net) - expected).norm() / expected.norm()).item()


def merged(weight: torch.Tensor) -> None:
    weight.mul_(8)


def copied(weight: torch.Tensor) -> None:
    weight.copy_(weight * 8)


def one_outlier(weight: torch.Tensor) -> None:
    weight[3, 5] = 40.0


@pytest.mark.parametrize(
    "change", [merged, copied, one_outlier], ids=lambda change: change.__name__
)
def test_a_weight_that_was_changed_from_outside(change: Callable[[torch.Tensor], None]) -> None:
    net = trained()
    before = {name: value.clone() for name, value in net[2].recipe_state.state_dict().items()}
    with torch.no_grad():
        change(net[2].weight)
    scale = before["scale"][1]
    expected = int((net[2].weight.detach() * scale).abs().gt(448).sum())
    with clamps() as operands:
        evaluated(net)
        assert counts(net) == expected > 0
        evaluated(net)
    assert operands == ["weight of layer '2'"]
    assert counts(net) == 2 * expected
    statistics = scaling_statistics(net)
    assert statistics["2"]["weight"].saturated == before["saturated"][1]
    assert counts(net, "2", "grad_output") == 0
    after = net[2].recipe_state.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_loaded_weight_and_the_remedy() -> None:
    net = trained()
    values = {**net.state_dict(), "2.weight": net[2].weight.detach() * 8}
    net.load_state_dict(values)
    with clamps() as operands:
        assert error_of(net) > 0.3
    assert operands == ["weight of layer '2'"]
    with torch.no_grad(), ottava.autocast(calibrating=True):
        net(X)
    with clamps() as operands:
        assert error_of(net) < 0.06
    assert operands == []


def test_inputs_are_counted_and_warned_of_as_well() -> None:
    net = trained()
    with clamps() as operands:
        evaluated(net, 100 * X)
        with torch.no_grad():
            net[0].weight.mul_(8)
        evaluated(net, 100 * X)
    assert operands == ["input of layer '0'", "weight of layer '0'"]
    assert counts(net, "0", "input") > 0
    net[0].recipe_state.reset()
    assert counts(net, "0", "input") == 0


def test_what_rounding_would_change_as_much_is_no_reason() -> None:
    """Weights grow a little in each step, and an evaluation between two steps has the scales of the
    one before."""
    net = trained()
    with torch.no_grad():
        net[2].weight.mul_(1.02)
    with clamps() as operands:
        evaluated(net)
    assert operands == []
    assert counts(net) > 0
    # Among many batches some have values that are somewhat larger than all of training's.
    with clamps() as operands:
        evaluated(net, 1.8 * X)
    assert operands == []
    # An earlier pass with larger inputs, which its scale had room for, is no reason either.
    evaluated(net, 0.9 * X)
    net[0].recipe_state.scale[0] *= 1.5
    with clamps() as operands:
        evaluated(net, 0.68 * X)
    assert operands == []


def reentrant(net: Any) -> None:
    checkpoint(net, (8 * X).requires_grad_(), use_reentrant=True).sum().backward()


def recomputed(net: Any) -> None:
    checkpoint(net, 8 * X, use_reentrant=False).sum().backward()


def plain(net: Any) -> None:
    net(8 * X).sum().backward()


@pytest.mark.parametrize("step", [plain, recomputed, reentrant], ids=lambda step: step.__name__)
def test_a_step_is_no_evaluation(step: Callable[[Any], None]) -> None:
    net = trained()
    with clamps() as operands:
        step(net)
    assert operands == []
    assert counts(net, "0", "input") == 0
    assert scaling_statistics(net)["0"]["input"].saturated > 0


def test_compiled_evaluation_is_whole_and_counts_nothing() -> None:
    torch._dynamo.reset()
    net = trained()
    with torch.no_grad():
        net[2].weight.mul_(8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with clamps() as operands:
        result = evaluated(compiled)
    assert (operands, counts(net)) == ([], 0)
    with clamps() as operands:
        assert torch.equal(evaluated(net), result)
    assert operands == ["weight of layer '2'"]


def test_a_weight_that_is_kept_for_microbatches() -> None:
    net = trained()
    with torch.no_grad():
        net[2].weight.mul_(8)
    with clamps() as operands:
        with ottava.microbatch(first=True):
            evaluated(net)
        once = counts(net)
        with ottava.microbatch(first=False):
            evaluated(net)
    assert operands == ["weight of layer '2'"]
    assert counts(net) == once > 0


def test_a_recipe_that_another_one_asks_for() -> None:
    recipe = ottava.get_recipe("delayed", margin=1)
    asks = {"weight": ottava.QuantizerRequest(RECIPE)}
    recipe.set_quantizer_factory(lambda role: asks.get(role.tensor_type))
    net = trained(recipe)
    with torch.no_grad():
        net[2].weight.mul_(8)
    with clamps() as operands:
        evaluated(net)
    assert operands == ["weight of layer '2'"]


def test_modes_copies_and_observers() -> None:
    net = trained()
    with torch.no_grad():
        net[2].weight.mul_(8)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with clamps() as operands, torch.inference_mode():
            evaluated(other)
        with clamps() as again:
            evaluated(other)
        assert (operands, again) == (["weight of layer '2'"], [])
        assert counts(copy.deepcopy(other)) == 0
    assert counts(net) == 0
    names = [name for name, _ in net.named_buffers()]
    with clamps() as operands, torch.device("cpu"):
        evaluated(net)
    assert operands == ["weight of layer '2'"]
    assert [name for name, _ in net.named_buffers()] == names
    assert evaluated(copy.deepcopy(net).to("meta"), X.to("meta")).is_meta
