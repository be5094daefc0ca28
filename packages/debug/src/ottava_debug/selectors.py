"""The selection of layers for a section, in the format of nvdlfw-inspect's configurations.

``exact_layer_names`` decides alone if it is given, otherwise ``layer_name_regex_pattern`` (searched
for in the name). Without both, a layer must match ``layer_numbers`` and ``layer_types`` (substrings
of the name), as far as they are given. A layer's number is the first number in its name that does
not follow ``fc``. Layers that do not match are not selected; nvdlfw-inspect itself raises for some
of them.
"""

import re
from collections.abc import Callable
from typing import Any

from ottava.errors import OptionError
from ottava_debug.located import Located, kind_of

_KEYS = ("exact_layer_names", "layer_name_regex_pattern", "layer_numbers", "layer_types")
# nvdlfw-inspect uses the same expression.
_NUMBER = re.compile(r"(?<!fc)\d+")
_ALL = "all"

Test = Callable[[str], bool]


class Selector:
    """The layers of a section, a :class:`~ottava_debug.enabled.Selection`."""

    def __init__(self, layers: Located) -> None:
        layers.check_keys(_KEYS)
        if not layers:
            raise OptionError(f"{layers.where()} is empty", expected=f"one of {', '.join(_KEYS)}")
        self._tests = {key: _tests(layers, key) for key in _KEYS if key in layers}
        for alone in _KEYS[:2]:
            if alone in self._tests:
                self._tests = {alone: self._tests[alone]}
        self.unmatched = {
            f"{key} {label!r}": layers.where(key)
            for key, tests in self._tests.items()
            for label in tests
            if label != _ALL
        }

    def matches(self, name: str) -> bool:
        """Whether a layer of this name is selected; what it matches leaves :attr:`unmatched`."""
        selected = True
        for key, tests in self._tests.items():
            matching = [label for label, test in tests.items() if test(name)]
            for label in matching:
                self.unmatched.pop(f"{key} {label!r}", None)
            selected = selected and bool(matching)
        return selected


def _tests(layers: Located, key: str) -> dict[object, Test]:
    """The values of a key, each with its test of names."""
    value = layers[key]
    where = f"{layers.where(key)}: {key}"
    if key == "layer_name_regex_pattern":
        try:
            pattern = re.compile(value)
        except (re.error, TypeError) as error:
            raise OptionError(
                f"{where} is {kind_of(value)}: {error}", expected="a regular expression"
            ) from error
        return {value: lambda name: pattern.search(name) is not None}
    items = value if isinstance(value, list) else [value]
    if not items:
        raise OptionError(f"{where} is empty", expected="at least one")
    if any(str(item).lower() == _ALL for item in items) and key != "exact_layer_names":
        return {_ALL: lambda name: key == "layer_types" or _number(name) is not None}
    if key == "layer_numbers":
        return {item: _in(_range(item, where)) for item in items}
    for item in items:
        if not isinstance(item, str):
            raise OptionError(f"{where} has {kind_of(item)}", expected="names")
    if key == "exact_layer_names":
        return {item: item.__eq__ for item in items}
    return {item: _contains(item) for item in items}


def _contains(text: str) -> Test:
    return lambda name: text in name


def _in(numbers: range) -> Test:
    return lambda name: _number(name) in numbers


def _number(name: str) -> int | None:
    match = _NUMBER.search(name)
    return int(match[0]) if match else None


def _range(item: Any, where: str) -> range:
    """The range of one number, or of a text such as ``"2-5"``, which includes both ends."""
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return range(item, item + 1)
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item) if isinstance(item, str) else None
    if match is None:
        raise OptionError(
            f"{where} has {kind_of(item)}", expected="numbers, ranges as '2-5', or all"
        )
    return range(int(match[1]), int(match[2] or match[1]) + 1)
