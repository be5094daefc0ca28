"""Where the keys and values of a TOML document stand, which the standard library's reader does not tell."""

from __future__ import annotations

import contextlib
import re
import tomllib
from dataclasses import dataclass, field

from ottava_custom.files.nodes import MAX_DEPTH

#: Keys, and positions in arrays, from the root.
Path = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BLANKS = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2}(?!"))|' + r"'''.*?'''(?:'{0,2}(?!'))|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'",
    re.S,
)
# A date and a time may be separated by a space.
_PLAIN = re.compile(r"\d{4}-\d\d-\d\d(?: \d\d:)?[^\s,\]}#]*|[^\s,\]}#]+")


@dataclass
class Places:
    """What was found.

    Attributes:
        keys: where the last key of each path was written first.
        values: where each value begins; of a table that is written in parts, the first part.
        twice: the first key with a value that had one already: its name, and both places.
        deep: where values are nested more than ``MAX_DEPTH`` times, if they are; nothing behind it is found.
    """

    keys: dict[Path, int] = field(default_factory=dict)
    values: dict[Path, int] = field(default_factory=lambda: {(): 0})
    twice: tuple[str, int, int] | None = None
    deep: int | None = None


def find_places(text: str) -> Places:
    """The places of a valid document; of any other those in front of what is not valid."""
    places = Places()
    # What follows is no TOML.
    with contextlib.suppress(IndexError, ValueError):
        _Finder(text, places).document()
    return places


class _Finder:
    def __init__(self, text: str, places: Places) -> None:
        self.text, self.at, self.places = text, 0, places
        # Number of tables that each array of tables has so far.
        self.lengths: dict[Path, int] = {}
        # Tables that had a header, and where.
        self.headers: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        while True:
            self.skip(_SPACE)
            if self.at >= len(self.text):
                return
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.pair(table)

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Go behind what ``pattern`` matches here, which it does in a valid document."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"no TOML at {self.at}")
        self.at = found.end()
        return found[0]

    def take(self, token: str) -> bool:
        """Go behind ``token`` if it is here."""
        here = self.text.startswith(token, self.at)
        self.at += len(token) if here else 0
        return here

    def header(self) -> Path:
        """A line ``[table]`` or ``[[array]]``: the path of what follows."""
        start, is_array = self.at, self.take("[[")
        self.at += not is_array
        parts = self.key()
        self.skip(_BLANKS)
        self.at += 2 if is_array else 1
        path: Path = ()
        for number, (part, index) in enumerate(parts):
            path = (*path, part)
            self.places.keys.setdefault(path, index)
            self.places.values.setdefault(path, start)
            last = number == len(parts) - 1
            if last and is_array:
                self.lengths[path] = self.lengths.get(path, 0) + 1
            elif last:
                self.note(self.headers, path, start)
                # One that a header below it made before begins here all the same.
                self.places.keys[path], self.places.values[path] = index, start
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
                self.places.values.setdefault(path, start)
        return path

    def check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            self.places.deep = self.at
            raise ValueError(f"too deep at {self.at}")

    def note(self, known: dict[Path, int], path: Path, index: int) -> None:
        if path in known and self.places.twice is None:
            self.places.twice = (str(path[-1]), known[path], index)
        known.setdefault(path, index)

    def key(self) -> list[tuple[str, int]]:
        """A dotted key: its parts, each with its place."""
        parts: list[tuple[str, int]] = []
        while True:
            self.skip(_BLANKS)
            start = self.at
            self.check_depth(len(parts))
            if self.text[start] in "\"'":
                parts.append((tomllib.loads(f"k = {self.skip(_STRING)}")["k"], start))
            else:
                parts.append((self.skip(_BARE), start))
            self.skip(_BLANKS)
            if not self.take("."):
                return parts

    def pair(self, table: Path) -> None:
        """``key = value`` of ``table``."""
        parts = self.key()
        path = table
        for part, index in parts:
            path = (*path, part)
            if path not in self.places.keys:
                self.places.keys[path] = self.places.values[path] = index
            elif path[len(table) :] == tuple(name for name, _ in parts) and self.places.twice is None:
                self.places.twice = (part, self.places.keys[path], index)
        self.skip(_BLANKS)
        if not self.take("="):
            raise ValueError(f"no value at {self.at}")
        self.skip(_BLANKS)
        self.value(path)

    def value(self, path: Path) -> None:
        start = self.at
        self.check_depth(len(path))
        self.places.values[path] = start
        if self.take("["):
            self.array(path)
        elif self.take("{"):
            self.inline_table(path)
        else:
            self.skip(_STRING if self.text[start] in "\"'" else _PLAIN)

    def array(self, path: Path) -> None:
        number = 0
        while True:
            self.skip(_SPACE)
            if self.take("]"):
                return
            self.value((*path, number))
            number += 1
            self.skip(_SPACE)
            self.take(",")

    def inline_table(self, path: Path) -> None:
        while True:
            self.skip(_SPACE)
            if self.take("}"):
                return
            self.pair(path)
            self.skip(_SPACE)
            self.take(",")
