"""Storage of ``torch.distributed.checkpoint`` that pickles nothing: a safetensors file for each rank, and an index.

DCP's plans travel between the live processes; of what lies in files, nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ottava.checkpoint.folder import as_path, check_target, fresh_token, locate, partial_name, publish
from ottava.checkpoint.header import DTYPE_NAMES
from ottava.checkpoint.index import (
    INDEX_NAME,
    Index,
    StoredFile,
    StoredPiece,
    StoredTensor,
    check_files,
    read_index,
)
from ottava.checkpoint.pieces import PieceReader, as_bytes, blocks_of
from ottava.errors import CheckpointError, DTypeError

#: Bytes of a piece that one checksum covers, and that are held in memory at once while they are written.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator of a piece: where it is, and of the file that it is in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    piece: StoredPiece
    file: StoredFile


@dataclass(frozen=True)
class _Place:
    """What the coordinator tells a rank: the save's token, which rank it is, and of how many."""

    token: str
    rank: int
    world_size: int


class FolderWriter(StorageWriter):
    """Writes a checkpoint of tensors for ``torch.distributed.checkpoint.save``, whole or not at all.

    The file system has to be shared by all ranks. Values that are not tensors belong in ``description``.

    Args:
        path: the folder to write; its parent is made.
        overwrite: whether a checkpoint of that name is replaced.
        description: JSON that the index keeps.

    Raises:
        CheckpointError: ``path`` exists, or cannot be written; from whatever DCP calls.
        DTypeError: a value is not a tensor of a dtype that safetensors has; from the planning.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = as_path(path)
        self.overwrite, self.description = overwrite, dict(description or {})
        self._place: _Place | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.path = self.path if checkpoint_id is None else as_path(checkpoint_id)
        self._place = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            check_target(self.path, self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                raise DTypeError(
                    f"{item.index.fqn!r} is not a tensor", expected="tensors", remedy="save it with save_sharded"
                )
            if item.tensor_data.properties.dtype not in DTYPE_NAMES:
                raise DTypeError(
                    f"{item.index.fqn!r} is of {item.tensor_data.properties.dtype}",
                    expected="a dtype that safetensors has",
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        token = fresh_token()
        with _written(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial_name(self.path, token).mkdir()
        self._place = _Place(token, 0, len(plans))
        return [replace(plan, storage_data=_Place(token, rank, len(plans))) for rank, plan in enumerate(plans)]

    @property
    def partial(self) -> Path | None:
        """The hidden folder of this save, once planned."""
        return None if self._place is None else partial_name(self.path, self._place.token)

    def discard(self) -> None:
        """Remove what a failed save has written so far."""
        if self.partial is not None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._place = place = plan.storage_data
        name = f"rank-{place.rank:05d}-of-{place.world_size:05d}.safetensors"
        path = partial_name(self.path, place.token) / name
        results: list[WriteResult] = []
        if plan.items:
            with _written(path), open(path, "xb") as file:
                results = _write_items(file, name, plan.items, planner)
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        place, partial = self._place, self.partial
        if place is None or partial is None:
            raise CheckpointError(f"{self.path} was not planned", expected="torch.distributed.checkpoint.save")
        written = [(result.index.fqn, result.storage_data) for rank in results for result in rank]
        tensors: dict[str, StoredTensor] = {}
        for name, part in written:
            pieces = tensors[name].pieces if name in tensors else ()
            tensors[name] = StoredTensor(part.dtype, part.shape, (*pieces, part.piece))
        files = {part.piece.file: part.file for _, part in written}
        index = Index(place.world_size, BLOCK_BYTES, files, tensors, self.description)
        # Also where the ranks do not see each other's files.
        check_files(partial, index)
        with _written(self.path):
            with open(partial / INDEX_NAME, "xb") as file:
                file.write(index.encode())
                file.flush()
                os.fsync(file.fileno())
            # What was just written is read once more before it may stand for a checkpoint.
            read_index(partial)
            publish(partial, self.path, place.token, self.overwrite)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}", expected="a folder to write to") from error


def _write_items(file: BinaryIO, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """One safetensors file: its header, and the bytes of each piece, block by block."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    # Larger elements first, so that every tensor is aligned.
    items = sorted(items, key=lambda item: -_data(item).properties.dtype.itemsize)
    for item in items:
        data = _data(item)
        sizes = list(data.chunk.sizes)
        begins.append(end)
        end += math.prod(sizes) * data.properties.dtype.itemsize
        part = "" if sizes == list(data.size) else "@" + ",".join(map(str, data.chunk.offsets))
        key = item.index.fqn + part
        if key in header:
            raise CheckpointError(f"two tensors of {name} would have the name {key!r}", remedy="rename one of them")
        header[key] = {
            "dtype": DTYPE_NAMES[data.properties.dtype],
            "shape": sizes,
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    file.write(head)
    stored = StoredFile(len(head) + end, len(head), zlib.crc32(head))
    results = []
    for item, begin in zip(items, begins, strict=True):
        data, checksums = _data(item), []
        tensor: Any = planner.resolve_data(item)
        for block in blocks_of(tensor, BLOCK_BYTES):
            file.write(block)
            checksums.append(zlib.crc32(block))
        piece = StoredPiece(
            name, len(head) + begin, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(checksums)
        )
        written = _Written(data.properties.dtype, tuple(data.size), piece, stored)
        results.append(WriteResult(item.index, math.prod(piece.shape) * data.properties.dtype.itemsize, written))
    return results


def _data(item: WriteItem) -> Any:
    return item.tensor_data


class FolderReader(StorageReader):
    """Reads what :class:`FolderWriter` wrote, for ``torch.distributed.checkpoint.load``; nothing is unpickled.

    Args:
        path: the folder of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is not whole, or not what was written; from whatever DCP calls.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        self._index: Index | None = None
        self._folder = self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.path = self.path if checkpoint_id is None else as_path(checkpoint_id)
        self._index = None

    @property
    def index(self) -> Index:
        """The index, read at the first use.

        Raises:
            CheckpointError: the checkpoint is not whole.
        """
        if self._index is None:
            self._folder = locate(self.path)
            index = read_index(self._folder)
            check_files(self._folder, index)
            self._index = index
        return self._index

    def pieces(self) -> PieceReader:
        """A reader of single pieces, to be used in a ``with`` block."""
        index = self.index
        return PieceReader(self._folder, index)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata({name: _metadata(tensor) for name, tensor in self.index.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self.pieces() as reader:
            for item in plan.items:
                self._read_item(reader, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, reader: PieceReader, item: ReadItem, planner: LoadPlanner) -> None:
        name, offset = item.storage_index.fqn, item.storage_index.offset
        pieces = self.index.tensors[name].pieces
        piece = next(p for p in pieces if offset is None or p.offsets == tuple(offset))
        values = reader.read(name, piece, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item)
        as_bytes(target.detach()).copy_(values)
        planner.commit_tensor(item, target)


def _metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in tensor.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
