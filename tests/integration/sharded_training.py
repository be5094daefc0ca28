"""A training that is sharded, saved and loaded, and the bytes of the whole of its state."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ottava
from ottava.checkpoint import load_sharded
from ottava.tensors import QuantizedTensorStorage

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

    def step(self) -> float:
        # Each rank collects garbage at its own time, and garbage would take part in reductions.
        gc.collect()
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
        self.steps = loaded["steps"]
        return loaded


# -- bytes of whole tensors --


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


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def local_bytes(value: Any) -> dict[str, tuple[bool, torch.Tensor]]:
    """The bytes that this rank has of a tensor, and whether they are rows of the whole."""
    local, sharded = value, isinstance(value, DTensor)
    if sharded:
        local = value.to_local()
    if not isinstance(local, QuantizedTensorStorage):
        return {"": (sharded, raw(local))}
    # A transpose is made of the rows when it is needed.
    derived = "columnwise" if local.grid_layout.transposed else ""
    held = {i: getattr(local, i.attribute) for i in local.inner_tensors if i.usage != derived}
    return {i.argument: (sharded and i.gather, raw(t)) for i, t in held.items() if t is not None}


def gathered(state: Any, group: Any = None) -> dict[str, torch.Tensor]:
    """The bytes of the whole tensors of a state; those of rank 0 of what is not sharded."""
    mine = {}
    for name, value in tensors_of(state).items():
        place = value.device_mesh.get_coordinate()[-1] if isinstance(value, DTensor) else 0
        mine |= {f"{name}:{part}": (place, *of) for part, of in local_bytes(value).items()}
    every: list[Any] = [mine]
    if dist.is_initialized():
        every = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, mine, group=group)
    whole = {}
    for name, (_, sharded, first) in every[0].items():
        shards = {ranks[name][0]: ranks[name][2] for ranks in reversed(every)}
        whole[name] = torch.cat([shards[at] for at in sorted(shards)]) if sharded else first
    return whole


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert found.keys() == expected.keys(), (case, found.keys() ^ expected.keys())
    for name, value in expected.items():
        assert torch.equal(found[name], value), (case, name)
