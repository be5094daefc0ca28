"""Damaged and forged sharded checkpoints: an error that names the file, nothing run, nothing
changed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

import ottava
from ottava.checkpoint import index, is_complete, load_sharded, save_sharded
from ottava.errors import CheckpointError, UsageError


@pytest.fixture
def training(recipe: Any) -> Callable[[int], dict[str, Any]]:
    """Makes weights, an optimizer that has made a step, and what else belongs to a training."""

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        with ottava.quantized_model_init(recipe):
            net = torch.nn.Sequential(
                ottava.nn.Linear(5, 33, recipe=recipe), ottava.nn.Linear(33, 3, recipe=recipe)
            )
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * seed)
        net(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": seed}

    return make


def tensor_bytes(state: Any) -> list[bytes]:
    """Every byte of the tensors in a nested state."""
    if isinstance(state, ottava.QuantizedTensorStorage):
        return [
            part
            for tensor in state.inner_list()
            if tensor is not None
            for part in tensor_bytes(tensor)
        ]
    if isinstance(state, torch.Tensor):
        return [bytes(state.detach().contiguous().reshape(-1).view(torch.uint8).tolist())]
    entries = (
        state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    )
    return [part for entry in entries for part in tensor_bytes(entry)]


def flipped(data: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8) if at == bit // 8 else byte for at, byte in enumerate(data))


class Payload:
    """A pickle of it would leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def refused(path: Path, target: Any, match: str) -> None:
    before = tensor_bytes(target)
    with pytest.raises(CheckpointError, match=match):
        load_sharded(target, path)
    assert tensor_bytes(target) == before


def test_every_file_cut_extended_flipped_removed_or_replaced(training: Any, tmp_path: Path) -> None:
    original, path, trace = tmp_path / "saved", tmp_path / "damaged", tmp_path / "trace"
    save_sharded(training(1), original)
    target, chance = training(2), random.Random(0)
    for file in sorted(entry.name for entry in original.iterdir()):
        data = (original / file).read_bytes()
        bits = [chance.randrange(8 * len(data)) for _ in range(40)] + [0, 8 * len(data) - 9]
        ways = [flipped(data, bit) for bit in bits]
        ways += [data[: chance.randrange(len(data))] for _ in range(5)] + [
            b"",
            data[:-1],
            data + b"\0",
            data * 2,
        ]
        ways += [
            pickle.dumps(Payload(trace)),
            pickle.dumps(Payload(trace)).ljust(len(data), b"."),
            b"\0" * len(data),
        ]
        for way in ways:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(original, path)
            (path / file).write_bytes(way)
            refused(path, target, file)
        (path / file).unlink()
        refused(path, target, file)
        assert not is_complete(path)
        (path / file).mkdir()
        refused(path, target, file)
        assert not is_complete(path)
    shutil.rmtree(path)
    shutil.copytree(original, path)
    # What torch would unpickle is not even looked at.
    (path / ".metadata").write_bytes(pickle.dumps(Payload(trace)))
    assert tensor_bytes(load_sharded(target, path)) == tensor_bytes(training(1))
    assert not trace.exists()


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """An index that says something else, with the right checksum."""
    body = json.loads((path / "ottava.json").read_bytes())["checkpoint"]
    change(body)
    rest = json.dumps(body).encode() + b"}"
    (path / "ottava.json").write_bytes(b'{"crc32":"%08x","checkpoint":' % zlib.crc32(rest) + rest)


def shards(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body["tensors"]["x"]["shards"]  # type: ignore[no-any-return]


def from_outside(body: dict[str, Any]) -> None:
    """The very file, by a name that leaves the folder."""
    ((name, file),) = body["files"].items()
    body["files"] = {f"../saved/{name}": file}
    shards(body)[0].update(file=f"../saved/{name}")


@pytest.mark.parametrize(
    "change",
    [
        from_outside,
        lambda body: body.update(version=3),
        lambda body: body.update(files={"../outside.safetensors": [1, 2, 3]}),
        lambda body: body.update(description=[]),
        lambda body: body["description"].update(state={"tensor": "x", "value": 1}),
        lambda body: body["description"].update(state=[]),
        lambda body: body["description"].update(state={"dict": [[["unhashable"], {"value": 1}]]}),
        lambda body: body["description"].update(per_rank={"x": ["x", "y"]}),
        lambda body: body["description"].update(quantized={"x": 1}),
        lambda body: body["description"].update(quantized={"x": {}}),
        lambda body: body["tensors"]["x"].update(dtype="F4"),
        lambda body: body["tensors"]["x"].update(shape=[-4, -3]),
        lambda body: body["tensors"]["x"].update(shape=[4, 4]),
        lambda body: body["tensors"]["x"].update(shape=[1 << 70, 3]),
        lambda body: body["tensors"]["x"].update(shards=[]),
        lambda body: body["tensors"].pop("x"),
        lambda body: shards(body)[0].update(key="y"),
        lambda body: shards(body)[0].update(file="absent"),
        lambda body: shards(body)[0].update(offsets=[1, 0]),
        lambda body: shards(body).append(shards(body)[0]),
        lambda body: body["tensors"]["x"].update(shards=[shards(body)[0] | {"shape": [2, 3]}] * 2),
    ],
)
def test_a_forged_index_is_refused(change: Any, tmp_path: Path) -> None:
    save_sharded({"x": torch.ones(4, 3)}, tmp_path / "saved")
    forged(tmp_path / "saved", change)
    target = {"x": torch.zeros(4, 3)}
    with pytest.raises(CheckpointError, match="saved"):
        load_sharded(target, tmp_path / "saved")
    assert not target["x"].any()


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError, match=r"ottava.json cannot be read.*latest_checkpoint"):
            load_sharded({}, path)
        assert not is_complete(path)


def test_a_target_that_cannot_be_written_leaves_the_others(tmp_path: Path) -> None:
    save_sharded({name: torch.ones(3) for name in "abc"}, tmp_path / "saved")
    target = {"a": torch.zeros(3), "b": torch.zeros(1).expand(3), "c": torch.zeros(3)}
    with pytest.raises(UsageError, match="'b' is an expanded view"):
        load_sharded(target, tmp_path / "saved")
    with torch.inference_mode():
        target["b"] = torch.zeros(3)
    with pytest.raises(UsageError, match="'b' was made in inference mode"):
        load_sharded(target, tmp_path / "saved")
    assert not any(value.any() for value in target.values())


def test_a_write_that_torch_refuses_is_found_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element of each tensor is written as it is, and only then any value."""
    save_sharded({name: torch.ones(3) for name in "abc"}, tmp_path / "saved")
    target = {name: torch.zeros(3) for name in "abc"}
    real, calls = torch.Tensor.copy_, []

    def fails(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(tensor.data_ptr() == target["b"].data_ptr())
        if calls[-1] and sum(calls) == 1:
            raise RuntimeError("no more writing")
        return real(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", fails)
    with pytest.raises(RuntimeError, match="no more writing"):
        load_sharded(target, tmp_path / "saved")
    assert any(calls)
    assert not any(value.any() for value in target.values())


@pytest.mark.parametrize(
    ("shape", "boxes", "right"),
    [
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
        ((4, 3), [((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ((4, 3), [((0, 0), (2, 3)), ((3, 0), (2, 3))], False),
        ((4, 3), [((0,), (4,))], False),
        ((4, 3), [((0, 0), (2, 3)), ((2, 0), (1, 3))], False),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))], True),
        ((4, 4), [((0, 0), (4, 2)), ((0, 0), (4, 2))], False),
        ((4, 4), [((r, c), (2, 2)) for r in (0, 2) for c in (0, 2)], True),
        ((4, 4), [((0, 0), (4, 4)), ((4, 0), (0, 4))], True),
        ((0, 4), [((0, 0), (0, 4))], True),
        ((0, 4), [], False),
    ],
)
def test_shards_make_the_whole(shape: Any, boxes: Any, right: bool) -> None:
    shards: Any = [index.StoredShard(*map(torch.Size, box), "file", "key") for box in boxes]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), shards)
    assert index.is_whole(tensor) == right


@pytest.mark.parametrize("name", ["x", "half \ud800"])
def test_sizes_and_names_that_no_tensor_has(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    save_sharded({"x": torch.ones(0, 3)}, path)
    text = (path / "ottava.json").read_bytes()
    body = json.loads(text)["checkpoint"]
    entry = body["tensors"].pop("x")
    body["tensors"][name] = entry | {"shape": [1 << 70, 0], "shards": []}
    forged = json.dumps(body).encode() + b"}"
    start = b'{"crc32":"%08x","checkpoint":'
    (path / "ottava.json").write_bytes(start % zlib.crc32(forged) + forged)
    assert not is_complete(path)
    with pytest.raises(CheckpointError, match=r"ottava\.json"):
        load_sharded({"x": torch.ones(0, 3)}, path)


def test_old_checkpoints_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is whole all the same."""
    import ottava.checkpoint.sharded as module

    def fails(*_: Any) -> None:
        raise PermissionError("not yours")

    for step in (1, 2):
        ottava.checkpoint.save_step({"x": torch.ones(1)}, tmp_path, step)
    monkeypatch.setattr(module, "Partial", fails)
    with pytest.warns(RuntimeWarning, match="cannot be removed: not yours") as warned:
        path = ottava.checkpoint.save_step({"x": torch.ones(1)}, tmp_path, 3, keep=1)
    assert len(warned) == 2
    assert is_complete(path)


def test_memory_that_was_given_up_is_found_before_any_write(tmp_path: Path) -> None:
    """As libraries of sharded training do with the storage of what is gathered for a moment."""
    save_sharded({name: torch.ones(3) for name in "abc"}, tmp_path / "saved")
    target = {name: torch.zeros(3) for name in "abc"}
    target["b"].untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="'b' has no memory"):
        load_sharded(target, tmp_path / "saved")
    assert not target["a"].any()
    assert not target["c"].any()


def test_a_load_that_fails_leaves_what_autograd_has_saved(tmp_path: Path) -> None:
    save_sharded({name: torch.ones(3) for name in "ab"}, tmp_path / "saved")
    weight = torch.ones(3, requires_grad=True)
    loss = weight.square().sum()
    with pytest.raises(UsageError, match="'b' is an expanded view"):
        load_sharded({"a": weight, "b": torch.ones(1).expand(3)}, tmp_path / "saved")
    loss.backward()
    assert weight.grad is not None


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    save_sharded({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, tmp_path / "saved")
    tied = torch.zeros(3)
    loaded = load_sharded({"a": tied, "b": tied}, tmp_path / "saved")
    assert loaded["a"] is tied
    assert tied.tolist() == [2.0, 2.0, 2.0]
