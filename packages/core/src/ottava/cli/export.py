"""``ottava export``: a file of tensors converted to another recipe, or to high precision."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ottava.checkpoint.convert import HIGH_PRECISION_NAMES, Conversion, convert_file
from ottava.errors import DTypeError, OptionError, RecipeNotFoundError, UsageError
from ottava.recipes.options import OptionDefaults
from ottava.recipes.registry import list_recipes


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


def grouped(names: Sequence[str]) -> list[str]:
    """Names, those that differ in numbers alone as one with ``*`` and how many they are."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return [same[0] if len(same) == 1 else f"{pattern} ({len(same)})" for pattern, same in found.items()]


def make_model(reference: str) -> Any:
    """The model that ``module:callable`` makes, on the meta device where it can be made there.

    Raises:
        OptionError: it is no such reference, or names nothing that can be called.
        DTypeError: what it makes is no model.
        UsageError: it fails.
    """
    import torch

    module, _, attribute = reference.partition(":")
    # As of `python -m`: what is being worked on is found.
    sys.path.insert(0, os.getcwd())
    try:
        make: Any = importlib.import_module(module)
        for part in attribute.split("."):
            make = getattr(make, part)
    except (ImportError, AttributeError, ValueError) as error:
        what = f"--model {reference!r} cannot be had: {error}"
        raise OptionError(what, expected="module:callable, what makes the model without arguments") from error
    finally:
        sys.path.remove(os.getcwd())
    if not attribute or not callable(make):
        raise OptionError(f"--model {reference!r} names no callable", expected="module:callable")
    try:
        try:
            with torch.device("meta"):
                made = make()
        except (RuntimeError, NotImplementedError):  # what looks at values as it makes them
            made = make()
    except Exception as error:
        raise UsageError(f"--model {reference!r} fails: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.nn.Module):
        raise DTypeError(f"--model {reference!r} makes a {type(made).__name__}", expected="a torch.nn.Module")
    return made


def run_export(
    *,
    source: Path,
    target: Path,
    recipe: str,
    options: list[str] | None,
    include: list[str] | None,
    exclude: list[str] | None,
    model: str | None,
    columnwise: bool,
    prefix: str,
    force: bool,
) -> None:
    """Convert, with a progress bar on a terminal, and print what became of the tensors.

    Raises:
        RecipeNotFoundError: no installed package has the recipe; the name may be misspelled, and is not installed.
        UsageError: ``target`` exists and ``force`` is False, or it cannot be written.
        OttavaError: as :func:`ottava.checkpoint.convert_file`; nothing is written.
    """
    if target.exists() and not force:
        raise UsageError(f"{target} exists", expected="a new file", remedy="--force replaces it")
    names = [*(spec.name for spec in list_recipes()), *HIGH_PRECISION_NAMES]
    try:
        chosen = parse_options(recipe, options or [])
        _convert(source, target, recipe, chosen, include, exclude, model, columnwise, prefix)
    except RecipeNotFoundError as error:
        if "no installed package" not in error.what:
            raise
        remedy = "`ottava recipes` lists what is installed"
        raise RecipeNotFoundError(error.what, expected=f"one of {', '.join(names)}", remedy=remedy) from error


def _convert(
    source: Path,
    target: Path,
    recipe: str,
    options: dict[str, Any],
    include: list[str] | None,
    exclude: list[str] | None,
    model: str | None,
    columnwise: bool,
    prefix: str,
) -> None:
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
            options=options,
            include=include or None,
            exclude=exclude or None,
            model=None if model is None else make_model(model),
            columnwise=columnwise,
            prefix=prefix,
            progress=lambda read, total: progress.update(task, completed=read, total=total),
        )
    console = Console(markup=False, emoji=False)
    console.print(_table(done))
    for title, listed in (("Quantized", done.quantized), ("Left alone, named as embeddings", done.skipped)):
        if listed:
            console.print(f"{title}: {', '.join(grouped(listed))}", soft_wrap=True)
    console.print(f"Written: {target}", soft_wrap=True)
