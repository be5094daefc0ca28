"""TOML as nodes, whose places are the paths of keys, because Python's reader tells no lines."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from ottava_custom.files.source import MAX_DEPTH, Node, Place, too_deep

#: A key that needs no quotes.
_BARE = re.compile(r"[\w-]+", re.A)


def parse_toml(path: str, text: str) -> Node | None:
    """The values of a document, or None for an empty one.

    Raises:
        OptionError: the text is not TOML, or is nested too deeply.
    """
    try:
        document = tomllib.loads(text)
    except RecursionError as error:
        raise too_deep(Place(path)) from error
    except ValueError as error:
        raise Place(path).error(f"not TOML: {error}") from error
    return _node(document, path, "") if document else None


def _node(value: Any, path: str, position: str, depth: int = 0) -> Node:
    place = Place(path, position)
    if depth > MAX_DEPTH:
        raise too_deep(place)
    if isinstance(value, list):
        items = enumerate(value)
        return Node(
            [_node(item, path, f"{position}[{at}]", depth + 1) for at, item in items], place
        )
    if not isinstance(value, dict):
        return Node(value, place)
    values: dict[str, Node] = {}
    for key, inner in value.items():
        quoted = key if _BARE.fullmatch(key) else repr(key)
        values[key] = _node(inner, path, f"{position}.{quoted}".lstrip("."), depth + 1)
    return Node(values, place, {key: node.place for key, node in values.items()})
