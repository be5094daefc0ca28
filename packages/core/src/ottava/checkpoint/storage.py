"""Storage of ``torch.distributed.checkpoint`` that pickles nothing: a safetensors file for each rank, and an index.

DCP's plans travel between the live processes; of what lies in files, nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ottava.checkpoint.description import Description
from ottava.checkpoint.files import METADATA_KEY, TORCH_DTYPES, as_bytes, read_tensors, write_tensors
from ottava.checkpoint.folder import check_target, publish
from ottava.checkpoint.index import INDEX_NAME, Index, StoredShard, StoredTensor, read_index
from ottava.checkpoint.paths import Partial, as_path, sync
from ottava.errors import CheckpointError, DTypeError


class FolderWriter(StorageWriter):
    """Writes a checkpoint of tensors for ``torch.distributed.checkpoint.save``, whole or not at all.

    The file system has to be shared by all ranks. Values that are not tensors belong in ``description``.

    Args:
        path: the folder to write; its parent is made.
        overwrite: whether a checkpoint of that name is replaced.
        description: JSON that the index keeps.

    Raises:
        CheckpointError: ``path`` exists, or cannot be written; from whatever DCP calls.
        DTypeError: a value is not a tensor; from the planning.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, description: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.overwrite, self.partial = as_path(path), overwrite, None
        empty: dict[str, Any] = {"state": {"dict": []}, "quantized": {}, "per_rank": {}, "largest": []}
        self.description = empty | dict(description or {})
        self.partial: Partial | None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.path = self.path if checkpoint_id is None else as_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            check_target(self.path, self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise DTypeError(f"{item.index.fqn!r} is not a tensor", expected="tensors", remedy="use save_sharded")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with _written(self.path):
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            self.partial = Partial(self.path)
        # Names of their own: a checkpoint that is replaced keeps its files until the index says otherwise.
        token, world = secrets.token_hex(4), len(plans)
        names = [f"rank-{rank:05d}-of-{world:05d}-{token}.safetensors" for rank in range(world)]
        return [replace(p, storage_data=self.partial.path / name) for p, name in zip(plans, names, strict=True)]

    def discard(self) -> None:
        """Remove what a failed save has written so far."""
        if self.partial is not None:
            self.partial.discard()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path: Path = plan.storage_data
        tensors: dict[str, torch.Tensor] = {}
        stored: list[tuple[Any, Any, StoredShard]] = []
        for item in plan.items:
            about: Any = item.tensor_data
            offsets, sizes = tuple(about.chunk.offsets), tuple(about.chunk.sizes)
            if math.prod(sizes) == 0 and math.prod(about.size):
                continue  # the empty shard of a rank that has no rows
            key = item.index.fqn + ("" if sizes == tuple(about.size) else "@" + ",".join(map(str, offsets)))
            if key in tensors:
                raise CheckpointError(f"two tensors would have the name {key!r}", remedy="rename one of them")
            tensors[key] = planner.resolve_data(item)  # type: ignore[assignment]
            stored.append((item, about, StoredShard(path.name, key, offsets, sizes)))
        size, checksum = 0, ""
        if tensors:
            with _written(path):
                checksum = write_tensors(path, tensors, {METADATA_KEY: Description().encode()})
                size = path.stat().st_size
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, size, (str(about.properties.dtype)[6:], tuple(about.size), shard, checksum))
                for item, about, shard in stored
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, StoredTensor] = {}
        files: dict[str, tuple[int, str]] = {}
        for result in (result for rank in results for result in rank):
            dtype, shape, shard, checksum = result.storage_data
            before = tensors[result.index.fqn].shards if result.index.fqn in tensors else ()
            tensors[result.index.fqn] = StoredTensor(dtype, shape, (*before, shard))
            files[shard.file] = (result.size_in_bytes, checksum)
        if self.partial is None:
            raise CheckpointError(f"{self.path} was not planned", expected="torch.distributed.checkpoint.save")
        with _written(self.path):
            with open(self.partial.path / INDEX_NAME, "xb") as file:
                file.write(Index(len(results), files, tensors, self.description).encode())
            sync(self.partial.path / INDEX_NAME)
            # What was just written is read once more before it may stand for a checkpoint: also where the ranks do not
            # see each other's files.
            read_index(self.partial.path)
            publish(self.partial, self.overwrite)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{path} cannot be written: {error}"
        raise CheckpointError(what, expected="a folder to write to, and room in it") from error


class FolderReader(StorageReader):
    """Reads what :class:`FolderWriter` wrote, for ``torch.distributed.checkpoint.load``; nothing is unpickled.

    Files are mapped, and what is asked for is copied.

    Args:
        path: the folder of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is not whole, or not what was written; or it was replaced while it was read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        self._read: Index | None = None
        self._files: dict[str, dict[str, torch.Tensor]] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path, self._read = as_path(checkpoint_id), None

    @property
    def index(self) -> Index:
        """The index, read at the first use."""
        if self._read is None:
            self._read, self._files = read_index(self.path), {}
        return self._read

    def file(self, name: str, *, verify: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of one file, mapped.

        Raises:
            CheckpointError: it is damaged, or not the file that the index speaks of.
        """
        if verify or name not in self._files:
            try:
                self._files[name], metadata = read_tensors(self.path / name, verify=verify)
                if metadata.get("ottava.crc32") != self.index.files[name][1]:
                    raise CheckpointError(f"{self.path / name} is another file than was written", expected="that one")
            except CheckpointError as error:
                if not self.current():
                    what = f"{self.path} was replaced while it was read"
                    raise CheckpointError(what, expected="one checkpoint", remedy="load it again") from error
                raise
        return self._files[name]

    def current(self) -> bool:
        """Whether the index is still the one that was read."""
        try:
            return read_index(self.path).crc32 == self.index.crc32
        except CheckpointError:
            return True

    def shard(self, name: str, shard: StoredShard) -> torch.Tensor:
        """A shard of the tensor ``name``, mapped."""
        found = self.file(shard.file).get(shard.key)
        if found is None or (str(found.dtype)[6:], found.shape) != (self.index.tensors[name].dtype, shard.shape):
            what = f"{self.path / shard.file} does not have {shard.key!r} as {INDEX_NAME} says"
            raise CheckpointError(what, expected=f"a tensor of shape {shard.shape}", remedy="load another checkpoint")
        return found

    def whole(self, name: str) -> torch.Tensor:
        """The whole of a tensor: mapped where it is in one file, else put together of its shards."""
        tensor = self.index.tensors[name]
        if len(tensor.shards) == 1:
            return self.shard(name, tensor.shards[0])
        made = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        for shard in tensor.shards:
            box = as_bytes(made)[tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.shape, strict=True))]
            box.copy_(as_bytes(self.shard(name, shard)))
        return made

    def merged(self, name: str) -> torch.Tensor:
        """The whole of a tensor; of what the next step would have reduced, the largest values of all ranks."""
        made, about = self.whole(name), self.index.description
        for other in about["per_rank"][name][1:] if name in about["largest"] else ():
            made = torch.maximum(made, self.whole(other))
        return made

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        def stored(tensor: StoredTensor) -> TensorStorageMetadata:
            chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.shape)) for s in tensor.shards]
            properties = TensorProperties(dtype=TORCH_DTYPES[tensor.dtype])
            return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)

        return Metadata({name: stored(tensor) for name, tensor in self.index.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, offsets = item.storage_index.fqn, item.storage_index.offset
            shards = self.index.tensors[name].shards
            shard = next(s for s in shards if offsets is None or s.offsets == tuple(offsets))
            box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item)
            as_bytes(target.detach()).copy_(as_bytes(self.shard(name, shard))[box])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
