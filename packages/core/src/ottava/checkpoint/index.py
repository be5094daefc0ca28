"""The index of a sharded checkpoint, ``ottava.json``: JSON with a checksum, of which nothing is code.

It is the last file that is written. A folder without it, with a damaged one, or with files that are not as long as it
says, is no checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.files import TORCH_DTYPES
from ottava.errors import CheckpointError

INDEX_NAME = "ottava.json"
FILE_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}(-[0-9a-f]+)?\.safetensors")
_VERSION = 2
# The checksum is that of all bytes that follow, as they are.
_START = re.compile(rb'\{"crc32":"([0-9a-f]{8})","checkpoint":')
# Cells that the cuts of one tensor may make: a grid of 2,000 by 2,000 ranks.
_MOST_CELLS = 4_000_000


@dataclass(frozen=True)
class StoredShard:
    """A box of a tensor: the file with it, the name that it has there, where in the whole it begins, and its shape."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: torch's name of its dtype, the shape of the whole, and the shards that make it."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Index:
    """What ``ottava.json`` says: how many ranks wrote, the length in bytes and the checksum of each file, the tensors,
    and what the state is made of besides (see ``sharded.py``); and its own checksum."""

    world_size: int
    files: Mapping[str, tuple[int, str]]
    tensors: Mapping[str, StoredTensor]
    description: Mapping[str, Any]
    crc32: int = 0

    def encode(self) -> bytes:
        """The bytes of ``ottava.json``."""
        rest = (
            json.dumps({**asdict(self), "version": _VERSION}, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
        )
        return f'{{"crc32":"{zlib.crc32(rest):08x}","checkpoint":'.encode() + rest


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in ``folder``, checked, whose files are there as long as they were written.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version of Ottava; or files are missing or cut.
    """
    path = folder / INDEX_NAME
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        what, expected = f"{path} cannot be read: {error}", "the folder of a whole sharded checkpoint"
        raise CheckpointError(what, expected=expected, remedy="latest_checkpoint() finds the newest one") from error
    try:
        start = _START.match(text)
        if start is None or zlib.crc32(text[start.end() :]) != int(start[1], 16):
            raise ValueError("its checksum is another")
        body = json.loads(text)["checkpoint"]
        version = body["version"]
        index = _decoded(body, int(start[1], 16)) if version == _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        what, expected = f"{path} is damaged: {error}", "the index of a sharded checkpoint"
        raise CheckpointError(what, expected=expected, remedy="load another one") from error
    if index is None:
        # The files of the first version of one-file checkpoints are read.
        remedy = "make one file of it with `ottava export` of the version of ottava that wrote it, and load that"
        raise CheckpointError(f"{path} has version {version!r}", expected=f"version {_VERSION}", remedy=remedy)
    for name, (size, _) in index.files.items():
        try:
            found = (folder / name).stat().st_size if (folder / name).is_file() else "no"
        except OSError as error:
            found = f"unknown ({error})"
        if found != size:
            what, remedy = f"{folder / name} has {found} bytes", "load another checkpoint"
            raise CheckpointError(what, expected=f"{size}, as were written", remedy=remedy)
    return index


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{values!r:.80} is no list of sizes")
    return tuple(values)


def _decoded(body: Mapping[str, Any], crc32: int) -> Index:
    (world_size,), description, files, tensors = _sizes([body["world_size"]]), body["description"], {}, {}
    for name, (size, checksum) in body["files"].items():
        # A name from a file: nothing outside the folder may be reached by it.
        if not FILE_NAME.fullmatch(name) or not isinstance(checksum, str):
            raise ValueError(f"{name!r} is no name of a file of tensors")
        files[name] = (_sizes([size])[0], checksum)
    for name, entry in body["tensors"].items():
        TORCH_DTYPES[entry["dtype"]].itemsize  # noqa: B018  (a KeyError where it is none)
        name.encode()  # half a character is a UnicodeError
        parts = [(s["file"], str(s["key"]), _sizes(s["offsets"]), _sizes(s["shape"])) for s in entry["shards"]]
        tensors[name] = StoredTensor(
            entry["dtype"], _sizes(entry["shape"]), tuple(StoredShard(*part) for part in parts)
        )
        if any(part[0] not in files for part in parts) or not covered(tensors[name]):
            raise ValueError(f"the shards of {name!r} do not make the whole")
    right = all(isinstance(entry, dict) for entry in (description["state"], *description["quantized"].values()))
    for names in description["per_rank"].values():
        right &= len(names) == world_size and len({(tensors[name].dtype, tensors[name].shape) for name in names}) == 1
    if not right or not set(description["largest"]) <= set(description["per_rank"]):
        raise ValueError("it does not describe the state")
    return Index(world_size, files, tensors, description, crc32)


def covered(tensor: StoredTensor) -> bool:
    """Whether the shards of a tensor lie inside it and cover it, each element once."""
    shape, volume = tensor.shape, math.prod(tensor.shape)
    boxes: list[Sequence[tuple[int, int]]] = [list(zip(s.offsets, s.shape, strict=True)) for s in tensor.shards]
    inside = all(len(box) == len(shape) and all(o + s <= n for (o, s), n in zip(box, shape)) for box in boxes)
    if not inside or not boxes or math.prod(max(size, 1) for size in shape) >= 1 << 60 or volume == 0:
        return inside and bool(boxes) and volume == 0 and max(shape) < 1 << 60
    # The cuts in each dimension make a grid of cells, each of which one box has to fill.
    cuts = [
        sorted({0, *(box[dim][0] for box in boxes), *(sum(box[dim]) for box in boxes)}) for dim in range(len(shape))
    ]
    if math.prod(len(cut) - 1 for cut in cuts) > _MOST_CELLS:
        return False
    cells = torch.zeros([len(cut) - 1 for cut in cuts], dtype=torch.int32)
    for box in boxes:
        cells[tuple(slice(cut.index(o), cut.index(o + s)) for cut, (o, s) in zip(cuts, box, strict=True))] += 1
    return all(cut[-1] == size for cut, size in zip(cuts, shape, strict=True)) and bool((cells == 1).all())
