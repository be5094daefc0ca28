"""``ottava.microbatch``: ``is_first_microbatch`` for all layers in a block."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import OptionError
from tests.comparing import assert_same

MICROBATCHES = 3
Run = Callable[[torch.Tensor, bool], torch.Tensor]


class Net(torch.nn.Module):
    """Two layers; ``first`` goes to each of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = ottava.nn.Linear(16, 32), ottava.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.up(x, is_first_microbatch=first).relu()
        return self.down(hidden, is_first_microbatch=first)


def net(recipe: str = "current") -> Any:
    return ottava.convert(Net(), ottava.get_recipe(recipe))


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number)) * (1 + number)


def steps(model: Any, run: Run) -> list[torch.Tensor]:
    """Outputs, gradients, weights and states of two steps of several microbatches."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        for number in range(MICROBATCHES):
            y = run(batch(step * MICROBATCHES + number).requires_grad_(), number == 0)
            y.square().mean().backward()
            results.append(y)
        results += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(value.clone() for value in model.state_dict().values())]


def in_a_block(run: Any) -> Run:
    def call(x: torch.Tensor, first: bool) -> torch.Tensor:
        with ottava.microbatch(first=first):
            y: torch.Tensor = run(x)
        return y

    return call


def with_other_blocks(model: Any) -> Run:
    """The innermost block decides, and the one around it goes on afterwards."""

    def run(x: torch.Tensor, first: bool) -> torch.Tensor:
        with ottava.microbatch(first=not first), ottava.microbatch(first=first):
            with pytest.raises(ZeroDivisionError), ottava.microbatch(first=not first):
                raise ZeroDivisionError
            y: torch.Tensor = model(x)
        return y

    return run


def beside_the_argument(model: Any) -> Run:
    """What a call says goes before what a block says."""
    return lambda x, first: ottava.microbatch(first=not first)(model)(x, first)


def around_a_checkpoint(model: Any, use_reentrant: bool) -> Run:
    """The block is over when the recomputation runs."""
    return in_a_block(lambda x: checkpoint(model, x, use_reentrant=use_reentrant))


def inside_a_checkpoint(model: Any, use_reentrant: bool) -> Run:
    run: Any = in_a_block(model)
    return lambda x, first: checkpoint(run, x, first, use_reentrant=use_reentrant)


def compiled(model: Any) -> Run:
    torch._dynamo.reset()
    run: Any = torch.compile(in_a_block(model), backend="aot_eager", fullgraph=True)
    return run  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Any], Run]] = {
    "in a block": in_a_block,
    "with other blocks": with_other_blocks,
    "beside the argument, decorated": beside_the_argument,
    "around a checkpoint": partial(around_a_checkpoint, use_reentrant=False),
    "around a reentrant checkpoint": partial(around_a_checkpoint, use_reentrant=True),
    "inside a checkpoint": partial(inside_a_checkpoint, use_reentrant=False),
    "inside a reentrant checkpoint": partial(inside_a_checkpoint, use_reentrant=True),
    "compiled": compiled,
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] * (way == "compiled")) for way in WAYS],
)
def test_a_block_has_the_bytes_of_the_argument(way: str) -> None:
    for recipe in ("delayed", "current"):
        model, other = net(recipe), net(recipe)
        expected = steps(other, other)
        assert_same(steps(model, WAYS[way](model)), expected, note=recipe)


def negated(model: Any) -> Any:
    """The model with another weight, which only layers that quantize it notice."""
    with torch.no_grad():
        model.up.weight.mul_(-1.0)
    return model


def test_weights_are_kept_in_blocks_of_this_thread_alone() -> None:
    """Also where another thread is in the same block."""
    model, x, block = net(), batch(0), ottava.microbatch(first=False)
    with ottava.microbatch(first=True):
        before = model(x)
    negated(model)
    with ThreadPoolExecutor(1) as pool:
        with block:
            elsewhere = pool.submit(model, x).result()
            assert torch.equal(model(x), before)
            pool.submit(block.__enter__).result()
        assert torch.equal(model(x), elsewhere)
        pool.submit(block.__exit__, None, None, None).result()
        assert torch.equal(pool.submit(model, x).result(), elsewhere)
    assert not torch.equal(elsewhere, before)


@pytest.mark.parametrize("first", [None, 1, "yes", torch.tensor(True)])
def test_a_block_refuses_what_is_no_bool(first: Any) -> None:
    with pytest.raises(OptionError, match=r"first of a microbatch is .*Expected: True or False"):
        ottava.microbatch(first=first)


def test_blocks_of_generators_end_in_any_order() -> None:
    def block(first: bool) -> Iterator[None]:
        with ottava.microbatch(first=first):
            yield

    model, x = net(), batch(0)
    outer, inner = block(True), block(False)
    next(outer)
    next(inner)
    outer.close()
    before = model(x)
    # The block that is left says False.
    assert torch.equal(negated(model)(x), before)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(inner.close).result()
        pool.submit(model, x).result()
    # The block was never ended in the thread that it was begun in.
    del ottava.recipes.region.regions.microbatches[:]


def test_a_block_begins_and_ends_without_a_call() -> None:
    """After one, an interrupt may come, which would leave the block open."""
    block, events = ottava.microbatch(first=True), []
    codes = {ottava.microbatch.__enter__.__code__, ottava.microbatch.__exit__.__code__}
    sys.setprofile(lambda frame, event, _: frame.f_code in codes and events.append(event))
    try:
        with block:
            pass
    finally:
        sys.setprofile(None)
    assert events == ["call", "return"] * 2


def loaded(layer: Any) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in layer.named_parameters()}
    layer.load_state_dict(zeros, strict=False)


def replaced(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(torch.zeros(32, 32))


def bound(layer: Any) -> None:
    layer.bind("mxfp8")


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("change", [loaded, replaced, torch.nn.Module.bfloat16, bound])
def test_a_kept_weight_goes_with_the_parameter_and_the_recipe(change: Any, recipe: str) -> None:
    layer: Any = ottava.nn.Linear(32, 32, recipe=recipe)
    x = torch.randn(16, 32)
    layer(x, is_first_microbatch=True)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        change(layer)
        other = ottava.nn.Linear.from_linear(copy.deepcopy(layer))
        other.bind(layer.recipe)
        x = x.to(layer.weight.dtype)
        assert torch.equal(layer(x, is_first_microbatch=False), other(x))
        # A region's other recipe quantizes it anew, whatever the call says.
        with ottava.autocast("rowwise"):
            assert torch.equal(layer(x, is_first_microbatch=False), other(x))


def test_a_kept_weight_is_in_no_copy_and_no_file() -> None:
    layer, x = ottava.nn.Linear(32, 32, bias=False, recipe="current"), torch.randn(16, 32)
    layer(x, is_first_microbatch=True)
    file = io.BytesIO()
    torch.save(layer, file)
    assert file.tell() < 32 * 32 * 4 + 4096
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    assert not other(x, is_first_microbatch=False).any()
