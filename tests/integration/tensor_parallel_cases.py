"""Tensor parallel plans, which quantized layers refuse; the DTensors of FSDP2, which they do
not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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

RECIPES = ("current", "delayed", "mxfp8")
PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "colwise": lambda: {"0": ColwiseParallel()},
    "rowwise": lambda: {"1": RowwiseParallel()},
    "both": lambda: {"0": ColwiseParallel(), "1": RowwiseParallel()},
    "sequence": lambda: {"0": SequenceParallel()},
    "inputs": lambda: {
        "0": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    },
}
MAKE: dict[str, Callable[[torch.nn.Module, str], torch.nn.Module]] = {
    "converted": ottava.convert,
    "primary": partial(ottava.convert, primary=True),
    "gathered": lambda net, recipe: gather_quantized(ottava.convert(net, recipe)),
}


def plain() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))


def train(net: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = net(torch.ones(32, 64)).sum()
    loss.backward()
    return loss.detach()


def after_conversion(mesh: Any) -> None:
    """Layers keep their weights where a plan would have replaced them."""
    for plan in PLANS.values():
        for recipe in RECIPES:
            for make in MAKE.values():
                net = make(plain(), recipe)
                with pytest.raises(UsageError, match="tensor parallel plan"):
                    train(parallelize_module(net, mesh, plan()))
                assert not any(hasattr(parameter, "placements") for parameter in net.parameters())


def before_conversion(mesh: Any) -> None:
    """A model that is refused stays what it was, and layers outside of the plan can be
    converted."""
    for name, plan in PLANS.items():
        for recipe in RECIPES:
            for primary in (False, True):
                net = parallelize_module(plain(), mesh, plan())
                with pytest.raises(UsageError, match="tensor parallel plan"):
                    train(ottava.convert(net, recipe, primary=primary))
                assert name == "inputs" or type(net[0]) is torch.nn.Linear
    net = parallelize_module(plain(), mesh, PLANS["colwise"]())
    ottava.convert(net, "current", exclude="0")
    assert type(net[1]) is ottava.nn.Linear


def by_hand(mesh: Any) -> None:
    for placement in (Shard(0), Shard(1), Replicate()):
        net: Any = plain()
        net[0].weight = torch.nn.Parameter(
            distribute_tensor(net[0].weight.detach(), mesh, [placement])
        )
        with pytest.raises(UsageError, match="weight of Linear '0' is a DTensor"):
            ottava.convert(net, "current")


def with_fully_shard(mesh: Any) -> None:
    """A plan and FSDP2 at once."""
    both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(plain(), both["tensor"], PLANS["both"]())
    fully_shard(net, mesh=both["data"])
    with pytest.raises(UsageError, match="weight of Linear '0' is a DTensor"):
        ottava.convert(net, "current")


def without_recipe(mesh: Any) -> None:
    """In high precision a layer takes a plan as that of torch does, and no recipe then."""
    expected = train(plain())
    net: Any = torch.nn.Sequential(*map(ottava.nn.Linear.from_linear, plain()))
    parallelize_module(net, mesh, PLANS["both"]())
    torch.testing.assert_close(train(net), expected)
    with pytest.raises(UsageError, match="tensor parallel plan"):
        net[0].bind("current")
    with ottava.autocast("current"), pytest.raises(UsageError, match="tensor parallel plan"):
        train(net)
    torch.testing.assert_close(train(net), expected)


def sharded_by_fully_shard(mesh: Any) -> None:
    """Converted before, and loaded by assignment; twice; and after, where a layer that FSDP wrapped
    is left alone."""
    losses = []
    for recipe in RECIPES:
        for order in ("before", "twice", "after"):
            net: Any = plain()
            excluded = "0" if order == "after" else None
            expected = train(ottava.convert(plain(), recipe, exclude=excluded))
            if order != "after":
                ottava.convert(net, recipe)
            fully_shard(net[0], mesh=mesh)
            fully_shard(net, mesh=mesh)
            if order == "before":
                net.load_state_dict(net.state_dict(), assign=True)
            else:
                ottava.convert(net, recipe)
            losses.append((order, recipe, torch.equal(train(net), expected)))
    assert all(same for *_, same in losses), losses
