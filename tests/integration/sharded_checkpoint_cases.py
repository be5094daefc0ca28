"""Cases of sharded checkpoints on four ranks: every byte is kept, whoever saves and loads."""

from __future__ import annotations

import gc
import pickle
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ottava
from ottava.checkpoint import flatten_state_dict, load_sharded, save_file, save_sharded
from ottava.errors import CheckpointError, DTypeError, OptionError, OttavaError, UsageError
from ottava.recipes.state import RecipeState
from ottava.tensors import QuantizedTensorStorage

#: A recipe, its options, and the rows of the first weight: 33 are uneven on 4 ranks, 128 whole
#: blocks.
RECIPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "current": ("current", {}, 33),
    "delayed": ("delayed", {"amax_history_len": 4}, 33),
    "mxfp8": ("mxfp8", {}, 128),
    "mxfp8-2d": ("mxfp8", {"with_2d_quantization": True}, 128),
    "blockwise": ("blockwise", {}, 512),
    "rowwise": ("rowwise", {}, 128),
}


def model(kind: str, seed: int) -> torch.nn.Sequential:
    """Of 3 rows the last rank has none, where a recipe has no blocks."""
    torch.manual_seed(seed)
    name, options, rows = RECIPES[kind]
    recipe = ottava.get_recipe(name, **options)
    last = 3 if rows == 33 else 512
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


# -- bytes of whole tensors, put together by hand --


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


def largest(state: Any) -> dict[str, torch.Tensor]:
    """The amaxes that the next step would reduce, reduced by hand."""
    end = "recipe_state.amax_history"
    mine = {name: value for name, value in tensors_of(state).items() if name.endswith(end)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {f"{name}:": raw(torch.stack([ranks[name] for ranks in every]).amax(0)) for name in mine}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert found.keys() == expected.keys(), (case, found.keys() ^ expected.keys())
    for name, value in expected.items():
        assert torch.equal(found[name], value), (case, name)


# -- cases --

_meshes: dict[str, tuple[DeviceMesh, Any]] = {}


def meshes() -> dict[str, tuple[DeviceMesh, Any]]:
    """Meshes of four, 2 x 2, two ranks and one, with their groups; made once."""
    if not _meshes:
        square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicas", "shards"))
        _meshes.update({"4": (DeviceMesh("cpu", [0, 1, 2, 3]), None), "2x2": (square, None)})
        for count in (2, 1):
            ranks = list(range(count))
            _meshes[str(count)] = DeviceMesh("cpu", ranks), dist.new_group(ranks)
    return _meshes


def common_folder() -> Path:
    """A new folder of all ranks."""
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    return Path(str(paths[0]))


def resharded(kind: str) -> None:
    """Each number of ranks loads what each other one saved; training goes on."""
    folder, (mesh, _) = common_folder(), meshes()["4"]
    original = Training(kind, 1, mesh)
    original.step()
    state = original.state()
    expected = gathered(state)
    reduced = expected | largest(state)
    save_sharded(state, folder / "4")
    assert len(list((folder / "4").glob("rank-*-of-00004-*.safetensors"))) == 4
    writers = ["4"]
    for name, (other, group) in meshes().items():
        if other.get_coordinate() is not None:
            for writer in writers:
                fresh = Training(kind, 2, other, group)
                loaded = fresh.resume(folder / writer)
                # Four ranks have amaxes of their own again, other numbers have the largest.
                wanted = expected if {writer, name} <= {"4", "2x2"} else reduced
                same(gathered(fresh.state(), group), wanted, f"{writer} into {name}")
                assert loaded["steps"] == 1
                groups = loaded["optimizer"]["param_groups"]
                assert groups == state["optimizer"]["param_groups"]
            if name != "4":
                save_sharded(fresh.state(), folder / name, group=group)
            assert fresh.step() > 0
        dist.barrier()
        writers = ["4", name]
    for writer in ("1", "4"):
        fresh = Training(kind, 4, mesh)
        fresh.resume(folder / writer)
        same(gathered(fresh.state()), expected if writer == "4" else reduced, f"{writer} into 4")
    assert fresh.step() == original.step()
    same(gathered(fresh.state()), gathered(original.state()), "continued")


def cut_blocks(mesh: DeviceMesh) -> None:
    """Shards that cut blocks are named; nothing is written."""
    folder = common_folder()
    with ottava.quantized_model_init("mxfp8"):
        net = torch.nn.Sequential(ottava.nn.Linear(40, 64, recipe="mxfp8"))
    fully_shard(net, mesh=mesh)
    words = r"0\.weight' has rows .* of 64, which cut the blocks"
    with pytest.raises(OttavaError, match=words):
        save_sharded(net.state_dict(), folder / "cut")
    assert not list(folder.iterdir())


DAMAGES: list[Callable[[bytes], bytes | None]] = [
    lambda data: data[:-3] + bytes([data[-3] ^ 16]) + data[-2:],
    lambda data: None,
    lambda data: pickle.dumps({}).ljust(len(data), b" "),
]


def damage(mesh: DeviceMesh) -> None:
    """On one rank alone: all fail, that one names the file, and no model has changed."""
    folder, rank = common_folder(), dist.get_rank()
    saved, own = folder / "saved", folder / f"own-{rank}"
    save_sharded(Training("current", 1, mesh).net.state_dict(), saved)
    target = Training("current", 2, mesh).net.state_dict()
    before = gathered(target)
    (part,) = [entry.name for entry in saved.glob("rank-00002-of-00004-*.safetensors")]
    for victim, file in ((2, part), (3, "ottava.json"), (0, "ottava.json")):
        for change in DAMAGES:
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(saved, own)
            if rank == victim:
                data = change((own / file).read_bytes())
                (own / file).unlink()
                if data is not None:
                    (own / file).write_bytes(data)
            with pytest.raises(CheckpointError) as caught:
                load_sharded(target, own)
            assert file in str(caught.value)
            assert (f"rank {victim} failed" in str(caught.value)) == (rank != victim)
            same(gathered(target), before, file)
    # Not damaged, but not the same either.
    save_sharded(Training("current", 3, mesh).net.state_dict(), folder / "other")
    with pytest.raises(CheckpointError, match="not the same checkpoint on all ranks"):
        load_sharded(target, folder / ("other" if rank == 1 else "saved"))
    same(gathered(target), before, "another checkpoint")


def failures(mesh: DeviceMesh) -> None:
    """What one rank cannot save, none does, and nothing is left."""
    rank, path = dist.get_rank(), common_folder() / "saved"
    state = Training("current", 1, mesh).net.state_dict()
    for where in (3, 0):
        bad = {"x": object()} if rank == where else {"x": 1}
        with pytest.raises(DTypeError if rank == where else CheckpointError) as caught:
            save_sharded(bad, path)
        assert "'x' is a object" in str(caught.value)
        assert (f"rank {where} failed" in str(caught.value)) == (rank != where)
    differing: list[tuple[dict[str, Any], str]] = [
        ({"a": rank}, "'a' of rank 1 is not that of rank 0"),
        ({"a": {"b": [1, rank // 2]}}, r"'a\.b\.1' of rank 2 is not"),
        ({"a": torch.ones(2), **({"b": 1} if rank else {})}, "'b' of rank 1 is not"),
        ({"a": torch.ones(2 + rank // 3)}, "'a' of rank 3 is not"),
    ]
    for value, words in differing:
        with pytest.raises(UsageError, match=words):
            save_sharded(value, path)
    clash = {"x": torch.full((1,), float(rank)), "x@rank-00001": torch.ones(1)}
    with pytest.raises(UsageError, match="a tensor has the name 'x@rank-00001'"):
        save_sharded(clash, path)
    with torch.no_grad():
        state["2.weight"].to_local()._scale_inv.mul_(1 + rank)
    with pytest.raises(UsageError, match=r"shards of '2\.weight' have different 'fp8_s"):
        save_sharded(state, path)
    (path.parent / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_sharded({"x": 1}, path.parent / "file" / "below")
    dist.barrier()
    assert not path.exists()
    save_sharded({"x": 1}, path)
    with pytest.raises(CheckpointError, match="exists"):
        save_sharded({"x": 2}, path)
    assert load_sharded({}, path) == {"x": 1}
    outside = meshes()["2"][1]
    if rank > 1:
        with pytest.raises(OptionError, match="a process group that this process is in"):
            save_sharded({"x": 2}, path, group=outside)


class Pending(RecipeState):
    """A state with a buffer that the ranks would reduce in the next step."""

    reduced_by_max = ("pending",)


def own_tensors(mesh: DeviceMesh) -> None:
    """Plain tensors that differ: each rank has its own again, other numbers of ranks those of
    rank 0, and the largest of what the next step would have reduced."""
    rank, path = dist.get_rank(), common_folder() / "saved"
    pending = torch.zeros(5)
    pending[rank] = 1.0 + rank
    state = {"own": torch.full((3,), float(rank)), "nan": torch.full((1,), torch.nan)}
    state |= {"0.recipe_state.pending": pending, "count": torch.tensor([3, rank])}
    save_sharded(state, path)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    load_sharded(target, path)
    for name, value in state.items():
        assert torch.equal(raw(target[name]), raw(value)), name
    two, group = meshes()["2"]
    if two.get_coordinate() is not None:
        load_sharded(target, path, group=group)
        assert target["own"].tolist() == [0.0] * 3
        assert target["0.recipe_state.pending"].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
        assert target["count"].tolist() == [3, 0]


class Master(torch.Tensor):
    """A weight in high precision that is quantized when it is gathered."""

    def high_precision(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def placements(mesh: DeviceMesh) -> None:
    """DTensors of every kind, wrappers in high precision among them, loaded in any other."""
    folder, values = common_folder(), torch.arange(70.0).reshape(10, 7)
    square = meshes()["2x2"][0]
    kinds = [(mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [Replicate()])]
    kinds += [(square, [Shard(0), Shard(1)]), (square, [Replicate(), Shard(1)])]
    kinds += [(square, [Shard(1), Replicate()])]

    def state(source: torch.Tensor) -> dict[str, Any]:
        made = {str(number): distribute_tensor(source, *kind) for number, kind in enumerate(kinds)}
        local = made["0"].to_local().clone().as_subclass(Master)
        size = {"shape": torch.Size((10, 7)), "stride": (7, 1)}
        master = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **size)
        return made | {"master": master, "whole": source.clone().as_subclass(Master)}

    save_sharded(state(values), folder / "saved")
    target, expected = state(torch.zeros(10, 7)), state(values)
    load_sharded(target, folder / "saved")
    assert isinstance(target["master"].to_local(), Master)
    for name, value in expected.items():
        mine, theirs = (
            v.to_local() if isinstance(v, DTensor) else v for v in (target[name], value)
        )
        assert torch.equal(mine.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor)), name
    zeros = torch.zeros(10, 7)
    swapped = {str(n): distribute_tensor(zeros, *kinds[-1 - n]) for n in range(len(kinds))}
    load_sharded(swapped, folder / "saved", strict=False)
    for value in swapped.values():
        assert torch.equal(value.full_tensor(), values)


def flattened(mesh: DeviceMesh) -> None:
    """Plain shards for the writers of others, with the description of the whole model."""
    net, whole = Training("current", 1, mesh).net, model("current", 1)
    flat, metadata = flatten_state_dict(net.state_dict())
    tensors, expected = flatten_state_dict(whole.state_dict())
    assert metadata == expected
    same(gathered(flat), gathered(tensors), "flat")
    folder = common_folder()
    save_sharded(flat, folder / "flat")
    fresh = Training("current", 2, mesh).net
    load_sharded(flatten_state_dict(fresh.state_dict())[0], folder / "flat")
    same(gathered(fresh.state_dict()), gathered(net.state_dict()), "loaded")
    with pytest.raises(DTypeError, match=r"is sharded.*save_sharded"):
        save_file(net.state_dict(), folder / f"file-{dist.get_rank()}")


def run_case(mesh: DeviceMesh, case: str) -> None:
    """A case by its name, or that of a recipe whose checkpoints are resharded."""
    if case in RECIPES:
        resharded(case)
    else:
        globals()[case](mesh)


CASES = ["cut_blocks", "damage", "failures", "own_tensors", "placements", "flattened"]
