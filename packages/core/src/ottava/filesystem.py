"""How a file or a folder appears under its name: whole, or not at all; and is read as one.

What is written goes to a hidden folder beside its place, and one rename gives it its name. The folder is locked while
its writer lives, so that a later writer of the same name removes what a killed one left and nothing else.
"""

import contextlib
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from ottava.errors import CheckpointError, DTypeError, UsageError, translated

AnyPath = str | os.PathLike[str]


def as_path(path: AnyPath) -> Path:
    """``path`` as a ``Path``; raises DTypeError where it is none."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(f"the path is a {type(path).__name__}", expected="a path")
    return Path(path)


def check_file_target(path: AnyPath) -> Path:
    """Where a file of that name is written, which is what a link leads to; UsageError where that is no regular file."""
    with translated(f"{path} cannot be written", "a file in an existing folder", to=UsageError):
        place = Path(os.path.realpath(as_path(path)))
        if not stat.S_ISDIR(place.parent.stat().st_mode):
            raise NotADirectoryError(f"{place.parent} is no folder")
        if os.path.lexists(place) and not place.is_file():
            raise FileExistsError(f"it is {'a folder' if place.is_dir() else 'no regular file'}")
    return place


@contextlib.contextmanager
def unreplaced(path: Path) -> Iterator[None]:
    """Read a regular file in the block; CheckpointError where it is none, or is another one at the end."""
    before, failure = _identity(path), None
    try:
        yield
    except Exception as error:
        # What looks like damage may be two files; an interrupt stays one.
        failure = error
    if _identity(path) != before:
        raise CheckpointError(f"{path} was replaced while it was read", "one file", "load it again") from failure
    if failure is not None:
        raise failure


def _identity(path: Path) -> tuple[int, ...]:
    with translated(f"{path} cannot be read", "a file"):
        found = path.stat()
    # Opening a pipe would wait for its other end.
    if not stat.S_ISREG(found.st_mode):
        what = "a folder, name one of its files" if path.is_dir() else "no regular file"
        raise CheckpointError(f"{path} is {what}", "a file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a file or a folder, to read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; only the main thread of a process is interrupted."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk; some file systems keep names by themselves and refuse."""
    with opened(path) as descriptor, contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
        os.fsync(descriptor)


class Partial(contextlib.ExitStack):
    """A hidden folder beside ``target``, to write in; at the end of its ``with`` block it is gone, or the target. What
    killed writers of the same target left is removed before."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self.target = Path(os.path.abspath(target))
        # Of two targets never alike, however long the names.
        digest = hashlib.blake2b(os.fsencode(self.target.name), digest_size=8).hexdigest()
        start = f".{self.target.name[:40]}-{digest}."
        remove_leftovers(self.target.parent, start)
        self.path = self.target
        # Until it is locked another writer may take the folder for a leftover and remove it.
        while self.path == self.target or not self.path.exists():
            self.close()
            self.path = self.target.with_name(f"{start}{secrets.token_hex(8)}.partial")
            self.callback(shutil.rmtree, self.path, ignore_errors=True)
            os.mkdir(self.path)
            # Where no locks are to be had nobody removes what others left.
            with contextlib.suppress(OSError):
                fcntl.flock(self.enter_context(opened(self.path)), fcntl.LOCK_EX)

    # An interrupt may come before the block begins, or as it ends.
    __del__ = contextlib.ExitStack.close

    def put_file(self, name: str) -> None:
        """Give a file in the folder, which is on the disk, the name of the target."""
        with contextlib.suppress(FileNotFoundError):
            # Who may read the old one may read the new one.
            os.chmod(self.path / name, stat.S_IMODE(os.stat(self.target).st_mode))
        os.replace(self.path / name, self.target)
        sync(self.target.parent)


def remove_leftovers(folder: Path, start: str) -> None:
    """Remove the hidden folders whose names begin so and whose writers were killed, as far as that can be done."""
    for entry in list(folder.glob(f"{glob.escape(start)}*.partial")):
        # A writer that lives has locked it.
        with contextlib.suppress(OSError), opened(entry) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry, ignore_errors=True)
