"""TOML as nodes, by the standard library, which tells no lines: the place of a value is the path of
its key."""

from __future__ import annotations

import re
import sys
import tomllib
from typing import Any

from ottava_custom.files.limits import MAX_DEPTH
from ottava_custom.files.nodes import Node, scalar, shown, too_deep
from ottava_custom.files.source import Place, Source

# A dotted key, for which the standard library takes time that grows with the square of its length.
_DEEP = re.compile(rf"(?:\.[ \t]*[\w\"'-]+[ \t]*){{{MAX_DEPTH}}}")
# A key that needs no quotes in a message.
_BARE = re.compile(r"[\w-]{1,60}", re.A)


def parse_toml(source: Source) -> Node | None:
    """The document, None when it says nothing; an OptionError where it is no TOML."""
    deep = _DEEP.search(source.text)
    if deep is not None:
        raise too_deep(source, source.place(deep.start()))
    try:
        found = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        raise source.error(Place(""), f"not TOML: {error}") from error
    except RecursionError as error:
        raise too_deep(source, Place("")) from error
    except ValueError as error:
        # Python refuses to convert a number of thousands of digits, wherever it stands.
        digits = re.search(rf"[\d_]{{{sys.get_int_max_str_digits() or 1},}}", source.text)
        place = source.place(digits.start()) if digits else Place("")
        raise source.error(place, f"not a value: {error}") from error
    return _node(source, found, "", 0) if found else None


def _node(source: Source, value: Any, path: str, depth: int) -> Node:
    place = Place(path)
    if depth > MAX_DEPTH:
        raise too_deep(source, place)
    if isinstance(value, dict):
        written = {key: key if _BARE.fullmatch(key) else shown(key) for key in value}
        paths = {key: f"{path}.{text}".lstrip(".") for key, text in written.items()}
        below = {key: _node(source, inner, paths[key], depth + 1) for key, inner in value.items()}
        return Node(below, place, {key: Place(written) for key, written in paths.items()})
    if isinstance(value, list):
        return Node(
            [_node(source, inner, f"{path}[{at}]", depth + 1) for at, inner in enumerate(value)],
            place,
        )
    return scalar(source, value, place)
