"""TOML as nodes: values from the standard library, places from the source."""

from __future__ import annotations

import re
import sys
import tomllib
from typing import Any

from ottava.errors import OptionError
from ottava_custom.files.nodes import Node, check_scalar, shown, too_deep
from ottava_custom.files.source import Source
from ottava_custom.files.toml_places import Path, Places, find_places

_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def parse_toml(source: Source) -> Node | None:
    """The document, None when it says nothing.

    Raises:
        OptionError: it is no TOML, or has a key twice.
    """
    places = find_places(source.text)
    # The standard library takes time that grows with the square of the depth.
    if places.deep is not None:
        raise too_deep(source, places.deep)
    try:
        found = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        raise _told(source, str(error)) from error
    except ValueError as error:
        # Python refuses to convert a number of thousands of digits, wherever it stands.
        digits = re.search(rf"\d{{{sys.get_int_max_str_digits() or 1},}}", source.text)
        raise source.error(digits.start() if digits else 0, f"not a value: {error}") from error
    return _node(source, found, (), places) if found else None


def _told(source: Source, message: str) -> OptionError:
    found = _AT.search(message)
    problem = message[: found.start()] if found else message
    index = len(source.text.rstrip())
    if found and found[1]:
        index = sum(len(line) + 1 for line in source.text.split("\n")[: int(found[1]) - 1]) + int(found[2]) - 1
    twice = find_places(source.text[:index]).twice
    if twice is not None:
        key, first, again = twice
        line = source.place(first).line
        return source.error(
            again, f"key {shown(key)} stands there twice, first in line {line}", expected="each key once"
        )
    return source.error(index, f"not TOML: {problem}")


def _node(source: Source, value: Any, path: Path, places: Places) -> Node:
    index = places.values[path]
    if isinstance(value, dict):
        below = {key: _node(source, inner, (*path, key), places) for key, inner in value.items()}
        return Node(below, index, {key: places.keys[*path, key] for key in value})
    if isinstance(value, list):
        return Node([_node(source, inner, (*path, at), places) for at, inner in enumerate(value)], index)
    node = Node(value, index)
    check_scalar(source, node)
    return node
