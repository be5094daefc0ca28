"""How large and how deep YAML may be, for recipe files and for other files that people are sent."""

from __future__ import annotations

from typing import Any

import yaml

#: Bytes of the largest file that is read.
MAX_BYTES = 1 << 18
#: Levels of values inside values.
MAX_DEPTH = 32
#: Values once aliases are replaced by what they stand for: a few lines can stand for billions.
MAX_VALUES = 50_000


class BeyondLimits(yaml.MarkedYAMLError):
    """YAML that is beyond a limit: ``problem`` and ``problem_mark`` say what is, and where.

    Attributes:
        expected: what is allowed.
    """

    def __init__(self, problem: str, expected: str, mark: Any) -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.expected = expected


class DepthLimit:
    """In front of a scanner of PyYAML, it raises :class:`BeyondLimits` for more than
    :data:`MAX_DEPTH` levels.

    The scanner takes time that grows with the square of the depth, long before anything is
    composed.
    """

    flow_level: int
    indents: list[int]

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._check_depth(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)  # type: ignore[misc]

    def add_indent(self, column: int) -> bool:
        self._check_depth(len(self.indents))
        return super().add_indent(column)  # type: ignore[misc,no-any-return]

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise too_deep(self.get_mark())  # type: ignore[attr-defined]


def too_deep(mark: Any) -> BeyondLimits:
    """The error about values that are nested deeper than any rule."""
    return BeyondLimits("values are nested too deeply", f"at most {MAX_DEPTH} levels", mark)


def check_node(root: Any) -> None:
    """See that a composed node, aliases replaced, is within the limits.

    Raises:
        BeyondLimits: it has too many levels or values, or an alias stands for what it is in.
    """
    _Counter().count(root)


class _Counter:
    """Counts the values in nodes. What an alias stands for is counted once, and added wherever it
    stands."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._open: set[int] = set()

    def count(self, node: Any) -> int:
        """The number of values in a node, itself included."""
        if id(node) in self._known:
            return self._known[id(node)]
        if id(node) in self._open:
            raise BeyondLimits(
                "an alias stands for what it is in", "no such circle", node.start_mark
            )
        self._open.add(id(node))
        if len(self._open) > MAX_DEPTH:
            raise too_deep(node.start_mark)
        total = 1 + sum(self.count(child) for child in _children(node))
        if total > MAX_VALUES:
            what = f"these are {total} values, those that aliases stand for included"
            raise BeyondLimits(what, f"at most {MAX_VALUES}", node.start_mark)
        self._open.discard(id(node))
        self._known[id(node)] = total
        return total


def _children(node: Any) -> list[Any]:
    """The values inside of a node, and keys that are no text."""
    if isinstance(node, yaml.MappingNode):
        keys = [key for key, _ in node.value if not isinstance(key, yaml.ScalarNode)]
        return keys + [value for _, value in node.value]
    return node.value if isinstance(node, yaml.SequenceNode) else []
