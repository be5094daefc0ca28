"""Output of commands: tables and sentences for people, JSON for programs; and options of
recipes."""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Task, TextColumn
from rich.table import Table
from rich.text import Text

from ottava.errors import OptionError

#: The option of every command that can print for programs.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


#: The words of Python for values that JSON writes in another way.
_WORDS = {"True": "true", "False": "false", "None": "null"}


def parse_options(texts: Sequence[str], flag: str = "--option") -> dict[str, object]:
    """Options of a recipe from texts ``key=value``; a value that is not JSON is a text.

    Args:
        texts: what the user wrote after each ``flag``.
        flag: the option of the command, for errors.

    Raises:
        OptionError: a text is not of this form, or a key is given twice.
    """
    options: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise OptionError(f"{flag} {text!r}", expected="key=value, each key once")
        options[key] = value
        with contextlib.suppress(ValueError, RecursionError):
            options[key] = json.loads(_WORDS.get(value, value))
    return options


def escaped(text: str, *, lines: bool = False) -> str:
    """A text with escapes, as Python writes them, for control and other unprintable characters.

    Names of tensors, files and plugins come from outside, and a terminal would obey control
    characters in them.

    Args:
        text: any text.
        lines: whether to keep ends of lines and tabs.
    """
    unchanged = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in unchanged else ascii(c)[1:-1] for c in text)


class _Console(Console):
    """A console that escapes every text, also in tables and titles, by :func:`escaped`."""

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(escaped(text, lines=True), *arguments, **options)


class PlainColumn(TextColumn):
    """A column of a progress bar, whose texts are :func:`escaped` and are no markup."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False)

    def render(self, task: Task) -> Text:
        # The text is escaped before it becomes a Text, which leaves out some control characters.
        return Text(escaped(self.text_format.format(task=task)), self.style, justify=self.justify)


def console(*, stderr: bool = False) -> Console:
    """A console that prints brackets and colons as they are, and control characters escaped."""
    return _Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(text: str, *, stderr: bool = False, lines: bool = False) -> None:
    """Print a sentence without wrapping it; with ``lines`` a text of several lines."""
    console(stderr=stderr).print(escaped(text, lines=lines), soft_wrap=True)


def plain(value: Any) -> Any:
    """``value`` as JSON data; floats that are not finite become ``"inf"``, ``"-inf"`` or
    ``"nan"``."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def show_json(value: object) -> None:
    """Print JSON, in ASCII."""
    # DEL is the one control character that JSON leaves as it is.
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def grouped(names: Sequence[str]) -> list[str]:
    """Names, where those that differ only in numbers become one pattern with their count.

    ``["h.0.w", "h.1.w", "x"]`` becomes ``["h.*.w (2)", "x"]``.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return [
        group[0] if len(group) == 1 else f"{pattern} ({len(group)})"
        for pattern, group in groups.items()
    ]


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    *,
    lines: bool = False,
) -> Table:
    """A table; the columns named in ``right`` are aligned there, and with ``lines`` cells have
    several lines."""
    grid = Table(title=escaped(title))
    for column in columns:
        side: Literal["left", "right"] = "right" if column in right else "left"
        grid.add_column(column, overflow="fold", justify=side)
    for row in rows:
        grid.add_row(*(escaped(cell, lines=lines) for cell in row))
    return grid
