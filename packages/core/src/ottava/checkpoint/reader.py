"""``SafetensorsFile``: a safetensors file whose tensors are read one by one, checked."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from ottava.checkpoint.header import LENGTH_BYTES, MAX_HEADER, Header, TensorSpec, decode
from ottava.checkpoint.pieces import buffer_of
from ottava.errors import CheckpointError, DeviceError, DTypeError, OttavaError, UsageError
from ottava.tensors.quantizer import as_device

# Bytes between two looks at the checksum, so that they are still in the cache.
_CHUNK = 1 << 20

_BY_TORCH = "torch.load(path, weights_only=True) reads it, and `ottava export` converts it"
_LOOKS_LIKE = (
    (b"PK\x03\x04", "a file of torch.save", _BY_TORCH),
    (b"\x80", "a pickle", _BY_TORCH),
    (b"GGUF", "a GGUF file", "convert it to safetensors"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "run `git lfs pull`"),
)


def as_path(path: str | os.PathLike[str]) -> Path:
    """``path`` as a ``Path``.

    Raises:
        DTypeError: it is none.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise DTypeError(f"the path is a {type(path).__name__}", expected="a path")
    return Path(path)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except OttavaError as error:
        if str(path) in error.what:
            raise
        raise type(error)(f"{path}: {error.what}", expected=error.expected, remedy=error.remedy) from error


class SafetensorsFile:
    """A safetensors file, open for reading; use it in a ``with`` block.

    The header is read and checked at once, tensors when they are asked for: memory is bounded by the size of the file,
    whatever it says. The tensors of files of Ottava have checksums; those of other tools have none.

    Args:
        path: the file.
        verify: whether the bytes of tensors are compared with their checksums.

    Raises:
        CheckpointError: it is not a whole safetensors file; the error says what it looks like.
        DTypeError: ``path`` is no path.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = as_path(path)
        self._verify = verify
        self._file = _opened(self.path)
        try:
            with named(self.path):
                self._header = _read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def metadata(self) -> dict[str, str]:
        """The texts that the header holds besides the tensors."""
        return dict(self._header.metadata)

    def names(self) -> list[str]:
        """The tensors, in the order of their bytes."""
        return sorted(self._header.entries, key=lambda name: self._header.entries[name].begin)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        entry = self._header.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", expected="one of its names()")
        return entry.spec

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU, in memory of its own.

        Raises:
            CheckpointError: there is none of that name, it is damaged, or the file ends in it.
            UsageError: there is no memory for it.
        """
        spec, entry = self.spec(name), self._header.entries[name]
        try:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
        except (RuntimeError, MemoryError) as error:
            raise UsageError(f"{self.path}: no memory for tensor {name!r}, {spec.nbytes} bytes") from error
        view, crc32 = buffer_of(tensor), 0
        try:
            self._file.seek(entry.begin)
            for at in range(0, spec.nbytes, _CHUNK):
                chunk = view[at : at + _CHUNK]
                if self._file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                    raise CheckpointError(f"{self.path} ends in tensor {name!r}", expected="a file that is whole")
                if self._verify and entry.crc32 is not None:
                    crc32 = zlib.crc32(chunk, crc32)
        except OSError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} cannot be read: {error}") from error
        if self._verify and entry.crc32 is not None and crc32 != entry.crc32:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is damaged: its checksum is {crc32:08x}",
                expected=f"{entry.crc32:08x}, that of the bytes that were written",
                remedy="load another checkpoint",
            )
        # Any other byte in memory of this dtype is undefined behaviour.
        if spec.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise CheckpointError(f"{self.path}: tensor {name!r} has values besides 0 and 1", expected="booleans")
        return tensor

    def close(self) -> None:
        """Close the file; tensors that were read stay."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _opened(path: Path) -> BinaryIO:
    try:
        mode = path.stat().st_mode
        # Opening a pipe would wait for its other end.
        if stat.S_ISREG(mode):
            return path.open("rb")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", expected="a safetensors file") from error
    what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
    raise CheckpointError(
        f"{path} is {what}", expected="a safetensors file", remedy="name one of its files" if "folder" in what else ""
    )


def _read_header(file: BinaryIO) -> Header:
    try:
        size = os.fstat(file.fileno()).st_size
        start = file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if size < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER, size - LENGTH_BYTES):
            raise _foreign(start + file.read(64), size, length)
        raw = start + file.read(length)
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"the header cannot be read: {error}") from error
    if len(raw) != LENGTH_BYTES + length:
        raise CheckpointError("the file ends in its header", expected="a file that is whole")
    try:
        return decode(raw, size)
    except CheckpointError as error:
        # A short pickle may begin with what could be the length of a header.
        raise _foreign(raw[:64], size, length) if raw[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{" else error from error


def _foreign(start: bytes, size: int, length: int) -> CheckpointError:
    if size == 0:
        return CheckpointError("the file is empty", expected="a safetensors file")
    for magic, what, remedy in _LOOKS_LIKE:
        if start.startswith(magic) and start[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
            return CheckpointError(f"this looks like {what}", expected="a safetensors file", remedy=remedy)
    return CheckpointError(
        f"a header of {length} bytes in a file of {size}", expected="a whole safetensors file", remedy=""
    )


def usable_device(device: str | int | torch.device) -> torch.device:
    """A device on which tensors can be made.

    Raises:
        DeviceError: it names none, or this machine does not have it.
    """
    place = as_device(device)
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(f"device {str(place)!r} cannot be used: {str(error).splitlines()[0]}") from error
    return place
