"""Real recipes under FSDP2, saved and loaded by 4, 2 x 2, 2 and 1 ranks and by a process without a
group."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import Ranks, alone
from sampling import some
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.checkpoint import is_complete, load_sharded, save_sharded
from ottava.errors import CheckpointError, ShapeError
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage
from ottava_integrations import read_state

#: Of each recipe: its options, and the rows of the first weight. 33 are uneven on 4 ranks; 128 are
#: whole blocks.
RECIPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "current": ("current", {}, 33),
    "delayed": ("delayed", {"amax_history_len": 4}, 33),
    "mxfp8": ("mxfp8", {}, 128),
    "mxfp8-2d": ("mxfp8", {"with_2d_quantization": True}, 128),
    "blockwise": ("blockwise", {}, 512),
    "rowwise": ("rowwise", {}, 128),
}


def model(kind: str, seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    name, options, rows = RECIPES[kind]
    recipe = ottava.get_recipe(name, **options)
    with ottava.quantized_model_init(recipe):
        return torch.nn.Sequential(
            ottava.nn.Linear(40, rows, dtype=torch.bfloat16, recipe=recipe),
            torch.nn.GELU(),
            ottava.nn.Linear(rows, max(rows, 128), dtype=torch.bfloat16, recipe=recipe),
        )


class Training:
    """A model, sharded over ``mesh`` (None: whole), with an optimizer; every rank of ``group`` sees
    data of its own."""

    def __init__(self, kind: str, seed: int, mesh: Any = None, group: Any = None) -> None:
        self.net, self.group = model(kind, seed), group
        if mesh is not None:
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01 * seed)
        self.steps = 0

    def step(self) -> float:
        # Garbage would take part in the reduction until it is collected, on each rank at another
        # time.
        gc.collect()
        rank = dist.get_rank() if dist.is_initialized() else 0
        data = torch.Generator().manual_seed(100 * self.steps + rank)
        x = torch.randn(32, 40, generator=data).bfloat16() * (1 + rank)
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
        state = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(self.net, self.optimizer, **state)
        self.steps = loaded["steps"]
        return loaded


def tensors_of(state: Any, prefix: str = "") -> dict[str, Any]:
    """The tensors of a nested state by name."""
    entries = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list)
        else ()
    )
    found = {}
    for key, value in entries:
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        else:
            found |= tensors_of(value, f"{prefix}{key}.")
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def local_bytes(value: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The bytes that this rank has of a tensor: those in rows, and those that all ranks have."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if not isinstance(local, QuantizedTensorStorage):
        sharded = hasattr(value, "to_local")
        return ({"": raw(local)}, {}) if sharded else ({}, {"": raw(local)})
    # The transpose is made of the rows when it is asked for, in one process or in another.
    made = "columnwise" if local.grid_layout.transposed else ""
    held = {i: getattr(local, i.attribute) for i in local.inner_tensors if i.usage != made}
    held = {i: tensor for i, tensor in held.items() if tensor is not None}
    if not hasattr(value, "to_local"):
        return {}, {i.argument: raw(t) for i, t in held.items()}
    rows = {i.argument: raw(t) for i, t in held.items() if i.gather}
    return rows, {i.argument: raw(t) for i, t in held.items() if not i.gather}


def gathered(state: Any, group: Any = None) -> dict[str, torch.Tensor]:
    """The bytes of the whole tensors of a state, put together by hand: those of rank 0 for what is
    not sharded."""
    mine = {name: (*local_bytes(value), _shard(value)) for name, value in tensors_of(state).items()}
    every = [mine]
    if dist.is_initialized():
        every = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, mine, group=group)
    whole = {}
    for name in mine:
        for part, value in every[0][name][1].items():
            whole[f"{name}:{part}"] = value
        # One replica of each shard, in order.
        shards = {ranks[name][2]: ranks[name][0] for ranks in reversed(every)}
        for part in every[0][name][0]:
            whole[f"{name}:{part}"] = torch.cat([shards[number][part] for number in sorted(shards)])
    return whole


def largest(state: Any) -> dict[str, torch.Tensor]:
    """The bytes of what the ranks would reduce in the next step, reduced by hand: amaxes of delayed
    scaling."""
    mine = {
        name: value
        for name, value in tensors_of(state).items()
        if name.endswith("recipe_state.amax_history")
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {f"{name}:": raw(torch.stack([ranks[name] for ranks in every]).amax(0)) for name in mine}


def _shard(value: Any) -> int:
    """Which shard of a tensor this rank has: its place in the last dimension of the mesh."""
    return int(value.device_mesh.get_coordinate()[-1]) if hasattr(value, "device_mesh") else 0


def same(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert seen.keys() == expected.keys(), (case, seen.keys() ^ expected.keys())
    for name, value in expected.items():
        assert torch.equal(seen[name], value), (case, name)


def resharded(kind: str, folder: Path, meshes: dict[str, tuple[Any, Any]]) -> None:
    """Whoever saves, whoever loads: the same bytes of the whole, and training goes on."""
    mesh, _ = meshes["4"]
    original = Training(kind, 1, mesh)
    for _ in range(2):
        original.step()
    expected, state = gathered(original.state()), original.state()
    reduced = expected | largest(state)
    save_sharded(state, folder / f"{kind}-4")
    if dist.get_rank() == 0:
        torch.save(reduced, folder / f"{kind}.expected")
    dist.barrier()
    saved_by = ["4"]
    for name, (mesh, group) in meshes.items():
        if mesh.get_coordinate() is not None:
            for writer in saved_by:
                fresh = Training(kind, 2, mesh, group)
                loaded = fresh.resume(folder / f"{kind}-{writer}")
                own = {writer, name} <= {"4", "2x2"}
                wanted = expected if own else reduced
                same(
                    gathered(fresh.state(), group),
                    wanted,
                    f"{kind}: saved by {writer}, loaded by {name}",
                )
                groups = loaded["optimizer"]["param_groups"]
                assert loaded["steps"] == 2, (kind, name)
                assert groups == state["optimizer"]["param_groups"], (kind, name)
                assert fresh.step() > 0
            again = Training(kind, 3, mesh, group)
            again.resume(folder / f"{kind}-4")
            if name != "4":
                save_sharded(again.state(), folder / f"{kind}-{name}", group=group)
        dist.barrier()
        if name != "4":
            saved_by = [name]
    # Back to where it began, from one rank; and what goes on equals what was never interrupted.
    for writer in ("1", "4"):
        fresh = Training(kind, 4, meshes["4"][0])
        fresh.resume(folder / f"{kind}-{writer}")
        wanted = expected if writer == "4" else reduced
        same(gathered(fresh.state()), wanted, f"{kind}: saved by {writer}, loaded by 4")
    for _ in range(2):
        assert fresh.step() == original.step(), kind
    same(gathered(fresh.state()), gathered(original.state()), f"{kind}: continued")


def whole(kind: str, folder: Path, mesh: Any) -> None:
    """A checkpoint of one process without a group, loaded into shards."""
    path = folder / f"{kind}-whole"
    fresh = Training(kind, 2, mesh)
    fresh.resume(path)
    expected = torch.load(folder / f"{kind}-whole.expected", weights_only=True)
    same(gathered(fresh.state()), expected, f"{kind}: saved whole")


def cut_blocks(mesh: Any, folder: Path) -> None:
    """Shards that cut blocks are named; nothing is written."""
    torch.manual_seed(0)
    with ottava.quantized_model_init("mxfp8"):
        net = torch.nn.Sequential(ottava.nn.Linear(40, 64, dtype=torch.bfloat16, recipe="mxfp8"))
    fully_shard(net, mesh=mesh)
    with pytest.raises(
        (ShapeError, CheckpointError), match=r"0\.weight' has rows .* of 64, which cut the blocks"
    ):
        save_sharded(net.state_dict(), folder / "cut")
    assert not (folder / "cut").exists()


def on_four_ranks(mesh: DeviceMesh, folder: Path, kinds: list[str]) -> None:
    two, one = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0])
    meshes = {
        "4": (mesh, None),
        "2x2": (DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicas", "shards")), None),
        "2": (two, dist.new_group([0, 1])),
        "1": (one, dist.new_group([0])),
    }
    for kind in kinds:
        resharded(kind, folder, meshes)
        whole(kind, folder, mesh)
    cut_blocks(mesh, folder)


def save_whole(folder: Path, kinds: list[str]) -> None:
    for kind in kinds:
        trained = Training(kind, 1)
        trained.step()
        save_sharded(trained.state(), folder / f"{kind}-whole")
        torch.save(gathered(trained.state()), folder / f"{kind}-whole.expected")


def load_whole(folder: Path, kinds: list[str]) -> None:
    for kind in kinds:
        expected = torch.load(folder / f"{kind}.expected", weights_only=True)
        path = folder / f"{kind}-4"
        assert is_complete(path)
        fresh = Training(kind, 2)
        fresh.resume(path)
        same(gathered(fresh.state()), expected, f"{kind}: saved by 4, loaded by a process")
        fresh.step()
        read_tensor_by_tensor(path, expected, kind)


def read_tensor_by_tensor(path: Path, expected: dict[str, torch.Tensor], kind: str) -> None:
    state, _ = read_state(path)
    assert len(list(path.glob("rank-*-of-00004-*.safetensors"))) == 4
    weights = {name: value for name, value in state.items() if isinstance(value, QuantizedTensor)}
    assert sorted(weights) == ["model.0.weight", "model.2.weight"]
    assert tuple(weights["model.0.weight"].shape) == (RECIPES[kind][2], 40)
    model = {
        "model": {
            name.removeprefix("model."): value for name, value in state.items() if "model" in name
        }
    }
    for name, value in gathered(model).items():
        assert torch.equal(value, expected[name]), (kind, name)


def every_recipe_on_any_number_of_ranks(folder: Path) -> None:
    """4, 2 x 2, 2 and 1 ranks and a process without a group load what each of them saved."""
    kinds = some(["delayed"], list(RECIPES))
    alone(lambda: save_whole(folder, kinds), folder)
    Ranks(lambda mesh: on_four_ranks(mesh, folder, kinds), 4, folder).succeed(300)
    alone(lambda: load_whole(folder, kinds), folder)
