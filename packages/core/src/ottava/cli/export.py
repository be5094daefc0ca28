"""``ottava export``: a file of tensors converted to another recipe, or to high precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ottava.checkpoint.convert import HIGH_PRECISION_NAMES, Conversion, convert_file
from ottava.errors import OptionError, UsageError
from ottava.recipes.options import OptionDefaults


def parse_options(recipe: str, given: list[str]) -> dict[str, Any]:
    """Options from texts ``key=value``: JSON where that makes sense, else text; members of enumerations by name.

    Raises:
        OptionError: one is not ``key=value``, stands there twice, or names no member.
    """
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise OptionError(f"--option {text!r}", expected="key=value, each key once")
        options[key] = value
    if not options or recipe in HIGH_PRECISION_NAMES:
        return options
    defaults = OptionDefaults(recipe)
    return {key: defaults.parse(key, value) for key, value in options.items()}


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _table(done: Conversion) -> Table:
    table = Table(title=f"Converted to {done.recipe}")
    table.add_column("tensors")
    table.add_column("number", justify="right")
    for kind, names in (
        ("quantized", done.quantized),
        ("dequantized", done.dequantized),
        ("cast", done.cast),
        ("copied as they are", done.copied),
        ("dropped: scaling state of another recipe", done.dropped),
    ):
        if names:
            table.add_row(kind, str(len(names)))
    table.add_row("bytes before", _size(done.bytes_before))
    table.add_row("bytes after", _size(done.bytes_after))
    return table


def run_export(
    *,
    source: Path,
    target: Path,
    recipe: str,
    options: list[str] | None,
    include: list[str] | None,
    exclude: list[str] | None,
    prefix: str,
    force: bool,
) -> None:
    """Convert, with a progress bar on a terminal, and print what became of the tensors.

    Raises:
        UsageError: ``target`` exists and ``force`` is False, or it cannot be written.
        OttavaError: as :func:`ottava.checkpoint.convert_file`; nothing is written.
    """
    if target.exists() and not force:
        raise UsageError(f"{target} exists", expected="a new file", remedy="--force replaces it")
    chosen = parse_options(recipe, options or [])
    # On standard error, so that the table alone can be kept.
    bar = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=bar, disable=not bar.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("Converting", total=None)
        done = convert_file(
            source,
            target,
            recipe,
            options=chosen,
            include=include or None,
            exclude=exclude or None,
            prefix=prefix,
            progress=lambda read, total: progress.update(task, completed=read, total=total),
        )
    console = Console(markup=False, emoji=False)
    console.print(_table(done))
    console.print(f"Written: {target}", soft_wrap=True)
