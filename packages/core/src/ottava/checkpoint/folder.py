"""Names of sharded checkpoints in the file system, and how one appears under its final name, or not at all.

A checkpoint is written into a hidden folder beside its final name and renamed when everything in it is on the disk.
Replacing one takes two renames, and between them the old one is found under a hidden name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from ottava.checkpoint.index import INDEX_NAME, check_files, read_index
from ottava.errors import CheckpointError, DTypeError, OptionError

_STEP = re.compile(r"step-(\d+)")
_HIDDEN_STEP = re.compile(r"\.(step-\d+)\.(partial|replaced)-.*")


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path, absolute, without a trailing slash.

    Raises:
        DTypeError: it is none.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(f"the path is a {type(path).__name__}", expected="a path")
    return Path(os.path.abspath(path))


def fresh_token() -> str:
    """What tells the hidden names of one save from those of another."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def partial_name(target: Path, token: str) -> Path:
    """Where a checkpoint is while it is written."""
    return target.with_name(f".{target.name}.partial-{token}")


def _replaced_name(target: Path, token: str) -> Path:
    return target.with_name(f".{target.name}.replaced-{token}")


def _beside(target: Path, kind: str) -> list[Path]:
    """The hidden folders of one kind that belong to ``target``."""
    prefix = f".{target.name}.{kind}-"
    try:
        return sorted(entry for entry in target.parent.iterdir() if entry.name.startswith(prefix))
    except OSError:
        return []


def _whole(folder: Path) -> bool:
    try:
        check_files(folder, read_index(folder))
    except CheckpointError:
        return False
    return True


def locate(path: Path) -> Path:
    """The folder with the checkpoint ``path``: that path or, between the renames of a replacement, the old one."""
    if not os.path.lexists(path):
        for replaced in _beside(path, "replaced"):
            if _whole(replaced):
                return replaced
    return path


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a whole sharded checkpoint: its index is in order and every file is there in full length.

    The bytes of the tensors are not read here; loading checks them.

    Raises:
        DTypeError: ``path`` is no path.
    """
    return _whole(locate(as_path(path)))


def step_name(step: int) -> str:
    """The name of the checkpoint of a step, ``step-0000100`` for 100.

    Raises:
        OptionError: ``step`` is no number of a step.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise OptionError(f"step is {step!r}", expected="an integer from 0")
    return f"step-{step:07d}"


def step_checkpoints(folder: Path) -> Iterator[Path]:
    """The whole checkpoints ``step-NUMBER`` in ``folder``, the highest number first."""
    found: dict[str, int] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        # In the middle of a replacement it has a hidden name only.
        hidden, _, rest = entry.name.removeprefix(".").partition(".replaced-")
        match = _STEP.fullmatch(hidden if rest else entry.name)
        if match:
            found[match[0]] = int(match[1])
    for name in sorted(found, key=lambda name: (found[name], name), reverse=True):
        if is_complete(folder / name):
            yield folder / name


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint ``step-NUMBER`` with the highest number in ``folder``; None where there is none.

    What was not written to its end, or for which :func:`is_complete` is False, is passed over. Nothing is removed.

    Raises:
        DTypeError: ``folder`` is no path.
    """
    return next(step_checkpoints(as_path(folder)), None)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse what a checkpoint may not be written over.

    Raises:
        CheckpointError: something has the name and ``overwrite`` is False, or it is no checkpoint.
    """
    present = locate(target)
    if not os.path.lexists(present):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists", expected="a new name", remedy="pass overwrite=True to replace a checkpoint"
        )
    folder = present.is_dir() and not present.is_symlink()
    if not folder or (not (present / INDEX_NAME).exists() and any(present.iterdir())):
        raise CheckpointError(
            f"{target} is not a sharded checkpoint and is not replaced",
            expected="a checkpoint or a new name",
            remedy="move it away",
        )


def publish(partial: Path, target: Path, token: str, overwrite: bool) -> None:
    """Give a folder that is written to its end its final name.

    Raises:
        CheckpointError: see :func:`check_target`.
        OSError: it cannot be renamed; what had the name has it still.
    """
    sync_folder(partial)
    check_target(target, overwrite)
    if os.path.lexists(target):
        # At most one folder is found when the target is not, whatever was interrupted before.
        for folder in _beside(target, "replaced"):
            shutil.rmtree(folder)
        replaced = _replaced_name(target, token)
        os.rename(target, replaced)
        try:
            os.rename(partial, target)
        except OSError:
            os.rename(replaced, target)
            raise
    else:
        os.rename(partial, target)
    sync_folder(target.parent)
    remove_leftovers(target)


def remove_leftovers(target: Path) -> None:
    """Remove what interrupted saves of ``target``, which is whole, have left beside it."""
    for folder in (*_beside(target, "partial"), *_beside(target, "replaced")):
        shutil.rmtree(folder, ignore_errors=True)


def prune(folder: Path, keep: int, written: Path) -> None:
    """Remove the whole checkpoints of steps but ``written`` and the ``keep - 1`` others with the highest numbers.

    What interrupted saves of steps have left goes too.
    """
    for entry in list(folder.iterdir()):
        match = _HIDDEN_STEP.fullmatch(entry.name)
        if match and (match[2] == "partial" or os.path.lexists(folder / match[1])):
            shutil.rmtree(entry, ignore_errors=True)
    others = [path for path in step_checkpoints(folder) if path != written]
    for path in others[keep - 1 :]:
        doomed = partial_name(path, fresh_token())
        try:
            # Under this name a part of it is never taken for a checkpoint.
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} is not removed: {error}", UserWarning, stacklevel=2)
