"""``ottava export`` converts a file of tensors to another recipe, or to high precision."""

import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from ottava_integrations.converting import Conversion

_Texts = list[str] | None


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


def make_model(reference: str) -> Any:
    """The model that ``module:callable`` makes, on the meta device where it can be made there.

    Raises:
        OptionError: the reference names no callable, or its module cannot be imported.
        UsageError: the callable fails.
        DTypeError: the callable gives no ``torch.nn.Module``.
    """
    import torch

    option = f"--model {reference!r}"
    expected = "module:callable, a callable that makes the model without arguments"
    # As `python -m` does, so that modules in the current directory can be imported.
    sys.path.insert(0, os.getcwd())
    with translated(f"{option} cannot be loaded", expected, to=OptionError):
        make: Any = pkgutil.resolve_name(reference) if ":" in reference else None
        if not callable(make):
            raise ValueError("it names no callable")
    expected = "a callable that makes the model"
    with named(option), translated(f"{option} fails", expected, to=UsageError):
        try:
            with torch.device("meta"):
                model = make()
        except RuntimeError:
            # A constructor that reads the values of its tensors cannot run on the meta device.
            model = make()
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"{option} makes a {type(model).__name__}", expected="a torch.nn.Module")
    return model


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
    from ottava_integrations.converting import convert_file

    if OUT.exists() and not force:
        raise UsageError(f"{OUT} exists", expected="a new file", remedy="--force replaces it")
    # The target is checked first, because making the model can take long.
    check_file_target(OUT)
    # The progress goes to standard error, so that standard output has the table alone.
    errors = console(stderr=True)
    columns = (*Progress.get_default_columns(), DownloadColumn())
    with (
        _other_remedy(),
        Progress(
            *columns, console=errors, disable=not errors.is_terminal, transient=True
        ) as progress,
    ):
        options = parse_options(option or [])
        task = progress.add_task("Converting", total=None)
        conversion = convert_file(
            IN,
            OUT,
            recipe,
            options=options,
            include=include or None,
            exclude=exclude or None,
            model=None if model is None else make_model(model),
            columnwise=columnwise,
            prefix=prefix,
            progress=lambda read, total: progress.update(task, completed=read, total=total),
        )
    _print(conversion)
    say(f"Written: {OUT}")


@contextmanager
def _other_remedy() -> Iterator[None]:
    """Replace the remedy of a recipe that is not found: its name may be misspelled, so the error
    must not propose to install a package with that name."""
    from ottava_integrations.converting import HIGH_PRECISION_NAMES

    names = [*(spec.name for spec in list_recipes()), *HIGH_PRECISION_NAMES]
    try:
        yield
    except RecipeNotFoundError as error:
        if "no installed package" not in error.what:
            raise
        raise RecipeNotFoundError(
            error.what, f"one of {', '.join(names)}", "`ottava recipes` lists what is installed"
        ) from error


def _print(conversion: "Conversion") -> None:
    """Print how many tensors had each outcome, and the names of those that a user may ask for."""
    from ottava_integrations.converting import KINDS

    words = {"copied": "copied as they are", "dropped": "dropped: scaling state of another recipe"}
    counts: list[tuple[str, str]] = []
    for kind in KINDS:
        if names := getattr(conversion, kind):
            counts.append((words.get(kind, kind), str(len(names))))
    counts.append(("bytes before", decimal(conversion.bytes_before)))
    counts.append(("bytes after", decimal(conversion.bytes_after)))
    console().print(
        table(f"Converted to {conversion.recipe}", ("tensors", "number"), counts, right=("number",))
    )
    if conversion.quantized:
        say(f"Quantized: {', '.join(grouped(conversion.quantized))}")
    if conversion.skipped:
        say(f"Left alone, named as embeddings: {', '.join(grouped(conversion.skipped))}")
