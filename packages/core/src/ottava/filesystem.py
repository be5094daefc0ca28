"""How a file or a folder appears under its name: whole, or not at all; and is read as one.

What is written goes to a hidden folder beside its place, and one rename gives it its name. The
folder is locked while its writer lives, so that a later writer of the same name removes what a
killed one left and nothing else.

Opening a pipe waits for its other end, and opening a device may do anything: regular files alone
are opened.
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
from typing import TextIO

from ottava.errors import CheckpointError, DTypeError, UsageError, translated

AnyPath = str | os.PathLike[str]


def as_path(path: AnyPath) -> Path:
    """``path`` as a ``Path``; raises DTypeError where it is none."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(f"the path is a {type(path).__name__}", expected="a path")
    return Path(path)


def check_file_target(path: AnyPath) -> Path:
    """Where a file of that name is written, which is what a link leads to; UsageError where that is
    no regular file."""
    with translated(f"{path} cannot be written", "a file in an existing folder", to=UsageError):
        place = Path(os.path.realpath(as_path(path)))
        if not stat.S_ISDIR(place.parent.stat().st_mode):
            raise NotADirectoryError(f"{place.parent} is no folder")
        if os.path.lexists(place) and not place.is_file():
            raise FileExistsError(f"it is {'a folder' if place.is_dir() else 'no regular file'}")
    return place


@contextlib.contextmanager
def unreplaced(path: Path) -> Iterator[None]:
    """Read a regular file in the block; CheckpointError where it is none, or is another one at the
    end."""
    before, failure = _identity(path), None
    try:
        yield
    except Exception as error:
        # What looks like damage may be two files; an interrupt stays one.
        failure = error
    if _identity(path) != before:
        raise CheckpointError(
            f"{path} was replaced while it was read", "one file", "load it again"
        ) from failure
    if failure is not None:
        raise failure


def _identity(path: Path) -> tuple[int, ...]:
    with translated(f"{path} cannot be read", "a file"):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        what = "a folder, name one of its files" if path.is_dir() else "no regular file"
        raise CheckpointError(f"{path} is {what}", "a file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_bytes(path: AnyPath, most: int = -1) -> bytes:
    """What a regular file holds, or so many bytes of it; an OSError where it is none."""
    with open(_descriptor(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def open_text(path: AnyPath) -> TextIO:
    """A text file to write, in UTF-8, line by line, empty; an OSError where what has the name is no
    regular file."""
    descriptor = _descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    return open(descriptor, "w", encoding="utf-8", newline="\n", buffering=1)


def _descriptor(path: AnyPath, flags: int) -> int:
    """Of a regular file; an OSError where it is none."""
    # What is no regular file is not even opened. Without waiting, because it may have become a pipe
    # meanwhile.
    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.stat(path))
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is a folder" if stat.S_ISDIR(found.st_mode) else "it is no regular file")


def mode_of(path: Path) -> int | None:
    """The permissions of a file or a folder; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    return None


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a new file with some permissions, to the disk."""
    # Those that the process takes off new files are added at the end, when everything is written.
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode | stat.S_IWUSR
    )
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a folder, to read; an OSError where it is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk; some file systems keep names by themselves and
    refuse."""
    with opened(folder) as descriptor, contextlib.suppress(OSError):
        os.fsync(descriptor)


class Partial(contextlib.ExitStack):
    """A hidden folder beside ``target``, to write in; at the end of its ``with`` block it is gone,
    or the target. It has the permissions of a folder that is the target now. What killed writers of
    the same target left is removed before."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self.target = Path(os.path.abspath(target))
        # Of two targets never alike, however long the names.
        digest = hashlib.blake2b(os.fsencode(self.target.name), digest_size=8).hexdigest()
        start = f".{self.target.name[:40]}-{digest}."
        remove_leftovers(self.target.parent, start)
        mode = mode_of(self.target) if self.target.is_dir() else None
        self.path = self.target
        # Until it is locked another writer may take the folder for a leftover and remove it.
        while self.path == self.target or not self.path.exists():
            self.close()
            self.path = self.target.with_name(f"{start}{secrets.token_hex(8)}.partial")
            self.callback(shutil.rmtree, self.path, ignore_errors=True)
            os.mkdir(self.path, 0o777 if mode is None else 0o700)
            if mode is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(self.path, mode | 0o700)
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
    """Remove the hidden folders whose names begin so and whose writers were killed, as far as that
    can be done."""
    for entry in list(folder.glob(f"{glob.escape(start)}*.partial")):
        # A writer that lives has locked it; what is no folder no writer has left.
        with contextlib.suppress(OSError), opened(entry) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry, ignore_errors=True)
