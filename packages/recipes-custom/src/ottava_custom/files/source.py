"""The text of a recipe file, its places, and errors that name them."""

from __future__ import annotations

import bisect
import codecs
import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ottava.errors import OptionError, OttavaError
from ottava_custom.files.limits import MAX_BYTES

# The longer ones first: those of UTF-32 begin as those of UTF-16.
_BOMS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


@dataclass(frozen=True)
class Place:
    """Where something stands: ``text`` in words, and its line, from 1, where the reader of the
    language tells it."""

    text: str
    line: int | None = None

    @property
    def short(self) -> str:
        """The line, or else the words."""
        return self.text if self.line is None else f"line {self.line}"


@dataclass(frozen=True)
class Source:
    """A recipe file: its path as it was given, and its text, whose lines end with ``\\n``."""

    path: str
    text: str

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(found.end() for found in re.finditer("\n", self.text))]

    def place(self, index: int) -> Place:
        """The place of a character."""
        line = bisect.bisect_right(self._starts, index)
        return Place(f"line {line}, column {index - self._starts[line - 1] + 1}", line)

    def where(self, place: Place) -> str:
        """The file and the place."""
        return f"{self.path}, {place.text}" if place.text else self.path

    def error(
        self, place: Place, what: str, *, expected: str = "", remedy: str = ""
    ) -> OptionError:
        """An error that names the place."""
        return OptionError(f"{self.where(place)}: {what}", expected=expected, remedy=remedy)

    @contextlib.contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """What fails inside names the place too."""
        try:
            yield
        except OttavaError as error:
            what = f"{self.where(place)}: {error.what}"
            raise type(error)(what, expected=error.expected, remedy=error.remedy) from error
        except Exception as error:
            error.add_note(self.where(place))
            raise


def read_text(
    path: str,
    expected: str = "a recipe file, in YAML or TOML",
    shorter: str = "use fewer patterns",
) -> str:
    """The text of a file; an OptionError where it is missing, no file, too large, or not UTF-8.

    Args:
        expected: what errors say that the file should be.
        shorter: the remedy where it is too large.
    """
    try:
        mode = os.stat(path).st_mode
        # Opening a pipe would wait for its other end.
        data = None
        if stat.S_ISREG(mode):
            with Path(path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(
            f"{path} cannot be read: {reason}",
            expected=expected,
            remedy="check the path and the permissions",
        ) from error
    if data is None:
        raise OptionError(
            f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}",
            expected=expected,
        )
    check_size(path, len(data), shorter)
    return _decoded(path, data)


def check_size(path: str, size: int, shorter: str = "use fewer patterns") -> None:
    """Refuse a file of more bytes than are read with an OptionError: before it is parsed, and
    before it is written."""
    if size > MAX_BYTES:
        expected = f"a file of at most {MAX_BYTES} bytes"
        raise OptionError(
            f"{path} is larger than {MAX_BYTES} bytes", expected=expected, remedy=shorter
        )


def _decoded(path: str, data: bytes) -> str:
    encoding = next((name for name, boms in _BOMS.items() if data.startswith(boms)), None)
    remedy = "save the file as UTF-8"
    if encoding is not None:
        raise OptionError(
            f"{path}, line 1: the file is in {encoding}", expected="UTF-8", remedy=remedy
        )
    try:
        return _lines(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        # Of what stands before the byte, the line is known all the same.
        before = Source(path, _lines(data[: error.start].decode("utf-8-sig")))
        what = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise before.error(
            before.place(len(before.text)), what, expected="UTF-8", remedy=remedy
        ) from error


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
