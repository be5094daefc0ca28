"""YAML mappings that know the lines of their keys, and errors that name these lines."""

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from ottava.errors import OptionError, text_of
from ottava_custom.files.source import MAX_DEPTH, read_text


class Located(dict[str, Any]):
    """A mapping from ``source``, a file's path or another name, with the lines of its keys."""

    def __init__(
        self, values: Mapping[str, Any], source: str = "", lines: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(values)
        self.source = source
        self.lines = dict(lines or getattr(values, "lines", {}))

    def where(self, key: str = "") -> str:
        """The source and, if it is known, the line of ``key``; without a key the first line."""
        line = self.lines.get(key) or min(self.lines.values(), default=0)
        return f"{self.source}, line {line}" if line else self.source

    def over(self, other: "Located", *left_out: str) -> "Located":
        """The keys of both mappings except ``left_out``; this mapping's values take precedence."""
        values = {key: value for key, value in {**other, **self}.items() if key not in left_out}
        return Located(values, self.source or other.source, {**other.lines, **self.lines})


class _Loader(yaml.SafeLoader):
    """Loads the same values as ``yaml.safe_load``, with :class:`Located` for mappings."""

    source = ""
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """PyYAML's own, down to the levels that a recipe file may have."""
        if self.depth > MAX_DEPTH:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            line = event.start_mark.line + 1
            raise OptionError(
                f"{self.source}, line {line}: values are nested too deeply",
                expected=f"at most {MAX_DEPTH} levels",
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_yaml_map(self, node: Any) -> Any:
        # This is a generator of two steps, as PyYAML's own constructor: the mapping is yielded
        # while it is empty, because its values may contain an alias of it.
        section = Located({}, self.source)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in lines and name != "<<":
                raise OptionError(
                    f"{self.source}, line {line}: {name!r} stands twice, first in line "
                    f"{lines[name]}",
                    expected="each key once: the first would be lost",
                )
            lines[name] = line
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
        return Located(located(configuration, "the configuration"), "the configuration")
    source = str(os.fspath(configuration))
    expected = "sections, as name: {enabled: True, layers: …, transformer_engine: …}"
    text = read_text(source, "a YAML file", "use fewer sections, and patterns of layers")
    try:
        root = _load(text, source)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        raise OptionError(
            f"{_line(source, error)}: not YAML: {problem}", expected=expected
        ) from error
    except OptionError:
        raise
    except ValueError as error:
        # YAML raises ValueError for dates that do not exist, and numbers of thousands of digits.
        raise OptionError(f"{source}: not a value: {text_of(error)}", expected=expected) from error
    if not isinstance(root, Located) or not root:
        raise OptionError(f"{source} holds {kind_of(root)}", expected=expected)
    return root


def _load(text: str, source: str) -> Any:
    loader = _Loader(text)
    loader.source = source
    return loader.get_single_data()


def _line(source: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{source}, line {mark.line + 1}" if mark else source


def located(value: Any, source: str) -> Any:
    """``value`` with all dicts in it as :class:`Located`, and all tuples as lists."""
    if isinstance(value, Mapping):
        return Located({str(key): located(item, source) for key, item in value.items()}, source)
    if isinstance(value, (list, tuple)):
        return [located(item, source) for item in value]
    return value


def plain(value: Any) -> Any:
    """``value`` with all mappings in it as plain dicts."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def kind_of(value: Any) -> str:
    """A short description of a value, for errors."""
    if isinstance(value, Mapping):
        return "a mapping"
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value)[:80]


def unknown(where: str, problem: str, name: object, allowed: Iterable[str]) -> OptionError:
    """The error about a name that is not one of those ``allowed``; it suggests the nearest one."""
    names = sorted(map(str, allowed))
    near = difflib.get_close_matches(str(name), names, n=1)
    remedy = f"use {near[0]!r}" if near else ""
    prefix = f"{where}: " if where else ""
    return OptionError(
        f"{prefix}{problem} {name!r}", expected=f"one of {', '.join(names)}", remedy=remedy
    )


def mapping(parent: Located, key: str, title: str) -> Located:
    """The mapping at a key."""
    value = parent[key]
    if not isinstance(value, Located):
        raise OptionError(
            f"{parent.where(key)}: {title}: {key} is {kind_of(value)}", expected="a mapping"
        )
    return value


def names(parent: Located, key: str, title: str, allowed: Iterable[str]) -> list[str]:
    """The names at a key, whose value is one of the ``allowed`` names, a list of them, or
    ``all``."""
    value = parent[key]
    requested = value if isinstance(value, list) else [value]
    allowed = list(allowed)
    for name in requested:
        if name not in allowed and name != "all":
            raise unknown(parent.where(key), f"{title}: {key} has", name, allowed)
    return allowed if "all" in requested else requested


def truth(parent: Located, key: str, title: str) -> bool:
    """The boolean at a key."""
    value = parent[key]
    if not isinstance(value, bool):
        raise OptionError(
            f"{parent.where(key)}: {title}: {key} is {kind_of(value)}", expected="True or False"
        )
    return value
