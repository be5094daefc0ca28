"""The text of a recipe file, its places, and errors that name them."""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ottava.errors import OptionError, OttavaError

#: Bytes of the largest file that is read.
MAX_BYTES = 1 << 18

_BOMS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class Place(NamedTuple):
    """A line and a column, from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Source:
    """A recipe file.

    Attributes:
        path: as it was given.
        text: what it holds, lines separated by ``\\n``.
    """

    path: str
    text: str

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(found.end() for found in re.finditer("\n", self.text))]

    def place(self, index: int) -> Place:
        """The place of a character."""
        line = bisect.bisect_right(self._starts, index)
        return Place(line, index - self._starts[line - 1] + 1)

    def where(self, index: int) -> str:
        """A place in words."""
        line, column = self.place(index)
        return f"{self.path}, line {line}, column {column}"

    def error(self, index: int, what: str, *, expected: str = "", remedy: str = "") -> OptionError:
        """An error that names the place."""
        return OptionError(f"{self.where(index)}: {what}", expected=expected, remedy=remedy)

    @contextlib.contextmanager
    def at(self, index: int) -> Iterator[None]:
        """What fails inside names the place too."""
        try:
            yield
        except OttavaError as error:
            what = f"{self.where(index)}: {error.what}"
            raise type(error)(what, expected=error.expected, remedy=error.remedy) from error
        except Exception as error:
            error.add_note(self.where(index))
            raise


def read_source(path: str) -> Source:
    """The text of a file.

    Raises:
        OptionError: it is missing, no file, too large, or not UTF-8.
    """
    expected = "a recipe file, in YAML or TOML"
    try:
        # Opening a pipe would wait for its other end.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise OptionError(f"{path} is {kind}", expected=expected)
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, OttavaError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(
            f"{path} cannot be read: {reason}", expected=expected, remedy="check the path and the permissions"
        ) from error
    if len(data) > MAX_BYTES:
        raise OptionError(f"{path} is larger than {MAX_BYTES} bytes", expected=expected, remedy="use fewer patterns")
    return Source(path, _decoded(path, data))


def _decoded(path: str, data: bytes) -> str:
    encoding = next((name for bom, name in _BOMS if data.startswith(bom)), None)
    remedy = "save the file as UTF-8"
    if encoding is not None:
        raise OptionError(f"{path}, line 1: the file is in {encoding}", expected="UTF-8", remedy=remedy)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Of what stands before the byte, the line is known all the same.
        before = Source(path, _lines(data[: error.start].decode("utf-8-sig")))
        what = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise before.error(len(before.text), what, expected="UTF-8", remedy=remedy) from error
    return _lines(text)


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
