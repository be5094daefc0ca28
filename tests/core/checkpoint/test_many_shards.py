"""A tensor of many shards is loaded by a number of looks that grows with their number, not with its
square."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava import checkpoint
from ottava.checkpoint import storage

FILE = "rank-00000-of-00001.safetensors"


def write_shards(folder: Path, number: int) -> None:
    """A checkpoint of ``x``, ``[number, 2]``, in a shard for each row, with the number of the row
    in it."""
    checkpoint.save_file(
        {f"x@{row}": torch.full((1, 2), float(row)) for row in range(number)}, folder / FILE
    )
    crc32 = checkpoint.files.read_tensors(folder / FILE)[1]["ottava.crc32"]
    shards = [
        {"file": FILE, "key": f"x@{row}", "offsets": [row, 0], "shape": [1, 2]}
        for row in range(number)
    ]
    state: Any = {"dict": [["x", {"tensor": "x"}]]}
    body = {
        "version": 2,
        "files": {FILE: [(folder / FILE).stat().st_size, crc32]},
        "tensors": {"x": {"dtype": "float32", "shape": [number, 2], "shards": shards}},
        "description": {"state": state, "quantized": {}, "per_rank": {}, "largest": []},
    }
    rest = json.dumps(body, separators=(",", ":")).encode() + b"}\n"
    (folder / "ottava.json").write_bytes(b'{"crc32":"%08x","checkpoint":' % zlib.crc32(rest) + rest)


class Counted(list[Any]):
    """A list that counts the entries that it was asked for."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            Counted.looks += 1
            yield entry

    def __reversed__(self) -> Iterator[Any]:
        return iter(Counted(super().__reversed__()))


@pytest.mark.parametrize("number", [20, 200])
def test_looks(number: int, tmp_path: Path) -> None:
    write_shards(tmp_path, number)
    target = {"x": torch.zeros(number, 2)}
    assert checkpoint.load_sharded(target, tmp_path)["x"][:, 0].tolist() == list(range(number))
    reader = storage.FolderReader(tmp_path)
    reader.index.tensors["x"].chunks = Counted(reader.index.tensors["x"].chunks)
    Counted.looks = 0
    assert len(reader.pairs(target)) == number
    assert Counted.looks <= 4 * number
