"""What a recipe file says, each value and key with its place, whatever the language of the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ottava.errors import OptionError
from ottava_custom.files.limits import MAX_DEPTH
from ottava_custom.files.source import Place, Source

_KINDS: dict[type, str] = {
    bool: "true or false",
    dict: "a mapping",
    float: "a number",
    int: "a number",
    list: "a list",
    str: "text",
    type(None): "nothing",
}
_SHOWN = 60
_INTEGER_BITS = 64


def shown(text: str) -> str:
    """A text for a message: in quotes, and not too long."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


@dataclass(frozen=True)
class Node:
    """A scalar, a list of nodes or a mapping of nodes by key; where it begins, and where the keys
    of a mapping are."""

    value: Any
    place: Place
    keys: Mapping[str, Place] = field(default_factory=dict)

    def __str__(self) -> str:
        """The kind in words, and a scalar itself, for messages."""
        kind = _KINDS.get(type(self.value), "a date or a time")
        if isinstance(self.value, (list, dict)) or self.value is None:
            return kind
        text = shown(self.value) if isinstance(self.value, str) else str(self.value)
        return text if isinstance(self.value, bool) else f"{kind}, {text}"

    def plain(self) -> Any:
        """The value with plain values inside."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def scalar(source: Source, value: Any, place: Place) -> Node:
    """A node without nodes inside. NaN is refused, which would make a recipe unequal to itself, and
    huge integers."""
    if isinstance(value, float) and math.isnan(value):
        raise source.error(place, "the number is NaN", expected="a number that equals itself")
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        what = f"the number has {value.bit_length()} bits"
        raise source.error(place, what, expected=f"an integer of at most {_INTEGER_BITS} bits")
    return Node(value, place)


def too_deep(source: Source, place: Place) -> OptionError:
    """The error about values that are nested deeper than any rule."""
    return source.error(
        place, "values are nested too deeply", expected=f"at most {MAX_DEPTH} levels"
    )
