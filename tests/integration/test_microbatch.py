"""``ottava.microbatch``: what ``is_first_microbatch`` says for one layer, said for all in a
block."""

from __future__ import annotations

import copy
import io
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import OptionError
from tests.combinations import slow

RECIPES = ["delayed", "current"]
MICROBATCHES = 3


class Net(torch.nn.Module):
    """Two layers; ``first`` goes to each of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = ottava.nn.Linear(16, 32), ottava.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.up(x, is_first_microbatch=first).relu()
        return self.down(hidden, is_first_microbatch=first)


def net(recipe: str) -> Any:
    return ottava.convert(Net(), ottava.get_recipe(recipe))


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number)) * (1 + number)


def steps(
    model: Any, run: Callable[[torch.Tensor, bool], torch.Tensor], count: int = 2
) -> list[torch.Tensor]:
    """What some steps of several microbatches give: outputs, gradients, weights and states."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[torch.Tensor] = []
    for step in range(count):
        for number in range(MICROBATCHES):
            # A converted model begins a step of scales with every forward pass, with or without
            # microbatches.
            y = run(batch(step * MICROBATCHES + number).requires_grad_(), number == 0)
            y.square().mean().backward()
            made.append(y.detach().clone())
        made += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return made + [value.clone() for value in model.state_dict().values()]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def by_argument(recipe: str) -> list[torch.Tensor]:
    model = net(recipe)
    return steps(model, lambda x, first: model(x, first))


def in_a_block(model: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    def run(x: torch.Tensor, first: bool) -> torch.Tensor:
        with ottava.microbatch(first=first):
            y: torch.Tensor = model(x)
        return y

    return run


def with_other_blocks(model: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """The innermost block says it, and the one around it goes on afterwards."""

    def run(x: torch.Tensor, first: bool) -> torch.Tensor:
        with ottava.microbatch(first=not first), ottava.microbatch(first=first):
            with ottava.microbatch(first=not first):
                pass
            y: torch.Tensor = model(x)
        return y

    return run


def decorated(model: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    functions = {
        first: ottava.microbatch(first=first)(lambda x: model(x)) for first in (True, False)
    }
    return lambda x, first: functions[first](x)


def after_an_exception(model: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    def run(x: torch.Tensor, first: bool) -> torch.Tensor:
        with ottava.microbatch(first=first):
            with pytest.raises(ZeroDivisionError), ottava.microbatch(first=not first):
                raise ZeroDivisionError
            y: torch.Tensor = model(x)
        return y

    return run


def beside_the_argument(model: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """What a call says goes before what a block says."""

    def run(x: torch.Tensor, first: bool) -> torch.Tensor:
        with ottava.microbatch(first=not first):
            y: torch.Tensor = model(x, first)
        return y

    return run


def compiled(model: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    torch._dynamo.reset()
    return in_a_block(torch.compile(model, backend="aot_eager", fullgraph=True))


def compiled_with_the_block(model: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    torch._dynamo.reset()
    block: Callable[[torch.Tensor, bool], torch.Tensor]
    block = torch.compile(in_a_block(model), backend="aot_eager", fullgraph=True)
    return block


WAYS = [
    in_a_block,
    with_other_blocks,
    decorated,
    after_an_exception,
    beside_the_argument,
]


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        *itertools.product(RECIPES, WAYS),
        ("delayed", compiled),
        ("current", compiled_with_the_block),
        *slow(("current", compiled), ("delayed", compiled_with_the_block)),
    ],
)
def test_the_bytes_of_the_argument(recipe: str, way: Callable[..., Any]) -> None:
    model = net(recipe)
    assert same(steps(model, way(model)), by_argument(recipe))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed(recipe: str, inside: bool, use_reentrant: bool) -> None:
    """The block is around the checkpoint, and over by the recomputation, or inside of what is
    recomputed."""
    model = net(recipe)
    block = in_a_block(model)

    def run(x: torch.Tensor, first: bool) -> torch.Tensor:
        y: torch.Tensor
        if inside:
            y = checkpoint(block, x, first, use_reentrant=use_reentrant)
            return y
        with ottava.microbatch(first=first):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
        return y

    assert same(steps(model, run), by_argument(recipe))


def test_weights_are_kept_in_a_block_alone() -> None:
    """With False layers use what they kept, whatever the weight is now; after the block they
    quantize it."""
    model = net("current")
    x = batch(0)
    with ottava.microbatch(first=True):
        before = model(x)
    with torch.no_grad():
        model.up.weight.mul_(-1.0)
    with ottava.microbatch(first=False):
        assert torch.equal(model(x), before)
    assert not torch.equal(model(x), before)


def test_other_threads_are_not_in_the_block() -> None:
    model = net("current")
    x = batch(0)
    told: list[torch.Tensor] = []
    with ottava.microbatch(first=True):
        before = model(x)
    with torch.no_grad():
        model.up.weight.mul_(-1.0)
    with ottava.microbatch(first=False):
        thread = threading.Thread(target=lambda: told.append(model(x)))
        thread.start()
        thread.join()
        assert torch.equal(model(x), before)
    assert torch.equal(told[0], model(x))
    assert not torch.equal(told[0], before)


def test_threads_may_share_a_block() -> None:
    """One enters it while another is in it, and each goes back to what it was in."""
    model, block, x = net("current"), ottava.microbatch(first=True), batch(0)
    entered, left = threading.Event(), threading.Event()

    def run() -> None:
        with ottava.microbatch(first=False), block:
            entered.set()
            left.wait()

    thread = threading.Thread(target=run)
    with block:
        model(x)
        thread.start()
        entered.wait()
    with torch.no_grad():
        model.up.weight.mul_(-1.0)
    after = model(x)
    left.set()
    thread.join()
    assert torch.equal(after, net_with(model.up.weight)(x))


def net_with(weight: torch.Tensor) -> Any:
    made = net("current")
    with torch.no_grad():
        made.up.weight.copy_(weight)
    return made


@pytest.mark.parametrize("first", [None, 1, "yes", torch.tensor(True)])
def test_what_is_no_bool_is_refused(first: Any) -> None:
    with pytest.raises(OptionError, match=r"first of a microbatch is .*Expected: True or False"):
        ottava.microbatch(first=first)


def test_blocks_end_in_any_order_and_in_any_thread() -> None:
    def block(first: bool) -> Iterator[None]:
        with ottava.microbatch(first=first):
            yield

    layer, x = ottava.nn.Linear(32, 32, recipe="current"), torch.randn(16, 32)
    outer, inner = block(True), block(False)
    next(outer)
    next(inner)
    outer.close()
    layer(x)
    quantized = layer._binding.microbatch_weight
    assert quantized is not None
    layer(x)
    assert layer._binding.microbatch_weight is quantized, "the block that is left says False"
    failed: list[BaseException] = []

    def elsewhere() -> None:
        inner.close()
        try:
            layer(x)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    # The block was never ended in the thread that it was begun in.
    del ottava.recipes.region.regions.microbatches[:]
    assert not failed


def test_a_kept_weight_is_that_of_the_parameter() -> None:
    layer, x = ottava.nn.Linear(32, 32, recipe="current"), torch.randn(16, 32)
    layer(x, is_first_microbatch=True)
    size = io.BytesIO()
    torch.save(layer, size)
    assert copy.deepcopy(layer)._binding.microbatch_weight is None
    assert size.tell() < 32 * 32 * 4 + 4096
    layer.weight, layer.bias = (
        torch.nn.Parameter(torch.zeros(32, 32)),
        torch.nn.Parameter(torch.zeros(32)),
    )
    assert not layer(x, is_first_microbatch=False).any()
    layer(x, is_first_microbatch=True)
    layer.bfloat16()
    assert layer._binding.microbatch_weight is None
    layer(x.bfloat16(), is_first_microbatch=True)
    layer.load_state_dict(layer.state_dict())
    assert layer._binding.microbatch_weight is None


def test_a_kept_weight_is_that_of_the_recipe() -> None:
    """A region's other recipe quantizes it anew, whatever the call says."""
    layer, x = ottava.nn.Linear(32, 32, recipe="current"), torch.randn(16, 32)
    layer(x, is_first_microbatch=True)
    other = ottava.nn.Linear.from_linear(layer)
    with ottava.autocast("mxfp8"), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        assert torch.equal(layer(x, is_first_microbatch=False), other(x))
    assert type(layer._binding.microbatch_weight.storage).__name__ == "MXFP8TensorStorage"


def test_a_block_begins_and_ends_without_a_call() -> None:
    """After one, an interrupt may come, which would leave the block open."""
    block, seen = ottava.microbatch(first=True), []
    own = {ottava.microbatch.__enter__.__code__, ottava.microbatch.__exit__.__code__}
    outer = ottava.microbatch(first=False)
    with outer:
        sys.setprofile(lambda frame, event, _: seen.append(event) if frame.f_code in own else None)
        try:
            with block:
                pass
        finally:
            sys.setprofile(None)
    assert seen == ["call", "return"] * 2
