"""Pipelines, whose stages keep the state of delayed scaling, and tensor parallel plans, which
quantized layers refuse."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ottava
from ottava.distributed import gather_quantized
from ottava.errors import UsageError
from ottava_delayed import DelayedScaling
from tests.cases import told
from tests.comparing import assert_same
from tests.fsdp import assert_states_equal
from tests.integration.mixed_recipes import delayed_inputs
from tests.ranks import Collectives, on_ranks

# -- pipelines --

SIZE, MICROBATCHES, STEPS = 32, 4, 2


@dataclass(frozen=True)
class HighPrecisionFirst(DelayedScaling):
    amax_history_len: int = 4
    high_precision_until_step: int = 1


def delayed() -> DelayedScaling:
    return DelayedScaling(amax_history_len=4)


def stage_of(index: int) -> Any:
    """Of the same names on all ranks."""
    torch.manual_seed(index)
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh())


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randn(2, 4 * MICROBATCHES, SIZE, generator=torch.Generator().manual_seed(step))
    return values[0] * 2**step, values[1]


def update(net: Any, divisor: int = 1) -> None:
    torch.optim.SGD(net.parameters(), lr=1 / divisor).step()
    net.zero_grad()


def own_group() -> Any:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def as_one_process(stages: int, recipe: Any) -> list[Any]:
    """Microbatches one after the other in one step, over which no ranks reduce anything."""
    whole = torch.nn.Sequential(*map(stage_of, range(stages)))
    ottava.convert(whole, recipe)
    alone = own_group()
    for step in range(STEPS):
        x, y = data(step)
        with ottava.autocast(amax_reduction_group=alone), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                torch.nn.functional.mse_loss(whole(part), target).backward()
        update(whole, MICROBATCHES)
    return list(whole)


def assert_pipeline(
    mesh: DeviceMesh,
    make: Callable[[], Any] = delayed,
    schedule: Any = Schedule1F1B,
    *,
    convert: Callable[[Any, Any], Any] = ottava.convert,
    block: Any = contextlib.nullcontext,
    per_rank: int = 1,
    **shapes: Any,
) -> list[Any]:
    """Weights, scales and histories are those of one process. Returns the stages of this rank."""
    rank, last, count = mesh.get_rank(), mesh.size() - 1, mesh.size() * per_rank
    indices = list(range(rank, count, mesh.size()))
    nets = [convert(stage_of(index), make()) for index in indices]
    stages: Any = [
        PipelineStage(net, at, count, torch.device("cpu"), group=mesh.get_group(), **shapes)
        for net, at in zip(nets, indices, strict=True)
    ]
    loss = torch.nn.functional.mse_loss
    runs = schedule(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=loss)
    with warnings.catch_warnings():
        # More forward passes after a backward pass are no mistake here.
        warnings.filterwarnings("error", message=".*another forward pass after a backward pass")
        for step in range(STEPS):
            x, y = data(step)
            with block():
                runs.step(*([] if rank else [x]), **({"target": y} if rank == last else {}))
            for net in nets:
                update(net)
    expected = as_one_process(count, make())
    for net, index in zip(nets, indices, strict=True):
        assert_states_equal(net.state_dict(), expected[index].state_dict(), index)
    return nets


def layers_alone(stage: Any, recipe: Any) -> Any:
    """Layers that are bound one by one, in no converted model and in no block."""
    stage[0] = ottava.nn.Linear.from_linear(stage[0])
    stage[0].bind(recipe)
    return stage


@on_ranks(2)
def test_a_schedule_is_one_step(mesh: DeviceMesh) -> None:
    """Its amaxes are those of its stage; what finds out shapes is seen by no state."""
    assert_pipeline(mesh, schedule=ScheduleGPipe)
    assert_pipeline(mesh, convert=layers_alone)
    shape = torch.empty(4, SIZE, requires_grad=mesh.get_rank() > 0)
    shapes = {"input_args": (shape,), "output_args": (torch.empty(4, SIZE, requires_grad=True),)}
    assert_pipeline(mesh, **shapes)
    assert_pipeline(mesh, schedule=ScheduleInterleaved1F1B, per_rank=2)
    # States count their steps.
    assert_pipeline(mesh, HighPrecisionFirst)


@on_ranks(2)
def test_pipelines_of_other_recipes_and_in_blocks(mesh: DeviceMesh) -> None:
    """Of the stage's own group, or of none: ranks of other stages are not asked."""
    assert_pipeline(mesh, delayed_inputs, block=ottava.autocast)
    assert_pipeline(mesh, block=partial(ottava.autocast, amax_reduction_group=own_group()))


@on_ranks(2)
def test_a_stage_leaves_its_pipeline(mesh: DeviceMesh) -> None:
    """The amaxes of a schedule stay on their rank; those of the steps after it are reduced."""
    (net,) = assert_pipeline(mesh)
    for reductions in (0, 1):
        with Collectives() as collectives:
            net(torch.ones(1, SIZE)).sum().backward()
        assert collectives.count == reductions


@on_ranks(4)
def test_replicas_of_a_stage_are_to_be_named(mesh: DeviceMesh) -> None:
    """Which ranks have the same stage is not known, where a pipeline has some of the ranks
    alone."""
    rank = mesh.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x, y = data(0)

    def steps_of(recipe: ottava.Recipe) -> Callable[..., None]:
        own, group = ottava.convert(stage_of(rank % 2), recipe), pairs[rank // 2]
        stage = PipelineStage(own, rank % 2, 2, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)

        def step(**options: Any) -> None:
            with ottava.autocast(**options):
                schedule.step(*([] if rank % 2 else [x]), **({"target": y} if rank % 2 else {}))

        return step

    alone = steps_of(DelayedScaling(reduce_amax=False))
    for _ in range(2):
        # Where nothing is reduced nobody asks which ranks they are.
        alone()
    step = steps_of(delayed())
    step()
    with pytest.raises(UsageError, match=r"pipeline of 2 of 4 ranks.*amax_reduction_group"):
        step()
    for _ in range(2):
        step(amax_reduction_group=replicas[rank % 2])


# -- tensor parallel plans --

PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "colwise": lambda: {"0": ColwiseParallel()},
    "rowwise": lambda: {"1": RowwiseParallel()},
    "sequence": lambda: {"0": SequenceParallel()},
    "inputs": lambda: {
        "0": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    },
}
BOTH = {"0": ColwiseParallel(), "1": RowwiseParallel()}
REFUSED = partial(pytest.raises, UsageError, match="tensor parallel plan")


def plain() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))


def train(net: Any) -> torch.Tensor:
    loss: torch.Tensor = net(torch.ones(32, 64)).sum()
    loss.backward()
    return loss.detach()


@on_ranks(2)
def test_a_plan_is_refused(mesh: DeviceMesh) -> None:
    """By converted layers, which keep their weights; and by the conversion, which leaves the model
    as it was."""
    for plan, make in PLANS.items():
        with told(plan):
            for net in (
                ottava.convert(plain(), "delayed"),
                ottava.convert(plain(), "delayed", primary=True),
                gather_quantized(ottava.convert(plain(), "mxfp8")),
            ):
                with REFUSED():
                    train(parallelize_module(net, mesh, make()))
                assert not any(hasattr(parameter, "placements") for parameter in net.parameters())
            net = parallelize_module(plain(), mesh, make())
            with REFUSED():
                train(ottava.convert(net, "delayed"))
            assert plan == "inputs" or type(net[0]) is torch.nn.Linear
    # Distributed by hand, or by a plan below FSDP2.
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    planned: Any = parallelize_module(plain(), both["tensor"], BOTH)
    by_hand = plain()
    weight = distribute_tensor(by_hand[0].weight.detach(), mesh, [Replicate()])
    by_hand[0].weight = torch.nn.Parameter(weight)
    for net in (by_hand, fully_shard(planned, mesh=both["data"])):
        with pytest.raises(UsageError, match="weight of Linear '0' is a DTensor"):
            ottava.convert(net, "current")


@on_ranks(2)
def test_what_has_no_recipe_takes_a_plan(mesh: DeviceMesh) -> None:
    """And no recipe then."""
    expected = train(plain())
    net: Any = torch.nn.Sequential(*map(ottava.nn.Linear.from_linear, plain()))
    parallelize_module(net, mesh, BOTH)
    torch.testing.assert_close(train(net), expected)
    with REFUSED():
        net[0].bind("current")
    with ottava.autocast("current"), REFUSED():
        train(net)
    # Layers beside a plan are converted.
    other = parallelize_module(plain(), mesh, {"0": ColwiseParallel()})
    ottava.convert(other, "current", exclude="0")
    assert type(other[1]) is ottava.nn.Linear


@on_ranks(2)
def test_fully_shard_is_no_plan(mesh: DeviceMesh) -> None:
    """Layers are converted before, or after, where one that FSDP wrapped is left alone."""
    for recipe in ("delayed", "mxfp8"):
        for exclude in (None, "0"):
            expected = train(ottava.convert(plain(), recipe, exclude=exclude))
            net = plain() if exclude else ottava.convert(plain(), recipe)
            fully_shard(net[0], mesh=mesh)
            fully_shard(net, mesh=mesh)
            net.load_state_dict(net.state_dict(), assign=True)
            # Twice changes nothing.
            ottava.convert(net, recipe)
            assert_same(train(net), expected, note=(exclude, recipe))
