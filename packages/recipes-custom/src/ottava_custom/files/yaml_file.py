"""YAML as nodes, whose places are lines and columns.

Values are those of YAML 1.2's core schema: ``no`` and ``1:30`` are text, ``1e-4`` is a number. Tags
(``!!python/...``) are refused, so that nothing in a file runs code.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ottava.errors import OptionError
from ottava_custom.files.source import MAX_DEPTH, Node, Place, too_deep

_PREFIX = "tag:yaml.org,2002:"
#: Tag -> how such a value is written without quotes.
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
#: The tags of the values that a recipe file may have.
_TAGS = {
    yaml.MappingNode: ("map",),
    yaml.SequenceNode: ("seq",),
    yaml.ScalarNode: ("str", *_SCALARS),
}
_BASES = {"0o": 8, "0x": 16}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which reads YAML 1.1, with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML declares it so

    def integer(self, node: yaml.ScalarNode) -> int:
        return int(node.value, _BASES.get(node.value[:2], 10))


for _tag, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"(?:{_pattern})\Z"), None)
_Loader.add_constructor(f"{_PREFIX}int", _Loader.integer)


def parse_yaml(path: str, text: str) -> Node | None:
    """The values of a document, or None for an empty one.

    Raises:
        OptionError: the text is not YAML, has tags or a key twice, or is nested too deeply.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return None if root is None else _node(loader, root, path)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(path, error) from error
    except yaml.reader.ReaderError as error:
        lines = text[: error.position].split("\n")
        line, column = len(lines), len(lines[-1]) + 1
        raise Place(path, f"line {line}, column {column}", line).error(
            f"character {chr(error.character)!r} is not allowed in YAML", remedy="take it out"
        ) from error
    except RecursionError as error:
        raise too_deep(Place(path)) from error


def _place(path: str, mark: yaml.Mark) -> Place:
    line = mark.line + 1
    return Place(path, f"line {line}, column {mark.column + 1}", line)


def _syntax_error(path: str, error: yaml.MarkedYAMLError) -> OptionError:
    mark = error.problem_mark or error.context_mark
    problem = " ".join(words for words in (error.context, error.problem) if words)
    remedy = "indent with spaces" if r"'\t'" in problem else ""
    place = Place(path) if mark is None else _place(path, mark)
    return place.error(f"not YAML: {problem}", remedy=remedy)


def _node(loader: _Loader, node: yaml.Node, path: str, depth: int = 0) -> Node:
    place = _place(path, node.start_mark)
    if depth > MAX_DEPTH:
        raise too_deep(place)
    if node.tag.removeprefix(_PREFIX) not in _TAGS[type(node)]:
        remedy = "take the tag (what begins with !) out"
        raise place.error(f"tag {node.tag!r}", expected="plain values", remedy=remedy)
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, path, depth)
    if isinstance(node, yaml.SequenceNode):
        return Node([_node(loader, item, path, depth + 1) for item in node.value], place)
    try:
        return Node(loader.construct_object(node), place)
    except ValueError as error:
        raise place.error(f"not a value: {error}") from error


def _mapping(loader: _Loader, node: yaml.MappingNode, path: str, depth: int) -> Node:
    values: dict[str, Node] = {}
    keys: dict[str, Place] = {}
    for key_node, value_node in node.value:
        key = _node(loader, key_node, path, depth + 1)
        if not isinstance(key.value, str):
            raise key.place.error(f"a key is {key}", expected="text", remedy="put it in quotes")
        if key.value in keys:
            raise key.place.error(
                f"key {key.value!r} stands there twice, first in {keys[key.value].short}",
                expected="each key once",
            )
        keys[key.value] = key.place
        values[key.value] = _node(loader, value_node, path, depth + 1)
    return Node(values, _place(path, node.start_mark), keys)
