"""An interrupt in a step leaves no region open: the next steps of the thread begin as usual.

Each case runs in a thread of its own, because regions belong to threads. A profile function raises
the interrupts where Python could raise them: as a function begins and after a call into C.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.recipes.region import regions
from ottava_delayed import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")


class Interrupts:
    """A profile function that raises KeyboardInterrupt at the ``at``-th place that it sees, and no
    other."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.place = at, 0, ""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_return"):
            return
        self.seen += 1
        if self.seen == self.at:
            name = frame.f_code.co_filename.rpartition("packages/")[2] or frame.f_code.co_filename
            self.place = f"{event} in {frame.f_code.co_qualname}, {name}:{frame.f_lineno}"
            raise KeyboardInterrupt


def in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns in a new thread, or its error."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run).start()
    return result.result()


# -- models, and their steps --


def converted(nested: bool = False) -> Any:
    """A converted model, the first part of which is one by itself if ``nested``."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    inner = ottava.convert(torch.nn.Sequential(first), RECIPE) if nested else first
    return ottava.convert(torch.nn.Sequential(inner, second), RECIPE)


def step(model: Any, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).sum().backward()
    optimizer.step()


def in_blocks(model: Any, x: torch.Tensor) -> None:
    """Blocks within blocks: one of the bound recipe around all, and one in high precision around a
    part."""
    with ottava.autocast():
        y = model(x)
        with ottava.autocast(RECIPE), ottava.autocast(enabled=False):
            y = y + model(x)
    y.sum().backward()


def calibrating(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad(), ottava.autocast(RECIPE, enabled=False, calibrating=True):
        model(x)
    with ottava.autocast(RECIPE):
        model(x).sum().backward()


def recomputed(model: Any, x: torch.Tensor, *, reentrant: bool = False) -> None:
    x = x.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()


def recomputed_with_region(model: Any, x: torch.Tensor) -> None:
    """The recomputation enters a region of its own, inside backward."""
    contexts = lambda: (contextlib.nullcontext(), ottava.autocast(RECIPE))  # noqa: E731
    with ottava.autocast(RECIPE):
        y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=False, context_fn=contexts)
    y.sum().backward()


def evaluated(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)
    model.train()
    step(model, x)


#: How a model, nested or not, is trained.
WAYS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "converted": step,
    "nested": step,
    "blocks": in_blocks,
    "calibrating": calibrating,
    "evaluated": evaluated,
    "recomputed": recomputed,
    "recomputed reentrantly": functools.partial(recomputed, reentrant=True),
    "recomputed with a region": recomputed_with_region,
}


# -- what holds after an interrupt --

# Before its first statement no code of a block can catch an interrupt: docs/limits.md says so.
LEAVING = ottava.autocast.__exit__.__code__


def close_an_unguarded_region(error: BaseException) -> None:
    """Close the regions after an interrupt that came there, so that the test goes on."""
    frames = traceback.walk_tb(error.__traceback__)
    *_, (frame, line) = (
        place for place in frames if place[0].f_code is not Interrupts.__call__.__code__
    )
    if frame.f_code is LEAVING and line == LEAVING.co_firstlineno:
        regions.stack.clear()


def scale_of(layer: Any) -> float:
    return float(layer.recipe_state.scale[0])


def wrong(model: Any, train: Callable[[Any, torch.Tensor], None]) -> str | None:
    """What does not go on as it should in this thread, or None."""
    # An interrupt may come between the two halves of torch's own no_grad, or of its own checkpoint.
    torch.set_grad_enabled(True)
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    x = torch.full((4, 16), 896.0)
    first = next(module for module in model.modules() if isinstance(module, ottava.nn.Linear))
    with warnings.catch_warnings(action="ignore"):
        for region in (ottava.autocast(), ottava.autocast(RECIPE)):
            layer = ottava.nn.Linear(16, 16, recipe=RECIPE)
            for _ in range(3):
                with region:
                    layer(x).sum().backward()
            if scale_of(layer) != 0.5:
                return "a block begins no steps"
        lone = ottava.nn.Linear(16, 16)
        if not torch.equal(lone(x), F.linear(x, lone.weight, lone.bias)):
            return "a layer without a recipe computes under one"
        seen = float(first.recipe_state.amax_history[0, 0])
        train(model, x)
        if train is not calibrating and seen and scale_of(first) != 448 / seen:
            return "the model's next step does not begin"
        for _ in range(2):
            train(model, x)
        if scale_of(first) != 0.5:
            return f"the model's steps do not begin: its scale is {scale_of(first)}"
    return None


def interrupted(way: str, at: int) -> tuple[Interrupts, str | None]:
    """The places of a step, and what is wrong after an interrupt at the ``at``-th one."""
    train, interrupts = WAYS[way], Interrupts(at)
    model = converted(way == "nested")
    x = torch.ones(4, 16)
    train(model, x)

    def run() -> str | None:
        try:
            sys.setprofile(interrupts)
            train(model, x)
        except KeyboardInterrupt as error:
            sys.setprofile(None)
            close_an_unguarded_region(error)
        finally:
            sys.setprofile(None)
        return wrong(model, train)

    with warnings.catch_warnings(action="ignore"):
        problem = in_thread(run)
    return interrupts, problem


@pytest.mark.parametrize("places", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_at_random_places(way: str, places: int) -> None:
    every, problem = interrupted(way, -1)
    assert problem is None
    problems = []
    for at in random.Random(0).sample(range(1, every.seen), places):
        interrupts, problem = interrupted(way, at)
        if problem is not None:
            problems.append(f"{interrupts.place}: {problem}")
    assert problems == []
