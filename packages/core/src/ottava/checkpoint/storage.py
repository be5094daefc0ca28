"""Storage of ``torch.distributed.checkpoint`` that pickles nothing: a safetensors file for each
rank, and an index.

The index, ``ottava.json``, is JSON with a checksum and contains no code. It is written last. A
folder is not a checkpoint if the index is missing or damaged, or if a file has another length than
the index says.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ottava.checkpoint.files import (
    CHECKSUM_KEY,
    DTYPES,
    INDEX_NAME,
    RESAVE,
    dtype_name,
    read_tensors,
    write_tensors,
)
from ottava.checkpoint.flatten import check_entry, described
from ottava.collectives import Ranks
from ottava.errors import CheckpointError, translated
from ottava.filesystem import (
    AnyPath,
    Partial,
    as_path,
    mode_of,
    opened,
    read_bytes,
    sync,
    write_new,
)

_FILE_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}(-[0-9a-f]+)?\.safetensors")
_VERSION = 2
# The checksum is computed from all bytes that follow this start.
_START = b'{"crc32":"%08x","checkpoint":'


@dataclass
class StoredShard(dcp.ChunkStorageMetadata):
    """A block of a tensor, the file that holds it, and its name in the file."""

    file: str
    key: str


@dataclass(frozen=True)
class Index:
    """The content of ``ottava.json``: the length in bytes and the checksum of each file, the
    tensors with their shards, the description of the state (see ``sharded.py``), and the checksum
    of the index itself."""

    files: dict[str, tuple[int, str]]
    tensors: dict[str, dcp.TensorStorageMetadata]
    description: Mapping[str, Any]
    crc32: int


def read_index(folder: Path, tries: int = 10) -> Index:
    """The checked index of the checkpoint in ``folder``; all of its files exist with their full
    lengths."""
    path = folder / INDEX_NAME
    with translated(
        f"{path} cannot be read", "the index", "latest_checkpoint() finds the newest whole one"
    ):
        text = read_bytes(path)
    with translated(f"{path} is damaged", "the index of a sharded checkpoint", "load another one"):
        start = len(_START % 0)
        if text[:start] != _START % (crc32 := zlib.crc32(text[start:])):
            raise ValueError("its checksum is another")
        body = json.loads(text)["checkpoint"]
        if body["version"] != _VERSION:
            raise CheckpointError(
                f"{path} has version {body['version']!r}", f"version {_VERSION}", RESAVE
            )
        index = _decoded(body, crc32)
    for file, size in ((folder / name, size) for name, (size, _) in index.files.items()):
        found: int | str = "no"
        with translated(
            f"{file} cannot be read", "a file of the checkpoint", "load another one", of=OSError
        ):
            with contextlib.suppress(FileNotFoundError):
                found = file.stat().st_size if file.is_file() else "no"
        if found != size:
            with contextlib.suppress(OSError):
                # A writer that replaces the checkpoint removes the old files; then read the new
                # index.
                if tries > 1 and read_bytes(path) != text:
                    return read_index(folder, tries - 1)
            raise CheckpointError(
                f"{file} has {found} bytes", expected=f"{size}", remedy="load another checkpoint"
            )
    return index


def _decoded(body: Mapping[str, Any], crc32: int) -> Index:
    """The index in a JSON object; any exception if the object has another form."""
    about = body["description"]
    files = {
        name: (_sizes([size])[0], str(checksum)) for name, (size, checksum) in body["files"].items()
    }
    index = Index(files, {}, about, crc32)
    for name, of in body["tensors"].items():
        name.encode()  # raises UnicodeError for half a character
        properties = dcp.TensorProperties(dtype=DTYPES[of["dtype"]])
        boxes = [
            (_sizes(s["offsets"]), _sizes(s["shape"]), s["file"], str(s["key"]))
            for s in of["shards"]
        ]
        tensor = dcp.TensorStorageMetadata(
            properties, _sizes(of["shape"]), [StoredShard(*box) for box in boxes]
        )
        index.tensors[name] = tensor
        if any(file not in index.files for *_, file, _ in boxes) or not is_whole(tensor):
            raise ValueError(f"the shards of {name!r} do not make the whole")
    for entry in about["quantized"].values():
        check_entry(entry)
    # The names come from a file and must not lead out of the folder.
    right = all(map(_FILE_NAME.fullmatch, index.files)) and set(about["largest"]) <= set(
        about["per_rank"]
    )
    for names in about["per_rank"].values():
        right &= (
            len(
                {(index.tensors[name].properties.dtype, index.tensors[name].size) for name in names}
            )
            == 1
        )
    if not right or not isinstance(about["state"], dict):
        raise ValueError("it does not describe files and the state")
    return index


def _sizes(values: Any) -> torch.Size:
    if not isinstance(values, list) or any(
        type(v) is not int or not 0 <= v < 1 << 60 for v in values
    ):
        raise ValueError(f"{values!r:.80} is no list of sizes")
    return torch.Size(values)


def is_whole(tensor: dcp.TensorStorageMetadata) -> bool:
    """Whether shards lie inside of a tensor, begin at different places and together have its
    size."""
    for shard in tensor.chunks:
        ends = [offset + size for offset, size in zip(shard.offsets, shard.sizes, strict=True)]
        if len(ends) != len(tensor.size) or any(
            end > size for end, size in zip(ends, tensor.size, strict=True)
        ):
            return False
    held = [shard for shard in tensor.chunks if math.prod(shard.sizes)]
    size = sum(math.prod(shard.sizes) for shard in held)
    return (
        bool(tensor.chunks)
        and size == math.prod(tensor.size)
        and len({s.offsets for s in held}) == len(held)
    )


def check_target(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError if ``target`` exists and must not be replaced: ``overwrite`` is False,
    or it is not a checkpoint."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists", expected="a new name", remedy="overwrite=True replaces a checkpoint"
        )
    replaceable = target.is_dir() and ((target / INDEX_NAME).is_file() or not any(target.iterdir()))
    if target.is_symlink() or not replaceable:
        raise CheckpointError(
            f"{target} is not a sharded checkpoint and is not replaced",
            "a checkpoint or a new name",
        )


def publish(partial: Partial, overwrite: bool) -> None:
    """Give a completely written folder its final name. If that raises, the old checkpoint stays.

    To replace a checkpoint, the new files are moved beside the old ones, and one rename of the
    index makes them the checkpoint.
    """
    source, target = partial.path, partial.target
    sync(source)
    try:
        os.rename(source, target)
    except OSError:
        if not (target / INDEX_NAME).is_file():
            raise
        check_target(target, overwrite)
        with opened(target) as descriptor:
            # Without locks, users have to make sure that only one process writes.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
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


class FolderWriter(StorageWriter):
    """Writes tensors and a description to a file system that all ranks share, whole or not at
    all."""

    def __init__(self, path: Path, overwrite: bool, description: Mapping[str, Any]) -> None:
        self.path, self.overwrite, self.description = path, overwrite, description

    def save(self, tensors: Mapping[str, Any], ranks: Ranks) -> None:
        """Save the tensors of this rank, while all ranks save theirs; raises only errors of this
        rank."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        to: dict[str, Any] = {
            "storage_writer": self,
            "process_group": ranks.group,
            "no_dist": ranks.alone,
        }
        with contextlib.ExitStack() as self._stack, warnings.catch_warnings():
            # torch warns of a save in one process, which is intended here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                save({**tensors}, planner=planner, **to)
            except CheckpointException as error:
                if ranks.rank in error.failures:
                    failure = error.failures[ranks.rank][0]
                    raise failure from failure.__cause__

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def _unchanged(self, *given: Any, **options: Any) -> Any:
        return given[0] if given else None

    reset = set_up_storage_writer = prepare_local_plan = _unchanged

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with _written(self.path):
            check_target(self.path, self.overwrite)
            Path(os.path.abspath(self.path)).parent.mkdir(parents=True, exist_ok=True)
            self.partial: Partial = self._stack.enter_context(Partial(self.path))
            # The new files have the permissions of the old ones from the first byte on.
            old = mode_of(self.path / INDEX_NAME)
            self._mode = (mode_of(self.partial.path) or 0) & 0o666 if old is None else old
        # The names are unique, because the files of a replaced checkpoint stay until its index is
        # replaced.
        token, world = secrets.token_hex(4), len(plans)
        names = [f"rank-{rank:05d}-of-{world:05d}-{token}.safetensors" for rank in range(world)]
        places = [(self.partial.path / name, self._mode) for name in names]
        return [replace(p, storage_data=place) for p, place in zip(plans, places, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path, mode = plan.storage_data
        tensors: dict[str, Any] = {}
        stored: list[Any] = []
        for item in plan.items:
            about: Any = item.tensor_data
            offsets, box = about.chunk.offsets, about.chunk.sizes
            # A rank that has no rows has an empty shard.
            if math.prod(box) or not math.prod(about.size):
                key = item.index.fqn + (
                    "" if box == about.size else "@" + ",".join(map(str, offsets))
                )
                if key in tensors:
                    raise CheckpointError(
                        f"two tensors would have the name {key!r}", remedy="rename one of them"
                    )
                tensors[key] = planner.resolve_data(item)
                stored.append(
                    (item.index, {"file": path.name, "key": key, "offsets": offsets, "shape": box})
                )
        file = None
        if tensors:
            with _written(path):
                checksum = write_tensors(path, tensors, described({}), mode)
                file = (path.stat().st_size, checksum)
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [WriteResult(i, tensors[shard["key"]].nbytes, (shard, file)) for i, shard in stored]
        )
        return written

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        of: dict[str, Any] = metadata.state_dict_metadata
        tensors: dict[str, Any] = {
            name: {"dtype": dtype_name(t.properties.dtype), "shape": t.size, "shards": []}
            for name, t in of.items()
        }
        files: dict[str, Any] = {}
        for result in (result for rank in results for result in rank):
            shard, files[shard["file"]] = result.storage_data
            tensors[result.index.fqn]["shards"].append(shard)
        body = {
            "version": _VERSION,
            "files": files,
            "tensors": tensors,
            "description": self.description,
        }
        index = self.partial.path / INDEX_NAME
        with _written(self.path):
            rest = json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
            write_new(index, _START % zlib.crc32(rest) + rest, self._mode)
            # The index is checked before the folder gets its name.
            read_index(self.partial.path)
            publish(self.partial, self.overwrite)


def _written(path: Path) -> contextlib.AbstractContextManager[None]:
    return translated(
        f"{path} cannot be written",
        "a folder to write to, and room in it",
        of=(OSError, ValueError),
    )


class FolderReader:
    """Maps the files of :class:`FolderWriter`; CheckpointError if the checkpoint is not whole, or
    was replaced during the read."""

    def __init__(self, path: AnyPath) -> None:
        self.path = as_path(path)
        self.index = read_index(self.path)
        self._files: dict[str, dict[str, torch.Tensor]] = {}

    def pairs(self, tensors: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a tensor to write and its mapped new value, of the same shape and dtype."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({**tensors}, dcp.Metadata({**self.index.tensors}))
        # Shards by offsets, because a linear search takes minutes for a tensor with many shards.
        # The first shard at a place counts.
        shards: dict[str, dict[Any, Any]] = {
            name: {shard.offsets: shard for shard in reversed(self.index.tensors[name].chunks)}
            for name in tensors
        }
        pairs = []
        for item in planner.create_local_plan().items:
            name, offsets = item.storage_index.fqn, item.storage_index.offset
            stored = self.shard(name, shards[name][offsets])
            pairs.append(
                (
                    planner.resolve_tensor(item).detach(),
                    stored[_box(item.storage_offsets, item.lengths)],
                )
            )
        return pairs

    def file(self, name: str, *, verify: bool = False) -> dict[str, torch.Tensor]:
        """The mapped tensors of one file, whose checksum is compared with that in the index."""
        if verify or name not in self._files:
            self._files[name], metadata = read_tensors(self.path / name, verify=verify)
            if metadata.get(CHECKSUM_KEY) != self.index.files[name][1]:
                what = f"{self.path / name} is another file than was written"
                raise CheckpointError(
                    what, "that one", "load it again, if it was replaced meanwhile, or another one"
                )
        return self._files[name]

    def shard(self, name: str, shard: StoredShard) -> torch.Tensor:
        """A shard of the tensor ``name``, mapped."""
        found, dtype = (
            self.file(shard.file).get(shard.key),
            self.index.tensors[name].properties.dtype,
        )
        if found is None or (found.dtype, found.shape) != (dtype, shard.sizes):
            what, expected = (
                f"{self.path / shard.file} has no such {shard.key!r}",
                f"{tuple(shard.sizes)} of {dtype}",
            )
            raise CheckpointError(what, expected=expected, remedy="load another checkpoint")
        return found

    def whole(self, name: str) -> torch.Tensor:
        """The whole of a tensor, mapped if it is in one file.

        For scaling state that the next step would have reduced, the largest values of all ranks.
        """
        shards: list[Any] = self.index.tensors[name].chunks
        made, about = self.shard(name, shards[0]), self.index.description
        if len(shards) > 1:
            made = torch.zeros(self.index.tensors[name].size, dtype=made.dtype)
            for shard in shards:
                made[_box(shard.offsets, shard.sizes)].copy_(self.shard(name, shard))
        for other in about["per_rank"][name][1:] if name in about["largest"] else ():
            made = torch.maximum(made, self.whole(other))
        return made


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
