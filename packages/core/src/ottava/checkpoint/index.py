"""The index of a sharded checkpoint, ``ottava.json``: JSON with a checksum, of which nothing is code.

It is the last file that is written. A folder without it, with a damaged one, or with files that are not as long as it
says, is no checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import stat
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
    """What ``ottava.json`` says.

    Attributes:
        world_size: how many ranks wrote the checkpoint.
        files: the length in bytes and the checksum of each file of tensors, by name.
        tensors: the tensors by name.
        description: what the state is made of besides tensors, see ``sharded.py``.
        crc32: the checksum of the index itself.
    """

    world_size: int
    files: Mapping[str, tuple[int, str]]
    tensors: Mapping[str, StoredTensor]
    description: Mapping[str, Any]
    crc32: int = 0

    def encode(self) -> bytes:
        """The bytes of ``ottava.json``."""
        body = {**asdict(self), "version": _VERSION}
        rest = json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
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
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            expected="the folder of a whole sharded checkpoint",
            remedy="latest_checkpoint() finds the newest one",
        ) from error
    try:
        start = _START.match(text)
        if start is None or zlib.crc32(text[start.end() :]) != int(start[1], 16):
            raise ValueError("its checksum is another")
        body = json.loads(text)["checkpoint"]
        version = body["version"]
        index = _decoded(body, int(start[1], 16)) if version == _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}", expected="the index of a sharded checkpoint", remedy="load another one"
        ) from error
    if index is None:
        raise CheckpointError(
            f"{path} has version {version!r}",
            expected=f"version {_VERSION}",
            remedy="make one file of it with the `ottava export` of the version of ottava that wrote it, which every "
            "later version reads",
        )
    for name, (size, _) in index.files.items():
        try:
            found = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}", expected="every file") from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            what, remedy = f"{folder / name} has {found.st_size} bytes", "load another checkpoint"
            raise CheckpointError(what, expected=f"{size}, as were written", remedy=remedy)
    return index


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{values!r:.80} is no list of sizes")
    return tuple(values)


def _decoded(body: Mapping[str, Any], crc32: int) -> Index:
    (world_size,) = _sizes([body["world_size"]])
    files = {}
    for name, (size, checksum) in body["files"].items():
        # A name from a file: nothing outside the folder may be reached by it.
        if not FILE_NAME.fullmatch(name) or not isinstance(checksum, str):
            raise ValueError(f"{name!r} is no name of a file of tensors")
        files[name] = (_sizes([size])[0], checksum)
    tensors = {}
    for name, entry in body["tensors"].items():
        dtype, shape = TORCH_DTYPES[entry["dtype"]], _sizes(entry["shape"])
        name.encode()  # half a character is a UnicodeError
        shards = tuple(
            StoredShard(s["file"], str(s["key"]), _sizes(s["offsets"]), _sizes(s["shape"])) for s in entry["shards"]
        )
        if any(shard.file not in files for shard in shards) or not covered(shape, shards):
            raise ValueError(f"the shards of {name!r} do not make the whole")
        tensors[name] = StoredTensor(str(dtype).removeprefix("torch."), shape, shards)
    description = body["description"]
    quantized, own = description["quantized"].values(), description["per_rank"].values()
    known = all(isinstance(entry, dict) for entry in quantized) and isinstance(description["state"], dict)
    for names in own:
        kinds = {(tensors[name].dtype, tensors[name].shape) for name in names}
        known = known and len(names) == world_size and len(kinds) == 1
    if not known or not set(description["largest"]) <= set(description["per_rank"]):
        raise ValueError("it does not describe the state")
    return Index(world_size, files, tensors, description, crc32)


def covered(shape: Sequence[int], shards: Sequence[StoredShard]) -> bool:
    """Whether boxes lie inside a shape and cover it, each element once."""
    if math.prod(max(size, 1) for size in shape) >= 1 << 60 or not shards:
        return False
    boxes = [list(zip(shard.offsets, shard.shape, strict=True)) for shard in shards]
    if any(len(box) != len(shape) or any(o + s > n for (o, s), n in zip(box, shape)) for box in boxes):
        return False
    if sum(math.prod(shard.shape) for shard in shards) != math.prod(shape) or math.prod(shape) == 0:
        return math.prod(shape) == 0
    # The cuts in each dimension make a grid of cells, each of which one box has to fill.
    cuts = [sorted({end for box in boxes for end in (box[dim][0], sum(box[dim]))}) for dim in range(len(shape))]
    if math.prod(len(cut) - 1 for cut in cuts) > _MOST_CELLS:
        return False
    cells = torch.zeros([len(cut) - 1 for cut in cuts], dtype=torch.int32)
    place = [{at: number for number, at in enumerate(cut)} for cut in cuts]
    for box in boxes:
        cells[tuple(slice(place[d][o], place[d][o + s]) for d, (o, s) in enumerate(box))] += 1
    return bool((cells == 1).all())
