"""Sharded checkpoints in the file system: which are whole, which is the latest, and how one takes its place.

The index, ``ottava.json``, is JSON with a checksum, of which nothing is code. It is the last file that is written: a
folder without it, with a damaged one, or with files that are not as long as it says, is no checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.files import RESAVE, TORCH_DTYPES, dtype_name
from ottava.checkpoint.flatten import check_entry
from ottava.errors import CheckpointError, translated
from ottava.filesystem import Partial, as_path, locked, remove_leftovers, sync

INDEX_NAME = "ottava.json"
_FILE_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}(-[0-9a-f]+)?\.safetensors")
_STEP = re.compile(r"step-(\d+)")
_VERSION = 2
# The checksum is that of all bytes that follow, as they are.
_START = b'{"crc32":"%08x","checkpoint":'


@dataclass(frozen=True)
class StoredShard:
    """A box of a tensor: the file with it, the name that it has there, where in the whole it begins, and its shape."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, with the shape of the whole, and the shards that make it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True)
class Index:
    """What ``ottava.json`` says: how many ranks wrote, the length in bytes and the checksum of each file, the tensors,
    and what the state is made of besides (see ``sharded.py``); and its own checksum."""

    world_size: int
    files: dict[str, tuple[int, str]]
    tensors: dict[str, StoredTensor]
    description: Mapping[str, Any]
    crc32: int = 0


def write_index(folder: Path, index: Index) -> None:
    """Write the index to the disk, and read it once more before it may stand for a checkpoint."""
    body = {**asdict(index), "version": _VERSION}
    rest = json.dumps(body, separators=(",", ":"), allow_nan=False, default=dtype_name).encode() + b"}\n"
    (folder / INDEX_NAME).write_bytes(_START % zlib.crc32(rest) + rest)
    sync(folder / INDEX_NAME)
    read_index(folder)


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in ``folder``, checked, whose files are there as long as they were written."""
    path = folder / INDEX_NAME
    with translated(f"{path} cannot be read", "the index", "latest_checkpoint() finds the newest whole one"):
        text = path.read_bytes()
    with translated(f"{path} is damaged", "the index of a sharded checkpoint", "load another one"):
        start = len(_START % 0)
        if text[:start] != _START % (crc32 := zlib.crc32(text[start:])):
            raise ValueError("its checksum is another")
        body = json.loads(text)["checkpoint"]
        if body["version"] != _VERSION:
            what = f"{path} has version {body['version']!r}"
            raise CheckpointError(what, expected=f"version {_VERSION}", remedy=RESAVE)
        index = _decoded(body, crc32)
    for file, size in ((folder / name, size) for name, (size, _) in index.files.items()):
        with translated(f"{file} cannot be read", "a file of the checkpoint", "load another one", of=OSError):
            found = file.stat().st_size if file.is_file() else "no"
        if found != size:
            raise CheckpointError(f"{file} has {found} bytes", expected=f"{size}", remedy="load another checkpoint")
    return index


def _decoded(body: Mapping[str, Any], crc32: int) -> Index:
    """An index of JSON; raises whatever JSON of another form leads to."""
    about = body["description"]
    index = Index(_sizes([body["world_size"]])[0], {}, {}, about, crc32)
    for name, (size, checksum) in body["files"].items():
        index.files[name] = (_sizes([size])[0], str(checksum))
    for name, of in body["tensors"].items():
        name.encode()  # half a character is a UnicodeError
        boxes = [(s["file"], str(s["key"]), _sizes(s["offsets"]), _sizes(s["shape"])) for s in of["shards"]]
        shards = tuple(StoredShard(*box) for box in boxes)
        index.tensors[name] = StoredTensor(TORCH_DTYPES[of["dtype"]], _sizes(of["shape"]), shards)
        if any(shard.file not in index.files for shard in shards) or not is_whole(index.tensors[name]):
            raise ValueError(f"the shards of {name!r} do not make the whole")
    for entry in about["quantized"].values():
        check_entry(entry)
    # A name from a file: nothing outside the folder may be reached by it.
    right = all(map(_FILE_NAME.fullmatch, index.files)) and set(about["largest"]) <= set(about["per_rank"])
    for names in about["per_rank"].values():
        alike = {(index.tensors[name].dtype, index.tensors[name].shape) for name in names}
        right &= len(names) == index.world_size and len(alike) == 1
    if not right or not isinstance(about["state"], dict):
        raise ValueError("it does not describe files and the state")
    return index


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < 1 << 60 for v in values):
        raise ValueError(f"{values!r:.80} is no list of sizes")
    return tuple(values)


def is_whole(tensor: StoredTensor) -> bool:
    """Whether shards lie inside a tensor and are as large as it, no two in one place: those that were cut make it."""
    for shard in tensor.shards:
        ends = [offset + size for offset, size in zip(shard.offsets, shard.shape, strict=True)]
        if len(ends) != len(tensor.shape) or any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            return False
    held = [shard for shard in tensor.shards if math.prod(shard.shape)]
    size = sum(math.prod(shard.shape) for shard in held)
    return bool(tensor.shards) and size == math.prod(tensor.shape) and len({s.offsets for s in held}) == len(held)


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a whole sharded checkpoint: its index is in order and every file is there in full length.

    The bytes of the tensors are not read here; loading checks them. Raises DTypeError where ``path`` is no path.
    """
    folder = as_path(path)
    with contextlib.suppress(CheckpointError):
        return bool(read_index(folder))
    return False


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint ``step-NUMBER`` with the highest number in ``folder``; None where there is none.

    One for which :func:`is_complete` is False is passed over. Raises DTypeError where ``folder`` is no path.
    """
    return next(_step_checkpoints(as_path(folder)), None)


def _step_checkpoints(folder: Path) -> Iterator[Path]:
    """The highest number first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return (path for _, path in sorted(found, reverse=True) if is_complete(path))


def check_target(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError where something has the name and ``overwrite`` is False, or it is no checkpoint."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        remedy = "pass overwrite=True to replace a checkpoint"
        raise CheckpointError(f"{target} exists", expected="a new name", remedy=remedy)
    replaceable = target.is_dir() and ((target / INDEX_NAME).exists() or not any(target.iterdir()))
    if target.is_symlink() or not replaceable:
        what = f"{target} is not a sharded checkpoint and is not replaced"
        raise CheckpointError(what, expected="a checkpoint or a new name", remedy="move it away")


def publish(partial: Partial, overwrite: bool) -> None:
    """Give a folder that is written to its end its final name, or raise, and what had the name has it still.

    A checkpoint that is there is replaced by the one rename of its index, once the new files lie beside the old ones.
    """
    source, target = partial.path, partial.target
    sync(source)
    try:
        os.rename(source, target)
    except OSError:
        if not (target / INDEX_NAME).exists():
            raise
        check_target(target, overwrite)
        with locked(target):
            files = {name for name in os.listdir(source) if name != INDEX_NAME}
            for name in files:
                os.replace(source / name, target / name)
            sync(target)
            os.replace(source / INDEX_NAME, target / INDEX_NAME)
            sync(target)
            for old in os.listdir(target):
                if _FILE_NAME.fullmatch(old) and old not in files:
                    (target / old).unlink(missing_ok=True)
    sync(target.parent)


def prune(folder: Path, keep: int, written: Path) -> None:
    """Keep ``written`` and the ``keep - 1`` other whole steps with the highest numbers; interrupted saves go too."""
    remove_leftovers(folder, ".step-")
    for path in [path for path in _step_checkpoints(folder) if path != written][keep - 1 :]:
        try:
            with Partial(path) as doomed:
                # Under this name what is left of it is never taken for a checkpoint.
                os.rename(path, doomed.path / "removed")
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} is not removed: {error}", UserWarning, stacklevel=2)
