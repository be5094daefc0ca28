"""The index of a sharded checkpoint, ``ottava.json``: JSON with a checksum and without code.

It lists the files with their lengths and checksums, the places of all tensors in the files, and the
description of the state. A folder is a checkpoint if its index is in order and all files have the
lengths that the index says.
"""

import contextlib
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch.distributed.checkpoint import metadata as dcp

from ottava.checkpoint.contracts import Table, contracts_in
from ottava.checkpoint.files import DTYPES, INDEX_NAME, RESAVE
from ottava.checkpoint.flatten import Entry, check_entry
from ottava.errors import CheckpointError, translated
from ottava.filesystem import read_bytes

#: The names of the files of ranks.
FILE_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}(-[0-9a-f]+)?\.safetensors")
_VERSION = 2
# The start of an index. The checksum is computed from all bytes that follow this start.
_START = b'{"crc32":"%08x","checkpoint":'


class Description(TypedDict):
    """The state in a checkpoint.

    Attributes:
        state: the nested state, in which names stand for tensors (see ``state_tree.py``).
        quantized: the entries of quantized tensors, by name.
        contracts: their contracts by hash, if any is stated.
        per_rank: the plain tensors that differ between ranks, with the name of each rank's tensor.
        largest: those of them that the next step would have reduced by MAX.
    """

    state: dict[str, object]
    quantized: dict[str, Entry]
    per_rank: dict[str, list[str]]
    largest: list[str]
    contracts: NotRequired[Table]


class ShardEntry(TypedDict):
    """A shard in the index as JSON."""

    file: str
    key: str
    offsets: Sequence[int]
    shape: Sequence[int]


class TensorEntry(TypedDict):
    """A tensor in the index as JSON."""

    dtype: str
    shape: Sequence[int]
    shards: list[ShardEntry]


class _Body(TypedDict):
    """The index as JSON, without its checksum; ``files`` has lengths in bytes and checksums."""

    version: int
    files: dict[str, tuple[int, str]]
    tensors: dict[str, TensorEntry]
    description: Description


@dataclass
class StoredShard(dcp.ChunkStorageMetadata):
    """A block of a tensor, the file that holds it, and its name in the file."""

    file: str
    key: str


@dataclass(frozen=True)
class Index:
    """The content of ``ottava.json``.

    Attributes:
        files: the length in bytes and the checksum of each file.
        tensors: the tensors with their shards, which are :class:`StoredShard`.
        description: the description of the state.
        crc32: the checksum of the index itself.
    """

    files: dict[str, tuple[int, str]]
    tensors: dict[str, dcp.TensorStorageMetadata]
    description: Description
    crc32: int

    def shards(self, name: str) -> list[StoredShard]:
        """The shards of a tensor."""
        return [shard for shard in self.tensors[name].chunks if isinstance(shard, StoredShard)]


def encoded_index(
    files: dict[str, tuple[int, str]],
    tensors: dict[str, TensorEntry],
    description: Description,
) -> bytes:
    """The text of an index, which :func:`read_index` reads.

    Args:
        files: the length in bytes and the checksum of each file.
        tensors: the tensors by name.
        description: the description of the state.
    """
    body: _Body = {
        "version": _VERSION,
        "files": files,
        "tensors": tensors,
        "description": description,
    }
    rest = json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
    return _START % zlib.crc32(rest) + rest


def read_index(folder: Path, tries: int = 10) -> Index:
    """The checked index of the checkpoint in ``folder``; all of its files exist with their full
    lengths."""
    path = folder / INDEX_NAME
    with translated(
        f"{path} cannot be read", "the index", "latest_checkpoint() finds the newest whole one"
    ):
        text = read_bytes(path)
    with translated(f"{path} is damaged", "the index of a sharded checkpoint", "load another one"):
        index = _decoded(path, text)
    for name, (expected, _) in index.files.items():
        file = folder / name
        size = _size_of(file)
        if size == expected:
            continue
        # A writer that replaces the checkpoint removes the old files; then read the new index.
        with contextlib.suppress(OSError):
            if tries > 1 and read_bytes(path) != text:
                return read_index(folder, tries - 1)
        raise CheckpointError(
            f"{file} has {'no' if size is None else size} bytes",
            expected=f"{expected}",
            remedy="load another checkpoint",
        )
    return index


def _size_of(file: Path) -> int | None:
    """The length of a file in bytes; None if there is no such file."""
    with translated(
        f"{file} cannot be read", "a file of the checkpoint", "load another one", of=OSError
    ):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                return file.stat().st_size
    return None


def _decoded(path: Path, text: bytes) -> Index:
    """The index in a JSON text; any exception if the text has another form."""
    start = len(_START % 0)
    crc32 = zlib.crc32(text[start:])
    if text[:start] != _START % crc32:
        raise ValueError("its checksum is another")
    body: _Body = json.loads(text)["checkpoint"]
    if body["version"] != _VERSION:
        raise CheckpointError(
            f"{path} has version {body['version']!r}", f"version {_VERSION}", RESAVE
        )
    files = {
        name: (_sizes([size])[0], str(checksum)) for name, (size, checksum) in body["files"].items()
    }
    # The names come from a file and must not lead out of the folder.
    if not all(map(FILE_NAME.fullmatch, files)):
        raise ValueError("it names other files than those of a checkpoint")
    tensors = {name: _decoded_tensor(name, entry) for name, entry in body["tensors"].items()}
    index = Index(files, tensors, body["description"], crc32)
    for name in tensors:
        if not all(shard.file in files for shard in index.shards(name)):
            raise ValueError(f"the shards of {name!r} do not make the whole")
    _check_description(index)
    return index


def _decoded_tensor(name: str, entry: TensorEntry) -> dcp.TensorStorageMetadata:
    name.encode()  # raises UnicodeError for half a character
    shards: list[dcp.ChunkStorageMetadata] = [
        StoredShard(
            _sizes(shard["offsets"]), _sizes(shard["shape"]), shard["file"], str(shard["key"])
        )
        for shard in entry["shards"]
    ]
    properties = dcp.TensorProperties(dtype=DTYPES[entry["dtype"]])
    tensor = dcp.TensorStorageMetadata(properties, _sizes(entry["shape"]), shards)
    if not is_whole(tensor):
        raise ValueError(f"the shards of {name!r} do not make the whole")
    return tensor


def _check_description(index: Index) -> None:
    """Check that a description has the right form and names tensors of the index; any exception if
    it does not."""
    description = index.description
    for entry in description["quantized"].values():
        check_entry(entry)
    contracts_in(description.get("contracts", {}))
    if not isinstance(description["state"], dict):
        raise ValueError("it does not describe the state")
    if not set(description["largest"]) <= set(description["per_rank"]):
        raise ValueError("it reduces tensors that do not differ between ranks")
    for name, names_of_ranks in description["per_rank"].items():
        tensors = [index.tensors[name_of_rank] for name_of_rank in names_of_ranks]
        if len({(tensor.properties.dtype, tensor.size) for tensor in tensors}) != 1:
            raise ValueError(f"the tensors {name!r} of the ranks are not of one shape and dtype")


def _sizes(values: object) -> torch.Size:
    if not isinstance(values, list) or any(
        type(value) is not int or not 0 <= value < 1 << 60 for value in values
    ):
        raise ValueError(f"{values!r:.80} is no list of sizes")
    return torch.Size(values)


def is_whole(tensor: dcp.TensorStorageMetadata) -> bool:
    """Whether shards lie inside of a tensor, begin at different places and together have its
    size."""
    if not tensor.chunks or not all(_lies_in(shard, tensor.size) for shard in tensor.chunks):
        return False
    shards = [shard for shard in tensor.chunks if math.prod(shard.sizes)]
    numel = sum(math.prod(shard.sizes) for shard in shards)
    places = {shard.offsets for shard in shards}
    return numel == math.prod(tensor.size) and len(places) == len(shards)


def _lies_in(shard: dcp.ChunkStorageMetadata, size: torch.Size) -> bool:
    """Whether a shard lies inside of a tensor of ``size``."""
    ends = [offset + length for offset, length in zip(shard.offsets, shard.sizes, strict=True)]
    if len(ends) != len(size):
        return False
    return all(end <= length for end, length in zip(ends, size, strict=True))
