"""Sharded checkpoints over ``torch.distributed.checkpoint``: saved by any number of ranks, loaded
by any other.

A state has two parts. Its tensors are written by ``storage``, one file for each rank. Everything
else is a tree of JSON (``state_tree``), which ``index`` holds together with the places of all
tensors.
"""

import contextlib
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ottava.checkpoint.contracts import contracts_in, warn_of_other_contracts
from ottava.checkpoint.files import crc32_of, dtype_name, in_memory
from ottava.checkpoint.flatten import Entry, Value, contract_table, flatten_values
from ottava.checkpoint.model import check_writable, write_all
from ottava.checkpoint.state_tree import Node, decoded, encoded, leaves_of, merged
from ottava.collectives import Group, Ranks
from ottava.contract import Contract
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError, listed, translated
from ottava.filesystem import AnyPath, Partial, as_path, remove_leftovers
from ottava.recipes.state import is_reduced_by_max
from ottava.tensors.declaration import bump_versions
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import is_distributed, local_tensor

if TYPE_CHECKING:
    from ottava.checkpoint.index import Description
    from ottava.checkpoint.storage import FolderReader

_State = Mapping[str, object]
_STEP = re.compile(r"step-(\d+)")


class _FlatState:
    """A nested state in flat form. Nothing is copied.

    Attributes:
        tree: the state as JSON, in which names stand for tensors.
        values: the tensors by name.
        tensors: their plain tensors by name.
        quantized: the entries of those that are quantized.
        owners: the name in ``values`` of the owner of each plain tensor.
    """

    def __init__(self, state: object) -> None:
        if not isinstance(state, Mapping):
            raise DTypeError(f"the state is a {type(state).__name__}", expected="a dict")
        self.values: dict[str, Value] = {}
        self.tree = encoded(state, self.values)
        self.tensors, self.quantized = flatten_values(self.values, derived=False)
        self.owners = {name: name for name in self.tensors}
        for name, entry in self.quantized.items():
            for argument in entry["tensors"]:
                self.owners[f"{name}.{argument}"] = name


def save_sharded(
    state: _State, path: AnyPath, *, group: Group = None, overwrite: bool = False
) -> None:
    """Save a state as one checkpoint, which appears under ``path`` whole or not at all.

    Every rank calls this and saves its shards. Names, and values that are not tensors, are the same
    on all ranks. If a plain tensor differs between ranks, such as a statistic, each rank's tensor
    is saved.

    Args:
        state: nested dicts, lists and tuples of tensors, numbers, text, bools, None and dtypes.
        path: a new folder, on a file system that all ranks share; its parent is made.
        group: the process group; None is the default group, or this process alone without one.
        overwrite: whether a checkpoint of that name is replaced. The old checkpoint can be read
            until the new one is complete.

    Raises:
        CheckpointError: ``path`` exists or cannot be written, or another rank failed.
        DTypeError, ShapeError: the state holds a value that is neither a tensor nor JSON, or shards
            that cut blocks; the message names it.
        UsageError, OptionError: names or values that have to be equal differ between ranks;
            ``group`` is not a group, or this process is not in it.
    """
    from ottava.checkpoint.storage import FolderWriter

    ranks = Ranks(group)
    folder, flat = ranks.each(lambda: (as_path(path), _FlatState(state)))
    per_rank = _names_per_rank(flat, ranks)
    description: Description = {
        "state": flat.tree,
        "quantized": flat.quantized,
        "per_rank": per_rank,
        "largest": [name for name in per_rank if is_reduced_by_max(name)],
    }
    contracts = contract_table(flat.values)
    if contracts:
        description["contracts"] = contracts
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in flat.tensors.items():
        if name in per_rank:
            tensors[per_rank[name][ranks.rank]] = tensor
        else:
            tensors[name] = tensor
    ranks.each(lambda: FolderWriter(folder, overwrite, description).save(tensors, ranks))


def _names_per_rank(flat: _FlatState, ranks: Ranks) -> dict[str, list[str]]:
    """The plain tensors that differ between ranks, with the name of each rank's tensor in the
    files.

    Raises:
        UsageError: the ranks differ in names or values that have to be equal.
    """
    if ranks.world == 1:
        return {}
    _check_equal(_texts_of(flat), ranks)
    checksums = {
        name: crc32_of(in_memory(name, tensor))
        for name, tensor in flat.tensors.items()
        if not is_distributed(tensor)
    }
    checksums_of_ranks = ranks.gather(checksums)
    names: dict[str, list[str]] = {}
    for name in checksums:
        if len({checksums_of_rank[name] for checksums_of_rank in checksums_of_ranks}) == 1:
            continue
        owner = flat.owners[name]
        if is_distributed(flat.values[owner]):
            raise UsageError(
                f"the shards of {owner!r} have different {name.removeprefix(owner + '.')!r}",
                "one value for all of a weight",
                "set it before it is sharded",
            )
        others = [f"{name}@rank-{rank:05d}" for rank in range(1, ranks.world)]
        duplicates = set(others) & set(flat.tensors)
        if duplicates:
            raise UsageError(f"a tensor has the name {min(duplicates)!r}", remedy="rename it")
        names[name] = [name, *others]
    return names


def _texts_of(flat: _FlatState) -> dict[str, str]:
    """Everything of a state that has to be equal on all ranks, as JSON."""
    parts: dict[str, object] = {**leaves_of(flat.tree)}
    for name, entry in flat.quantized.items():
        parts[f"{name} (quantized)"] = entry
    for name, tensor in flat.tensors.items():
        parts[name] = (tuple(tensor.shape), str(tensor.dtype))
    return {name: json.dumps(part, sort_keys=True) for name, part in parts.items()}


def _check_equal(texts: dict[str, str], ranks: Ranks) -> None:
    """Raise UsageError if the texts of the ranks differ."""
    checksum = zlib.crc32(json.dumps(texts, sort_keys=True).encode())
    if len(set(ranks.gather(checksum))) == 1:
        return
    first, *others = ranks.gather(texts)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    name = min(name for name in first | other if first.get(name) != other.get(name))
    raise UsageError(
        f"{name!r} of rank {rank} is not that of rank 0: {other.get(name)} and {first.get(name)}",
        expected="the same names, shapes, dtypes and values besides tensors on all ranks",
        remedy="save what each rank has of its own as tensors",
    )


def load_sharded(
    state: _State, path: AnyPath, *, group: Group = None, strict: bool = True, verify: bool = True
) -> Any:
    """Load a checkpoint that any number of ranks saved into the tensors of ``state``, in place, or
    change nothing.

    Every rank calls this. When all ranks have found the values of their shards, each copies them
    from the mapped files into its tensors. An error on one rank is an error on all ranks. Ctrl-C
    leaves the tensors of a rank all old or all new.

    Args:
        state, path, group: as of :func:`save_sharded`; the tensors may be sharded over another
            number of ranks.
        strict: whether names that only the state or only the checkpoint has are an error. Otherwise
            the state keeps the values that the checkpoint misses, and other tensors of the
            checkpoint are ignored.
        verify: whether the files are compared with their checksums; one of the ranks reads each
            file completely.

    Returns:
        The state with its own tensors, now loaded, and all other values as they were saved.

    Raises:
        CheckpointError: the checkpoint is damaged, has other names, shapes or dtypes than the
            state, was replaced while it was read, or another rank failed. The message names the
            file or the tensor.
        DTypeError, UsageError: as of :func:`save_sharded`, or a tensor cannot be written to.
    """
    from ottava.checkpoint.storage import FolderReader

    ranks = Ranks(group)
    reader = ranks.each(lambda: FolderReader(path))
    match = ranks.each(lambda: _match(state, reader, strict, ranks))
    flat = match.flat
    if len(set(ranks.gather(reader.index.crc32))) > 1:
        raise CheckpointError(
            f"{path} is not the same checkpoint on all ranks", expected="a shared file system"
        )
    own_files: list[str] = []
    if verify:
        own_files = sorted(reader.index.files)[ranks.rank :: ranks.world]
    ranks.each(lambda: [reader.file(name, verify=True) for name in own_files])
    pairs = ranks.each(lambda: _pairs(match, reader, ranks))
    # Data derived from the bytes of quantized tensors is outdated now.
    for name in flat.quantized:
        storage = local_tensor(flat.values[name])
        if isinstance(storage, QuantizedTensorStorage):
            storage.mark_written()
        if isinstance(storage, torch.Tensor):
            bump_versions([storage])
    ranks.each(lambda: write_all(pairs))
    return match.result


class _Match(NamedTuple):
    """A state that fits a checkpoint.

    Attributes:
        flat: the state to load into.
        result: the result of the load.
        saved_names: the name in the checkpoint of each tensor that is loaded.
    """

    flat: _FlatState
    result: object
    saved_names: dict[str, str]


def _pairs(
    match: _Match, reader: "FolderReader", ranks: Ranks
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a tensor to write and its mapped new value."""
    tensors = match.flat.tensors
    description = reader.index.description
    # If another number of ranks saved scaling state of its own, each rank loads the largest values.
    largest = {
        name: reader.whole(name)
        for name in description["largest"]
        if name in match.saved_names and len(description["per_rank"][name]) != ranks.world
    }
    shards = {
        saved_name: tensors[name]
        for name, saved_name in match.saved_names.items()
        if name not in largest
    }
    return reader.pairs(shards) + [(tensors[name], values) for name, values in largest.items()]


def _match(state: _State, reader: "FolderReader", strict: bool, ranks: Ranks) -> _Match:
    """Compare a state with a checkpoint.

    Raises:
        CheckpointError: names, kinds, shapes or dtypes differ.
        UsageError: a tensor cannot be written to.
    """
    flat = _FlatState(state)
    path, description = reader.path, reader.index.description
    with translated(f"{path} describes no state", "what save_sharded wrote"):
        tree = merged(flat.tree, description["state"])
        missing, unexpected = _differing_names(leaves_of(tree), leaves_of(description["state"]))
        result = decoded(tree, flat.values)
    if strict:
        _check_names(path, missing, unexpected)
    saved_names: dict[str, str] = {}
    for name, tensor in flat.tensors.items():
        owner = flat.owners[name]
        if owner in missing:
            continue
        _check_same_kind(owner, path, description["quantized"], flat.quantized)
        value = flat.values[owner]
        if isinstance(value, QuantizedTensorStorage) and value._whole is not None:
            raise UsageError(
                f"{owner!r} is a view of another tensor",
                "a whole one",
                "load into the whole tensor",
            )
        # If as many ranks saved tensors of their own, each rank loads its own; else that of rank 0.
        names = description["per_rank"].get(name, [])
        saved_names[name] = names[ranks.rank] if len(names) == ranks.world else name
        _check_same_shape(saved_names[name], tensor, reader)
        check_writable(owner, local_tensor(tensor))
    warn_of_other_contracts(_contracts(description, flat, missing))
    return _Match(flat, result, saved_names)


def _contracts(
    description: "Description", flat: _FlatState, missing: Sequence[str]
) -> dict[str, tuple[Contract | None, Contract | None]]:
    """The contracts of the tensors that are loaded: that of the checkpoint and that of the
    state."""
    saved = contracts_in(description.get("contracts", {}))
    present = contracts_in(contract_table(flat.values))
    return {
        name: (
            saved.get(description["quantized"][name].get("contract", "")),
            present.get(entry.get("contract", "")),
        )
        for name, entry in flat.quantized.items()
        if name not in missing and name in description["quantized"]
    }


def _differing_names(
    leaves: Mapping[str, Node], saved_leaves: Mapping[str, Node]
) -> tuple[list[str], list[str]]:
    """The names of the state that a checkpoint misses, and those of its tensors that the state
    misses.

    Args:
        leaves: the leaves of the merged tree.
        saved_leaves: the leaves of the tree in the checkpoint.
    """
    missing = []
    for name, leaf in leaves.items():
        if "tensor" not in leaf and "value" not in leaf:
            # An empty container needs no counterpart.
            continue
        saved_leaf = saved_leaves.get(name)
        if saved_leaf is None or ("tensor" in leaf) != ("tensor" in saved_leaf):
            missing.append(name)
    unexpected = [
        name
        for name, leaf in saved_leaves.items()
        if "tensor" in leaf and "tensor" not in leaves.get(name, {})
    ]
    return missing, unexpected


def _check_names(path: Path, missing: list[str], unexpected: list[str]) -> None:
    faults = {f"{path} misses": missing, "the state has no place for": unexpected}
    for fault, names in faults.items():
        if names:
            raise CheckpointError(
                f"{fault} {listed(names)}",
                f"the names of {path}",
                "make the state that was saved: an optimizer has none before its first step",
            )


def _check_same_kind(
    name: str, path: Path, saved_entries: Mapping[str, Entry], entries: Mapping[str, Entry]
) -> None:
    """Raise CheckpointError unless a tensor is quantized as it was when it was saved."""
    kind, expected = _kind_of(saved_entries.get(name)), _kind_of(entries.get(name))
    if kind != expected:
        raise CheckpointError(
            f"{name!r} of {path} is {kind}",
            f"{expected}, as in the state",
            "make the model with the recipe that was saved, or convert the checkpoint",
        )


def _kind_of(entry: Entry | None) -> str:
    if entry is None:
        return "not quantized"
    return f"quantized, {entry['class']} of {entry['static']}"


def _check_same_shape(name: str, tensor: torch.Tensor, reader: "FolderReader") -> None:
    """Raise CheckpointError unless the tensor ``name`` of a checkpoint can be copied into
    ``tensor``."""
    expected = f"shape {tuple(tensor.shape)} and dtype {dtype_name(tensor.dtype)}"
    kind = "no values"
    metadata = reader.index.tensors.get(name)
    if metadata is not None:
        kind = f"shape {tuple(metadata.size)} and dtype {dtype_name(metadata.properties.dtype)}"
    if kind != expected:
        raise CheckpointError(
            f"{name!r} of {reader.path} has {kind}", expected=f"{expected}, as in the state"
        )


def save_step(
    state: _State,
    folder: AnyPath,
    step: int,
    *,
    keep: int | None = None,
    group: Group = None,
    overwrite: bool = False,
) -> Path:
    """:func:`save_sharded` as ``folder/step-0000100``, where :func:`latest_checkpoint` looks.

    Args:
        state, group, overwrite: as of :func:`save_sharded`.
        folder: the folder of the checkpoints of one training; it is made.
        step: the number of the step, from 0.
        keep: how many whole checkpoints stay, at least 1: this one and those with the highest
            numbers besides. The others are removed, and so are leftovers of interrupted saves.
            None keeps all.

    Returns:
        The path of the checkpoint.

    Raises:
        OptionError: ``step`` or ``keep`` is no such number.
        CheckpointError, DTypeError, ShapeError, UsageError: as of :func:`save_sharded`.
    """

    def check() -> Path:
        _check_number("step", step, 0)
        if keep is not None:
            _check_number("keep", keep, 1)
        return as_path(folder) / f"step-{step:07d}"

    ranks = Ranks(group)
    path = ranks.each(check)
    save_sharded(state, path, group=group, overwrite=overwrite)
    if keep is not None and ranks.rank == 0:
        remove_leftovers(path.parent, ".step-")
        others = [other for other in _step_checkpoints(path.parent) if other != path]
        for checkpoint in others[keep - 1 :]:
            _remove_old(checkpoint)
    return path


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} is {value!r}", f"an integer from {least}")


def _remove_old(checkpoint: Path) -> None:
    """Remove a checkpoint, or warn: the new one is whole, so that a training goes on."""
    try:
        with Partial(checkpoint) as partial:
            # A folder of this name is never taken for a checkpoint.
            os.rename(checkpoint, partial.path / "removed")
    except OSError as error:
        warnings.warn(
            f"the old checkpoint {checkpoint} cannot be removed: {error}",
            RuntimeWarning,
            stacklevel=3,
        )


def is_complete(path: AnyPath) -> bool:
    """Whether ``path`` is a whole sharded checkpoint: its index is in order, and every file exists
    in full length.

    The bytes of the tensors are not read here; loading checks them. Raises DTypeError if ``path``
    is no path.
    """
    from ottava.checkpoint.index import read_index

    with contextlib.suppress(CheckpointError):
        return bool(read_index(as_path(path)))
    return False


def latest_checkpoint(folder: AnyPath) -> Path | None:
    """The whole checkpoint ``step-NUMBER`` with the highest number in ``folder``; None if there is
    none.

    Checkpoints for which :func:`is_complete` is False are passed over. Raises DTypeError if
    ``folder`` is no path.
    """
    return next(_step_checkpoints(as_path(folder)), None)


def _step_checkpoints(folder: Path) -> Iterator[Path]:
    """The whole checkpoints in a folder, those with the highest numbers first."""
    numbered: list[tuple[int, Path]] = []
    for path in folder.glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match is not None:
            numbered.append((int(match[1]), path))
    return (path for _, path in sorted(numbered, reverse=True) if is_complete(path))
