"""``SafetensorsWriter``: a safetensors file written tensor by tensor, that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ottava.checkpoint.header import TensorSpec, encode, layout
from ottava.checkpoint.pieces import buffer_of
from ottava.checkpoint.reader import as_path
from ottava.errors import DTypeError, ShapeError, UsageError

_CHUNK = 1 << 20


class SafetensorsWriter:
    """Writes the tensors that were declared, in any order, one in memory at a time; use it in a ``with`` block.

    The bytes go to a hidden file beside ``path``, which takes its name when the block ends without an error, everything
    is written and on the disk. An error, of whatever kind, removes it and leaves what had the name.

    Args:
        path: the file to write; a present one is replaced in the end.
        specs: dtype and shape of every tensor by name.
        metadata: texts to keep in the header, the description of :func:`flatten_state_dict` among them.

    Raises:
        UsageError: the file cannot be written, a name is not possible, or a tensor was not written at the end.
        DTypeError: the format does not have a dtype.
    """

    def __init__(
        self, path: str | os.PathLike[str], specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        # Of a link, the file that it leads to.
        self.path = Path(os.path.realpath(as_path(path)))
        self._specs, self._metadata = layout(specs), dict(metadata)
        header = encode(self._specs, self._metadata)
        self._begins: dict[str, int] = {}
        self.nbytes = len(header)
        for name, spec in self._specs.items():
            self._begins[name] = self.nbytes
            self.nbytes += spec.nbytes
        self._checksums: dict[str, int] = {}
        self._partial = self.path.with_name(f".{self.path.name[:48]}.{secrets.token_hex(8)}.partial")
        if self.path.is_dir():
            raise self._failed("it is a folder")
        try:
            self._file = open(self._partial, "xb")  # noqa: SIM115  (closed in __exit__)
        except (OSError, ValueError) as error:
            raise self._failed(error) from error

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor that was declared.

        Raises:
            UsageError: it was not declared or is written already, or the file cannot be written.
            DTypeError, ShapeError: it is not as declared, or has no values.
        """
        spec = self._specs.get(name)
        if spec is None or name in self._checksums:
            raise UsageError(f"{name!r} is written {'without being declared' if spec is None else 'twice'}")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise DTypeError(f"{name!r} is on meta or sparse", expected="a dense tensor with values")
        if tensor.dtype != spec.dtype:
            raise DTypeError(f"{name!r} is of {tensor.dtype}", expected=f"{spec.dtype}, as declared")
        if tuple(tensor.shape) != spec.shape:
            raise ShapeError(f"{name!r} has shape {tuple(tensor.shape)}", expected=f"{spec.shape}, as declared")
        try:
            # Of a tensor without memory of its own, a wrapper's, this raises.
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            view, crc32 = buffer_of(plain), 0
        except RuntimeError as error:
            raise DTypeError(f"{name!r} is a {type(tensor).__name__}: {error}", expected="a plain tensor") from error
        try:
            self._file.seek(self._begins[name])
            for at in range(0, len(view), _CHUNK):
                crc32 = zlib.crc32(view[at : at + _CHUNK], crc32)
                self._file.write(view[at : at + _CHUNK])
        except OSError as error:
            raise self._failed(error) from error
        self._checksums[name] = crc32

    def _failed(self, why: object) -> UsageError:
        return UsageError(f"{self.path} cannot be written: {why}", expected="a file in an existing folder")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        missing = [name for name in self._specs if name not in self._checksums]
        if missing:
            raise UsageError(f"{missing[0]!r} was declared and not written", expected="every tensor")
        try:
            self._file.seek(0)
            self._file.write(encode(self._specs, self._metadata, [self._checksums[name] for name in self._specs]))
            self._file.flush()
            os.fsync(self._file.fileno())
            with contextlib.suppress(FileNotFoundError):
                # Who may read the old one may read the new one.
                os.chmod(self._partial, stat.S_IMODE(os.stat(self.path).st_mode))
            os.replace(self._partial, self.path)
        except OSError as error:
            raise self._failed(error) from error
        _sync_folder(self.path.parent)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """What writers of this name left that were killed."""
        pattern = re.compile(
            re.escape(self._partial.name[: -len("0123456789abcdef.partial")]) + "[0-9a-f]{16}[.]partial"
        )
        with contextlib.suppress(OSError):
            for entry in self.path.parent.iterdir():
                if pattern.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Have the name on the disk too, on file systems that do this by themselves or let others ask for it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
