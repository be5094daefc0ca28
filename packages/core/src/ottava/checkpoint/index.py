"""The index of a sharded checkpoint, ``ottava.json``: JSON with a checksum, of which nothing is code.

It is the last file that is written. A folder without it, with a damaged one, or with files that are not as long as it
says, is no checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from ottava.checkpoint.header import DTYPE_NAMES, DTYPES
from ottava.errors import CheckpointError

INDEX_NAME = "ottava.json"
_VERSION = 1
# Of pieces of one tensor: a grid of 200 by 200 ranks has fewer.
_MOST_COMPARISONS = 4_000_000
# The checksum is that of all bytes that follow, as they are.
_START = re.compile(rb'\{"crc32":"([0-9a-f]{8})","checkpoint":')
_PART = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor: the file with it, where it begins there, and the checksums of its blocks of bytes."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its dtype, the shape of the whole, and the pieces that make it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class StoredFile:
    """A file of tensors: its length in bytes, that of what stands before the tensors, and the checksum of that."""

    size: int
    header: int
    crc32: int


@dataclass(frozen=True)
class Index:
    """What ``ottava.json`` says.

    Attributes:
        world_size: how many ranks wrote the checkpoint.
        block_bytes: how many bytes of a piece one checksum covers.
        files: the files of tensors by name.
        tensors: the tensors by name.
        description: what the state is made of besides tensors, see ``sharded.py``.
        crc32: the checksum of the index itself.
    """

    world_size: int
    block_bytes: int
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    description: Mapping[str, Any] = field(default_factory=dict)
    crc32: int = 0

    def encode(self) -> bytes:
        """The bytes of ``ottava.json``."""
        body = {
            "version": _VERSION,
            "world_size": self.world_size,
            "block_bytes": self.block_bytes,
            "files": {name: [f.size, f.header, f.crc32] for name, f in self.files.items()},
            "tensors": {
                name: {
                    "dtype": DTYPE_NAMES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "pieces": [
                        {
                            "file": p.file,
                            "begin": p.begin,
                            "offsets": list(p.offsets),
                            "shape": list(p.shape),
                            "crc32": list(p.crc32),
                        }
                        for p in tensor.pieces
                    ],
                }
                for name, tensor in self.tensors.items()
            },
            "description": dict(self.description),
        }
        rest = json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
        return f'{{"crc32":"{zlib.crc32(rest):08x}","checkpoint":'.encode() + rest


def _damaged(path: Path, why: object) -> NoReturn:
    cause = why if isinstance(why, BaseException) else None
    raise CheckpointError(
        f"{path} is damaged: {why}", expected="the index of a sharded checkpoint", remedy="load another checkpoint"
    ) from cause


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in ``folder``, checked.

    Raises:
        CheckpointError: there is none, it is damaged, or a later version of Ottava wrote it.
    """
    path = folder / INDEX_NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            expected="the folder of a whole sharded checkpoint",
            remedy="latest_checkpoint() finds the newest one",
        ) from error
    start = _START.match(text)
    if start is None:
        _damaged(path, "it does not begin as an index does")
    crc32 = int(start[1], 16)
    if zlib.crc32(text[start.end() :]) != crc32:
        _damaged(path, "its checksum is another")
    try:
        body = json.loads(text)["checkpoint"]
    except (ValueError, RecursionError, MemoryError) as error:
        _damaged(path, error)
    version = body.get("version") if isinstance(body, dict) else None
    if version != _VERSION:
        raise CheckpointError(
            f"{path} has version {version!r}",
            expected=f"version {_VERSION}",
            remedy="read it with the version of ottava that wrote it",
        )
    try:
        return _decoded(path, body, crc32)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _damaged(path, error)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple(values)


def _decoded(path: Path, body: Mapping[str, Any], crc32: int) -> Index:
    world_size, block = _sizes([body["world_size"], body["block_bytes"]])
    if world_size < 1 or block < 1:
        raise ValueError("it says of no ranks or blocks")
    files = {}
    for name, values in body["files"].items():
        # A name from a file: nothing outside the folder may be reached by it.
        if not _PART.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a file of tensors")
        files[name] = StoredFile(*_sizes(values))
    tensors = {}
    for name, entry in body["tensors"].items():
        dtype, shape = DTYPES[entry["dtype"]], _sizes(entry["shape"])
        name.encode()  # half a character is a UnicodeError
        if math.prod(max(size, 1) for size in shape) >= 1 << 60:
            raise ValueError(f"{name!r:.80} has shape {shape!r:.80}")
        pieces = tuple(
            StoredPiece(p["file"], _sizes([p["begin"]])[0], *(_sizes(p[key]) for key in ("offsets", "shape", "crc32")))
            for p in entry["pieces"]
        )
        for piece in pieces:
            _check_piece(name, dtype, shape, piece, files, block)
        check_cover(name, shape, pieces)
        tensors[name] = StoredTensor(dtype, shape, pieces)
    _check_description(body["description"], tensors, world_size)
    return Index(world_size, block, files, tensors, body["description"], crc32)


def _check_description(description: Any, tensors: Mapping[str, StoredTensor], world_size: int) -> None:
    if not isinstance(description, dict):
        raise ValueError("it does not describe the state")
    if not all(isinstance(entry, dict) for entry in description.get("quantized", {}).values()):
        raise ValueError("it does not describe the quantized tensors")
    for name, names in description.get("per_rank", {}).items():
        if len(names) != world_size or any(own not in tensors for own in names):
            raise ValueError(f"what each rank has of {name!r} is not there")
        if len({(tensors[own].dtype, tensors[own].shape) for own in names}) > 1:
            raise ValueError(f"the ranks have {name!r} of several kinds")
    for name in description.get("largest", []):
        dtype = tensors[name].dtype if name in description.get("per_rank", {}) else None
        if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
            raise ValueError(f"{name!r} has no largest values")


def _check_piece(
    name: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    piece: StoredPiece,
    files: Mapping[str, StoredFile],
    block: int,
) -> None:
    inside = len(piece.offsets) == len(piece.shape) == len(shape) and all(
        offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.shape, shape, strict=True)
    )
    nbytes = math.prod(piece.shape) * dtype.itemsize
    file = files[piece.file]
    held = file.header <= piece.begin and piece.begin + nbytes <= file.size
    if not inside or not held or len(piece.crc32) != -(-nbytes // block):
        raise ValueError(f"a piece of {name!r} does not fit")


def check_cover(name: str, shape: Sequence[int], pieces: Sequence[StoredPiece]) -> None:
    """Check that boxes inside a shape cover it, each element once.

    Raises:
        ValueError: they do not.
    """
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape) or not pieces:
        raise ValueError(f"the pieces of {name!r} do not make the whole")
    boxes = [(p.offsets, p.shape) for p in pieces if math.prod(p.shape)]
    # Along the dimension that is cut most often few boxes meet.
    cuts = [len({offsets[dim] for offsets, _ in boxes}) for dim in range(len(shape))]
    along = cuts.index(max(cuts)) if cuts else 0
    boxes.sort(key=lambda box: box[0][along : along + 1])
    compared = 0
    for number, (offsets, sizes) in enumerate(boxes):
        for other, others in itertools.islice(boxes, number + 1, None):
            if shape and other[along] >= offsets[along] + sizes[along]:
                break
            compared += 1
            if compared > _MOST_COMPARISONS:
                raise ValueError(f"{name!r} is cut into {len(pieces)} pieces that lie in all directions")
            both = zip(offsets, sizes, other, others, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in both):
                raise ValueError(f"pieces of {name!r} overlap")


def check_files(folder: Path, index: Index) -> None:
    """Check that the files of a checkpoint are there, as long as they were written; their bytes are not read.

    Raises:
        CheckpointError: one is missing, shorter or longer.
    """
    for name, file in index.files.items():
        try:
            found = os.stat(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}", expected="every file") from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
            raise CheckpointError(
                f"{folder / name} has {found.st_size} bytes",
                expected=f"{file.size}, as were written",
                remedy="load another checkpoint",
            )
