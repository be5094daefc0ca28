"""Files and folders that appear under their names whole or not at all.

A writer writes to a hidden folder beside the target, and one rename gives the result its name. The
folder is locked while its writer lives. So a later writer of the same name can remove the folder of
a killed writer, and no other.

Only regular files are opened, because opening a pipe waits for its other end, and opening a device
may have any effect.
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

from ottava.errors import CheckpointError, DTypeError, OptionError, UsageError, translated

AnyPath = str | os.PathLike[str]


def as_path(path: AnyPath) -> Path:
    """``path`` as a ``Path``; raises DTypeError if it is not a path."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(f"the path is a {type(path).__name__}", expected="a path")
    return Path(path)


def check_file_target(path: AnyPath) -> Path:
    """The place where a file of that name is written, with links followed.

    Raises UsageError if the place exists and is not a regular file.
    """
    with translated(f"{path} cannot be written", "a file in an existing folder", to=UsageError):
        place = Path(os.path.realpath(as_path(path)))
        if not stat.S_ISDIR(place.parent.stat().st_mode):
            raise NotADirectoryError(f"{place.parent} is no folder")
        if os.path.lexists(place) and not place.is_file():
            kind = "a folder" if place.is_dir() else "no regular file"
            raise FileExistsError(f"it is {kind}")
    return place


@contextlib.contextmanager
def unreplaced(path: Path) -> Iterator[None]:
    """Check that a regular file is not replaced while the block reads it.

    Raises CheckpointError if it is not a regular file, or is another file at the end.
    """
    before = _identity(path)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        # If the file was replaced, the error comes from reading two files, and that is the cause to
        # report. Ctrl-C is no Exception and passes.
        failure = error
    if _identity(path) != before:
        raise CheckpointError(
            f"{path} was replaced while it was read", "one file", "load it again"
        ) from failure
    if failure is not None:
        raise failure


def _identity(path: Path) -> tuple[int, ...]:
    with translated(f"{path} cannot be read", "a file"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder, name one of its files" if path.is_dir() else "no regular file"
        raise CheckpointError(f"{path} is {kind}", "a file")
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_bytes(path: AnyPath, most: int = -1) -> bytes:
    """The bytes of a regular file, at most ``most`` of them.

    Raises OSError if it is not a regular file.
    """
    with open(_descriptor(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def open_text(path: AnyPath) -> TextIO:
    """An empty text file to write to, in UTF-8 and line by line.

    Raises OSError if ``path`` exists and is not a regular file.
    """
    descriptor = _descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    return open(descriptor, "w", encoding="utf-8", newline="\n", buffering=1)


def _descriptor(path: AnyPath, flags: int) -> int:
    """Open a regular file; OSError if it is not a regular file."""
    # Other files are not even opened. O_NONBLOCK is set because the file may have been replaced by
    # a pipe after the check.
    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.stat(path))
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError("it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no regular file")


def mode_of(path: Path) -> int | None:
    """The permissions of a file or a folder; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    return None


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a new file with the permissions ``mode`` and sync it to the disk."""
    # The process's umask removes permissions of new files; fchmod adds them after the write.
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
    """A descriptor of a folder for reading; OSError if it is not a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; it interrupts only the main thread of a process."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


def sync(folder: Path) -> None:
    """Sync the names in a folder to the disk; file systems that do so by themselves may refuse."""
    with opened(folder) as descriptor, contextlib.suppress(OSError):
        os.fsync(descriptor)


class Partial(contextlib.ExitStack):
    """A hidden folder beside ``target`` to write to.

    At the end of its ``with`` block the folder has become the target or is removed. It has the
    permissions of the current target, if that is a folder. Folders of killed writers of the same
    target are removed first.
    """

    def __init__(self, target: Path) -> None:
        super().__init__()
        self.target = Path(os.path.abspath(target))
        # Unique for each target, however long the names are.
        digest = hashlib.blake2b(os.fsencode(self.target.name), digest_size=8).hexdigest()
        start = f".{self.target.name[:40]}-{digest}."
        remove_leftovers(self.target.parent, start)
        self.path = self._locked_folder(start)
        # Until the folder is locked, another writer may remove it as a leftover; then try again.
        while not self.path.exists():
            self.close()
            self.path = self._locked_folder(start)

    def _locked_folder(self, start: str) -> Path:
        """A new hidden folder, locked; closing this object unlocks and removes it."""
        folder = self.target.with_name(f"{start}{secrets.token_hex(8)}.partial")
        self.callback(shutil.rmtree, folder, ignore_errors=True)
        mode: int | None = None
        if self.target.is_dir():
            mode = mode_of(self.target)
        if mode is None:
            os.mkdir(folder)
        else:
            os.mkdir(folder, 0o700)
            with contextlib.suppress(FileNotFoundError):
                os.chmod(folder, mode | 0o700)
        # Where the file system has no locks, leftovers cannot be told from folders in use and stay.
        with contextlib.suppress(OSError):
            fcntl.flock(self.enter_context(opened(folder)), fcntl.LOCK_EX)
        return folder

    # If Ctrl-C comes before the block begins, or as it ends, __exit__ is not called.
    __del__ = contextlib.ExitStack.close

    def put_file(self, name: str) -> None:
        """Rename a file in the folder, which is synced to the disk, to the target."""
        with contextlib.suppress(FileNotFoundError):
            # The new file keeps the permissions of the old one.
            os.chmod(self.path / name, stat.S_IMODE(os.stat(self.target).st_mode))
        os.replace(self.path / name, self.target)
        sync(self.target.parent)


def remove_leftovers(folder: Path, start: str) -> None:
    """Remove the hidden folders whose names begin with ``start`` and whose writers were killed.

    A folder that cannot be removed stays.
    """
    for entry in list(folder.glob(f"{glob.escape(start)}*.partial")):
        # A living writer has locked its folder, so flock fails; a file is not a leftover.
        with contextlib.suppress(OSError), opened(entry) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry, ignore_errors=True)


def replace_file(path: AnyPath, data: bytes) -> None:
    """Write a file completely; or leave an existing one unchanged.

    Raises:
        OptionError: the place is no regular file, or there is no room.
    """
    expected = "a file in an existing folder, and room"
    with translated(f"{path} cannot be written", expected, to=OptionError, of=OSError):
        place = Path(os.path.realpath(as_path(path)))
        if os.path.lexists(place) and not place.is_file():
            raise FileExistsError("it is no regular file")
        with Partial(place) as partial:
            mode = mode_of(place)
            if mode is None:
                mode = (mode_of(partial.path) or 0) & 0o666
            write_new(partial.path / "file", data, mode)
            partial.put_file("file")
