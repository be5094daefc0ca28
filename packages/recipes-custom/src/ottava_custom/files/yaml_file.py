"""YAML as nodes: the core schema of YAML 1.2 (``on``, ``no`` and ``1:30`` are text), and nothing
that runs code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from ottava.errors import OptionError
from ottava_custom.files.limits import BeyondLimits, DepthLimit, check_node
from ottava_custom.files.nodes import Node, scalar, shown
from ottava_custom.files.source import Place, Source

_PREFIX = "tag:yaml.org,2002:"


class _Loader(DepthLimit, yaml.SafeLoader):
    """Composes nodes whose scalars are resolved by the core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own declaration


_BASES = {"0o": 8, "0x": 16}
# Tag -> what such a value looks like, which characters it may begin with, and how it is read.
_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", "~nN", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        "-+0123456789",
        lambda text: int(text, _BASES.get(text[:2], 10)),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
for _name, (_pattern, _first, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(
        _PREFIX + _name,
        re.compile(rf"(?:{_pattern})\Z"),
        [*_first, *([""] if _name == "null" else [])],
    )


def parse_yaml(source: Source) -> Node | None:
    """The document, None when there is none; an OptionError where it is no YAML, or more than plain
    values."""
    try:
        root = yaml.compose(source.text, Loader=_Loader)
        if root is not None:
            check_node(root)
    except yaml.MarkedYAMLError as error:
        raise _told(source, error) from error
    except yaml.reader.ReaderError as error:
        what = f"character {chr(error.character)!r} is not allowed in YAML"
        raise source.error(source.place(error.position), what, remedy="take it out") from error
    return None if root is None else _Reader(source).read(root)


def _told(source: Source, error: yaml.MarkedYAMLError) -> OptionError:
    mark = error.problem_mark or error.context_mark
    place = source.place(0 if mark is None else min(mark.index, len(source.text)))
    if isinstance(error, BeyondLimits):
        return source.error(place, error.problem or "", expected=error.expected)
    problem = " ".join(str(words) for words in (error.context, error.problem) if words)
    if "single document" in problem:
        return source.error(
            place,
            "a second document begins",
            expected="one document",
            remedy="use one file for each",
        )
    tab = error.problem_mark is not None and source.text[error.problem_mark.index :].startswith(
        "\t"
    )
    return source.error(place, f"not YAML: {problem}", remedy="indent with spaces" if tab else "")


class _Reader:
    """Nodes of PyYAML's nodes, which are within the limits. What an alias stands for is read
    once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[int, Node] = {}
        self._containers: dict[tuple[type, str], Callable[[Any, Place], Node]] = {
            (yaml.MappingNode, "map"): self._mapping,
            (yaml.SequenceNode, "seq"): self._sequence,
        }

    def read(self, given: Any) -> Node:
        """The node of a YAML node."""
        if id(given) not in self._known:
            kind = type(given), given.tag.removeprefix(_PREFIX)
            read = self._containers.get(kind, self._scalar)
            self._known[id(given)] = read(given, self._source.place(given.start_mark.index))
        return self._known[id(given)]

    def _scalar(self, given: Any, place: Place) -> Node:
        tag, value = given.tag.removeprefix(_PREFIX), given.value
        if not isinstance(given, yaml.ScalarNode) or (tag not in _SCALARS and tag != "str"):
            remedy = "take the tag (what begins with !) out"
            raise self._source.error(
                place, f"tag {shown(given.tag)}", expected="plain values", remedy=remedy
            )
        if tag != "str":
            pattern, _, convert = _SCALARS[tag]
            # With an explicit tag, or more digits than Python converts.
            try:
                if re.fullmatch(pattern, value) is None:
                    raise ValueError(f"{shown(value)} is no {tag}")
                value = convert(value)
            except ValueError as error:
                raise self._source.error(place, f"not a value: {error}") from error
        return scalar(self._source, value, place)

    def _sequence(self, given: Any, place: Place) -> Node:
        return Node([self.read(item) for item in given.value], place)

    def _mapping(self, given: Any, place: Place) -> Node:
        values: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        for key_node, value_node in given.value:
            key = self.read(key_node)
            # An alias as a key stands where it stands, but is known by what it stands for.
            if not isinstance(key.value, str):
                remedy = "put it in quotes" if not isinstance(key.value, list) else ""
                raise self._source.error(
                    key.place, f"a key is {key}", expected="text", remedy=remedy
                )
            if key.value in keys:
                what = (
                    f"key {shown(key.value)} stands there twice, first in {keys[key.value].short}"
                )
                raise self._source.error(key.place, what, expected="each key once")
            values[key.value], keys[key.value] = self.read(value_node), key.place
        return Node(values, place, keys)
