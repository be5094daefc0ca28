"""Which layers a section is for, as configurations of nvdlfw-inspect say it.

``exact_layer_names`` decides alone, else ``layer_name_regex_pattern`` (searched for in the name);
else ``layer_numbers`` and ``layer_types`` (parts of the name) must both hold, where both are given.
A layer's number is the first one in its name that is not that of an ``fc``. Layers that do not
match are not selected; nvdlfw-inspect itself raises for some of them.
"""

import re
from collections.abc import Callable
from typing import Any

from ottava.errors import OptionError
from ottava_debug.located import Located, kind_of, unknown

_KEYS = ("exact_layer_names", "layer_name_regex_pattern", "layer_numbers", "layer_types")
# As nvdlfw-inspect finds it.
_NUMBER = re.compile(r"(?<!fc)\d+")
_ALL = "all"

Test = Callable[[str], bool]


class Selector:
    """The layers of a section.

    Args:
        given: the section's ``layers``.
        what: what errors call the section.

    Attributes:
        unmatched: patterns, numbers and names that no layer has matched so far -> where they stand.

    Raises:
        OptionError: a key or a value is not allowed; the message names the line.
    """

    def __init__(self, given: Located, what: str) -> None:
        for key in given:
            if key not in _KEYS:
                raise unknown(given.where(key), f"{what}: layers has no key", key, _KEYS)
        if not given:
            raise OptionError(
                f"{given.where()}: {what}: layers is empty", expected=f"one of {', '.join(_KEYS)}"
            )
        self._tests = {key: self._read(given, key, what) for key in _KEYS if key in given}
        for alone in _KEYS[:2]:
            if alone in self._tests:
                self._tests = {alone: self._tests[alone]}
        self.unmatched = {
            f"{key} {label!r}": given.where(key)
            for key, tests in self._tests.items()
            for label in tests
            if label != _ALL
        }

    def matches(self, name: str) -> bool:
        """Whether a layer of the name is selected; what it matches is no longer unmatched."""
        found = True
        for key, tests in self._tests.items():
            matching = [label for label, test in tests.items() if test(name)]
            for label in matching:
                self.unmatched.pop(f"{key} {label!r}", None)
            found = found and bool(matching)
        return found

    def _read(self, given: Located, key: str, what: str) -> dict[object, Test]:
        value, where = given[key], f"{given.where(key)}: {what}: {key}"
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
        return {item: _part(item) for item in items}


def _part(text: str) -> Test:
    return lambda name: text in name


def _in(numbers: range) -> Test:
    return lambda name: _number(name) in numbers


def _number(name: str) -> int | None:
    found = _NUMBER.search(name)
    return int(found[0]) if found else None


def _range(item: Any, where: str) -> range:
    """A number, or several as ``"2-5"``."""
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return range(item, item + 1)
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item) if isinstance(item, str) else None
    if found is None:
        raise OptionError(
            f"{where} has {kind_of(item)}", expected="numbers, ranges as '2-5', or all"
        )
    return range(int(found[1]), int(found[2] or found[1]) + 1)
