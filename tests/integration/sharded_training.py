"""A training that is sharded, saved and loaded, and the whole of its state."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.checkpoint import load_sharded
from tests.fsdp import values_of

#: A recipe, its options, and the rows of the first weight: 33 are uneven on 4 ranks, 128 whole
#: blocks.
RECIPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "current": ("current", {}, 33),
    "delayed": ("delayed", {"amax_history_len": 4}, 33),
    "mxfp8": ("mxfp8", {}, 128),
}


def model(kind: str, seed: int) -> torch.nn.Sequential:
    """Of 3 rows the last rank has none, where a recipe has no blocks."""
    torch.manual_seed(seed)
    name, options, rows = RECIPES[kind]
    recipe = ottava.get_recipe(name, **options)
    last = 3 if rows == 33 else 128
    with ottava.quantized_model_init(recipe):
        layers = [ottava.nn.Linear(*size, recipe=recipe) for size in ((40, rows), (rows, last))]
    return torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])


class Training:
    """A model, sharded over ``mesh`` (None: whole), with an optimizer; each rank has its data."""

    def __init__(self, kind: str, seed: int, mesh: Any = None, group: Any = None) -> None:
        self.net, self.group = model(kind, seed), group
        if mesh is not None:
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01 * seed)
        self.steps = 0
        self.has_garbage = True

    def step(self) -> float:
        # Each rank collects garbage at its own time, and a training that is garbage would take part
        # in reductions.
        if self.has_garbage:
            gc.collect()
            self.has_garbage = False
        rank = dist.get_rank() if dist.is_initialized() else 0
        data = torch.Generator().manual_seed(100 * self.steps + rank)
        x = torch.randn(32, 40, generator=data) * (1 + rank)
        with ottava.autocast(amax_reduction_group=self.group) if self.group else nullcontext():
            loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": weights, "optimizer": optimizer, "steps": self.steps}

    def resume(self, path: Path) -> dict[str, Any]:
        loaded: dict[str, Any] = load_sharded(self.state(), path, group=self.group)
        parts = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(self.net, self.optimizer, **parts)
        self.steps, self.has_garbage = loaded["steps"], True
        return loaded


def tensors_of(state: Any, prefix: str = "") -> dict[str, Any]:
    """The tensors of a nested state by name."""
    found = {}
    entries = enumerate(state) if isinstance(state, list) else state.items()
    for key, value in entries:
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, (dict, list)):
            found |= tensors_of(value, f"{prefix}{key}.")
    return found


def whole(state: Any) -> dict[str, torch.Tensor]:
    """The values of the whole tensors of a nested state; this rank's of those that are plain."""
    # gloo has no FP8.
    named = {n: v.view(torch.uint8) if v.itemsize == 1 else v for n, v in tensors_of(state).items()}
    return {name: values_of(value).clone() for name, value in named.items()}
