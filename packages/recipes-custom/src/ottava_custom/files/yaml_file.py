"""YAML as nodes: the core schema of YAML 1.2 (``on``, ``no`` and ``1:30`` are text), and nothing that runs code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from ottava.errors import OptionError
from ottava_custom.files.nodes import MAX_DEPTH, Node, scalar, shown, too_deep
from ottava_custom.files.source import Place, Source

# Values once aliases are replaced by what they stand for: a few lines can stand for billions.
_MAX_VALUES = 50_000
_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes nodes whose scalars are resolved by the core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own declaration

    # The scanner takes time that grows with the square of the depth, long before anything is composed.
    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._check_depth(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._check_depth(len(self.indents))
        return super().add_indent(column)

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _TooDeep(problem_mark=self.get_mark())


class _TooDeep(yaml.MarkedYAMLError):
    """Values are nested more than :data:`MAX_DEPTH` times."""


_BASES = {"0o": 8, "0x": 16}
# Tag -> what such a value looks like, which characters it may begin with, and how it is read.
_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", "~nN", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", lambda text: int(text, _BASES.get(text[:2], 10))),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
for _name, (_pattern, _first, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(
        _PREFIX + _name, re.compile(rf"(?:{_pattern})\Z"), [*_first, *([""] if _name == "null" else [])]
    )


def parse_yaml(source: Source) -> Node | None:
    """The document, None when there is none; an OptionError where it is no YAML, or more than plain values."""
    try:
        root = yaml.compose(source.text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise _told(source, error) from error
    except yaml.reader.ReaderError as error:
        what = f"character {chr(error.character)!r} is not allowed in YAML"
        raise source.error(source.place(error.position), what, remedy="take it out") from error
    return None if root is None else _Reader(source).read(root)[0]


def _told(source: Source, error: yaml.MarkedYAMLError) -> OptionError:
    mark = error.problem_mark or error.context_mark
    place = source.place(0 if mark is None else min(mark.index, len(source.text)))
    if isinstance(error, _TooDeep):
        return too_deep(source, place)
    problem = " ".join(str(words) for words in (error.context, error.problem) if words)
    if "single document" in problem:
        return source.error(place, "a second document begins", expected="one document", remedy="use one file for each")
    tab = error.problem_mark is not None and source.text[error.problem_mark.index :].startswith("\t")
    return source.error(place, f"not YAML: {problem}", remedy="indent with spaces" if tab else "")


class _Reader:
    """Nodes of PyYAML's nodes, each with the number of values in it. What an alias stands for is read once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[int, tuple[Node, int]] = {}
        self._open: set[int] = set()
        self._containers: dict[tuple[type, str], Callable[[Any, Place], tuple[Node, int]]] = {
            (yaml.MappingNode, "map"): self._mapping,
            (yaml.SequenceNode, "seq"): self._sequence,
        }

    def read(self, given: Any) -> tuple[Node, int]:
        """The node of a YAML node, and the number of values in it."""
        if id(given) in self._known:
            return self._known[id(given)]
        place = self._source.place(given.start_mark.index)
        if id(given) in self._open:
            raise self._source.error(place, "an alias stands for what it is in", expected="no such circle")
        self._open.add(id(given))
        if len(self._open) > MAX_DEPTH:
            raise too_deep(self._source, place)
        kind = type(given), given.tag.removeprefix(_PREFIX)
        node, count = self._containers.get(kind, self._scalar)(given, place)
        if count > _MAX_VALUES:
            what = f"these are {count} values, those that aliases stand for included"
            raise self._source.error(place, what, expected=f"at most {_MAX_VALUES}")
        self._open.discard(id(given))
        self._known[id(given)] = node, count
        return node, count

    def _scalar(self, given: Any, place: Place) -> tuple[Node, int]:
        tag, value = given.tag.removeprefix(_PREFIX), given.value
        if not isinstance(given, yaml.ScalarNode) or (tag not in _SCALARS and tag != "str"):
            remedy = "take the tag (what begins with !) out"
            raise self._source.error(place, f"tag {shown(given.tag)}", expected="plain values", remedy=remedy)
        if tag != "str":
            pattern, _, convert = _SCALARS[tag]
            # With an explicit tag, or more digits than Python converts.
            try:
                if re.fullmatch(pattern, value) is None:
                    raise ValueError(f"{shown(value)} is no {tag}")
                value = convert(value)
            except ValueError as error:
                raise self._source.error(place, f"not a value: {error}") from error
        return scalar(self._source, value, place), 1

    def _sequence(self, given: Any, place: Place) -> tuple[Node, int]:
        items = [self.read(item) for item in given.value]
        return Node([node for node, _ in items], place), 1 + sum(count for _, count in items)

    def _mapping(self, given: Any, place: Place) -> tuple[Node, int]:
        values: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        total = 1
        for key_node, value_node in given.value:
            key, _ = self.read(key_node)
            # An alias as a key stands where it stands, but is known by what it stands for.
            if not isinstance(key.value, str):
                remedy = "put it in quotes" if not isinstance(key.value, list) else ""
                raise self._source.error(key.place, f"a key is {key}", expected="text", remedy=remedy)
            if key.value in keys:
                what = f"key {shown(key.value)} stands there twice, first in {keys[key.value].short}"
                raise self._source.error(key.place, what, expected="each key once")
            node, count = self.read(value_node)
            values[key.value], keys[key.value] = node, key.place
            total += count
        return Node(values, place, keys), total
