"""Storage of ``torch.distributed.checkpoint`` that pickles nothing: a safetensors file for each
rank, and an index.

The index (``index.py``) is written last, into a hidden folder that then gets the name of the
checkpoint. So a folder with an index in order is a whole checkpoint.
"""

import contextlib
import fcntl
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ottava.checkpoint.files import (
    CHECKSUM_KEY,
    INDEX_NAME,
    dtype_name,
    read_tensors,
    write_tensors,
)
from ottava.checkpoint.flatten import described
from ottava.checkpoint.index import (
    FILE_NAME,
    Description,
    ShardEntry,
    StoredShard,
    TensorEntry,
    encoded_index,
    read_index,
)
from ottava.collectives import Ranks
from ottava.errors import CheckpointError, translated
from ottava.filesystem import (
    AnyPath,
    Partial,
    as_path,
    mode_of,
    opened,
    sync,
    write_new,
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
            for name in os.listdir(target):
                if FILE_NAME.fullmatch(name) and name not in files:
                    (target / name).unlink(missing_ok=True)
    sync(target.parent)


class FolderWriter(StorageWriter):
    """Writes tensors and a description to a file system that all ranks share, whole or not at
    all.

    ``torch.distributed.checkpoint`` calls the methods after :meth:`save` in their order:
    :meth:`prepare_global_plan` and :meth:`finish` on one rank, :meth:`write_data` on each.
    """

    def __init__(self, path: Path, overwrite: bool, description: Description) -> None:
        self.path, self.overwrite, self.description = path, overwrite, description

    def save(self, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        """Save the tensors of this rank, while all ranks save theirs; raises only errors of this
        rank."""
        with contextlib.ExitStack() as self._stack, warnings.catch_warnings():
            # torch warns of a save in one process, which is intended here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                save(
                    {**tensors},
                    storage_writer=self,
                    planner=DefaultSavePlanner(
                        flatten_state_dict=False, flatten_sharded_tensors=False
                    ),
                    process_group=ranks.group,
                    no_dist=ranks.alone,
                )
            except CheckpointException as error:
                if ranks.rank in error.failures:
                    failure = error.failures[ranks.rank][0]
                    raise failure from failure.__cause__

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        return False

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with _write_errors(self.path):
            check_target(self.path, self.overwrite)
            Path(os.path.abspath(self.path)).parent.mkdir(parents=True, exist_ok=True)
            self.partial: Partial = self._stack.enter_context(Partial(self.path))
            # The new files have the permissions of the old ones from the first byte on.
            mode = mode_of(self.path / INDEX_NAME)
            if mode is None:
                mode = (mode_of(self.partial.path) or 0) & 0o666
            self._mode = mode
        # The names are unique, because the files of a replaced checkpoint stay until its index is
        # replaced.
        token, world = secrets.token_hex(4), len(plans)
        names = [f"rank-{rank:05d}-of-{world:05d}-{token}.safetensors" for rank in range(world)]
        places = [(self.partial.path / name, self._mode) for name in names]
        return [
            replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path, mode = plan.storage_data
        tensors: dict[str, torch.Tensor] = {}
        shards: list[tuple[dcp.MetadataIndex, ShardEntry]] = []
        for item in plan.items:
            shard = _shard_entry(item, path.name)
            if shard is None:
                continue
            key = shard["key"]
            if key in tensors:
                raise CheckpointError(
                    f"two tensors would have the name {key!r}", remedy="rename one of them"
                )
            data = planner.resolve_data(item)
            if not isinstance(data, torch.Tensor):
                raise TypeError(f"{key!r} is no tensor")
            tensors[key] = data
            shards.append((item.index, shard))
        file = None
        if tensors:
            with _write_errors(path):
                checksum = write_tensors(path, tensors, described({}, {}), mode)
                file = (path.stat().st_size, checksum)
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(index, tensors[shard["key"]].nbytes, (shard, file))
                for index, shard in shards
            ]
        )
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, TensorEntry] = {
            name: {
                "dtype": dtype_name(tensor.properties.dtype),
                "shape": tensor.size,
                "shards": [],
            }
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, dcp.TensorStorageMetadata)
        }
        files: dict[str, tuple[int, str]] = {}
        for result in (result for rank in results for result in rank):
            shard, file = result.storage_data
            files[shard["file"]] = file
            tensors[result.index.fqn]["shards"].append(shard)
        with _write_errors(self.path):
            text = encoded_index(files, tensors, self.description)
            write_new(self.partial.path / INDEX_NAME, text, self._mode)
            # The index is checked before the folder gets its name.
            read_index(self.partial.path)
            publish(self.partial, self.overwrite)


def _shard_entry(item: WriteItem, file: str) -> ShardEntry | None:
    """The shard that a rank writes to ``file``; None for the empty shard of a rank that has no
    rows."""
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn!r} is no tensor")
    offsets, shape = data.chunk.offsets, data.chunk.sizes
    if not shape.numel() and data.size.numel():
        return None
    key = item.index.fqn
    if shape != data.size:
        key += "@" + ",".join(map(str, offsets))
    return {"file": file, "key": key, "offsets": offsets, "shape": shape}


def _write_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn the errors of a write to ``path`` into CheckpointErrors."""
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

    def pairs(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a tensor to write and its mapped new value, of the same shape and dtype."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({**tensors}, dcp.Metadata({**self.index.tensors}))
        # Shards by offsets, because a linear search takes minutes for a tensor with many shards.
        # The first shard at a place counts.
        shards: dict[str, dict[torch.Size | None, StoredShard]] = {
            name: {shard.offsets: shard for shard in reversed(self.index.shards(name))}
            for name in tensors
        }
        pairs = []
        for item in planner.create_local_plan().items:
            name, offsets = item.storage_index.fqn, item.storage_index.offset
            values = self.shard(name, shards[name][offsets])
            target = planner.resolve_tensor(item).detach()
            pairs.append((target, values[_box(item.storage_offsets, item.lengths)]))
        return pairs

    def file(self, name: str, *, verify: bool = False) -> dict[str, torch.Tensor]:
        """The mapped tensors of one file, whose checksum is compared with that in the index."""
        if verify or name not in self._files:
            self._files[name], metadata = read_tensors(self.path / name, verify=verify)
            if metadata.get(CHECKSUM_KEY) != self.index.files[name][1]:
                raise CheckpointError(
                    f"{self.path / name} is another file than was written",
                    "that one",
                    "load it again, if it was replaced meanwhile, or another one",
                )
        return self._files[name]

    def shard(self, name: str, shard: StoredShard) -> torch.Tensor:
        """A shard of the tensor ``name``, mapped."""
        dtype = self.index.tensors[name].properties.dtype
        values = self.file(shard.file).get(shard.key)
        if values is None or values.dtype != dtype or values.shape != shard.sizes:
            raise CheckpointError(
                f"{self.path / shard.file} has no such {shard.key!r}",
                expected=f"{tuple(shard.sizes)} of {dtype}",
                remedy="load another checkpoint",
            )
        return values

    def whole(self, name: str) -> torch.Tensor:
        """The whole of a tensor, mapped if it is in one file.

        For scaling state that the next step would have reduced, the largest values of all ranks.
        """
        shards = self.index.shards(name)
        values = self.shard(name, shards[0])
        if len(shards) > 1:
            values = torch.zeros(self.index.tensors[name].size, dtype=values.dtype)
            for shard in shards:
                values[_box(shard.offsets, shard.sizes)].copy_(self.shard(name, shard))
        description = self.index.description
        if name in description["largest"]:
            for other in description["per_rank"][name][1:]:
                values = torch.maximum(values, self.whole(other))
        return values


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
