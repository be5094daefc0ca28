"""A state lives as long as its layer, by no leave of the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_delayed import DelayedScaling, Float8Quantizer

RECIPE = DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def no_garbage_is_collected() -> Iterator[None]:
    # The first one of a process imports the compiler, with what is running in the frames of its
    # errors.
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def bare() -> Any:
    return ottava.nn.Linear(16, 16)


def converted() -> Any:
    return ottava.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), RECIPE)


def alone(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # type: ignore[no-any-return]


def in_a_block(model: Any, x: torch.Tensor) -> torch.Tensor:
    with ottava.autocast(RECIPE):
        return model(x)  # type: ignore[no-any-return]


def recomputed(model: Any, x: torch.Tensor) -> torch.Tensor:
    with ottava.autocast(RECIPE):
        return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def calibrated(model: Any, x: torch.Tensor) -> torch.Tensor:
    with ottava.autocast(RECIPE, calibrating=True):
        model(x)
    return in_a_block(model, x)


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (converted, alone),
        (bare, in_a_block),
        (converted, in_a_block),
        (bare, recomputed),
        (bare, calibrated),
    ],
)
def test_it_goes_with_the_layer(
    make: Callable[[], Any], run: Callable[[Any, torch.Tensor], torch.Tensor]
) -> None:
    model = make()
    for _ in range(2):
        run(model, torch.ones(4, 16, requires_grad=True)).sum().backward()
    state = next(m for name, m in model.named_modules() if name.endswith("recipe_state"))
    scale, state = weakref.ref(state.scale), weakref.ref(state)
    del model
    assert state() is None
    assert scale() is None


def test_those_that_were_given_up_hold_up_no_others() -> None:
    """A layer that is garbage, and not collected yet, takes part in the step that it ran before,
    and in no other."""
    layer, other = bare(), bare()
    layer.__dict__["itself"] = [layer]
    in_a_block(layer, torch.ones(4, 16)).sum().backward()
    state = layer.recipe_state
    del layer
    histories = []
    for _ in range(3):
        in_a_block(other, torch.ones(4, 16)).sum().backward()
        histories.append(state.amax_history.clone())
    assert torch.equal(histories[0], histories[2])


def test_a_step_notes_what_ran_since_it_began() -> None:
    """However many there were."""
    layer = bare()
    for _ in range(5):
        in_a_block(layer, torch.ones(4, 16)).sum().backward()
    assert layer.recipe_state.step.members.states() == [layer.recipe_state]


def test_a_layer_that_ran_in_another_step_since_is_begun_by_that_one() -> None:
    layer, other = ottava.nn.Linear(16, 16, recipe=RECIPE), bare()
    in_a_block(torch.nn.Sequential(layer, other), torch.ones(4, 16)).sum().backward()
    with ottava.autocast():
        layer(torch.full((4, 16), 2.0)).sum().backward()
    before = layer.recipe_state.amax_history.clone()
    in_a_block(other, torch.ones(4, 16)).sum().backward()
    assert torch.equal(layer.recipe_state.amax_history, before)
    with ottava.autocast():
        assert layer.recipe_state.scale[0] == 448 / 2


class Still(ottava.Recipe):
    """A recipe without state."""

    name = "still"

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Float8Quantizer:
        return Float8Quantizer(torch.ones(1), None, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("recipe", "bind"),
    [
        (DelayedScaling(amax_history_len=2), True),
        (DelayedScaling(amax_history_len=2), False),
        (Still(), True),
    ],
    ids=["bound", "in a region", "bound to a recipe without state"],
)
@pytest.mark.filterwarnings(
    "ignore:Linear changes from", "ignore:the scaling state of Linear is discarded"
)
def test_a_state_that_was_discarded_begins_no_step(recipe: ottava.Recipe, bind: bool) -> None:
    layer, other = ottava.nn.Linear(16, 16, recipe=RECIPE), bare()
    in_a_block(torch.nn.Sequential(layer, other), torch.ones(4, 16)).sum().backward()
    state = layer.recipe_state
    if bind:
        layer.bind(recipe)
    else:
        with ottava.autocast(recipe):
            layer(torch.ones(4, 16))
    before = state.amax_history.clone()
    in_a_block(other, torch.ones(4, 16)).sum().backward()
    assert torch.equal(state.amax_history, before)
