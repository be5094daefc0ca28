"""YAML whose keys know their lines, and errors that name them."""

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from ottava.errors import OptionError, text_of
from ottava_custom.files.source import read_text


class Located(dict[str, Any]):
    """A mapping with the lines of its keys, from 1; a dict that was made by a program has none.

    Attributes:
        source: the path of the file, or what else errors call it.
        lines: key -> line.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str = "", lines: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(values)
        self.source, self.lines = source, dict(lines or getattr(values, "lines", {}))

    def where(self, key: str = "") -> str:
        """The source and, where it is known, the line of a key; without a key the first line."""
        line = self.lines.get(key) or min(self.lines.values(), default=0)
        return f"{self.source}, line {line}" if line else self.source

    def over(self, other: "Located", *left_out: str) -> "Located":
        """This mapping's keys over another's, without some."""
        values = {key: value for key, value in {**other, **self}.items() if key not in left_out}
        return Located(values, self.source or other.source, {**other.lines, **self.lines})


class _Loader(yaml.SafeLoader):
    """What ``yaml.safe_load`` gives, with :class:`Located` for mappings."""

    source = ""

    def construct_yaml_map(self, node: Any) -> Any:
        # In two steps, as PyYAML's own: what an alias stands for may still be empty.
        found = Located({}, self.source)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                what = (
                    f"{self.source}, line {line}: {name!r} stands twice, first in line "
                    f"{lines[name]}"
                )
                raise OptionError(what, expected="each key once: the first would be lost")
            lines[name] = line
        yield found
        found.update({str(key): value for key, value in self.construct_mapping(node).items()})
        found.lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)


def read(given: str | os.PathLike[str] | Mapping[str, Any]) -> Located:
    """The sections of a file, or of a dict.

    Raises:
        OptionError: the file cannot be read, is not YAML or not a mapping, is nested too deeply, or
            is larger than a recipe file may be; with the line where there is one.
    """
    if isinstance(given, Mapping):
        return Located(located(given, "the configuration"), "the configuration")
    source = str(os.fspath(given))
    expected = "sections, as name: {enabled: True, layers: …, transformer_engine: …}"
    text = read_text(source, "a YAML file", "use fewer sections, and patterns of layers")
    try:
        root = _constructed(text, source)
    except RecursionError as error:
        raise OptionError(f"{source}: values are nested too deeply", expected=expected) from error
    except yaml.YAMLError as error:
        what = f"{_line(source, error)}: not YAML: {getattr(error, 'problem', error)}"
        raise OptionError(what, expected=expected) from error
    except OptionError:
        raise
    except ValueError as error:
        # Dates that there are not, and numbers of thousands of digits.
        raise OptionError(f"{source}: not a value: {text_of(error)}", expected=expected) from error
    if not isinstance(root, Located) or not root:
        raise OptionError(f"{source} holds {kind_of(root)}", expected=expected)
    return root


def _constructed(text: str, source: str) -> Any:
    loader = _Loader(text)
    loader.source = source
    return loader.get_single_data()


def _line(source: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{source}, line {mark.line + 1}" if mark else source


def located(given: Any, source: str) -> Any:
    """A dict, and those inside, as :class:`Located`."""
    if isinstance(given, Mapping):
        return Located({str(key): located(value, source) for key, value in given.items()}, source)
    return [located(item, source) for item in given] if isinstance(given, (list, tuple)) else given


def plain(given: Any) -> Any:
    """The values as plain dicts and lists."""
    if isinstance(given, Mapping):
        return {key: plain(value) for key, value in given.items()}
    return [plain(item) for item in given] if isinstance(given, list) else given


def kind_of(value: Any) -> str:
    """What a value is, for errors."""
    if isinstance(value, Mapping):
        return "a mapping"
    if value is None:
        return "nothing"
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:80]


def unknown(where: str, what: str, given: object, known: Iterable[str]) -> OptionError:
    """The error about a name that nobody knows."""
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(given), names, n=1)
    remedy = f"use {near[0]!r}" if near else ""
    what = f"{where}: {what}" if where else what
    return OptionError(f"{what} {given!r}", expected=f"one of {', '.join(names)}", remedy=remedy)


def mapping(parent: Located, key: str, what: str) -> Located:
    """The mapping at a key."""
    value = parent[key]
    if not isinstance(value, Located):
        raise OptionError(
            f"{parent.where(key)}: {what}: {key} is {kind_of(value)}", expected="a mapping"
        )
    return value


def names(parent: Located, key: str, what: str, known: Iterable[str]) -> list[str]:
    """The names at a key, which is one of those known, a list of such, or ``all``; an empty list is
    none of them."""
    value = parent[key]
    given = value if isinstance(value, list) else [value]
    known = list(known)
    for name in given:
        if name not in known and name != "all":
            raise unknown(parent.where(key), f"{what}: {key} has", name, known)
    return known if "all" in given else given


def truth(parent: Located, key: str, what: str) -> bool:
    """The boolean at a key."""
    value = parent[key]
    if not isinstance(value, bool):
        raise OptionError(
            f"{parent.where(key)}: {what}: {key} is {kind_of(value)}", expected="True or False"
        )
    return value
