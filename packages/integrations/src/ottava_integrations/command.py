"""``ottava export``: a file of tensors converted to another recipe, or to high precision."""

import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress

from ottava.cli.output import console, parse_options, say, table
from ottava.errors import (
    DTypeError,
    OptionError,
    RecipeNotFoundError,
    UsageError,
    named,
    translated,
)
from ottava.filesystem import check_file_target
from ottava.recipes.registry import list_recipes

_Texts = list[str] | None


def grouped(names: Sequence[str]) -> list[str]:
    """Names, those that differ in numbers alone as one with ``*`` and how many they are."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return [
        same[0] if len(same) == 1 else f"{pattern} ({len(same)})" for pattern, same in found.items()
    ]


def make_model(reference: str) -> Any:
    """The model that ``module:callable`` makes, on the meta device where it can be made there."""
    import torch

    what, expected = (
        f"--model {reference!r}",
        "module:callable, what makes the model without arguments",
    )
    # As of `python -m`: what is being worked on is found.
    sys.path.insert(0, os.getcwd())
    with translated(f"{what} cannot be had", expected, to=OptionError):
        make: Any = pkgutil.resolve_name(reference) if ":" in reference else None
        if not callable(make):
            raise ValueError("it names no callable")
    with named(what), translated(f"{what} fails", "what makes the model", to=UsageError):
        try:
            with torch.device("meta"):
                made = make()
        except RuntimeError:  # what looks at values as it makes them
            made = make()
    if not isinstance(made, torch.nn.Module):
        raise DTypeError(f"{what} makes a {type(made).__name__}", expected="a torch.nn.Module")
    return made


def export(
    IN: Annotated[
        Path,
        typer.Argument(help="A file or folder of safetensors, a torch.save file, or a checkpoint."),
    ],
    OUT: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    recipe: Annotated[str, typer.Option(help="An installed recipe, or bf16, fp16 or fp32.")],
    option: Annotated[
        _Texts, typer.Option(help="An option of the recipe, key=value; may be given again.")
    ] = None,
    include: Annotated[
        _Texts, typer.Option(help="A pattern of tensors (of modules, with --model) to convert.")
    ] = None,
    exclude: Annotated[
        _Texts, typer.Option(help="A pattern of what not to convert; may be given again.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="module:callable, a model whose layers are converted.")
    ] = None,
    columnwise: Annotated[
        bool, typer.Option("--columnwise", help="Write columnwise data too, to train on.")
    ] = False,
    prefix: Annotated[
        str, typer.Option(help="Take only tensors whose names begin with it, and take it off.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Convert the tensors of a file to another recipe, or to high precision."""
    from ottava_integrations.converting import HIGH_PRECISION_NAMES, KINDS, convert_file

    if OUT.exists() and not force:
        raise UsageError(f"{OUT} exists", expected="a new file", remedy="--force replaces it")
    check_file_target(OUT)  # before the model is made
    known = [*(spec.name for spec in list_recipes()), *HIGH_PRECISION_NAMES]
    # On standard error, so that the table alone can be kept.
    bar, columns = console(stderr=True), (*Progress.get_default_columns(), DownloadColumn())
    try:
        options = parse_options(option or [])
        with Progress(
            *columns, console=bar, disable=not bar.is_terminal, transient=True
        ) as progress:
            task = progress.add_task("Converting", total=None)
            made = None if model is None else make_model(model)
            given: dict[str, Any] = {
                "include": include or None,
                "exclude": exclude or None,
                "columnwise": columnwise,
            }
            given["progress"] = lambda read, total: progress.update(
                task, completed=read, total=total
            )
            done = convert_file(
                IN, OUT, recipe, options=options, model=made, prefix=prefix, **given
            )
    except RecipeNotFoundError as error:
        # The name may be misspelled: no command may be proposed that installs whatever has that
        # name.
        if "no installed package" not in error.what:
            raise
        expected = f"one of {', '.join(known)}"
        raise RecipeNotFoundError(
            error.what, expected, "`ottava recipes` lists what is installed"
        ) from error
    words = {"copied": "copied as they are", "dropped": "dropped: scaling state of another recipe"}
    counts = [
        (words.get(kind, kind), str(len(names))) for kind in KINDS if (names := getattr(done, kind))
    ]
    counts += [
        ("bytes before", decimal(done.bytes_before)),
        ("bytes after", decimal(done.bytes_after)),
    ]
    console().print(
        table(f"Converted to {done.recipe}", ("tensors", "number"), counts, right=("number",))
    )
    for title, listed in (
        ("Quantized", done.quantized),
        ("Left alone, named as embeddings", done.skipped),
    ):
        if listed:
            say(f"{title}: {', '.join(grouped(listed))}")
    say(f"Written: {OUT}")
