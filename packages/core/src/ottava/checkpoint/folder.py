"""Sharded checkpoints in the file system: which are whole, which is the latest, and how one takes its place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from ottava.checkpoint.index import FILE_NAME, INDEX_NAME, read_index
from ottava.checkpoint.paths import Partial, as_path, remove_leftovers, sync
from ottava.errors import CheckpointError

_STEP = re.compile(r"step-(\d+)")


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a whole sharded checkpoint: its index is in order and every file is there in full length.

    The bytes of the tensors are not read here; loading checks them. Raises DTypeError where ``path`` is no path.
    """
    folder = as_path(path)
    with contextlib.suppress(CheckpointError):
        return bool(read_index(folder))
    return False


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint ``step-NUMBER`` with the highest number in ``folder``; None where there is none.

    What was not written to its end, or for which :func:`is_complete` is False, is passed over. Nothing is removed.
    Raises DTypeError where ``folder`` is no path.
    """
    return next(_step_checkpoints(as_path(folder)), None)


def _step_checkpoints(folder: Path) -> Iterator[Path]:
    """The whole checkpoints ``step-NUMBER`` in ``folder``, the highest number first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return (path for _, path in sorted(found, reverse=True) if is_complete(path))


def check_target(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError where something has the name and ``overwrite`` is False, or it is no checkpoint."""
    if os.path.lexists(target) and not overwrite:
        remedy = "pass overwrite=True to replace a checkpoint"
        raise CheckpointError(f"{target} exists", expected="a new name", remedy=remedy)
    if os.path.lexists(target):
        folder = target.is_dir() and not target.is_symlink()
        if not folder or (not (target / INDEX_NAME).exists() and any(target.iterdir())):
            what = f"{target} is not a sharded checkpoint and is not replaced"
            raise CheckpointError(what, expected="a checkpoint or a new name", remedy="move it away")


def publish(partial: Partial, overwrite: bool) -> None:
    """Give a folder that is written to its end its final name.

    A checkpoint that is there is replaced by the one rename of its index, once the new files lie beside the old ones;
    then those that the index does not name are removed.

    Raises:
        CheckpointError: see :func:`check_target`.
        OSError: it cannot be renamed; what had the name has it still.
    """
    target = partial.target
    sync(partial.path)
    check_target(target, overwrite)
    try:
        os.rename(partial.path, target)
    except OSError:
        if not (target / INDEX_NAME).exists():
            raise
        check_target(target, overwrite)
        descriptor = os.open(target, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # where no locks are to be had, one writer at a time is up to the user
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            names = [entry.name for entry in partial.path.iterdir() if entry.name != INDEX_NAME]
            for name in names:
                os.replace(partial.path / name, target / name)
            sync(target)
            os.replace(partial.path / INDEX_NAME, target / INDEX_NAME)
            sync(target)
            for entry in list(target.iterdir()):
                if FILE_NAME.fullmatch(entry.name) and entry.name not in names:
                    entry.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    sync(target.parent)
    remove_leftovers(target)


def prune(folder: Path, keep: int, written: Path) -> None:
    """Remove the whole checkpoints of steps but ``written`` and the ``keep - 1`` others with the highest numbers, and
    what interrupted saves of steps have left."""
    remove_leftovers(folder / "step", ".step-")
    for path in [path for path in _step_checkpoints(folder) if path != written][keep - 1 :]:
        try:
            with Partial(path) as doomed:
                # Under this name what is left of it is never taken for a checkpoint.
                os.rename(path, doomed.path / "removed")
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} is not removed: {error}", UserWarning, stacklevel=2)
