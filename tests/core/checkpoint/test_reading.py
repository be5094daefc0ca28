"""Tensors read from files and folders of any tool, files of torch.save, and sharded checkpoints."""

from __future__ import annotations

import json
import os
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ottava import checkpoint
from ottava.checkpoint import read_state
from ottava.errors import CheckpointError, OttavaError
from tests.core.checkpoint.files import contents, lines_of

INDEX = "model.safetensors.index.json"
STATE = {f"{n}.weight": torch.full((3, n + 1), float(n)) for n in range(5)}
WHERE = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(STATE)}


def in_two_files(folder: Path) -> Path:
    """A folder of large models, as they are published."""
    folder.mkdir()
    for file in {*WHERE.values()}:
        tensors = {name: value for name, value in STATE.items() if WHERE[name] == file}
        safetensors.torch.save_file(tensors, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": WHERE}))
    return folder


def same(state: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two states have the same tensors, in whatever order."""
    return contents(state) == {name: contents(value) for name, value in expected.items()}


def test_a_folder_of_files(tmp_path: Path) -> None:
    folder = in_two_files(tmp_path / "folder")
    state, texts = read_state(folder)
    assert same(state, STATE)
    assert texts == {}
    (folder / INDEX).unlink()
    safetensors.torch.save_file(STATE, folder / "model.safetensors", {"format": "pt"})
    state, texts = read_state(folder)
    assert same(state, STATE)
    assert texts == {"format": "pt"}


INDICES: list[tuple[str | None, str]] = [
    ("{", r"index\.json cannot be read"),
    ("[]", r"index\.json cannot be read"),
    ('{"weight_map": []}', r"index\.json cannot be read"),
    ('{"weight_map": {"a": 3}}', r"index\.json cannot be read"),
    ("[" * 100_000, r"index\.json cannot be read"),
    ('{"weight_map": {"a": "../in"}}', "same folder"),
    ('{"weight_map": {"a": "/etc/passwd"}}', "same folder"),
    ('{"weight_map": {"a": "absent"}}', "absent cannot be read"),
    (json.dumps({"weight_map": WHERE | {"a": WHERE["0.weight"]}}), "no tensor 'a'"),
    (None, r"Expected: model\.safetensors, files by tensor in model\.safetensors\.index\.json, or"),
]


@pytest.mark.parametrize(("text", "words"), INDICES)
def test_indices_of_files(text: str | None, words: str, tmp_path: Path) -> None:
    index = in_two_files(tmp_path / "folder") / INDEX
    index.unlink()
    if text is not None:
        index.write_text(text)
    with pytest.raises(CheckpointError, match=words):
        read_state(tmp_path / "folder")


@pytest.mark.parametrize("name", [INDEX, "ottava.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)


def test_files_of_torch_save(small: Any, tmp_path: Path) -> None:
    model = small(0)
    for new in (True, False):
        torch.save(model.state_dict(), tmp_path / "pt", _use_new_zipfile_serialization=new)
        state, texts = read_state(tmp_path / "pt")
        assert texts == {}
        assert contents(state["layer.weight"]) == contents(model.layer.weight)
        assert state.keys() == model.state_dict().keys()


OTHER = "'x' is on meta, sparse, nested or expanded"
PICKLES: list[tuple[Any, str]] = [
    ([torch.ones(1)], "holds a list"),
    ({"model": {}, "epoch": 3}, "'model' is a"),
    ({3: torch.ones(1)}, "3 is a Tensor"),
    ({"x": torch.eye(2).to_sparse()}, OTHER),
    ({"x": torch.ones(2, device="meta")}, OTHER),
    # A small file that asks for any amount of memory.
    ({"x": torch.zeros(1).expand(2**14, 2**14)}, OTHER),
    ({"x": torch.zeros(1).expand(2**24, 2**24)}, OTHER),
    (torch.nn.Linear(2, 2), r"it needs code to be run \(torch.nn.modules.linear.Linear\)"),
]


@pytest.mark.parametrize(("value", "words"), PICKLES)
def test_refused_files_of_torch_save(value: Any, words: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "pt")
    assert (tmp_path / "pt").stat().st_size < 4000
    with pytest.raises(CheckpointError, match=words) as caught:
        read_state(tmp_path / "pt")
    # torch's own message advises to run the code.
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(layout: Any, tmp_path: Path) -> None:
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    torch.save({"x": value}, tmp_path / "pt")
    with pytest.raises(OttavaError):
        read_state(tmp_path / "pt")


def test_damaged_files_of_torch_save(tmp_path: Path) -> None:
    """Tensors, or Ottava's error; the file has no checksum."""
    path, chance, refused = tmp_path / "pt", random.Random(2), 0
    torch.save({"a": torch.arange(6), "b.weight": torch.randn(4, 4)}, path)
    raw = path.read_bytes()
    for _ in range(300):
        changed = bytearray(raw)
        for _ in range(chance.choice((1, 1, 8))):
            changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed[: chance.choice((len(raw), chance.randrange(len(raw))))])
        try:
            with warnings.catch_warnings(action="ignore"):
                state = read_state(path)[0]
        except OttavaError:
            refused += 1
        else:
            assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert refused > 75


def test_a_sharded_checkpoint(small: Any, tmp_path: Path) -> None:
    net = small(0)
    checkpoint.save_sharded(net.state_dict(), tmp_path / "saved")
    state, texts = read_state(tmp_path / "saved")
    assert texts == {}
    assert state.keys() == net.state_dict().keys()
    assert same(state, net.state_dict())
    assert (
        checkpoint.flatten_state_dict(state)[1]
        == checkpoint.flatten_state_dict(net.state_dict())[1]
    )
    for file in sorted((tmp_path / "saved").iterdir()):
        raw = bytearray(file.read_bytes())
        # In the description of the tensors, and in a tensor.
        for place in (len(raw) // 2, -1):
            raw[place] ^= 1
            file.write_bytes(raw)
            with pytest.raises(CheckpointError, match=file.name):
                read_state(tmp_path / "saved")
            raw[place] ^= 1
        file.write_bytes(raw)


def test_an_index_of_many_files_is_read_in_linear_time(tmp_path: Path) -> None:
    """A search through the index for each file takes long for large models."""
    lines = []
    for number in (20, 160):
        folder = tmp_path / str(number)
        folder.mkdir()
        where = {f"{n}.weight": f"{n}.safetensors" for n in range(number)}
        for name, file in where.items():
            safetensors.torch.save_file({name: torch.ones(1)}, folder / file)
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
        lines.append(lines_of(partial(read_state, folder)))
    assert lines[1] < 10 * lines[0]
