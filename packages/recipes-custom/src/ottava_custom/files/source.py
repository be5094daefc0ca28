"""The text of a recipe file, the values in it with their places, and errors that name a place."""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ottava.errors import OptionError, OttavaError

#: Bytes of the largest file that is read.
MAX_BYTES = 1 << 18
#: Levels of values inside values.
MAX_DEPTH = 32

Scalar: TypeAlias = bool | int | float | str | datetime.date | datetime.time | None

_KINDS: dict[type, str] = {
    bool: "a boolean",
    dict: "a mapping",
    float: "a number",
    int: "a number",
    list: "a list",
    str: "text",
}


@dataclass(frozen=True)
class Place:
    """A place in a recipe file.

    Attributes:
        path: the path of the file, as it was given.
        position: ``"line 4, column 5"`` in YAML, the path of a key in TOML, such as
            ``"layers[0].all"``; empty for the file as a whole.
        line: the line, counted from 1. None in TOML, because Python's reader tells no lines.
    """

    path: str
    position: str = ""
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}, {self.position}" if self.position else self.path

    @property
    def short(self) -> str:
        """The line, or the path of the key."""
        return self.position if self.line is None else f"line {self.line}"

    def error(self, problem: str, expected: str = "", remedy: str = "") -> OptionError:
        """An error that names this place."""
        return OptionError(f"{self}: {problem}", expected=expected, remedy=remedy)

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Errors that are raised inside name this place, too."""
        try:
            yield
        except OttavaError as error:
            raise type(error)(
                f"{self}: {error.what}", expected=error.expected, remedy=error.remedy
            ) from error
        except Exception as error:
            error.add_note(str(self))
            raise


@dataclass(frozen=True)
class Node:
    """A value of a recipe file.

    Attributes:
        value: a scalar, a list of nodes, or a mapping of nodes by key.
        place: where the value begins.
        keys: where the keys of a mapping are.
    """

    value: Scalar | list[Node] | dict[str, Node]
    place: Place
    keys: Mapping[str, Place] = field(default_factory=dict)

    @property
    def mapping(self) -> dict[str, Node]:
        """The nodes of a mapping by key; none of another value."""
        return self.value if isinstance(self.value, dict) else {}

    def __str__(self) -> str:
        """The value in words, for errors: its kind, and a scalar itself."""
        if self.value is None:
            return "nothing"
        kind = _KINDS.get(type(self.value), "a date or a time")
        if isinstance(self.value, (list, dict)):
            return kind if self.value else f"{kind} without entries"
        if isinstance(self.value, str):
            return f"{kind}, {self.value!r}"
        return f"{kind}, {self.value}"

    def plain(self) -> object:
        """The value with plain values inside."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def too_deep(place: Place) -> OptionError:
    """The error about values that are nested deeper than any recipe."""
    return place.error("values are nested too deeply", expected=f"at most {MAX_DEPTH} levels")


def read_text(
    path: str,
    expected: str = "a recipe file, in YAML or TOML",
    shorter: str = "use fewer patterns",
) -> str:
    """The text of a file.

    Args:
        expected: what errors say that the file should be.
        shorter: the remedy of the error about a file that is too large.

    Raises:
        OptionError: the file cannot be read, is larger than :data:`MAX_BYTES`, or is not UTF-8.
    """
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            check_size(path, status.st_size, shorter)
            return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise OptionError(
            f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8",
            expected="UTF-8",
            remedy="save the file as UTF-8",
        ) from error
    except OSError as error:
        raise OptionError(
            f"{path} cannot be read: {error.strerror}",
            expected=expected,
            remedy="check the path and the permissions",
        ) from error
    # Opening a pipe would wait for its other end.
    raise OptionError(f"{path} is no regular file", expected=expected)


def check_size(path: str, size: int, shorter: str = "use fewer patterns") -> None:
    """Raises OptionError for a file of more than :data:`MAX_BYTES`."""
    if size > MAX_BYTES:
        raise OptionError(
            f"{path} is larger than {MAX_BYTES} bytes",
            expected=f"at most {MAX_BYTES} bytes",
            remedy=shorter,
        )
