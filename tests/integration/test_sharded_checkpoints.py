"""Sharded checkpoints: every byte is kept, whoever saves and loads; what one rank cannot do, all
refuse."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ottava
from ottava.checkpoint import flatten_state_dict, load_sharded, save_file, save_sharded
from ottava.distributed import post_all_gather_processing
from ottava.errors import CheckpointError, DTypeError, OptionError, OttavaError, UsageError
from ottava.recipes.state import RecipeState
from ottava.tensors import columnwise_layout
from tests.comparing import assert_same
from tests.fsdp import assert_states_equal
from tests.integration.sharded_training import RECIPES, Training, model, whole
from tests.ranks import on_ranks


def for_other_numbers(state: Any) -> dict[str, torch.Tensor]:
    """What other numbers of ranks load: of plain tensors those of rank 0, of amaxes that the next
    step would reduce the largest."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, whole(state))
    largest = {
        name: torch.stack([ranks[name] for ranks in every]).amax(0)
        for name in every[0]
        if name.endswith("recipe_state.amax_history")
    }
    return every[0] | largest


@pytest.mark.parametrize("kind", RECIPES)
def test_in_one_process(kind: str, tmp_path: Path) -> None:
    """Loaded into a model of the recipe, and refused by others."""
    saved, loaded = Training(kind, 1), Training(kind, 2)
    saved.step()
    save_sharded(saved.state(), tmp_path / "saved")
    for other in RECIPES.keys() - {kind}:
        fresh = Training(other, 2)
        before = whole(fresh.net.state_dict())
        # Current and delayed scaling have the same tensors, and differ in the state besides.
        strict = {kind, other} == {"current", "delayed"}
        with pytest.raises(CheckpointError, match="recipe_state" if strict else "0.weight"):
            load_sharded({"model": fresh.net.state_dict()}, tmp_path / "saved", strict=strict)
        assert_states_equal(whole(fresh.net.state_dict()), before, f"{kind} into {other}")
    loaded.resume(tmp_path / "saved")
    assert_states_equal(whole(loaded.state()), whole(saved.state()), kind)
    assert loaded.step() == saved.step()


def meshes() -> dict[str, tuple[DeviceMesh, Any]]:
    """Meshes of four, 2 x 2 and two ranks, with their groups."""
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicas", "shards"))
    four, two = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [0, 1])
    return {"4": (four, None), "2x2": (square, None), "2": (two, dist.new_group([0, 1]))}


# Ranks of delayed scaling have amaxes of their own.
@pytest.mark.parametrize("kind", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
@on_ranks(4)
def test_other_numbers_of_ranks_load_what_was_saved(
    mesh: DeviceMesh, kind: str, tmp_path: Path
) -> None:
    """And training goes on."""
    folder = tmp_path
    original = Training(kind, 1, mesh)
    original.step()
    state = original.state()
    expected = whole(state)
    reduced = for_other_numbers(state)
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
                assert_states_equal(whole(fresh.state()), wanted, f"{writer} into {name}")
                assert loaded["steps"] == 1
                groups = loaded["optimizer"]["param_groups"]
                assert groups == state["optimizer"]["param_groups"]
            if name != "4":
                save_sharded(fresh.state(), folder / name, group=group)
            assert fresh.step() > 0
        dist.barrier()
        writers = list(dict.fromkeys(("4", name)))
    for writer in ("2", "4"):
        fresh = Training(kind, 4, mesh)
        fresh.resume(folder / writer)
        wanted = expected if writer == "4" else reduced
        assert_states_equal(whole(fresh.state()), wanted, f"{writer} into 4")
    assert fresh.step() == original.step()
    assert_states_equal(whole(fresh.state()), whole(original.state()), "continued")


@on_ranks(4)
def test_shards_that_cut_blocks_are_named(mesh: DeviceMesh, tmp_path: Path) -> None:
    with ottava.quantized_model_init("mxfp8"):
        net = torch.nn.Sequential(ottava.nn.Linear(40, 64, recipe="mxfp8"))
    fully_shard(net, mesh=mesh)
    words = r"0\.weight' has rows .* of 64, which cut the blocks"
    with pytest.raises(OttavaError, match=words):
        save_sharded(net.state_dict(), tmp_path / "cut")
    assert not list(tmp_path.iterdir())


DAMAGES: list[Callable[[bytes], bytes | None]] = [
    lambda data: data[:-3] + bytes([data[-3] ^ 16]) + data[-2:],
    lambda data: None,
    lambda data: pickle.dumps({}).ljust(len(data), b" "),
]


@on_ranks(4)
def test_damage_on_one_rank(mesh: DeviceMesh, tmp_path: Path) -> None:
    """All fail, that one names the file, and no model has changed."""
    folder, rank = tmp_path, dist.get_rank()
    saved, own = folder / "saved", folder / f"own-{rank}"
    save_sharded(Training("current", 1, mesh).net.state_dict(), saved)
    target = Training("current", 2, mesh).net.state_dict()
    before = whole(target)
    (part,) = [entry.name for entry in saved.glob("rank-00002-of-00004-*.safetensors")]
    victims = ((2, part), (3, "ottava.json"), (0, "ottava.json"))
    for (victim, file), change in zip(victims, DAMAGES, strict=True):
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
        assert_states_equal(whole(target), before, file)
    # Not damaged, but not the same either.
    save_sharded(Training("current", 3, mesh).net.state_dict(), folder / "other")
    with pytest.raises(CheckpointError, match="not the same checkpoint on all ranks"):
        load_sharded(target, folder / ("other" if rank == 1 else "saved"))
    assert_states_equal(whole(target), before, "another checkpoint")


@on_ranks(4)
def test_what_one_rank_cannot_save_none_does(mesh: DeviceMesh, tmp_path: Path) -> None:
    """And nothing is left."""
    rank, path = dist.get_rank(), tmp_path / "saved"
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
    dist.barrier()
    assert not path.exists()
    save_sharded({"x": 1}, path)
    with pytest.raises(CheckpointError, match="exists"):
        save_sharded({"x": 2}, path)
    outside = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(OptionError, match="a process group that this process is in"):
            save_sharded({"x": 2}, path, group=outside)


class Pending(RecipeState):
    """A state with a buffer that the ranks would reduce in the next step."""

    reduced_by_max = ("pending",)


@on_ranks(4)
def test_plain_tensors_that_differ(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Each rank has its own again, other numbers of ranks those of rank 0, and the largest of what
    the next step would have reduced."""
    rank, path = dist.get_rank(), tmp_path / "saved"
    pending = torch.zeros(5)
    pending[rank] = 1.0 + rank
    state = {"own": torch.full((3,), float(rank)), "nan": torch.full((1,), torch.nan)}
    state |= {"0.recipe_state.pending": pending, "count": torch.tensor([3, rank])}
    save_sharded(state, path)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    load_sharded(target, path)
    for name, value in state.items():
        assert_same(target[name], value, note=name)
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


@on_ranks(4)
def test_placements(mesh: DeviceMesh, tmp_path: Path) -> None:
    """DTensors of every kind, a wrapper in high precision among them, loaded in any other."""
    values, zeros, square = (
        torch.arange(70.0).reshape(10, 7),
        torch.zeros(10, 7),
        meshes()["2x2"][0],
    )
    kinds = [(mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [Replicate()])]
    kinds += [(square, [Shard(0), Shard(1)]), (square, [Replicate(), Shard(1)])]
    kinds += [(square, [Shard(1), Replicate()])]

    def state(source: torch.Tensor, kinds: list[Any]) -> dict[str, Any]:
        made = {str(number): distribute_tensor(source, *kind) for number, kind in enumerate(kinds)}
        local = distribute_tensor(source, mesh, [Shard(0)]).to_local().clone().as_subclass(Master)
        size = {"shape": torch.Size((10, 7)), "stride": (7, 1)}
        master = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **size)
        return made | {"master": master}

    save_sharded(state(values, kinds), tmp_path / "saved")
    for others in (kinds, kinds[::-1]):
        target = state(zeros, others)
        load_sharded(target, tmp_path / "saved")
        assert isinstance(target["master"].to_local(), Master)
        for name, expected in state(values, others).items():
            mine, theirs = (
                v.to_local().as_subclass(torch.Tensor) for v in (target[name], expected)
            )
            assert torch.equal(mine, theirs), name


@on_ranks(4)
def test_plain_shards_for_the_writers_of_others(mesh: DeviceMesh, tmp_path: Path) -> None:
    """With the description of the whole model, and without transposes."""
    with columnwise_layout("transpose"), torch.no_grad():
        net = Training("current", 1, mesh).net
        post_all_gather_processing(list(net.parameters()))
        assert net[0].weight.to_local()._transpose is not None
    flat, metadata = flatten_state_dict(net.state_dict())
    tensors, expected = flatten_state_dict(model("current", 1).state_dict())
    assert metadata == expected
    assert_states_equal(whole(flat), whole(tensors), "flat")
    save_sharded(flat, tmp_path / "flat")
    fresh = Training("current", 2, mesh).net
    load_sharded(flatten_state_dict(fresh.state_dict())[0], tmp_path / "flat")
    assert_states_equal(whole(fresh.state_dict()), whole(net.state_dict()), "loaded")
    with pytest.raises(DTypeError, match=r"is sharded.*save_sharded"):
        save_file(net.state_dict(), tmp_path / f"file-{dist.get_rank()}")
