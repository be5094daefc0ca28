"""Elements that evaluation clamps are counted, and warned of once for each operand of a layer; no
scale moves."""

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
from tests.comparing import assert_same

RECIPE = DelayedScaling(amax_history_len=4)
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(7))
WEIGHT = ["weight of layer '2'"]


@contextmanager
def clamped() -> Iterator[list[str]]:
    """The operands that are warned of inside, in order; there are no other warnings."""
    operands: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield operands
    for warning in caught:
        text = str(warning.message)
        assert text.startswith("evaluation clamps the "), text
        assert "ottava.autocast(calibrating=True)" in text
        operands.append(text.removeprefix("evaluation clamps the ").partition(",")[0])


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


def merged(recipe: Any = RECIPE) -> Any:
    """A trained model whose last weight was changed from outside."""
    net = trained(recipe)
    with torch.no_grad():
        net[2].weight.mul_(8)
    return net


@torch.no_grad()
def evaluated(net: Any, x: torch.Tensor = X) -> torch.Tensor:
    return net(x)  # type: ignore[no-any-return]


def count(net: Any, layer: str = "2", tensor: str = "weight") -> int:
    return scaling_statistics(net)[layer][tensor].saturated_in_evaluation


def error_of(net: Any) -> float:
    with ottava.autocast(enabled=False):
        exact = evaluated(copy.deepcopy(net))
    return ((evaluated(net) - exact).norm() / exact.norm()).item()


def loaded(net: Any) -> None:
    net.load_state_dict({**net.state_dict(), "2.weight": net[2].weight.detach() * 8})


def one_outlier(net: Any) -> None:
    net[2].weight[3, 5] = 40.0


@pytest.mark.parametrize("change", [loaded, one_outlier])
def test_a_weight_that_was_changed_from_outside(change: Callable[[Any], None]) -> None:
    """It is counted in each evaluation, warned of once, and calibration is the remedy."""
    net = trained()
    with torch.no_grad():
        change(net)
    state = net[2].recipe_state
    before = {name: value.clone() for name, value in state.state_dict().items()}
    expected = int((net[2].weight.detach() * before["scale"][1]).abs().gt(448).sum())
    with clamped() as operands:
        assert error_of(net) > 0.05
        evaluated(net)
    assert operands == WEIGHT
    assert count(net) == 2 * expected > 0
    assert count(net, "2", "grad_output") == 0
    assert scaling_statistics(net)["2"]["weight"].saturated == before["saturated"][1]
    assert_same(list(state.state_dict().values()), list(before.values()))
    with torch.no_grad(), ottava.autocast(calibrating=True):
        net(X)
    with clamped() as operands:
        assert error_of(net) < 0.06
    assert operands == []


def test_inputs_are_counted_and_warned_of_as_well() -> None:
    net = trained()
    with clamped() as operands:
        evaluated(net, 100 * X)
        with torch.no_grad():
            net[0].weight.mul_(8)
        evaluated(net, 100 * X)
    assert operands == ["input of layer '0'", "weight of layer '0'"]
    assert count(net, "0", "input") > 0
    net[0].recipe_state.reset()
    assert count(net, "0", "input") == 0
    with clamped() as operands:
        evaluated(net, 1e4 * X)
    assert operands == ["input of layer '0'"]
    assert count(net, "0", "input") > 0


def test_small_excesses_are_counted_without_a_warning() -> None:
    net = trained()
    with torch.no_grad():
        # As in one step of training; rounding changes values as much.
        net[2].weight.mul_(1.02)
        net[0].weight.mul_(0.9)
    with clamped() as operands:
        evaluated(net)
        assert count(net) > 0
        # Among many batches some have values that are larger than all of training's.
        evaluated(net, 1.8 * X)
        # The scale had room for an earlier pass with larger inputs.
        evaluated(net, 0.9 * X)
        net[0].recipe_state.scale[0] *= 3
        evaluated(net, 0.34 * X)
    assert operands == []


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_step_is_no_evaluation(use_reentrant: bool | None) -> None:
    net, x = trained(), (8 * X).requires_grad_()
    with clamped() as operands:
        if use_reentrant is None:
            net(x).sum().backward()
        else:
            checkpoint(net, x, use_reentrant=use_reentrant).sum().backward()
    assert operands == []
    assert count(net, "0", "input") == 0
    assert scaling_statistics(net)["0"]["input"].saturated > 0


# The process that compiles for the conformance kit has imported the compiler.
@pytest.mark.xdist_group("ranks")
def test_compiled_evaluation_is_whole_and_counts_nothing() -> None:
    torch._dynamo.reset()
    net = merged()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with clamped() as operands:
        result = evaluated(compiled)
    assert (operands, count(net)) == ([], 0)
    with clamped() as operands:
        assert torch.equal(evaluated(net), result)
    assert operands == WEIGHT


def test_a_weight_that_is_kept_for_microbatches_counts_once() -> None:
    net, counts = merged(), []
    with clamped() as operands:
        for first in (True, False):
            with ottava.microbatch(first=first):
                evaluated(net)
            counts.append(count(net))
    assert operands == WEIGHT
    assert counts[0] == counts[1] > 0


def test_a_part_of_a_mixed_state_warns_too() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    request = ottava.QuantizerRequest(DelayedScaling(amax_history_len=2))
    recipe.set_quantizer_factory(lambda role: request if role.tensor_type == "weight" else None)
    with clamped() as operands:
        evaluated(merged(recipe))
    assert operands == WEIGHT


def test_copies_count_from_zero() -> None:
    """The counts are no state."""
    net = merged()
    names = [name for name, _ in net.named_buffers()]
    with clamped() as operands, torch.device("cpu"):
        evaluated(net)
    assert operands == WEIGHT
    assert [name for name, _ in net.named_buffers()] == names
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert count(other) == 0
        with clamped() as operands:
            with torch.inference_mode():
                other(X)
            evaluated(other)
        assert operands == WEIGHT


def test_an_evaluation_has_the_scales_that_the_state_has_now() -> None:
    net = trained()
    evaluated(net)
    net[0].recipe_state.scale = net[0].recipe_state.scale / 1000
    assert_same(evaluated(net), evaluated(copy.deepcopy(net)))


def test_evaluation_on_meta_counts_nothing() -> None:
    with clamped() as operands:
        assert evaluated(merged().to("meta"), X.to("meta")).is_meta
    assert operands == []
