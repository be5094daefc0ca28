"""The comparison in a terminal, as JSON, and as a page."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from ottava.cli.files import FileKind, write_text
from ottava.cli.output import table
from ottava.filesystem import AnyPath
from ottava_debug.analysis.terminal import decibels, percent
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
    return tuple(_ratio(getattr(layer, attribute)) for _, attribute in COLUMNS)


def _ratio(value: float) -> str:
    return "other rows" if math.isnan(value) else decibels(value)


def underflows(layer: ServedLayer) -> tuple[str, str]:
    """The underflow of a layer's operands in the trainer and in the server, as texts."""
    return percent(layer.trained_underflow), percent(layer.served_underflow)


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
    yield from _underflow(comparison)
    if any(math.isnan(layer.accumulated) for layer in comparison.layers):
        yield (
            '"other rows": a router chose other experts when the server ran by itself. The ratios '
            "for the same input compare these layers."
        )
    first, worst = comparison.first, comparison.worst
    if first is None or worst is None:
        yield "Trainer and server compute the same: no output differs for the same input."
        return
    yield f"They part first in {first.name}, {_apart(first)} for the same input."
    yield f"They differ most in {worst.name}, {_apart(worst)}."


def _apart(layer: ServedLayer) -> str:
    """How far a trainer's layer and a server's are apart."""
    if layer.between == -math.inf:
        return "where one of them is not finite"
    return f"at {decibels(layer.between)} dB"


def _underflow(comparison: ServedComparison) -> Iterator[str]:
    """The layer that loses most small values in the server, or else in the trainer."""
    losing = [each for each in comparison.layers if each.served_underflow or each.trained_underflow]
    if losing:
        layer = max(losing, key=lambda each: (each.served_underflow, each.trained_underflow))
        trained, served = underflows(layer)
        yield (
            f"Underflow is largest in {layer.name}: of its input or its weight, {trained} become "
            f"zero in the trainer, and {served} in the server."
        )


def write_json(comparison: ServedComparison, path: AnyPath) -> None:
    """Write the comparison as JSON; an existing file is replaced atomically.

    Raises:
        OptionError: the file cannot be written.
    """
    write_text(path, json.dumps(comparison.to_json(), indent=1, allow_nan=False))


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
        underflows=underflows,
        notes=list(sentences(comparison, len(comparison.layers))),
    )
    write_text(path, page)
