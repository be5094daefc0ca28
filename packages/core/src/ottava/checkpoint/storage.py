"""Storage of ``torch.distributed.checkpoint`` that pickles nothing: a safetensors file for each rank, and an index."""

from __future__ import annotations

import contextlib
import math
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ottava.checkpoint.files import CHECKSUM_KEY, METADATA_KEY, read_tensors, write_tensors
from ottava.checkpoint.flatten import encode_description
from ottava.checkpoint.folder import Index, StoredShard, StoredTensor, check_target, publish, read_index, write_index
from ottava.collectives import Ranks
from ottava.errors import CheckpointError, translated
from ottava.filesystem import AnyPath, Partial, as_path


class _OfOnePath:
    """What DCP asks of storages that it makes for a ``checkpoint_id``, or that change its plans."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def _unchanged(self, *given: Any, **options: Any) -> Any:
        return given[0] if given else None

    reset = set_up_storage_reader = prepare_local_plan = prepare_global_plan = _unchanged


def _run(ranks: Ranks, function: Callable[..., object], tensors: Mapping[str, Any], **options: Any) -> None:
    """A function of DCP, which fails on all ranks where it fails on one."""

    def call() -> None:
        try:
            function(tensors, process_group=ranks.group, no_dist=ranks.alone, **options)
        except CheckpointException as error:
            if ranks.rank in error.failures:
                failure = error.failures[ranks.rank][0]
                raise failure from failure.__cause__

    with warnings.catch_warnings():
        # One process alone is what is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        ranks.each(call)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class FolderWriter(_OfOnePath, StorageWriter):
    """Writes tensors, and a description of all else, on a file system that all ranks share: whole or not at all."""

    def __init__(self, path: AnyPath, overwrite: bool, description: Mapping[str, Any]) -> None:
        self.path, self.overwrite, self.description = as_path(path), overwrite, description
        self.partial: Partial | None = None

    def save(self, tensors: Mapping[str, Any], ranks: Ranks) -> None:
        """Save the tensors of this rank, as all ranks do theirs."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            _run(ranks, save, tensors, storage_writer=self, planner=planner)
        finally:
            if self.partial is not None:
                self.partial.discard()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            check_target(self.path, self.overwrite)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with _written(self.path):
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            self.partial = Partial(self.path)
        # Names of their own: a checkpoint that is replaced keeps its files until the index says otherwise.
        token, world = secrets.token_hex(4), len(plans)
        names = [f"rank-{rank:05d}-of-{world:05d}-{token}.safetensors" for rank in range(world)]
        return [replace(p, storage_data=self.partial.path / name) for p, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path: Path = plan.storage_data
        tensors: dict[str, Any] = {}
        stored: list[Any] = []
        for item in plan.items:
            about: Any = item.tensor_data
            offsets, box, shape = tuple(about.chunk.offsets), tuple(about.chunk.sizes), tuple(about.size)
            # A rank that has no rows has an empty shard.
            if math.prod(box) or not math.prod(shape):
                key = item.index.fqn + ("" if box == shape else "@" + ",".join(map(str, offsets)))
                if key in tensors:
                    raise CheckpointError(f"two tensors would have the name {key!r}", remedy="rename one of them")
                tensors[key] = planner.resolve_data(item)
                stored.append((item.index, about.properties.dtype, shape, StoredShard(path.name, key, offsets, box)))
        file = None
        if tensors:
            with _written(path):
                checksum = write_tensors(path, tensors, {METADATA_KEY: encode_description({})})
                file = (path.stat().st_size, checksum)
        return _done([WriteResult(i, tensors[shard.key].nbytes, (*of, shard, file)) for i, *of, shard in stored])

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        assert self.partial is not None  # it was planned
        index = Index(len(results), {}, {}, self.description)
        for result in (result for rank in results for result in rank):
            dtype, shape, shard, index.files[shard.file] = result.storage_data
            before = index.tensors.get(result.index.fqn)
            index.tensors[result.index.fqn] = StoredTensor(dtype, shape, (*(before.shards if before else ()), shard))
        with _written(self.path):
            write_index(self.partial.path, index)
            publish(self.partial, self.overwrite)


def _written(path: Path) -> contextlib.AbstractContextManager[None]:
    return translated(f"{path} cannot be written", "a folder to write to, and room in it", of=OSError)


class FolderReader(_OfOnePath, StorageReader):
    """Maps what :class:`FolderWriter` wrote; CheckpointError where it is not whole, or was replaced meanwhile."""

    def __init__(self, path: AnyPath) -> None:
        self.path = as_path(path)
        self.index = read_index(self.path)
        self._files: dict[str, dict[str, torch.Tensor]] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def load(self, tensors: Mapping[str, Any], ranks: Ranks) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What goes where: tensors to write, and their new values, mapped, of the same shapes and dtypes."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _run(ranks, load, tensors, storage_reader=self, planner=planner)
        return self._pairs

    def file(self, name: str, *, verify: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of one file, mapped, which is the one that the index speaks of."""
        if verify or name not in self._files:
            try:
                self._files[name], metadata = read_tensors(self.path / name, verify=verify)
                if metadata.get(CHECKSUM_KEY) != self.index.files[name][1]:
                    raise CheckpointError(f"{self.path / name} is another file than was written", expected="that one")
            except CheckpointError as error:
                now = self.index
                with contextlib.suppress(CheckpointError):
                    now = read_index(self.path)
                if now.crc32 == self.index.crc32:
                    raise
                what = f"{self.path} was replaced while it was read"
                raise CheckpointError(what, expected="one checkpoint", remedy="load it again") from error
        return self._files[name]

    def shard(self, name: str, shard: StoredShard) -> torch.Tensor:
        """A shard of the tensor ``name``, mapped."""
        found, dtype = self.file(shard.file).get(shard.key), self.index.tensors[name].dtype
        if found is None or (found.dtype, found.shape) != (dtype, shard.shape):
            what, expected = f"{self.path / shard.file} has no such {shard.key!r}", f"{shard.shape} of {dtype}"
            raise CheckpointError(what, expected=expected, remedy="load another checkpoint")
        return found

    def whole(self, name: str) -> torch.Tensor:
        """The whole of a tensor, mapped where it is in one file; of what the next step would have reduced, the largest
        values of all ranks."""
        tensor, about = self.index.tensors[name], self.index.description
        made = self.shard(name, tensor.shards[0])
        if len(tensor.shards) > 1:
            made = torch.zeros(tensor.shape, dtype=tensor.dtype)
            for shard in tensor.shards:
                made[_box(shard.offsets, shard.shape)].copy_(self.shard(name, shard))
        for other in about["per_rank"][name][1:] if name in about["largest"] else ():
            made = torch.maximum(made, self.whole(other))
        return made

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        tensors: dict[str, Any] = {}
        for name, tensor in self.index.tensors.items():
            chunks = [dcp.ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.shape)) for s in tensor.shards]
            about = dcp.TensorProperties(dtype=tensor.dtype)
            tensors[name] = dcp.TensorStorageMetadata(about, torch.Size(tensor.shape), chunks)
        return dcp.Metadata(tensors)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, offsets = item.storage_index.fqn, item.storage_index.offset
            shards = self.index.tensors[name].shards
            stored = self.shard(name, next(s for s in shards if offsets is None or s.offsets == tuple(offsets)))
            value = stored[_box(item.storage_offsets, item.lengths)]
            self._pairs.append((planner.resolve_tensor(item).detach(), value))
        return _done(None)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
