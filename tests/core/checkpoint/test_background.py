"""Saving while another thread trains: what is written can be loaded, whatever changes meanwhile."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.checkpoint import files
from ottava.checkpoint.files import read_tensors

State = dict[str, Any]


def save_step(state: State, path: Path) -> None:
    assert checkpoint.save_step(state, path, 3, overwrite=True) == path / "step-0000003"


def save_model(state: State, path: Path) -> None:
    model = torch.nn.Module()
    for name, tensor in state.items():
        model.register_buffer(name, tensor)
    checkpoint.save_model(model, path)


def save_sharded(state: State, path: Path) -> None:
    checkpoint.save_sharded(state, path, overwrite=True)


def of_folder(path: Path) -> State:
    (file,) = path.rglob("*.safetensors")
    return read_tensors(file)[0]


#: How a state is saved under a path, and read again with its checksums compared.
WRITERS: dict[str, tuple[Callable[[State, Path], None], Callable[[Path], State]]] = {
    "save_file": (checkpoint.save_file, checkpoint.load_file),
    "save_model": (save_model, checkpoint.load_file),
    "save_sharded": (save_sharded, of_folder),
    "save_step": (save_step, of_folder),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_changes_while_it_is_written(
    writer: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the library writes the bytes, and just after: the file has those that were
    written."""
    state, real = {"a": torch.zeros(1000), "b": torch.ones(3).bfloat16()}, files.serialize_file
    save, load = WRITERS[writer]

    def serialize(*arguments: Any) -> None:
        if when == "before":
            state["a"][500:] = 7.0
        real(*arguments)
        state["a"][500:] = 7.0

    monkeypatch.setattr(files, "serialize_file", serialize)
    save(state, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    written = 7.0 if when == "before" else 0.0
    assert loaded["a"].tolist() == [0.0] * 500 + [written] * 500
    assert loaded["b"].tolist() == [1.0] * 3
    if writer == "save_sharded":
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert (
            checkpoint.load_sharded(target, tmp_path / "saved")["a"].tolist()
            == loaded["a"].tolist()
        )


@pytest.mark.parametrize("writer", WRITERS)
def test_every_save_beside_a_training_can_be_loaded(writer: str, tmp_path: Path) -> None:
    state, stop = {str(number): torch.zeros(20_000) for number in range(10)}, threading.Event()
    save, load = WRITERS[writer]

    def train() -> None:
        while not stop.is_set():
            for tensor in state.values():
                tensor.add_(1.0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(10):
            save(state, tmp_path / "saved")
            assert load(tmp_path / "saved").keys() == state.keys()
    finally:
        stop.set()
        thread.join()


def test_a_file_that_is_short_never_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library says of what it wrote."""
    state, path, real = {"a": torch.zeros(1000)}, tmp_path / "saved", files.serialize_file
    checkpoint.save_file(state, path)
    before = path.read_bytes()
    for length in (0, 4, 50, len(before) - 1):

        def serialize(specs: Any, file: Path, texts: Any, length: int = length) -> None:
            real(specs, file, texts)
            file.write_bytes(file.read_bytes()[:length])

        monkeypatch.setattr(files, "serialize_file", serialize)
        with pytest.raises(
            ottava.errors.UsageError, match="something is missing from what was written"
        ):
            checkpoint.save_file(state, path)
        assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_texts_and_names_that_look_like_the_checksum(tmp_path: Path) -> None:
    entry = '"ottava.crc32":"00000000"'
    checkpoint.save_file(
        {entry: torch.ones(2), "ottava.crc32": torch.ones(1)},
        tmp_path / "x",
        metadata={entry: entry},
    )
    tensors, metadata = read_tensors(tmp_path / "x")
    assert tensors[entry].tolist() == [1.0, 1.0]
    assert metadata[entry] == entry


def test_a_copy_is_a_snapshot(small: Any, contents: Any, tmp_path: Path) -> None:
    """As docs/checkpoints.md has it, quantized and tied tensors included."""
    model = small(0)
    before = contents(model)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert contents(model) != before
    checkpoint.save_file(state, tmp_path / "x")
    assert contents(checkpoint.load_file(tmp_path / "x")) == before
    assert {"first", "tied"} - read_tensors(tmp_path / "x")[0].keys() == {"tied"}
