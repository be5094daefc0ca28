"""How a file or a folder appears under its name: whole, or not at all.

What is written goes to a hidden folder beside its place, and one rename gives it its name. The folder is locked while
its writer lives, so that a later writer of the same name removes what a killed one left and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from ottava.errors import DTypeError, UsageError


def as_path(path: str | os.PathLike[str]) -> Path:
    """``path`` as a ``Path``; raises DTypeError where it is none."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(f"the path is a {type(path).__name__}", expected="a path")
    return Path(path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a file or a folder, to read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk; some file systems keep names by themselves and refuse."""
    with opened(path) as descriptor, contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
        os.fsync(descriptor)


class Partial:
    """A hidden folder beside ``target``, to write in; at the end of its ``with`` block it is gone, or the target."""

    path = target = Path()
    _lock = -1

    def __init__(self, target: Path) -> None:
        self.path = self.target = Path(os.path.abspath(target))
        # Until it is locked another writer may take the folder for a leftover and remove it.
        while not self._is_held():
            self.discard()
            self.path = self.target.with_name(f"{_start(self.target)}{secrets.token_hex(8)}.partial")
            os.mkdir(self.path)

    def _is_held(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._lock = os.open(self.path, os.O_RDONLY) if self.path != self.target else -1
            return self._lock >= 0 and _locked(self._lock) is not False and self.path.exists()
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def __del__(self) -> None:
        # An interrupt may come before the block begins, or as it ends.
        self.discard()

    def discard(self) -> None:
        """Remove the folder and give the lock up."""
        if self.path != self.target:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            descriptor, self._lock = self._lock, -1
            os.close(descriptor)

    def put_file(self, name: str) -> None:
        """Give a file in the folder, which is on the disk, the name of the target."""
        with contextlib.suppress(FileNotFoundError):
            # Who may read the old one may read the new one.
            os.chmod(self.path / name, stat.S_IMODE(os.stat(self.target).st_mode))
        os.replace(self.path / name, self.target)
        sync(self.target.parent)


def _locked(descriptor: int) -> bool | None:
    """Whether a folder could be locked; None where no locks are to be had, and so nobody removes what others left."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _start(target: Path) -> str:
    """How the hidden folders of writers of ``target`` begin: of two targets never alike, however long the names."""
    digest = hashlib.blake2b(os.fsencode(target.name), digest_size=8).hexdigest()
    return f".{target.name[:40]}-{digest}."


def remove_leftovers(target: Path, start: str = "") -> None:
    """Remove the hidden folders beside ``target`` whose writers were killed: those of this target, or with a start."""
    target = Path(os.path.abspath(target))
    for entry in list(target.parent.iterdir()):
        if entry.name.startswith(start or _start(target)) and entry.name.endswith(".partial"):
            with contextlib.suppress(OSError), opened(entry) as descriptor:
                if _locked(descriptor):
                    shutil.rmtree(entry, ignore_errors=True)


def check_file_target(path: Path) -> Path:
    """Where a file of that name is written, which is what a link leads to.

    Raises:
        UsageError: a folder, a device or a pipe has the name, which a file would replace.
    """
    try:
        place = Path(os.path.realpath(path))
        mode = os.stat(place).st_mode if os.path.lexists(place) else stat.S_IFREG
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {error}", expected="a file in an existing folder") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise UsageError(f"{path} cannot be written: it is {what}", expected="a new name, or a file to replace")
    return place
