"""The comparison in a terminal, as JSON, and as a page."""

import json
import re
from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from ottava.cli.files import FileKind, write_text
from ottava.cli.output import table
from ottava.filesystem import AnyPath
from ottava_debug.analysis.terminal import decibels
from ottava_debug.output import rendered
from ottava_debug.served.comparing import ServedComparison, ServedLayer

JSON = FileKind(
    "JSON report of `ottava analyze --served`", re.compile(rb'\{\s*"trainer":\s*"(?:[^"\\]|\\.)*",')
)
PAGE = FileKind(
    "page of `ottava analyze --served`",
    re.compile(rb"(?is)<!doctype html>.*?<title>[^<]* ottava analyze --served</title>"),
)
#: The columns of ratios: title, and the attribute of a layer.
COLUMNS = (
    ("weight", "weight"),
    ("trainer", "trained"),
    ("server", "served"),
    ("trainer x server", "between"),
    ("accumulated", "accumulated"),
)


def ratios(layer: ServedLayer) -> tuple[str, ...]:
    """The ratios of a layer as texts."""
    return tuple(decibels(getattr(layer, attribute)) for _, attribute in COLUMNS)


def layer_table(comparison: ServedComparison, rows: int) -> Table:
    """The layers that differ most for the same input, at most ``rows`` of them, in their order."""
    worst = sorted(comparison.layers, key=lambda layer: layer.between)[:rows]
    heads = ("layer", *(title for title, _ in COLUMNS))
    lines = [(layer.name, *ratios(layer)) for layer in comparison.layers if layer in worst]
    return table("Trainer x server: SQNR of outputs (dB)", heads, lines, right=heads[1:])


def sentences(comparison: ServedComparison, rows: int) -> Iterator[str]:
    """Where the two part, and by how much."""
    others = len(comparison.layers) - rows
    if others > 0:
        yield f"{others} more layers are not shown: --rows shows more, --html and --json all."
    kinds = Counter((layer.trainer, layer.server) for layer in comparison.layers)
    for (trainer, server), count in kinds.items():
        yield f"Layers that train under {trainer} and are served as {server}: {count}."
    first, worst = comparison.first, comparison.worst
    if first is None or worst is None:
        yield "Trainer and server compute the same: no output differs for the same input."
        return
    yield f"They part first in {first.name}, at {decibels(first.between)} dB for the same input."
    yield f"They differ most in {worst.name}, at {decibels(worst.between)} dB."


def write_json(comparison: ServedComparison, path: AnyPath) -> None:
    """Write the comparison as JSON; an existing file is replaced atomically.

    Raises:
        OptionError: the file cannot be written.
    """
    write_text(path, json.dumps(comparison.to_json(), indent=1))


def write_html(comparison: ServedComparison, path: AnyPath) -> None:
    """Write the comparison as a page that requests nothing else.

    Raises:
        OptionError: the file cannot be written.
    """
    page = rendered(
        __package__,
        comparison=comparison,
        columns=COLUMNS,
        ratios=ratios,
        notes=list(sentences(comparison, len(comparison.layers))),
    )
    write_text(path, page)
