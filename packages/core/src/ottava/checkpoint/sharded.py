"""Sharded checkpoints over ``torch.distributed.checkpoint``: saved by any number of ranks, loaded
by any other.

The values of a nested state that are not tensors are stored as JSON. Each node is a dict with one
key, the kind of the node.
"""

import contextlib
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.files import DTYPES, crc32_of, dtype_name, in_memory
from ottava.checkpoint.flatten import flatten_values
from ottava.checkpoint.model import check_writable, write_all
from ottava.collectives import Ranks
from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError, listed, translated
from ottava.filesystem import AnyPath, Partial, as_path, remove_leftovers
from ottava.recipes.state import is_reduced_by_max
from ottava.tensors.declaration import bump_versions
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import local_tensor

_State = Mapping[str, Any]
_STEP = re.compile(r"step-(\d+)")
#: Kinds of nodes with entries -> the function that makes the container.
_CONTAINERS: dict[str, Callable[..., Any]] = {"dict": dict, "list": list, "tuple": tuple}


def _encoded(value: Any, tensors: dict[str, Any], path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """A nested state as JSON, in which names replace tensors; the tensors are added to
    ``tensors``."""
    name = ".".join(map(str, path))
    if len(path) > 100:
        raise DTypeError(f"{name[:50]!r} is nested too deep", expected="up to 100 levels")
    if isinstance(value, (torch.Tensor, QuantizedTensorStorage)):
        if name in tensors:
            raise UsageError(
                f"two tensors would have the name {name!r}", remedy="rename one of them"
            )
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        if wrong := [
            key for key in value if isinstance(key, bool) or not isinstance(key, (str, int))
        ]:
            raise DTypeError(
                f"{name!r} has the key {wrong[0]!r}", expected="text and integers as keys"
            )
        return {
            "dict": [[key, _encoded(entry, tensors, (*path, key))] for key, entry in value.items()]
        }
    if isinstance(value, (list, tuple)):
        entries = [_encoded(entry, tensors, (*path, number)) for number, entry in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": entries}
    if isinstance(value, torch.dtype):
        return {"value": {"dtype": dtype_name(value)}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"value": {"float": str(float(value))}}  # JSON has no infinities and no NaN
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    expected = "a tensor, number, text, bool, None or torch.dtype, or a dict, list or tuple of them"
    raise DTypeError(
        f"{name!r} is a {type(value).__name__}", expected=expected, remedy="leave it out"
    )


def _opened(tree: Mapping[str, Any]) -> tuple[str, Any, dict[Any, Any]]:
    """The kind of a node, its content, and its entries by key; tensors and values have no
    entries."""
    ((kind, held),) = tree.items()
    return (
        kind,
        held,
        dict(held if kind == "dict" else enumerate(held)) if kind in _CONTAINERS else {},
    )


def _decoded(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The nested state of a tree with ``tensors`` by name; KeyError, TypeError or ValueError if the
    tree is invalid."""
    kind, held, entries = _opened(tree)
    if kind == "value" and isinstance(held, dict):
        ((special, text),) = held.items()
        return float(text) if special == "float" else DTYPES[text]
    if kind in ("value", "tensor"):
        return held if kind == "value" else tensors[held]
    made = {key: _decoded(entry, tensors) for key, entry in entries.items()}
    return _CONTAINERS[kind](made if kind == "dict" else made.values())


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Tensors, values and empty containers in a tree, by their names in error messages."""
    entries = _opened(tree)[2].items()
    leaves = {
        name: leaf
        for key, entry in entries
        for name, leaf in _leaves(entry, f"{path}.{key}").items()
    }
    return leaves if entries else {path.removeprefix("."): tree}


def _has_tensors(tree: Any) -> bool:
    return any("tensor" in leaf for leaf in _leaves(tree).values())


def _merged(target: Any, saved: Any) -> Any:
    """The target tree with the values of a saved tree. Tensors, and entries that only the target
    has, stay."""
    (kind, _, mine), (other, _, theirs) = _opened(target), _opened(saved)
    tensors = _has_tensors(target) or _has_tensors(saved)
    if (
        kind != other
        or kind not in _CONTAINERS
        or not (kind == "dict" or tensors or len(mine) == len(theirs))
    ):
        return target if tensors else saved
    made = {
        key: _merged(entry, theirs[key]) if key in theirs else entry for key, entry in mine.items()
    }
    made |= {
        key: entry for key, entry in theirs.items() if key not in mine and not _has_tensors(entry)
    }
    return {kind: list(made.items() if kind == "dict" else made.values())}


class _Flat:
    """A nested state as JSON, its tensors by name, and their plain tensors with the name of the
    owner of each. Nothing is copied."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise DTypeError(f"the state is a {type(state).__name__}", expected="a dict")
        self.values: dict[str, Any] = {}
        self.tree = _encoded(state, self.values)
        self.tensors, self.quantized = flatten_values(self.values, derived=False)
        inner = [
            (name, argument)
            for name, entry in self.quantized.items()
            for argument in entry["tensors"]
        ]
        self.owners = {n: n for n in self.tensors} | {
            f"{name}.{argument}": name for name, argument in inner
        }


def save_sharded(
    state: _State, path: AnyPath, *, group: Any = None, overwrite: bool = False
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
    folder, flat = ranks.each(lambda: (as_path(path), _Flat(state)))
    per_rank = _differing(flat, ranks)
    largest = [name for name in per_rank if is_reduced_by_max(name)]
    description = {
        "state": flat.tree,
        "quantized": flat.quantized,
        "per_rank": per_rank,
        "largest": largest,
    }
    tensors = {per_rank[n][ranks.rank] if n in per_rank else n: t for n, t in flat.tensors.items()}
    ranks.each(lambda: FolderWriter(folder, overwrite, description).save(tensors, ranks))


def _differing(flat: _Flat, ranks: Ranks) -> dict[str, list[str]]:
    """The plain tensors that differ between ranks, with the name of each rank's tensor in the
    files.

    Raises UsageError if the ranks differ in names or values that have to be equal.
    """
    if ranks.world == 1:
        return {}
    about: dict[str, Any] = _leaves(flat.tree) | {
        f"{n} (quantized)": entry for n, entry in flat.quantized.items()
    }
    about |= {
        name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in flat.tensors.items()
    }
    texts = {name: json.dumps(entry, sort_keys=True) for name, entry in about.items()}
    if len(set(ranks.gather(zlib.crc32(json.dumps(texts, sort_keys=True).encode())))) > 1:
        first, *others = ranks.gather(texts)
        rank, other = next((rank, of) for rank, of in enumerate(others, 1) if of != first)
        name = min(name for name in first | other if first.get(name) != other.get(name))
        what = (
            f"{name!r} of rank {rank} is not that of rank 0: {other.get(name)} and "
            f"{first.get(name)}"
        )
        expected = "the same names, shapes, dtypes and values besides tensors on all ranks"
        raise UsageError(
            what, expected=expected, remedy="save what each rank has of its own as tensors"
        )
    own = {
        n: crc32_of(in_memory(n, t)) for n, t in flat.tensors.items() if not hasattr(t, "to_local")
    }
    sums, names = ranks.gather(own), {}
    for name in (name for name in own if len({of[name] for of in sums}) > 1):
        owner = flat.owners[name]
        if hasattr(flat.values[owner], "to_local"):
            what = f"the shards of {owner!r} have different {name.removeprefix(owner + '.')!r}"
            raise UsageError(what, "one value for all of a weight", "set it before it is sharded")
        names[name] = [name, *(f"{name}@rank-{rank:05d}" for rank in range(1, ranks.world))]
        if taken := set(names[name][1:]) & set(flat.tensors):
            raise UsageError(f"a tensor has the name {min(taken)!r}", remedy="rename it")
    return names


def load_sharded(
    state: _State, path: AnyPath, *, group: Any = None, strict: bool = True, verify: bool = True
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
    flat, result, stored = ranks.each(lambda: _matched(state, reader, strict, ranks))
    if len(set(ranks.gather(reader.index.crc32))) > 1:
        raise CheckpointError(
            f"{path} is not the same checkpoint on all ranks", expected="a shared file system"
        )
    mine = sorted(reader.index.files)[ranks.rank :: ranks.world] if verify else []
    ranks.each(lambda: [reader.file(name, verify=True) for name in mine])
    # Another number of ranks saved scaling state of its own: this one loads the largest values.
    about = reader.index.description
    largest = [
        name
        for name in about["largest"]
        if name in stored and len(about["per_rank"][name]) != ranks.world
    ]
    shards = {there: flat.tensors[name] for name, there in stored.items() if name not in largest}
    pairs = ranks.each(
        lambda: (
            reader.pairs(shards) + [(flat.tensors[name], reader.whole(name)) for name in largest]
        )
    )
    # Data derived from the bytes of quantized tensors is outdated now.
    for name in flat.quantized:
        storage = local_tensor(flat.values[name])
        if isinstance(storage, QuantizedTensorStorage):
            storage.mark_written()
        if isinstance(storage, torch.Tensor):
            bump_versions([storage])
    ranks.each(lambda: write_all(pairs))
    return result


def _matched(
    state: _State, reader: Any, strict: bool, ranks: Ranks
) -> tuple[_Flat, Any, dict[str, str]]:
    """The state to load into, the result, and the name in the checkpoint of each tensor that is
    loaded."""
    flat, path, about = _Flat(state), reader.path, reader.index.description
    with translated(f"{path} describes no state", "what save_sharded wrote"):
        tree = _merged(flat.tree, about["state"])
        ours, theirs = _leaves(tree), _leaves(about["state"])
        held = [name for name, of in ours.items() if "tensor" in of or "value" in of]
        missing = [
            n for n in held if n not in theirs or ("tensor" in ours[n]) != ("tensor" in theirs[n])
        ]
        unexpected = [
            name
            for name, of in theirs.items()
            if "tensor" in of and "tensor" not in ours.get(name, {})
        ]
        result = _decoded(tree, flat.values)
    for what, names in ((f"{path} misses", missing), ("the state has no place for", unexpected)):
        if strict and names:
            remedy = "make the state that was saved: an optimizer has none before its first step"
            raise CheckpointError(f"{what} {listed(names)}", f"the names of {path}", remedy)
    stored = {}
    for name, tensor in flat.tensors.items():
        if (owner := flat.owners[name]) in missing:
            continue
        kinds = [of.get(owner) for of in (about["quantized"], flat.quantized)]
        saved, expected = (
            f"quantized, {of['class']} of {of['static']}" if of else "not quantized" for of in kinds
        )
        if saved != expected:
            remedy = "make the model with the recipe that was saved, or convert the checkpoint"
            raise CheckpointError(
                f"{owner!r} of {path} is {saved}", f"{expected}, as in the state", remedy
            )
        value = flat.values[owner]
        if isinstance(value, QuantizedTensorStorage) and value._whole is not None:
            raise UsageError(
                f"{owner!r} is a view of another tensor",
                "a whole one",
                "load into the whole tensor",
            )
        # Its own where each rank had its own and there are as many, else rank 0's.
        own = about["per_rank"].get(name, [])
        stored[name] = own[ranks.rank] if len(own) == ranks.world else name
        found = reader.index.tensors.get(stored[name])
        expected = f"shape {tuple(tensor.shape)} and dtype {dtype_name(tensor.dtype)}"
        seen = (
            f"shape {tuple(found.size)} and dtype {dtype_name(found.properties.dtype)}"
            if found
            else "no values"
        )
        if seen != expected:
            raise CheckpointError(
                f"{stored[name]!r} of {path} has {seen}", expected=f"{expected}, as in the state"
            )
        check_writable(owner, local_tensor(tensor))
    return flat, result, stored


def save_step(
    state: _State,
    folder: AnyPath,
    step: int,
    *,
    keep: int | None = None,
    group: Any = None,
    overwrite: bool = False,
) -> Path:
    """:func:`save_sharded` as ``folder/step-0000100``, the path returned, for
    :func:`latest_checkpoint`.

    Args:
        state, group, overwrite: as of :func:`save_sharded`.
        folder: where the checkpoints of one training are; it is made.
        step: the number, from 0; OptionError where it is none.
        keep: how many whole checkpoints stay, this one and those with the highest numbers besides;
            the others are removed, and so is what interrupted saves left. None is all; OptionError
            where it is no number from 1.
    """

    def check() -> Path:
        for name, value, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} is {value!r}", f"an integer from {least}")
        return as_path(folder) / f"step-{step:07d}"

    ranks = Ranks(group)
    path = ranks.each(check)
    save_sharded(state, path, group=group, overwrite=overwrite)
    if keep is not None and ranks.rank == 0:
        remove_leftovers(path.parent, ".step-")
        for old in [old for old in _step_checkpoints(path.parent) if old != path][keep - 1 :]:
            try:
                with Partial(old) as doomed:
                    # Under this name what is left of it is never taken for a checkpoint.
                    os.rename(old, doomed.path / "removed")
            except OSError as error:
                # The checkpoint is whole; that an old one is still there must not stop a training.
                warnings.warn(
                    f"the old checkpoint {old} cannot be removed: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
    return path


def is_complete(path: AnyPath) -> bool:
    """Whether ``path`` is a whole sharded checkpoint: its index is in order and every file is there
    in full length.

    The bytes of the tensors are not read here; loading checks them. Raises DTypeError where
    ``path`` is no path.
    """
    from ottava.checkpoint.storage import read_index

    with contextlib.suppress(CheckpointError):
        return bool(read_index(as_path(path)))
    return False


def latest_checkpoint(folder: AnyPath) -> Path | None:
    """The whole checkpoint ``step-NUMBER`` with the highest number in ``folder``; None where there
    is none.

    One for which :func:`is_complete` is False is passed over. Raises DTypeError where ``folder`` is
    no path.
    """
    return next(_step_checkpoints(as_path(folder)), None)


def _step_checkpoints(folder: Path) -> Iterator[Path]:
    """The highest number first."""
    found = [
        (int(match[1]), path)
        for path in folder.glob("step-*")
        if (match := _STEP.fullmatch(path.name))
    ]
    return (path for _, path in sorted(found, reverse=True) if is_complete(path))
