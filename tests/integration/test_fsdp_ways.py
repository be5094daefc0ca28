"""Ways to run a model under FSDP2 whose weights are gathered quantized: each trains as one process,
bit for bit."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import ottava
from ottava.distributed import hooks, quantized_on_gather
from ottava.errors import UsageError
from ottava_current import Float8CurrentScaling
from tests.cases import told
from tests.fsdp import (
    GROUPS,
    assert_states_equal,
    assert_trains_alike,
    batches,
    loss_of,
    make,
    optimizer_of,
    shard,
    state_of,
    train,
)
from tests.ranks import Collectives, on_ranks

RECIPES: dict[str, Callable[[], ottava.Recipe]] = {
    "current": lambda: ottava.get_recipe("current"),
    "delayed": lambda: ottava.get_recipe("delayed", amax_history_len=4),
    "mxfp8": lambda: ottava.get_recipe("mxfp8"),
}


@dataclass(frozen=True)
class Scheduled(Float8CurrentScaling):
    """The first step, and those after the second, are in high precision."""

    high_precision_until_step: int = 1
    high_precision_after_step: int | None = 2


GATHERED, SLOW = "gathered quantized", pytest.mark.slow
#: Groups, and reshard_after_forward.
SHARDINGS = list(itertools.product(GROUPS, (True, False)))


# -- what a training does besides --

Hook = Callable[[Any, int], Any]


def nothing(net: Any, number: int) -> None:
    pass


def loop(
    before: Hook = nothing,
    backward: Callable[[Any, torch.Tensor], Any] = lambda net, loss: loss.backward(),
    after: Hook = nothing,
    *,
    sharded: Hook = nothing,
    microbatches: int = 1,
    region: bool = False,
) -> Callable[[Any, int], list[float]]:
    """Steps of some microbatches, all of them in one region or each by itself; ``sharded`` is what
    is done to a sharded model before each."""

    def run(net: Any, count: int) -> list[float]:
        optimizer, losses, block = optimizer_of(net), [], contextlib.ExitStack()
        for number, batch in enumerate(batches(count * microbatches)):
            before(net, number)
            if isinstance(net, FSDPModule):
                sharded(net, number)
            if region and number % microbatches == 0:
                block.enter_context(ottava.autocast())
            loss = loss_of(net, batch)
            backward(net, loss)
            losses.append(loss.item())
            if number % microbatches == microbatches - 1:
                block.close()
                optimizer.step()
                optimizer.zero_grad()
            after(net, number)
        return losses

    return run


def keep_weights(net: Any, number: int) -> None:
    """Gradients are reduced, and weights released, after the last microbatch."""
    net.set_requires_gradient_sync(number % 2 == 1)
    net.set_reshard_after_backward(number % 2 == 1)


def unshard(net: Any, number: int) -> None:
    if number == 1:
        net.unshard()
        net.reshard()
    handle = net.unshard(async_op=number == 0)
    if handle is not None:
        handle.wait()


def evaluate(net: Any, number: int) -> None:
    """A step begins where one process would begin it, whatever ran before."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).bfloat16() * 9
    for training in (True, False):
        net.train(training)
        with torch.set_grad_enabled(not training):
            net(x)
        # FSDP keeps what no backward pass follows, quantized with the scale of the evaluation.
        for module in net.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    net.train()


def twice(net: Any, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def write(net: Any, number: int) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(1.25)


def optimize_in_backward(net: Any, number: int) -> None:
    """Which leaves no gradients to the optimizer of the loop."""
    if number:
        return
    optimizers = {p: torch.optim.SGD([p], lr=0.02) for p in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def prefetch(net: Any) -> None:
    net.set_modules_to_forward_prefetch([net.first, net.second])
    net.first.set_modules_to_forward_prefetch([net.second])
    net.second.set_modules_to_backward_prefetch([net.first])


def freeze(net: torch.nn.Module) -> None:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("weight" not in name)


class TiedLayers(torch.nn.Module):
    """Two layers have one weight, and are both quantized."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, width)
        self.last.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.nn.functional.gelu(self.second(self.first(x))))


#: Arguments of `assert_trains_alike`.
WAYS: dict[str, dict[str, Any]] = {
    "microbatches in a region": {"loop": loop(microbatches=2, region=True)},
    # The weights of the first one serve the second: in one region, where scales do not change.
    "microbatches with weights that are kept": {
        "loop": loop(sharded=keep_weights, microbatches=2, region=True)
    },
    # Before a forward pass has told which module is the outermost, whose weights are kept.
    "unsharded by hand": {
        "loop": loop(sharded=unshard),
        "groups": "layers",
        "fully_shard_options": {},
    },
    "prefetched": {"prepare_sharded": prefetch, "groups": "layers"},
    "evaluated in between": {"loop": loop(after=evaluate)},
    "recomputed": {"reentrant": False, "recomputes": True},
    "recomputed by a reentrant checkpoint": {"reentrant": True, "recomputes": True},
    "two backward passes": {"loop": loop(backward=twice)},
    "optimizer in the backward pass": {"loop": loop(optimize_in_backward)},
    "written through .data": {"loop": loop(after=write)},
    "frozen weights": {"prepare": freeze},
    "tied layers": {"kind": TiedLayers, "groups": "root"},
}


#: Which are tried with blocks, too, whose rows and columns are gathered by themselves.
WITH_BLOCKS = ("unsharded by hand", "recomputed", "frozen weights")


def check(mesh: DeviceMesh, way: str, name: str, sharding: tuple[str, bool], count: int) -> None:
    groups, reshard = sharding
    options = {"groups": groups, "fully_shard_options": {"reshard_after_forward": reshard}}
    options |= WAYS[way]
    assert_trains_alike(mesh, RECIPES[name](), GATHERED, name, count=count, **options)


@on_ranks(2)
def test_training_equals_one_process(mesh: DeviceMesh) -> None:
    for way in WAYS:
        with told(way):
            # Delayed scaling reduces as current scaling does, and has a state.
            check(mesh, way, "delayed", SHARDINGS[len(way) % 4], 2)
            if way in WITH_BLOCKS:
                check(mesh, way, "mxfp8", SHARDINGS[(1 + len(way)) % 4], 2)


@SLOW
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_training_of_every_recipe_equals_one_process(mesh: DeviceMesh, way: str) -> None:
    for name, sharding in itertools.product(RECIPES, SHARDINGS):
        check(mesh, way, name, sharding, 3)


@on_ranks(2)
def test_steps_in_high_precision(mesh: DeviceMesh) -> None:
    for kept, (groups, reshard) in itertools.product((GATHERED, "quantized"), SHARDINGS):
        sharding = {"groups": groups, "fully_shard_options": {"reshard_after_forward": reshard}}
        with told(kept, *sharding):
            assert_trains_alike(mesh, Scheduled(), kept, count=4, **sharding)


@on_ranks(2)
def test_blocks_of_two_directions_are_not_recomputed_unless_announced(mesh: DeviceMesh) -> None:
    """The gather for the backward pass brings columns alone."""
    for kept in (GATHERED, "quantized"):
        net = shard(make("mxfp8", kept, reentrant=False), mesh, reshard_after_forward=True)
        loss = loss_of(net, next(batches(1)))
        with pytest.raises(UsageError, match="reshard_after_forward=False or with_2d_quantization"):
            loss.backward()
    for options, reshard in (({"with_2d_quantization": True}, True), ({}, False)):
        recipe = ottava.get_recipe("mxfp8", **options)
        sharding = {"reshard_after_forward": reshard}
        assert_trains_alike(
            mesh, recipe, "quantized", reentrant=False, fully_shard_options=sharding
        )


@on_ranks(2)
def test_mixed_precision(mesh: DeviceMesh) -> None:
    """Float32 parameters, cast to bfloat16 before they are quantized."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, rows, groups in (("delayed", 33, "root"), ("mxfp8", 64, "layers")):
        net = make(RECIPES[name](), GATHERED, rows, dtype=torch.float32)
        shard(net, mesh, groups, mp_policy=policy)
        masters = make(RECIPES[name](), "high precision", rows, dtype=torch.float32)
        narrow, optimizer = copy.deepcopy(masters).bfloat16(), optimizer_of(masters)
        expected = []
        for batch in batches(2):
            with torch.no_grad():
                torch._foreach_copy_([*narrow.parameters()], [*masters.parameters()])
            loss = loss_of(narrow, batch)
            loss.backward()
            for own, master in zip(narrow.parameters(), masters.parameters(), strict=True):
                master.grad, own.grad = own.grad.float(), None
            optimizer.step()
            expected.append(loss.item())
        assert train(net, 2) == expected, (name, rows)
        state = state_of(narrow) | {n: p.detach() for n, p in masters.named_parameters()}
        assert_states_equal(state_of(net), state, (name, rows))


@on_ranks(2)
def test_torch_autocast(mesh: DeviceMesh) -> None:
    """Float32 parameters and gathers, products in bfloat16."""
    run = torch.autocast("cpu", torch.bfloat16)(train)
    for name in ("delayed", "mxfp8"):
        assert_trains_alike(mesh, RECIPES[name](), GATHERED, name, loop=run, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2, seconds=600)
def test_compiled(mesh: DeviceMesh, name: str) -> None:
    """A graph of both passes is traced around what the first of them gathers."""

    recipe = RECIPES[name]()
    alone = make(recipe, "high precision")
    expected, net = train(alone), make(recipe, GATHERED, recomputes=name == "mxfp8")
    assert train(net, run=torch.compile(shard(net, mesh), backend="aot_eager")) == expected
    assert_states_equal(state_of(net), state_of(alone), name)


@on_ranks(2)
def test_a_rank_may_write_its_shards_alone(mesh: DeviceMesh) -> None:
    """Between the passes: the backward pass reduces nothing, so no rank waits for another."""
    for name, groups in (("current", "layers"), ("delayed", "root")):
        net = shard(make(RECIPES[name](), GATHERED), mesh, groups, reshard_after_forward=True)
        for batch in batches(2):
            loss = loss_of(net, batch)
            if mesh.get_rank() == 0:
                for layer in (net.first, net.second, net.last):
                    layer.weight.to_local().high_precision().mul_(0.5)
            with Collectives() as backward:
                loss.backward()
            assert backward.count == 0, (name, groups)
            assert all(p.grad.to_local().isfinite().all() for p in net.parameters())


SHARDED = {"reshard_after_forward": True}


def collectives_of(mesh: DeviceMesh, name: str, *, grad: bool = True) -> Collectives:
    """The collectives of a step, or of a forward pass without gradients."""
    net = shard(make(RECIPES[name](), GATHERED), mesh, "root", **SHARDED)
    with torch.set_grad_enabled(grad), Collectives() as collectives:
        loss = loss_of(net, next(batches(1)))
        if grad:
            loss.backward()
    return collectives


@on_ranks(2)
def test_a_torch_that_does_not_say_which_weights_are_gathered_together(mesh: DeviceMesh) -> None:
    """More is gathered and reduced, and all of it is right."""
    found = []
    for module in (sys.modules["torch.distributed._composable_state"], None):
        sys.modules["torch.distributed._composable_state"] = module  # type: ignore[assignment]
        found.append([collectives_of(mesh, name) for name in ("current", "mxfp8")])
    for name in ("delayed", "mxfp8"):
        options = {"groups": "root", "fully_shard_options": SHARDED}
        assert_trains_alike(mesh, RECIPES[name](), GATHERED, name, **options)
    # The scale of each weight by itself; rows and columns in each pass.
    (together, rows), (alone, both) = found
    assert (together.count, alone.count) == (1, 3)
    assert sum(both.gathered) > sum(rows.gathered)


@on_ranks(2)
def test_rows_and_columns_are_gathered_where_torch_does_not_tell_the_pass(mesh: DeviceMesh) -> None:
    rows = collectives_of(mesh, "mxfp8", grad=False)
    vars(hooks)["KNOWS_BACKWARD"] = False
    assert sum(rows.gathered) < sum(collectives_of(mesh, "mxfp8", grad=False).gathered)
    for module in (hooks, quantized_on_gather):
        vars(module)["graph_task_id"] = lambda: -1
    options = {"groups": "root", "fully_shard_options": SHARDED}
    assert_trains_alike(mesh, RECIPES["mxfp8"](), GATHERED, "mxfp8", **options)
