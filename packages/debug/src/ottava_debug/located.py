"""YAML mappings that know the lines of their keys, and errors that name these lines."""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from ottava.errors import OptionError, OttavaError, text_of
from ottava_custom.files.source import MAX_DEPTH, read_text

#: ``check(value)`` returns the checked value, or raises an error of Ottava.
Check = Callable[[Any], Any]


class Located(dict[str, Any]):
    """A mapping of a configuration, which knows its place.

    Attributes:
        source: the path of the file, or another name.
        title: its name in errors, such as ``section 'it', FakeQuant``.
        line: the line of its own key; 0 if it is not known.
        lines: the lines of its keys, as far as they are known.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str = "",
        title: str = "",
        line: int = 0,
        lines: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(values)
        self.source = source
        self.title = title
        self.line = line
        self.lines = dict(lines or {})

    def where(self, key: str = "") -> str:
        """The source, the line of a key or else of the mapping, and the title."""
        line = self.lines.get(key) or self.line or min(self.lines.values(), default=0)
        place = f"{self.source}, line {line}" if line else self.source
        return ": ".join(filter(None, (place, self.title)))

    def over(self, other: "Located", *left_out: str) -> "Located":
        """``other``, with the keys and values of this mapping added, without ``left_out``."""
        values = {key: value for key, value in {**other, **self}.items() if key not in left_out}
        lines = {**other.lines, **self.lines}
        return Located(values, other.source, other.title, other.line, lines)

    def value(self, key: str, check: Check) -> Any:
        """The value at a key, as ``check`` returns it."""
        try:
            return check(self[key])
        except OttavaError as error:
            text = f"{self.where(key)}: {key} {error.what}"
            raise OptionError(text, expected=error.expected, remedy=error.remedy) from error

    def mapping(self, key: str, title: str) -> "Located":
        """The mapping at a key, with a title."""
        value = self.value(key, allowed(lambda value: isinstance(value, Located), "a mapping"))
        return Located(value, self.source, title, self.lines.get(key, 0), value.lines)

    def truth(self, key: str) -> bool:
        """The boolean at a key."""
        return bool(self.value(key, BOOLEAN))

    def names(self, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
        """The names at a key, whose value is one of the ``known`` names, a list of them, or
        ``all``."""
        value = self[key]
        requested = tuple(value) if isinstance(value, list) else (value,)
        for name in requested:
            if name not in known and name != "all":
                raise unknown(f"{self.where(key)}: {key} has", name, known)
        return known if "all" in requested else requested

    def check_keys(self, known: Iterable[str]) -> None:
        """Raise OptionError for a key that is not ``known``."""
        for key in self:
            if key not in known:
                raise unknown(f"{self.where(key)} has no key", key, known)


def allowed(is_allowed: Callable[[Any], bool], expected: str) -> Check:
    """A check of values by a predicate; its error says what is ``expected``."""

    def check(value: Any) -> Any:
        if not is_allowed(value):
            raise OptionError(f"is {kind_of(value)}", expected=expected)
        return value

    return check


#: The check of a boolean.
BOOLEAN = allowed(lambda value: isinstance(value, bool), "True or False")


def kind_of(value: Any) -> str:
    """A short description of a value, for errors."""
    if isinstance(value, Mapping):
        return "a mapping"
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value)[:80]


def unknown(problem: str, name: object, known: Iterable[str]) -> OptionError:
    """The error about a name that is not one of those ``known``; it suggests the nearest one."""
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(name), names, n=1)
    remedy = f"use {near[0]!r}" if near else ""
    return OptionError(f"{problem} {name!r}", expected=f"one of {', '.join(names)}", remedy=remedy)


class _Loader(yaml.SafeLoader):
    """Loads the same values as ``yaml.safe_load``, with :class:`Located` for mappings."""

    def construct_yaml_map(self, node: Any) -> Any:
        # This is a generator of two steps, as PyYAML's own constructor: the mapping is yielded
        # while it is empty, because its values may contain an alias of it.
        section = Located({})
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in lines and name != "<<":
                problem = f"{name!r} stands twice, first in line {lines[name]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[name] = key.start_mark.line + 1
        yield section
        section.update({str(key): value for key, value in self.construct_mapping(node).items()})
        # construct_mapping() has added the keys that ``<<`` merges to the node.
        section.lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)


def read(configuration: str | os.PathLike[str] | Mapping[str, Any]) -> Located:
    """The sections of a file, or of a dict.

    Raises:
        OptionError: the file cannot be read, is not YAML, is not a mapping, is nested too deeply,
            or is larger than a recipe file may be. The message names the line where one is known.
    """
    if isinstance(configuration, Mapping):
        return Located(_located(configuration), "the configuration")
    source = str(os.fspath(configuration))
    expected = "sections, as name: {enabled: True, layers: …, transformer_engine: …}"
    text = read_text(source, "a YAML file", "use fewer sections, and patterns of layers")
    try:
        _check_depth(text, source)
        root = _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", error)
        raise OptionError(f"{source}{line}: not YAML: {problem}", expected=expected) from error
    except OptionError:
        raise
    except ValueError as error:
        # YAML raises ValueError for dates that do not exist, and numbers of thousands of digits.
        raise OptionError(f"{source}: not a value: {text_of(error)}", expected=expected) from error
    if not isinstance(root, Located) or not root:
        raise OptionError(f"{source} holds {kind_of(root)}", expected=expected)
    return Located(root, source, lines=root.lines)


def _check_depth(text: str, source: str) -> None:
    """Refuse values that are nested more deeply than a recipe file may nest them."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if depth > MAX_DEPTH and isinstance(event, yaml.NodeEvent):
            mark: Any = event.start_mark
            raise OptionError(
                f"{source}, line {mark.line + 1}: values are nested too deeply",
                expected=f"at most {MAX_DEPTH} levels",
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)


def _located(value: Any) -> Any:
    """``value`` with all mappings in it as :class:`Located`, and all tuples as lists."""
    if isinstance(value, Mapping):
        return Located({str(key): _located(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return [_located(item) for item in value]
    return value
