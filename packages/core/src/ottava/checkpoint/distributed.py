"""Sharded checkpoints over ``torch.distributed.checkpoint``: saved by any number of ranks, loaded by any other.

Without an initialized process group, one process saves and loads the same format alone.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.folder import as_path, prune, step_name
from ottava.checkpoint.header import DTYPE_NAMES
from ottava.checkpoint.index import Index
from ottava.checkpoint.pieces import ShardedSource, blocks_of, check_writable
from ottava.checkpoint.ranks import Ranks
from ottava.checkpoint.sharded import FlatState, Piece, flatten_state
from ottava.checkpoint.tree import Merge, decode_tree, leaves
from ottava.errors import CheckpointError, OptionError, UsageError
from ottava.recipes.state import is_reduced_by_max

_HASHED_AT_ONCE = 4 << 20


def save_sharded(
    state: Mapping[str, Any], path: str | os.PathLike[str], *, group: Any = None, overwrite: bool = False
) -> None:
    """Save a state as one checkpoint, each rank its part; it appears under ``path`` whole or not at all.

    Every rank calls it, with the same names. Quantized tensors are saved as codes and scales, sharded ones in pieces
    that any number of ranks can load. A plain tensor that is not the same on all ranks (a statistic that each
    keeps) is saved once for each of them. Values that are not tensors have to be equal on all ranks.

    Args:
        state: a state dict, or nested dicts, lists and tuples of tensors, numbers, text, bools, None and dtypes.
        path: a new folder, on a file system that all ranks share; its parent is made.
        group: the process group that saves; None is the default group, or this process where there is none.
        overwrite: whether a checkpoint of that name is replaced. The old one is found until the new one is.

    Raises:
        CheckpointError: ``path`` exists or cannot be written, or another rank failed.
        DTypeError: the state holds what is no tensor and no JSON; it is named.
        ShapeError: shards of a quantized tensor cut its blocks.
        UsageError: the ranks differ in what has to be equal.
    """
    ranks = Ranks(group)
    flat = ranks.each(lambda: flatten_state(state))
    per_rank = _compared(flat, ranks)

    def save() -> None:
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        from ottava.checkpoint.planners import PieceSavePlanner
        from ottava.checkpoint.storage import FolderWriter

        largest = [name for name in per_rank if is_reduced_by_max(name)]
        description = {"state": flat.tree, "quantized": flat.quantized, "per_rank": per_rank, "largest": largest}
        writer = FolderWriter(path, overwrite=overwrite, description=description)
        pieces: dict[str, Any] = {}
        for name, piece in flat.pieces.items():
            pieces[per_rank[name][ranks.rank] if name in per_rank else name] = piece
        try:
            ranks.run(
                lambda: dcp_save(
                    pieces,
                    storage_writer=writer,
                    planner=PieceSavePlanner(),
                    process_group=group,
                    no_dist=ranks.alone,
                )
            )
        except BaseException:
            # By the coordinator alone: another rank may fail while it gives the folder its name.
            if ranks.rank == 0:
                writer.discard()
            raise

    ranks.each(lambda: as_path(path))
    save()


def _checksum(tensor: torch.Tensor) -> int:
    value = 0
    for block in blocks_of(tensor, _HASHED_AT_ONCE):
        value = zlib.crc32(block, value)
    return value


def _compared(flat: FlatState, ranks: Ranks) -> dict[str, list[str]]:
    """The plain tensors of which the ranks hold different ones, with the names that each rank's has in the files.

    Raises:
        UsageError: the ranks differ in what has to be equal.
    """
    if ranks.world == 1:
        return {}
    whole = {name: (piece.shape, str(piece.tensor.dtype)) for name, piece in flat.pieces.items()}
    parts: dict[str, Any] = {**leaves(flat.tree), **{f"{n} (quantized)": e for n, e in flat.quantized.items()}, **whole}
    digest = zlib.crc32(json.dumps(parts, sort_keys=True).encode())
    if len(set(ranks.gather(digest))) > 1:
        _name_difference(ranks.gather({name: json.dumps(part, sort_keys=True) for name, part in parts.items()}))
    own = {name: _checksum(piece.tensor) for name, piece in flat.pieces.items() if piece.everywhere}
    every = ranks.gather(own)
    differing = [name for name in own if len({sums[name] for sums in every}) > 1]
    for name in differing:
        owner = flat.pieces[name].of_shards
        if owner is not None:
            raise UsageError(
                f"the shards of {owner!r} have different {name.removeprefix(owner + '.')!r}",
                expected="one value for all shards of a weight",
                remedy="set the values of the weight before it is sharded",
            )
    taken = set(flat.pieces)
    return {name: [name, *(_free(f"{name}@rank-{r:05d}", taken) for r in range(1, ranks.world))] for name in differing}


def _free(name: str, taken: set[str]) -> str:
    if name in taken:
        raise UsageError(f"a tensor has the name {name!r}", remedy="rename it")
    return name


def _name_difference(every: list[dict[str, str]]) -> None:
    for rank, other in enumerate(every):
        for name in sorted({*every[0], *other}):
            if every[0].get(name) != other.get(name):
                raise UsageError(
                    f"{name!r} of rank {rank} is not that of rank 0: {other.get(name)} and {every[0].get(name)}",
                    expected="the same names, shapes, dtypes and values besides tensors on all ranks",
                    remedy="save what each rank has of its own as tensors",
                )


def load_sharded(
    state: Mapping[str, Any], path: str | os.PathLike[str], *, group: Any = None, strict: bool = True
) -> Any:
    """Load a checkpoint that any number of ranks saved into the tensors of ``state``, in place, or change nothing.

    Every rank calls it, reads its part into new memory and checks it; when all have succeeded, the tensors are
    written. An error on one rank is an error on all, and none has changed anything.

    Args:
        state: like what was saved, with tensors to load into, sharded over any number of ranks.
        path: the folder of the checkpoint.
        group: the process group that loads; None is the default group, or this process where there is none.
        strict: whether names that only the state or only the checkpoint has are an error. Otherwise the state keeps
            what is missing, and tensors that it has no place for are left out.

    Returns:
        The state with its own tensors, now loaded, and all other values as they were saved.

    Raises:
        CheckpointError: the checkpoint is not whole, is damaged, has other names, shapes or dtypes than the state, or
            another rank failed. The message names the file and the tensor.
        DTypeError: the state holds what is no tensor and no JSON; it is named.
        UsageError: a quantized tensor of the state is a part of another one.
    """
    ranks = Ranks(group)
    job = ranks.each(lambda: _prepare(state, path, strict, ranks))
    if len(set(ranks.gather(job.index.crc32))) > 1:
        raise CheckpointError(f"{path} is not the same checkpoint on all ranks", expected="a shared file system")

    def load() -> None:
        from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

        from ottava.checkpoint.planners import PieceLoadPlanner

        planner = PieceLoadPlanner(job.pieces, job.buffers)
        dcp_load(
            dict(job.buffers),
            storage_reader=job.reader,
            planner=planner,
            process_group=group,
            no_dist=ranks.alone,
        )

    ranks.run(load)
    ranks.each(lambda: _merge(job, ranks))
    values = {piece.name: job.buffers[stored] for stored, piece in job.pieces.items()}
    done: list[str] = []
    try:
        ranks.each(lambda: job.flat.exchange(values, done))
    except BaseException:
        job.flat.undo(values, done)
        raise
    return job.result


@dataclass
class _Load:
    """What a load needs: the state to load into, pieces and new memory by the names in the checkpoint, the result."""

    reader: Any
    index: Index
    flat: FlatState
    pieces: dict[str, Piece]
    buffers: dict[str, torch.Tensor]
    result: Any


def _prepare(state: Mapping[str, Any], path: str | os.PathLike[str], strict: bool, ranks: Ranks) -> _Load:
    from ottava.checkpoint.storage import FolderReader

    reader = FolderReader(path)
    index, flat = reader.index, flatten_state(state)
    description = index.description
    plain = {"dict": [[name, {"tensor": name}] for name in index.tensors]}
    try:
        merge = Merge(flat.tree, description.get("state", plain))
        result = decode_tree(merge.tree, flat.values)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{reader.path} says of no state: {error}", expected="what save_sharded wrote") from error
    for what, names in (("misses", merge.missing), ("has no place for", merge.unexpected)):
        if strict and names:
            subject = reader.path if what == "misses" else "the state"
            listed = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(
                f"{subject} {what} {listed}",
                expected=f"the names of {reader.path}",
                remedy="make the state that was saved: an optimizer has none before its first step",
            )
    skipped = set(merge.missing)
    pieces: dict[str, Piece] = {}
    parts = {path: name for name, paths in flat.parts.items() for path in paths}
    for name, piece in flat.pieces.items():
        owner = parts.get(name, name)
        if owner in skipped:
            continue
        _check_owner(owner, reader.path, flat, description)
        stored = _stored_name(name, description, index, ranks)
        _check_piece(piece, stored, index, reader.path)
        check_writable(owner, piece.tensor)
        pieces[stored] = piece
    buffers = {
        name: torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, device="cpu") for name, piece in pieces.items()
    }
    return _Load(reader, index, flat, pieces, buffers, result)


def _merge(job: _Load, ranks: Ranks) -> None:
    """Scaling state that each of another number of ranks had of its own: for all of these, the largest values."""
    merged = [
        name
        for name, names in job.index.description.get("per_rank", {}).items()
        if len(names) != ranks.world and name in job.buffers and name in job.index.description.get("largest", [])
    ]
    if merged:
        source = ShardedSource(job.reader.path)
        for name in merged:
            job.buffers[name].copy_(source.read(name))


def _stored_name(name: str, description: Mapping[str, Any], index: Index, ranks: Ranks) -> str:
    """The name of what this rank loads: its own where each rank had its own and there are as many, else rank 0's."""
    names = description.get("per_rank", {}).get(name)
    return str(names[ranks.rank]) if names is not None and len(names) == ranks.world else name


def _check_owner(name: str, path: Path, flat: FlatState, description: Mapping[str, Any]) -> None:
    """Refuse to load a tensor into one of another kind."""
    saved = description.get("quantized", {}).get(name)
    mine = flat.quantized.get(name)
    if mine is None and saved is None:
        return
    if mine is None or saved is None:
        kinds = ("quantized", "not") if mine is None else ("not quantized", "is")
        raise CheckpointError(
            f"{name!r} of {path} is {kinds[0]}, and that of the state {kinds[1]}",
            expected="one kind",
            remedy="make the model as it was saved, or convert the checkpoint",
        )
    if (saved.get("class"), saved.get("static")) != (mine["class"], mine["static"]):
        raise CheckpointError(
            f"{name!r} of {path} is {saved.get('class')} of {saved.get('static')}",
            expected=f"{mine['class']} of {mine['static']}, as in the state",
            remedy="make the model with the recipe that was saved",
        )
    storage = flat.storages[name]
    if storage._whole is not None and not hasattr(flat.values[name], "to_local"):
        raise UsageError(
            f"{name!r} is a part of another tensor", expected="a whole one", remedy="load into the whole tensor"
        )


def _check_piece(piece: Piece, stored: str, index: Index, path: Path) -> None:
    found = index.tensors.get(stored)
    if found is None:
        raise CheckpointError(f"{path} has no tensor {stored!r}", expected="every tensor of the state")
    if (found.dtype, found.shape) != (piece.tensor.dtype, piece.shape):
        raise CheckpointError(
            f"{stored!r} of {path} has shape {found.shape} and dtype {DTYPE_NAMES[found.dtype]}",
            expected=f"{piece.shape} and {DTYPE_NAMES[piece.tensor.dtype]}, as in the state",
        )


def save_step(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    step: int,
    *,
    keep: int | None = None,
    group: Any = None,
    overwrite: bool = False,
) -> Path:
    """Save a state as ``folder/step-0000100``, for :func:`latest_checkpoint`, and remove old ones.

    Args:
        state, group, overwrite: see :func:`save_sharded`.
        folder: where the checkpoints of one training are; it is made.
        step: the number, from 0.
        keep: how many whole checkpoints stay, this one and those with the highest numbers besides; None is all.
            The others are removed once this one is whole.

    Returns:
        The path of the checkpoint.

    Raises:
        OptionError: ``step`` or ``keep`` is no such number.
        OttavaError: see :func:`save_sharded`.
    """

    def check() -> Path:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise OptionError(f"keep is {keep!r}", expected="an integer from 1, or None")
        return as_path(folder) / step_name(step)

    ranks = Ranks(group)
    path = ranks.each(check)
    save_sharded(state, path, group=group, overwrite=overwrite)
    if keep is not None and ranks.rank == 0:
        try:
            prune(path.parent, keep, path)
        except OSError as error:
            # The checkpoint is whole; that old ones are still there must not stop a training.
            warnings.warn(f"old checkpoints in {path.parent} cannot be removed: {error}", RuntimeWarning, stacklevel=2)
    return path
