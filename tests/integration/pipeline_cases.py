"""Pipelines of torch.distributed.pipelining whose stages keep the state of delayed scaling."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import ottava
from ottava.errors import UsageError
from ottava_delayed import DelayedScaling

SIZE, MICROBATCHES, STEPS = 32, 4, 3
DELAYED = DelayedScaling(amax_history_len=4)


def stage_of(index: int) -> torch.nn.Module:
    """Of the same names on all ranks."""
    torch.manual_seed(index)
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh())


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randn(2, 4 * MICROBATCHES, SIZE, generator=torch.Generator().manual_seed(step))
    return values[0] * 2**step, values[1]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


def as_one_process(stages: int, recipe: Any) -> list[torch.nn.Module]:
    """Microbatches one after the other, in one step, over which no ranks reduce anything."""
    whole = torch.nn.Sequential(*map(stage_of, range(stages)))
    ottava.convert(whole, recipe)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for step in range(STEPS):
        x, y = data(step)
        with ottava.autocast(amax_reduction_group=alone), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                loss_of(whole(part), target).backward()
        update(whole, MICROBATCHES)
    return list(whole)


def update(net: Any, divisor: int = 1) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= parameter.grad / divisor
            parameter.grad = None


def same(stage: torch.nn.Module, expected: torch.nn.Module) -> None:
    mine, its = stage.state_dict(), expected.state_dict()
    assert mine.keys() == its.keys()
    for name, value in mine.items():
        assert torch.equal(value, its[name]), (name, value, its[name])


def train(
    schedule: Any, mesh: Any, stages: list[torch.nn.Module], block: Any = contextlib.nullcontext
) -> None:
    rank, last = mesh.get_rank(), mesh.size() - 1
    with warnings.catch_warnings():
        # More forward passes after a backward pass are no mistake here.
        warnings.filterwarnings("error", message=".*another forward pass after a backward pass")
        for step in range(STEPS):
            x, y = data(step)
            with block():
                schedule.step(
                    *([x] if rank == 0 else []), **({"target": y} if rank == last else {})
                )
            for stage in stages:
                update(stage)


def one_stage(
    mesh: Any, schedule: Any, recipe: Any, block: Any = contextlib.nullcontext, **shapes: Any
) -> None:
    rank, world = mesh.get_rank(), mesh.size()
    own = ottava.convert(stage_of(rank), recipe)
    stage = PipelineStage(own, rank, world, torch.device("cpu"), group=mesh.get_group(), **shapes)
    train(schedule(stage, MICROBATCHES, loss_fn=loss_of), mesh, [own], block)
    same(own, as_one_process(world, recipe)[rank])


def converted(mesh: Any) -> None:
    """A schedule is one step, whose amaxes are those of its stage; what finds out shapes is seen by
    no state."""
    for schedule in (Schedule1F1B, ScheduleGPipe):
        one_stage(mesh, schedule, DELAYED)


def layers_alone(mesh: Any) -> None:
    """Layers that were bound one by one, in no converted model and in no block."""
    rank, world = mesh.get_rank(), mesh.size()
    own: Any = stage_of(rank)
    own[0] = ottava.nn.Linear.from_linear(own[0])
    own[0].bind(DELAYED)
    stage = PipelineStage(own, rank, world, torch.device("cpu"), group=mesh.get_group())
    train(Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of), mesh, [own])
    same(own, as_one_process(world, DELAYED)[rank])


def of_known_shapes(mesh: Any) -> None:
    shape = torch.empty(4, SIZE, requires_grad=mesh.get_rank() > 0)
    one_stage(
        mesh,
        Schedule1F1B,
        DELAYED,
        input_args=(shape,),
        output_args=(shape.detach().requires_grad_(),),
    )


def several_recipes(mesh: Any) -> None:
    """Delayed scaling that a factory asks for, and recipes without state."""
    recipe = ottava.get_recipe("current")
    request = ottava.QuantizerRequest(DELAYED)
    recipe.set_quantizer_factory(lambda role: request if role.tensor_type == "input" else None)
    one_stage(mesh, Schedule1F1B, recipe)
    one_stage(mesh, Schedule1F1B, "current")
    one_stage(mesh, Schedule1F1B, "mxfp8")


def in_blocks(mesh: Any) -> None:
    """Of the stage's own group, or of none: ranks of other stages are not asked."""
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for options in ({}, {"amax_reduction_group": own}):
        one_stage(mesh, Schedule1F1B, DELAYED, lambda options=options: ottava.autocast(**options))


def interleaved(mesh: Any) -> None:
    """Two stages a rank."""
    rank, world = mesh.get_rank(), mesh.size()
    indices = [rank, rank + world]
    own = [ottava.convert(stage_of(index), DELAYED) for index in indices]
    pairs = zip(own, indices, strict=True)
    stages = [
        PipelineStage(net, at, 2 * world, torch.device("cpu"), group=mesh.get_group())
        for net, at in pairs
    ]
    train(ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of), mesh, own)
    expected = as_one_process(2 * world, DELAYED)
    for net, index in zip(own, indices, strict=True):
        same(net, expected[index])


def refused_among_replicas(mesh: Any) -> None:
    """Which ranks have the same stage is not known, where a pipeline has some of the ranks
    alone."""
    rank = mesh.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, same_stage = pairs[rank // 2], replicas[rank % 2]
    own = ottava.convert(stage_of(rank % 2), DELAYED)
    stage = PipelineStage(own, rank % 2, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    x, y = data(0)

    def step(**options: Any) -> None:
        with ottava.autocast(**options):
            schedule.step(*([] if rank % 2 else [x]), **({"target": y} if rank % 2 else {}))

    step()
    with pytest.raises(UsageError, match=r"pipeline of 2 of 4 ranks.*amax_reduction_group"):
        step()
    step(amax_reduction_group=same_stage)
    step(amax_reduction_group=same_stage)
