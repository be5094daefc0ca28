"""Sharded checkpoints in the file system: which are whole, which is the latest, and how one takes its place.

The index, ``ottava.json``, is JSON with a checksum, of which nothing is code. It is the last file that is written: a
folder without it, with a damaged one, or with files that are not as long as it says, is no checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ottava.checkpoint.files import TORCH_DTYPES, Partial, as_path, opened, remove_leftovers, sync, translated
from ottava.checkpoint.flatten import check_entry
from ottava.errors import CheckpointError

INDEX_NAME = "ottava.json"
_FILE_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}(-[0-9a-f]+)?\.safetensors")
_STEP = re.compile(r"step-(\d+)")
_VERSION = 2
# The checksum is that of all bytes that follow, as they are.
_START = re.compile(rb'\{"crc32":"([0-9a-f]{8})","checkpoint":')


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
        body = json.dumps({**asdict(self), "version": _VERSION}, separators=(",", ":"), allow_nan=False)
        rest = body.encode() + b"}\n"
        return b'{"crc32":"%08x","checkpoint":' % zlib.crc32(rest) + rest


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in ``folder``, checked, whose files are there as long as they were written."""
    path = folder / INDEX_NAME
    with translated(f"{path} cannot be read", "the index", "latest_checkpoint() finds the newest whole one"):
        text = path.read_bytes()
    with translated(f"{path} is damaged", "the index of a sharded checkpoint", "load another one"):
        start = _START.match(text)
        if start is None or zlib.crc32(text[start.end() :]) != int(start[1], 16):
            raise ValueError("its checksum is another")
        body = json.loads(text)["checkpoint"]
        index = _decoded(body, int(start[1], 16)) if body["version"] == _VERSION else None
    if index is None:
        # The files of the first version of one-file checkpoints are read.
        remedy = "make one file of it with `ottava export` of the version of ottava that wrote it, and load that"
        what = f"{path} has version {body['version']!r}"
        raise CheckpointError(what, expected=f"version {_VERSION}", remedy=remedy)
    for name, (size, _) in index.files.items():
        found: Any = "no"
        with contextlib.suppress(OSError):
            found = (folder / name).stat().st_size if (folder / name).is_file() else "no"
        if found != size:
            what, expected = f"{folder / name} has {found} bytes", f"{size}, as were written"
            raise CheckpointError(what, expected=expected, remedy="load another checkpoint")
    return index


def _decoded(body: Mapping[str, Any], crc32: int) -> Index:
    """An index of JSON; raises whatever JSON of another form leads to."""
    files, tensors, about = {}, {}, body["description"]
    for name, (size, checksum) in body["files"].items():
        # A name from a file: nothing outside the folder may be reached by it.
        if not _FILE_NAME.fullmatch(name) or not isinstance(checksum, str):
            raise ValueError(f"{name!r} is no name of a file of tensors")
        files[name] = (_sizes([size])[0], checksum)
    for name, of in body["tensors"].items():
        name.encode()  # half a character is a UnicodeError
        boxes = [(s["file"], str(s["key"]), _sizes(s["offsets"]), _sizes(s["shape"])) for s in of["shards"]]
        tensors[name] = StoredTensor(str(of["dtype"]), _sizes(of["shape"]), tuple(StoredShard(*box) for box in boxes))
        if of["dtype"] not in TORCH_DTYPES or any(box[0] not in files for box in boxes) or not _whole(tensors[name]):
            raise ValueError(f"the shards of {name!r} do not make the whole")
    for entry in about["quantized"].values():
        check_entry(entry)
    right = isinstance(about["state"], dict) and set(about["largest"]) <= set(about["per_rank"])
    for names in about["per_rank"].values():
        alike = {(tensors[name].dtype, tensors[name].shape) for name in names}
        right &= len(names) == body["world_size"] and len(alike) == 1
    if not right:
        raise ValueError("it does not describe the state")
    return Index(_sizes([body["world_size"]])[0], files, tensors, about, crc32)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < 1 << 60 for v in values):
        raise ValueError(f"{values!r:.80} is no list of sizes")
    return tuple(values)


def _whole(tensor: StoredTensor) -> bool:
    """Whether the shards of a tensor lie inside it and cover it, each element once."""
    shards, shape = tensor.shards, tensor.shape
    if not shards or any(len(s.offsets) != len(shape) or len(s.shape) != len(shape) for s in shards):
        return False
    boxes = [list(zip(s.offsets, map(sum, zip(s.offsets, s.shape)), strict=True)) for s in shards]
    inside = all(end <= size for box in boxes for (_, end), size in zip(box, shape, strict=True))
    if not inside or sum(math.prod(s.shape) for s in shards) != math.prod(shape):
        return False
    # In the order of the dimension with the most cuts, so that few are compared.
    most = max(range(len(shape)), key=lambda dim: len({box[dim] for box in boxes}), default=0)
    boxes = sorted((box for box in boxes if all(end > begin for begin, end in box)), key=lambda box: box[most:])
    for number, one in enumerate(boxes):
        for other in islice(boxes, number + 1, None):
            if other[most][0] >= one[most][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True)):
                return False
    return True


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

    What was not written to its end, or for which :func:`is_complete` is False, is passed over. Nothing is removed.
    Raises DTypeError where ``folder`` is no path.
    """
    return next(_step_checkpoints(as_path(folder)), None)


def _step_checkpoints(folder: Path) -> Iterator[Path]:
    """The whole checkpoints ``step-NUMBER`` in ``folder``, the highest number first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return (path for _, path in sorted(found, reverse=True) if is_complete(path))


def check_target(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError where something has the name and ``overwrite`` is False, or it is no checkpoint."""
    if os.path.lexists(target) and not overwrite:
        remedy = "pass overwrite=True to replace a checkpoint"
        raise CheckpointError(f"{target} exists", expected="a new name", remedy=remedy)
    replaceable = target.is_dir() and ((target / INDEX_NAME).exists() or not any(target.iterdir()))
    if os.path.lexists(target) and (target.is_symlink() or not replaceable):
        what = f"{target} is not a sharded checkpoint and is not replaced"
        raise CheckpointError(what, expected="a checkpoint or a new name", remedy="move it away")


def publish(partial: Partial, overwrite: bool) -> None:
    """Give a folder that is written to its end its final name.

    A checkpoint that is there is replaced by the one rename of its index, once the new files lie beside the old ones;
    then those that the index does not name are removed. Raises CheckpointError as :func:`check_target`, and OSError
    where it cannot be renamed: what had the name has it still.
    """
    source, target = partial.path, partial.target
    sync(source)
    check_target(target, overwrite)
    try:
        os.rename(source, target)
    except OSError:
        if not (target / INDEX_NAME).exists():
            raise
        check_target(target, overwrite)
        with opened(target) as descriptor:
            with contextlib.suppress(OSError):  # where no locks are to be had, one writer at a time is up to the user
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            names = sorted(os.listdir(source), key=lambda name: name == INDEX_NAME)
            for name in names:
                if name == INDEX_NAME:
                    sync(target)
                os.replace(source / name, target / name)
            sync(target)
            for old in os.listdir(target):
                if _FILE_NAME.fullmatch(old) and old not in names:
                    (target / old).unlink(missing_ok=True)
    sync(target.parent)
    remove_leftovers(target)


def prune(folder: Path, keep: int, written: Path) -> None:
    """Remove the whole checkpoints of steps but ``written`` and the ``keep - 1`` others with the highest numbers, and
    what interrupted saves of steps have left."""
    remove_leftovers(folder / "step", ".step-")
    for path in [path for path in _step_checkpoints(folder) if path != written][keep - 1 :]:
        try:
            with Partial(path) as doomed:
                # Under this name what is left of it is never taken for a checkpoint.
                os.rename(path, doomed.path / "removed")
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} is not removed: {error}", UserWarning, stacklevel=2)
