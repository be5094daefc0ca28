"""What commands print: every text as text, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.progress import Progress

from ottava.cli.output import PlainColumn, console, escaped, say, show_json, table


@pytest.mark.parametrize(
    ("text", "shown", "in_lines"),
    [
        ("blocks.1.up [red]", "blocks.1.up [red]", "blocks.1.up [red]"),
        ("größe 层 🙂", "größe 层 🙂", "größe 层 🙂"),
        ("\x1b[31m\x9b", r"\x1b[31m\x9b", r"\x1b[31m\x9b"),
        ("a\r\x07\x08\x7f", r"a\r\x07\x08\x7f", r"a\r\x07\x08\x7f"),
        ("a\n\tb", r"a\n\tb", "a\n\tb"),
        ("\u202ea\u2028\ud800", r"\u202ea\u2028\ud800", r"\u202ea\u2028\ud800"),
    ],
)
def test_control_characters_are_written_as_python_does(
    text: str, shown: str, in_lines: str, capsys: Any
) -> None:
    assert escaped(text) == shown
    assert escaped(text, lines=True) == in_lines
    say(text)
    assert capsys.readouterr().out == f"{shown}\n"
    console().print(table("title", ("head",), [[text]]))
    assert shown in capsys.readouterr().out
    show_json({text: text})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert all(c.isprintable() or c == "\n" for c in printed)
    assert json.loads(printed) == {text: text}


def test_a_bar_shows_names_as_they_are(capsys: Any) -> None:
    with Progress(PlainColumn("{task.description}"), console=console()) as progress:
        progress.add_task("[red]a[/red][/b]\x1b]0;title\x07", total=1)
    assert r"[red]a[/red][/b]\x1b]0;title\x07" in capsys.readouterr().out
