"""The cases of test_distributed.py that need ranks: four gloo processes each, forked once
everything is imported.

Usage: distributed_worker.py FOLDER. It ends with an error where a case fails.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ottava
from ottava.checkpoint import (
    files,
    flatten_state_dict,
    is_complete,
    latest_checkpoint,
    load_sharded,
    save_file,
    save_sharded,
    save_step,
    storage,
)
from ottava.errors import CheckpointError, DTypeError, OptionError, OttavaError, UsageError
from ottava.recipes.state import RecipeState
from ottava.tensors import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import SampleRecipe  # type: ignore[import-not-found]
from sampling import some  # type: ignore[import-not-found]

WORLD = 4
BITS = torch.uint8


def whole(seed: int, scale: float = 1.0) -> torch.nn.Sequential:
    """33 rows are uneven on four ranks; of 3 the last one has none, and of 8 each has some."""
    torch.manual_seed(seed)
    with ottava.quantized_model_init(SampleRecipe()):
        net = torch.nn.Sequential(
            *(ottava.nn.Linear(5, rows, recipe=SampleRecipe()) for rows in (33, 3, 8))
        )
    with torch.no_grad():
        for layer in net:
            layer.weight.copy_(torch.randn(layer.weight.shape) * scale)
    net.register_buffer("buffer", torch.randn(3))
    return net


def sharded(seed: int, mesh: Any) -> torch.nn.Sequential:
    net = whole(seed)
    fully_shard(net, mesh=mesh)
    return net


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(BITS).tolist())


def local_bytes(net: torch.nn.Module) -> dict[str, bytes]:
    """Every byte that this rank has."""
    found = {}
    for name, value in net.state_dict().items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, QuantizedTensor):
            held = ((i.argument, getattr(local, i.attribute)) for i in local.inner_tensors)
            found |= {f"{name}.{argument}": raw(t) for argument, t in held if t is not None}
        else:
            found[name] = raw(local)
    return found


def expected_bytes(net: torch.nn.Module, of: torch.nn.Module) -> dict[str, bytes]:
    """What this rank of ``net`` has to have of the whole model ``of``: its rows, and all of every
    scale."""
    bytes_of = local_bytes(of)
    for name, value in net.state_dict().items():
        if isinstance(value, DTensor):
            ranks, rank = value.device_mesh.size(-1), value.device_mesh.get_coordinate()[-1]
            rows = -(-value.shape[0] // ranks)
            source = of.state_dict()[name]
            key, data = (
                (f"{name}.data", source._data)
                if isinstance(source, QuantizedTensor)
                else (name, source)
            )
            bytes_of[key] = raw(data[rows * rank : rows * (rank + 1)])
    return bytes_of


class Ranks:
    """What the cases get: this rank, a folder, and meshes with their groups."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        two = DeviceMesh("cpu", [0, 1])
        self.meshes = {
            "4": (DeviceMesh("cpu", [0, 1, 2, 3]), None),
            "2x2": (
                DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicas", "shards")),
                None,
            ),
            "2": (two, dist.new_group([0, 1])),
        }
        self.mesh = self.meshes["4"][0]


def resharding(ranks: Ranks) -> None:
    """Uneven and empty shards, never gathered before: saved by any number, loaded by any other."""
    for writer, (mesh, group) in ranks.meshes.items():
        if mesh.get_coordinate() is not None:
            save_sharded(sharded(1, mesh).state_dict(), ranks.folder / writer, group=group)
        dist.barrier()
        for reader, (other, others) in ranks.meshes.items():
            if other.get_coordinate() is None:
                continue
            net = sharded(2, other)
            assert local_bytes(net) != expected_bytes(net, whole(1))
            load_sharded(net.state_dict(), ranks.folder / writer, group=others)
            assert local_bytes(net) == expected_bytes(net, whole(1)), (writer, reader)
            # The values follow: what a layer reads is what was loaded.
            with torch.no_grad():
                values = net[2].weight.to_local().dequantize()
            rank = other.get_coordinate()[-1]
            assert torch.equal(values, whole(1)[2].weight.dequantize().chunk(other.size(-1))[rank])
        dist.barrier()
    assert len(list((ranks.folder / "4").glob("rank-*"))) == 4


def damage(ranks: Ranks) -> None:
    """On one rank alone: all fail, that one says in which file, and no model has changed."""
    saved, own = ranks.folder / "saved", ranks.folder / f"own-{ranks.rank}"
    net = sharded(1, ranks.mesh)
    save_sharded(net.state_dict(), saved)
    trace = ranks.folder / "trace"

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(trace),)

    ways: list[Callable[[bytes], bytes | None]] = [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-3] + bytes([data[-3] ^ 16]) + data[-2:],
        lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
        lambda data: b"",
        lambda data: None,
        lambda data: pickle.dumps(Payload()).ljust(len(data), b" "),
    ]
    target = sharded(2, ranks.mesh)
    before = local_bytes(target)
    (part,) = [entry.name for entry in saved.glob("rank-00002-of-00004-*.safetensors")]
    for victim, file in ((2, part), (3, "ottava.json"), (0, "ottava.json")):
        for number, way in enumerate(some(ways[victim::2], ways)):
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(saved, own)
            if ranks.rank == victim:
                data = way((own / file).read_bytes())
                (own / file).unlink()
                if data is not None:
                    (own / file).write_bytes(data)
            with pytest.raises(CheckpointError) as caught:
                load_sharded(target.state_dict(), own)
            seen = str(caught.value)
            assert file in seen, (victim, number, seen)
            assert (f"rank {victim} failed" in seen) == (ranks.rank != victim), (
                victim,
                number,
                seen,
            )
            assert local_bytes(target) == before
    # Not damaged, but not the same either.
    other = ranks.folder / "other"
    save_sharded(sharded(3, ranks.mesh).state_dict(), other)
    with pytest.raises(CheckpointError, match="not the same checkpoint on all ranks"):
        load_sharded(target.state_dict(), other if ranks.rank == 1 else saved)
    assert local_bytes(target) == before
    load_sharded(target.state_dict(), saved)
    assert local_bytes(target) == expected_bytes(target, whole(1))
    assert not trace.exists()


def failures(ranks: Ranks) -> None:
    """What one rank cannot save, none does, and nothing is left."""
    net, path = sharded(1, ranks.mesh), ranks.folder / "saved"

    def fails(state: Any, kind: type[OttavaError], where: int, match: str) -> None:
        with pytest.raises(kind if ranks.rank == where else CheckpointError, match=match) as caught:
            save_sharded(state, path)
        assert (f"rank {where} failed" in str(caught.value)) == (ranks.rank != where)
        dist.barrier()
        assert list(ranks.folder.iterdir()) == []

    fails({"x": object() if ranks.rank == 1 else 1}, DTypeError, 1, "'x' is a object")

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    real = storage.write_tensors
    for where in (3, 0):
        storage.write_tensors = full if ranks.rank == where else real
        fails(net.state_dict(), CheckpointError, where, "cannot be written.*No space left")
        storage.write_tensors = real
    for state, match in (
        ({"a": ranks.rank}, "'a' of rank 1 is not that of rank 0"),
        ({"a": {"b": [1, ranks.rank // 2]}}, r"'a\.b\.1' of rank 2 is not"),
        ({"a": torch.ones(2), **({"b": 1} if ranks.rank else {})}, "'b' of rank 1 is not"),
        ({"a": torch.ones(2 + ranks.rank // 3)}, "'a' of rank 3 is not"),
    ):
        with pytest.raises(UsageError, match=match):
            save_sharded(state, path)
    with torch.no_grad():
        net[2].weight.to_local()._scale_inv.mul_(1 + ranks.rank)
    with pytest.raises(
        UsageError, match=r"the shards of '2.weight' have different 'fp8_scale_inv'"
    ):
        save_sharded(net.state_dict(), path)
    assert not path.exists()
    save_sharded({"x": 1}, path)
    with pytest.raises(CheckpointError, match="exists"):
        save_sharded({"x": 2}, path)
    assert load_sharded({}, path) == {"x": 1}
    outside = ranks.meshes["2"][1]
    if ranks.rank > 1:
        with pytest.raises(OptionError, match="a process group that this process is in"):
            save_sharded({"x": 2}, path, group=outside)


class Pending(RecipeState):
    """A state with a buffer that the ranks would reduce in the next step."""

    reduced_by_max = ("pending",)


def own_tensors(ranks: Ranks) -> None:
    """Plain tensors that differ: each rank has its own again; other numbers of ranks have those of
    the first.

    Of what the next step would have reduced they have the largest of all.
    """
    path = ranks.folder / "saved"
    state = {
        "own": torch.full((3,), float(ranks.rank)),
        "same": torch.ones(2),
        "nan": torch.full((1,), torch.nan),
    }
    pending = torch.zeros(5)
    pending[ranks.rank] = 1.0 + ranks.rank
    state["0.recipe_state.pending"] = pending
    state["0.recipe_state.count"] = torch.tensor([3, ranks.rank])
    save_sharded(state, path)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    load_sharded(target, path)
    assert raw(target["own"]) == raw(state["own"])
    assert raw(target["nan"]) == raw(state["nan"])
    mesh, group = ranks.meshes["2"]
    if mesh.get_coordinate() is not None:
        target["own"].fill_(9)
        load_sharded(target, path, group=group)
        assert not target["own"].any()
        assert target["0.recipe_state.pending"].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
        assert target["0.recipe_state.count"].tolist() == [3, 0]
    assert storage.FolderReader(path).whole("0.recipe_state.pending").tolist() == [
        1.0,
        2.0,
        3.0,
        4.0,
        0.0,
    ]
    dist.barrier()


class Master(torch.Tensor):
    """A weight in high precision that is quantized when it is gathered."""

    def high_precision(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def placements(ranks: Ranks) -> None:
    """DTensors of every kind, wrappers in high precision among them, and flat ones for other
    writers."""
    values = torch.arange(70.0).reshape(10, 7)
    mesh2 = ranks.meshes["2x2"][0]
    kinds = [(ranks.mesh, [Shard(0)]), (ranks.mesh, [Shard(1)]), (ranks.mesh, [Replicate()])]
    kinds += [
        (mesh2, [Shard(0), Shard(1)]),
        (mesh2, [Replicate(), Shard(1)]),
        (mesh2, [Shard(1), Replicate()]),
    ]

    def state(source: torch.Tensor) -> dict[str, Any]:
        made = {str(number): distribute_tensor(source, *kind) for number, kind in enumerate(kinds)}
        local = (
            distribute_tensor(source, ranks.mesh, [Shard(0)]).to_local().clone().as_subclass(Master)
        )
        made["master"] = DTensor.from_local(
            local, ranks.mesh, [Shard(0)], shape=(10, 7), stride=(7, 1)
        )
        return made | {"whole": source.clone().as_subclass(Master)}

    save_sharded(state(values), ranks.folder / "saved")
    target = state(torch.zeros(10, 7))
    assert isinstance(target["master"].to_local(), Master)
    load_sharded(target, ranks.folder / "saved")
    for name, value in state(values).items():
        seen = target[name]
        a, b = (v.to_local() if isinstance(v, DTensor) else v for v in (seen, value))
        assert raw(a.as_subclass(torch.Tensor)) == raw(b.as_subclass(torch.Tensor)), name
    # Whoever saved, in whatever placement.
    swapped = {
        str(n): distribute_tensor(torch.zeros(10, 7), *kinds[-1 - n]) for n in range(len(kinds))
    }
    load_sharded(swapped, ranks.folder / "saved", strict=False)
    for value in swapped.values():
        assert torch.equal(value.full_tensor(), values)
    net, of = sharded(1, ranks.mesh), whole(1).state_dict()
    flat, metadata = flatten_state_dict(net.state_dict())
    plain, described = flatten_state_dict(of)
    assert metadata == described
    assert flat.keys() == plain.keys()
    for name, value in plain.items():
        seen = flat[name]
        if isinstance(seen, DTensor):
            # gloo moves no 8-bit floats.
            local = seen.to_local().contiguous().view(BITS)
            pieces: list[Any] = [None] * WORLD
            dist.all_gather_object(pieces, local)
            assert seen.shape == value.shape
            assert seen.dtype == value.dtype
            seen = torch.cat(pieces)
        assert raw(seen) == raw(value), name
    save_sharded(flat, ranks.folder / "flat")
    fresh = sharded(2, ranks.mesh)
    load_sharded(flatten_state_dict(fresh.state_dict())[0], ranks.folder / "flat")
    assert local_bytes(fresh) == expected_bytes(fresh, whole(1))
    with pytest.raises(DTypeError, match=r"is sharded.*save_sharded"):
        save_file(net.state_dict(), ranks.folder / f"file-{ranks.rank}")


def killed(victim: int, call: int) -> Callable[[Ranks], None]:
    """A case in which one rank is killed in the middle of writing the second checkpoint."""

    def case(ranks: Ranks) -> None:
        save_step(sharded(1, ranks.mesh).state_dict(), ranks.folder, 1)
        calls, real = [0], files.zlib  # type: ignore[attr-defined]

        def crc32(data: Any) -> int:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real.crc32(data)

        if ranks.rank == victim:
            files.zlib = SimpleNamespace(crc32=crc32)  # type: ignore[attr-defined]
        # The others notice: it is not theirs to go on.
        with pytest.raises((RuntimeError, CheckpointError)):
            save_step(sharded(2, ranks.mesh).state_dict(), ranks.folder, 2)

    case.__name__ = f"killed_{victim}_{call}"
    return case


def resumed(ranks: Ranks) -> None:
    """After the kills: two ranks take the last whole checkpoint up and save the next."""
    mesh, group = ranks.meshes["2"]
    if mesh.get_coordinate() is None:
        return
    for folder in sorted(ranks.folder.parent.glob("killed_*")):
        latest = latest_checkpoint(folder)
        assert latest == folder / "step-0000001"
        net = sharded(3, mesh)
        load_sharded(net.state_dict(), latest, group=group)
        assert local_bytes(net) == expected_bytes(net, whole(1))
        save_step(net.state_dict(), folder, 2, keep=1, group=group)
        dist.barrier(group)
        assert [entry.name for entry in folder.iterdir()] == ["step-0000002"]
        assert is_complete(folder / "step-0000002")


KILLS = some([(0, 3), (1, 2)], [(0, 1), (0, 3), (1, 2), (3, 3)])
Case = Callable[[Ranks], None]
#: The cases of each launch; a rank that is killed takes its launch along.
LAUNCHES: list[list[Case]] = [
    [resharding, damage, failures, own_tensors, placements],
    *([killed(*kill)] for kill in KILLS),
    [resumed],
]


def rank_process(cases: list[Case], rank: int, store: Path, folder: Path) -> None:
    case = cases[0]
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", rank=rank, world_size=WORLD, store=dist.FileStore(str(store), WORLD)
        )
        for case in cases:
            case(Ranks(rank, folder / case.__name__))
            if not case.__name__.startswith("killed"):
                dist.barrier()
        code = 0
    except BaseException:
        print(f"{case.__name__} failed on rank {rank}:", file=sys.stderr)
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort (a group that is still
    # referenced).
    os._exit(code)


def run(cases: list[Case], store: Path, folder: Path) -> bool:
    """Whether all ranks came to the end, but one that had to be killed."""
    for case in cases:
        (folder / case.__name__).mkdir()
    ranks = {}
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            rank_process(cases, rank, store, folder)
        ranks[child] = rank
    ends: list[int] = []
    is_kill = cases[0].__name__.startswith("killed")
    expected = [0, 0, 0, signal.SIGKILL] if is_kill else [0] * WORLD
    while ranks:
        child, status = os.wait()
        del ranks[child]
        ends.append(status)
        if status and status not in expected:
            # The others would wait for it.
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return sorted(ends) == expected


if __name__ == "__main__":
    # fully_shard imports it, which takes longer than anything that is tested here.
    import torch._dynamo
    import torch.distributed.checkpoint

    top = Path(sys.argv[1])
    passed = [run(cases, top / f"store-{n}", top) for n, cases in enumerate(LAUNCHES)]
    sys.exit(not all(passed))
