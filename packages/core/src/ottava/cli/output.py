"""What commands have in common: tables and sentences for people, JSON for programs, and the options
of recipes."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from ottava.errors import OptionError

#: The option of every command that can print for programs.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a recipe from texts ``key=value``, each value as JSON where that makes sense, else
    a text."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise OptionError(f"--option {text!r}", expected="key=value, each key once")
        options[key] = value
        with contextlib.suppress(ValueError, RecursionError):
            options[key] = json.loads(
                {"True": "true", "False": "false", "None": "null"}.get(value, value)
            )
    return options


def escaped(text: str, *, lines: bool = False) -> str:
    """A text with its control characters, and all else that does not print, as Python writes them.

    Names of tensors, files and plugins are anybody's: a terminal would obey what is in them.

    Args:
        text: any text.
        lines: whether ends of lines and tabs stay.
    """
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


class _Console(Console):
    """Prints every text, those in tables and titles too, :func:`escaped`."""

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(escaped(text, lines=True), *arguments, **options)


class PlainColumn(TextColumn):
    """A column of a progress bar, whose texts are :func:`escaped` and are no markup."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False)

    def render(self, task: Any) -> Text:
        # Before it is a Text, which would leave out some control characters.
        return Text(escaped(self.text_format.format(task=task)), self.style, justify=self.justify)


def console(*, stderr: bool = False) -> Console:
    """A console that prints texts of plugins as they are, whatever brackets and colons they have,
    but for control characters, which it shows."""
    return _Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(text: str, *, stderr: bool = False, lines: bool = False) -> None:
    """Print a sentence, which no width of a terminal cuts; with ``lines`` a text of several
    lines."""
    console(stderr=stderr).print(escaped(text, lines=lines), soft_wrap=True)


def show_json(value: Any) -> None:
    """Print JSON, in ASCII."""
    # The one control character that JSON leaves as it is.
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


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
    made = Table(title=escaped(title))
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in right else "left")
    for row in rows:
        made.add_row(*(escaped(cell, lines=lines) for cell in row))
    return made
