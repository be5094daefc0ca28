"""Amaxes that ranks reduce: the scales of one process that saw all the data, in one all-reduce a
step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ottava
from ottava.collectives import all_gather, all_reduce_max
from ottava.errors import OptionError, UsageError
from ottava_delayed import DelayedScaling
from tests.ranks import Counted

STEPS = 6
ROWS = 5


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(3):
        layers += [torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def here(mesh: Any) -> tuple[int, int]:
    return mesh.get_rank(), mesh.size()


def shard(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 16, generator=random) * (1 + (7 * step + 3 * rank) % 5)


def scales(net: torch.nn.Module) -> torch.Tensor:
    values = [
        value.reshape(-1)
        for name, value in net.state_dict().items()
        if "recipe_state.scale" in name
    ]
    values += [
        value[1:].reshape(-1) for name, value in net.state_dict().items() if "amax_history" in name
    ]
    return torch.cat(values)


def same_on(ranks: list[int], group: Any, values: torch.Tensor) -> None:
    gathered = [torch.empty_like(values) for _ in ranks]
    dist.all_gather(gathered, values, group=group)
    assert all(torch.equal(other, gathered[0]) for other in gathered), gathered


def whole(net: torch.nn.Module, step: int, ranks: list[int]) -> None:
    """One process that sees all the data, in batches of the same shapes: the same bytes."""
    with ottava.autocast(DelayedScaling(amax_history_len=3, reduce_amax=False)):
        outputs = [net(shard(step, rank)) for rank in ranks]
    torch.cat(outputs).sum().backward()


def steps(
    rank: int, world: int, begin: Callable[[torch.nn.Module], Any], group: Any, ranks: list[int]
) -> None:
    net, alone = ottava.convert(model(), DelayedScaling(amax_history_len=3)), model()
    ottava.convert(alone, DelayedScaling(amax_history_len=3, reduce_amax=False))
    for step in range(STEPS):
        with Counted() as reductions:
            begin(net)(shard(step, rank)).sum().backward()
        # A block does not know its layers before they have run in it once.
        assert reductions.count == 1 or (step == 0 and begin is not converted), (
            step,
            reductions.count,
        )
        whole(alone, step, ranks)
        same_on(ranks, group, scales(net))
        assert torch.equal(scales(net), scales(alone)), step
        if rank == 0:
            # One rank evaluates by itself: in the same way, without the group, and a copy.
            with torch.no_grad():
                begin(net.eval())(1000 * shard(step, 0))
                with ottava.autocast():
                    net(1000 * shard(step, 0))
                    copy.deepcopy(net)(shard(step, 0))
                with ottava.autocast(DelayedScaling(amax_history_len=3)):
                    copy.deepcopy(net)(shard(step, 0))
            net.train()


def converted(net: torch.nn.Module) -> Any:
    return net


def in_default_group(mesh: Any) -> None:
    rank, world = here(mesh)
    steps(rank, world, converted, None, list(range(world)))


def in_block(mesh: Any) -> None:
    rank, world = here(mesh)

    def begin(net: torch.nn.Module) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with ottava.autocast(amax_reduction_group=dist.group.WORLD):
                return net(x)

        return run

    steps(rank, world, begin, None, list(range(world)))


def in_block_of_a_named_group(mesh: Any) -> None:
    """A name keeps no group alive."""
    rank, world = here(mesh)
    named = ottava.autocast(amax_reduction_group=dist.group.WORLD.group_name)
    steps(rank, world, named, None, list(range(world)))


def without_a_group(mesh: Any) -> None:
    """What is no group is named before any rank waits."""
    for group in (3, object(), [0, 1], mesh):
        for function in (all_reduce_max, all_gather):
            with pytest.raises(OptionError, match=r"the group is .*new_group\(\).*get_group\(\)"):
                function(torch.ones(2), group)
    with pytest.raises(UsageError, match="no process group has the name 'some'"):
        all_reduce_max(torch.ones(2), "some")
    outside = dist.new_group([dist.get_world_size() - 1])
    if dist.get_rank() == 0:
        with pytest.raises(OptionError, match="this process is in"):
            all_reduce_max(torch.ones(2), outside)


def in_halves(mesh: Any) -> None:
    """Each half of the ranks by itself."""
    rank, world = here(mesh)
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    groups = [dist.new_group(half) for half in halves]
    mine = rank // (world // 2)

    def begin(net: torch.nn.Module) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with ottava.autocast(amax_reduction_group=groups[mine]):
                return net(x)

        return run

    steps(rank, world, begin, groups[mine], halves[mine])


def nested(mesh: Any) -> None:
    """A region in a region, each with its own group: one reduction for each, over the right
    ranks."""
    rank, world = here(mesh)
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    outer, inner = DelayedScaling(amax_history_len=3), DelayedScaling(amax_history_len=4)
    a, b = ottava.nn.Linear(16, 16), ottava.nn.Linear(16, 16)
    expected_a, expected_b = 1.0, 1.0
    for step in range(STEPS):
        with Counted() as reductions:
            with ottava.autocast(outer, amax_reduction_group=dist.group.WORLD):
                a(shard(step, rank))
                with ottava.autocast(inner, amax_reduction_group=pairs[rank // 2]):
                    y = b(shard(step, rank))
            y.sum().backward()
        assert reductions.count == (2 if step else 0), (step, reductions.count)
        if step:
            past = range(max(0, step - 3), step)
            largest = max(shard(s, r).abs().max() for s in past for r in range(world))
            expected_a = torch.div(torch.tensor(448.0), largest)
            pair = (rank // 2 * 2, rank // 2 * 2 + 1)
            largest = max(
                shard(s, r).abs().max() for s in range(max(0, step - 4), step) for r in pair
            )
            expected_b = torch.div(torch.tensor(448.0), largest)
        assert a.recipe_state.scale[0] == expected_a, step
        assert b.recipe_state.scale[0] == expected_b, step


def under_ddp(mesh: Any) -> None:
    """DistributedDataParallel broadcasts buffers by default: not these, or amaxes of other ranks
    would be lost."""
    rank, world = here(mesh)
    net, alone = ottava.convert(model(), DelayedScaling(amax_history_len=3)), model()
    ottava.convert(alone, DelayedScaling(amax_history_len=3, reduce_amax=False))
    run = torch.nn.parallel.DistributedDataParallel(net)
    for step in range(3):
        run(shard(step, rank)).sum().backward()
        whole(alone, step, list(range(world)))
        assert torch.equal(scales(net), scales(alone)), step


def functions(mesh: Any) -> None:
    """A recipe's own functions see the reduced amaxes."""
    rank, world = here(mesh)
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.amax(0))
    net = ottava.convert(model(), recipe)
    for step in range(3):
        net(shard(step, rank)).sum().backward()
    largest = torch.stack(
        [shard(step, r).abs().max() for step in range(2) for r in range(world)]
    ).max()
    assert net[0].recipe_state.scale[0] == torch.div(torch.tensor(448.0), largest)


def one_recipe_two_groups(mesh: Any) -> None:
    """Regions of one recipe, one after the other, each with a group of its own."""
    rank, world = here(mesh)
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    recipe = DelayedScaling(amax_history_len=3)
    wide, narrow = ottava.nn.Linear(16, 16), ottava.nn.Linear(16, 16)
    for step in range(4):
        with Counted() as reductions:
            with ottava.autocast(recipe, amax_reduction_group=dist.group.WORLD):
                x = wide(shard(step, rank))
            with ottava.autocast(recipe, amax_reduction_group=pairs[rank // 2]):
                x = x.sum() + narrow(shard(step, rank)).sum()
            x.backward()
        assert reductions.count == (2 if step else 0), (step, reductions.count)
        # Entering the second region has moved nothing of the first.
        for layer in (wide, narrow):
            assert layer.recipe_state.amax_history[0, 0] == shard(step, rank).abs().max(), step
        if step:
            past = range(max(0, step - 3), step)
            for layer, ranks in (
                (wide, range(world)),
                (narrow, (rank // 2 * 2, rank // 2 * 2 + 1)),
            ):
                largest = torch.stack([shard(s, r).abs().max() for s in past for r in ranks]).max()
                assert layer.recipe_state.scale[0] == torch.div(torch.tensor(448.0), largest), step


def loaded_after_evaluation(mesh: Any) -> None:
    """Layers that only evaluated in a block, and were loaded then, begin their first step together,
    with it."""
    rank, world = here(mesh)
    recipe = DelayedScaling(amax_history_len=3)
    # In a model that nobody converted.
    trained, net = (
        torch.nn.Sequential(*(ottava.nn.Linear(16, 16) for _ in range(3))) for _ in range(2)
    )
    with ottava.autocast(recipe):
        trained(shard(0, rank)).sum().backward()
    with torch.no_grad(), ottava.autocast(recipe):
        net(shard(0, rank))
    net.load_state_dict(trained.state_dict())
    with Counted() as reductions, ottava.autocast(recipe):
        net(shard(1, rank))
    assert reductions.count == 1, reductions.count
    largest = torch.stack([shard(0, r).abs().max() for r in range(world)]).max()
    assert net[0].recipe_state.scale[0] == torch.div(torch.tensor(448.0), largest)
    same_on(list(range(world)), None, scales(net))


def given_up(mesh: Any) -> None:
    """A model in a reference cycle, which the garbage collector takes from one rank alone before
    the next step."""
    rank, _ = here(mesh)
    recipe = DelayedScaling(amax_history_len=3)
    original, sizes = dist.all_reduce, []

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    def train(net: torch.nn.Module, step: int) -> None:
        with ottava.autocast(recipe):
            y = net(shard(step, rank))
        y.sum().backward()

    gc.disable()
    dist.all_reduce = all_reduce
    try:
        for way in ("cycle", "counted"):
            first = ottava.convert(model(), recipe)
            for step in range(2):
                train(first, step)
            if way == "cycle":
                first.__dict__["itself"] = [first]
            del first
            if rank == 0:
                gc.collect()
            sizes.clear()
            second = ottava.convert(model(), recipe)
            for step in range(3):
                train(second, step)
                same_on(list(range(mesh.size())), None, scales(second))
            # What only the collector ends takes part in one step more; what nobody refers to in
            # none.
            slots = 3 * 3
            assert sizes == ([slots, slots, slots] if way == "cycle" else [slots, slots]), (
                way,
                sizes,
            )
            gc.collect()
    finally:
        dist.all_reduce = original
        gc.enable()


def compiled(mesh: Any) -> None:
    """The reduction inside the graph."""
    rank, world = here(mesh)
    net, alone = ottava.convert(model(), DelayedScaling(amax_history_len=3)), model()
    ottava.convert(alone, DelayedScaling(amax_history_len=3, reduce_amax=False))
    run = torch.compile(net, fullgraph=True, backend="aot_eager")
    for step in range(3):
        run(shard(step, rank)).sum().backward()
        whole(alone, step, list(range(world)))
        assert torch.equal(scales(net), scales(alone)), step
