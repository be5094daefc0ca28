"""What commands have in common: tables and sentences for people, JSON for programs, and the options of recipes."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ottava.errors import OptionError

#: The option of every command that can print for programs.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a recipe from texts ``key=value``, each value as JSON where that makes sense, else a text."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise OptionError(f"--option {text!r}", expected="key=value, each key once")
        options[key] = value
        with contextlib.suppress(ValueError, RecursionError):
            options[key] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    return options


def console(*, stderr: bool = False) -> Console:
    """A console that prints texts of plugins as they are, whatever brackets and colons they have."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(text: str, *, stderr: bool = False) -> None:
    """Print a sentence, which no width of a terminal cuts."""
    console(stderr=stderr).print(text, soft_wrap=True)


def show_json(value: Any) -> None:
    """Print JSON."""
    print(json.dumps(value, indent=2))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Table:
    """A table; the columns named in ``right`` are aligned there."""
    made = Table(title=title)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in right else "left")
    for row in rows:
        made.add_row(*row)
    return made
