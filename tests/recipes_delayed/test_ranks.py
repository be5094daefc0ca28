"""Ranks reduce amaxes: the scales of one process that saw all the data, in one all-reduce a
step."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ottava
from ottava.collectives import all_gather, all_reduce_max
from ottava.errors import OptionError, UsageError
from ottava_delayed import DelayedScaling, Float8Quantizer
from tests.comparing import assert_same
from tests.ranks import Collectives, on_ranks

# One process forks all ranks.
pytestmark = pytest.mark.xdist_group("forks")
HISTORY = 3
Net = torch.nn.Sequential


def model() -> Net:
    torch.manual_seed(0)
    return Net(*(part for _ in range(3) for part in (torch.nn.Linear(16, 16), torch.nn.Tanh())))


def shard(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 16, generator=random) * (1 + (7 * step + 3 * rank) % 5)


def state_of(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales and the amaxes of past steps."""
    state = {name: v for name, v in net.state_dict().items() if "recipe_state" in name}
    scales = {name: value for name, value in state.items() if name.endswith("scale")}
    return scales | {n: value[1:] for n, value in state.items() if n.endswith("amax_history")}


def scale_after(steps: range, ranks: Any) -> torch.Tensor:
    """The scale of an input, of the amaxes of the last steps of some ranks."""
    last = steps[-HISTORY:]
    amax = torch.stack([shard(step, rank).abs().max() for step in last for rank in ranks]).max()
    return torch.div(torch.tensor(448.0), amax)


def recipe(**options: Any) -> DelayedScaling:
    return DelayedScaling(amax_history_len=HISTORY, **options)


class Alone:
    """One process that sees the data of all ranks, in batches of the same shapes."""

    def __init__(self) -> None:
        self.net = ottava.convert(model(), recipe(reduce_amax=False))

    def assert_equal(self, net: Net, step: int, ranks: list[int]) -> None:
        """Its state after the step is that of a rank."""
        with ottava.autocast():
            outputs = [self.net(shard(step, rank)) for rank in ranks]
        torch.cat(outputs).sum().backward()
        expected = state_of(self.net)
        for name, value in state_of(net).items():
            assert_same(value, expected[name], note=(step, name))


@pytest.mark.parametrize("way", ["the default group", "halves", "halves by name"])
@on_ranks(4)
def test_ranks_have_the_bytes_of_one_process(mesh: DeviceMesh, way: str) -> None:
    """One all-reduce a step. One rank evaluates by itself: in the same way, without the group, and
    a copy. The name of a group keeps no group alive."""
    rank, ranks = mesh.get_rank(), list(range(4))
    region: Callable[[], Any] = contextlib.nullcontext
    if way != "the default group":
        halves = [[0, 1], [2, 3]]
        groups, ranks = [dist.new_group(half) for half in halves], halves[rank // 2]
        group = groups[rank // 2]
        name: Any = group.group_name if way == "halves by name" else group
        region = partial(ottava.autocast, amax_reduction_group=name)
    net, alone = ottava.convert(model(), recipe()), Alone()
    for step in range(5):
        with Collectives() as collectives:
            with region():
                y = net(shard(step, rank))
            y.sum().backward()
        # A region does not know its layers before they have run in it once.
        assert collectives.count == 1 or (step == 0 and way != "the default group"), step
        alone.assert_equal(net, step, ranks)
        if rank == ranks[0]:
            with torch.no_grad():
                with region():
                    net.eval()(1000 * shard(step, 0))
                with ottava.autocast():
                    net(1000 * shard(step, 0))
                    copy.deepcopy(net)(shard(step, 0))
                with ottava.autocast(recipe()):
                    copy.deepcopy(net)(shard(step, 0))
            net.train()


@on_ranks(2)
def test_a_function_has_the_amaxes_of_all_ranks(mesh: DeviceMesh) -> None:
    """A rank whose values are zero moves with the other."""
    algorithm = recipe(amax_compute_algo=lambda history: history.amax(0))
    net = ottava.convert(Net(torch.nn.Linear(16, 16)), algorithm)
    for step in range(3):
        net(shard(step, 0) * (mesh.get_rank() == 0)).sum().backward()
        if step:
            scale = net.state_dict()["0.recipe_state.scale"][0]
            assert_same(scale, scale_after(range(step), [0]), note=step)


@on_ranks(2)
def test_the_shards_of_a_weight_fit_the_largest_of_all(mesh: DeviceMesh) -> None:
    quantizer = Float8Quantizer(1.0, torch.zeros(1), torch.float8_e4m3fn)
    quantizer.initialize(torch.ones(1))
    shard_of, shard = quantizer.for_shards(dist.group.WORLD), torch.tensor([7.0, 14.0])
    own = shard[mesh.get_rank()].reshape(1)
    assert shard_of(own)._scale_inv.item() == 1 / 32
    # The quantizer itself stays alone.
    assert quantizer(own)._scale_inv.item() == own.item() / 448


@on_ranks(2)
def test_what_is_no_group(mesh: DeviceMesh) -> None:
    """It is named before any rank waits."""
    for group in (3, object(), [0, 1], mesh):
        for function in (all_reduce_max, all_gather):
            with pytest.raises(OptionError, match=r"the group is .*new_group\(\).*get_group\(\)"):
                function(torch.ones(2), group)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no process group has the name 'some'"):
        all_reduce_max(torch.ones(2), "some")
    outside = dist.new_group([1])
    if mesh.get_rank() == 0:
        with pytest.raises(OptionError, match="this process is in"):
            all_reduce_max(torch.ones(2), outside)


@pytest.mark.parametrize("nested", [True, False])
@on_ranks(4)
def test_two_groups(mesh: DeviceMesh, nested: bool) -> None:
    """Regions one in the other, or one after the other, of one recipe and each with a group: one
    reduction for each, and a region moves nothing of another."""
    rank, pair = mesh.get_rank(), mesh.get_rank() // 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer = recipe()
    inner = recipe(margin=1) if nested else outer
    a, b = ottava.nn.Linear(16, 16), ottava.nn.Linear(16, 16)
    for step in range(5):
        x = shard(step, rank)
        with Collectives() as collectives, contextlib.ExitStack() as regions:
            regions.enter_context(ottava.autocast(outer, amax_reduction_group=dist.group.WORLD))
            y = a(x)
            if not nested:
                regions.close()
            with ottava.autocast(inner, amax_reduction_group=pairs[pair]):
                y = y + b(x)
            regions.close()
            y.sum().backward()
        assert collectives.count == (2 if step else 0), (step, collectives.count)
        for layer, ranks, divisor in ((a, range(4), 1), (b, (2 * pair, 2 * pair + 1), 1 + nested)):
            assert layer.recipe_state.amax_history[0, 0] == x.abs().max(), step
            if step:
                expected = scale_after(range(step), ranks) / divisor
                assert_same(layer.recipe_state.scale[0], expected, note=step)


@pytest.mark.parametrize("way", ["DDP", pytest.param("compiled", marks=pytest.mark.slow)])
@on_ranks(2)
def test_wrapped_models(mesh: DeviceMesh, way: str) -> None:
    """DDP broadcasts buffers by default: not these, or amaxes of other ranks would be lost. A graph
    holds the reduction."""
    net, alone = ottava.convert(model(), recipe()), Alone()
    run: Any = torch.nn.parallel.DistributedDataParallel(net) if way == "DDP" else None
    run = run or torch.compile(net, fullgraph=True, backend="aot_eager")
    for step in range(3):
        run(shard(step, mesh.get_rank())).sum().backward()
        alone.assert_equal(net, step, [0, 1])


@pytest.mark.parametrize("cycle", [True, False])
@on_ranks(2)
def test_a_model_that_is_given_up(mesh: DeviceMesh, cycle: bool) -> None:
    """The garbage collector takes a reference cycle from one rank alone, before the next step. Such
    a model takes part in one step more; one that nobody refers to in none."""
    rank, chosen, sizes = mesh.get_rank(), recipe(), []

    def train(net: Net, step: int) -> None:
        with Collectives() as collectives, ottava.autocast(chosen):
            y = net(shard(step, rank))
        sizes.extend(size for name, _, size in collectives.calls if name == "all_reduce")
        y.sum().backward()

    gc.disable()
    first = ottava.convert(model(), chosen)
    for step in range(2):
        train(first, step)
    if cycle:
        first.__dict__["itself"] = [first]
    del first
    if rank == 0:
        gc.collect()
    sizes.clear()
    second = ottava.convert(model(), chosen)
    for step in range(3):
        train(second, step)
        scales = torch.cat([value.reshape(-1) for value in state_of(second).values()])
        of_ranks = all_gather(scales)
        assert_same(of_ranks[1], of_ranks[0])
    # Three slots of three layers, in float32.
    assert sizes == [36] * (3 if cycle else 2)
