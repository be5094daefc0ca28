"""``ottava export`` converts a file of tensors to another recipe, or to high precision."""

import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress

from ottava.cli.output import console, grouped, parse_options, say, table
from ottava.errors import (
    DTypeError,
    OptionError,
    RecipeNotFoundError,
    UsageError,
    named,
    translated,
)
from ottava.filesystem import check_file_target, read_bytes
from ottava.recipes.registry import list_recipes

if TYPE_CHECKING:
    from ottava_integrations.checking import ExportCheck
    from ottava_integrations.converting import Conversion
    from ottava_integrations.exporting import ExportReport

_Texts = list[str] | None


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
    OUT: Annotated[Path, typer.Argument(help="The file to write; with --to, the folder to write.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="An installed recipe, or bf16, fp16 or fp32. With --to: the recipe for weights in "
            "high precision."
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="A published format: a folder that servers read.")
    ] = None,
    option: Annotated[
        _Texts, typer.Option(help="An option of the recipe, key=value; may be given again.")
    ] = None,
    include: Annotated[
        _Texts,
        typer.Option(help="A pattern of tensors (of modules, with --model or --to) to convert."),
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
    activations: Annotated[
        str | None,
        typer.Option(
            help="With --to: what has one scale in inputs when served: tensor, token, block, group "
            "or none."
        ),
    ] = None,
    input_amaxes: Annotated[
        Path | None,
        typer.Option(
            help="With --to: JSON with the largest magnitude of each layer's input, for formats "
            "with constant scales of inputs."
        ),
    ] = None,
    max_shard_size: Annotated[int, typer.Option(help="With --to: bytes of one file, at most.")] = 5
    * 10**9,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="With --to: have the library of the format read OUT."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Convert a checkpoint to another recipe or to high precision, or to a published format."""
    if to is None and recipe is None:
        raise UsageError("neither --to nor --recipe is given", expected="one of them")
    if OUT.exists() and not force:
        raise UsageError(f"{OUT} exists", expected="a new file", remedy="--force replaces it")
    options = parse_options(option or [])
    if to is not None:
        with _other_remedy():
            _export_published(
                IN,
                OUT,
                to,
                recipe=_recipe_of(recipe, options),
                model=model,
                activations=activations,
                include=include or None,
                exclude=exclude or None,
                input_amaxes=_amaxes(input_amaxes),
                max_shard_size=max_shard_size,
                verify=verify,
                force=force,
            )
        return
    of_formats = {"--activations": activations, "--input-amaxes": input_amaxes}
    misplaced = [name for name, value in of_formats.items() if value is not None]
    if verify:
        misplaced.append("--verify")
    if misplaced:
        raise UsageError(f"{misplaced[0]} without --to", expected="--to FORMAT")
    assert recipe is not None
    _convert(
        IN,
        OUT,
        recipe,
        options=options,
        include=include or None,
        exclude=exclude or None,
        model=model,
        columnwise=columnwise,
        prefix=prefix,
    )


def _convert(source: Path, target: Path, recipe: str, *, model: str | None, **options: Any) -> None:
    """Convert a file to another recipe, or to high precision."""
    from ottava_integrations.converting import convert_file

    # The target is checked first, because making the model can take long.
    check_file_target(target)
    # The progress goes to standard error, so that standard output has the table alone.
    errors = console(stderr=True)
    columns = (*Progress.get_default_columns(), DownloadColumn())
    with (
        _other_remedy(),
        Progress(
            *columns, console=errors, disable=not errors.is_terminal, transient=True
        ) as progress,
    ):
        task = progress.add_task("Converting", total=None)
        conversion = convert_file(
            source,
            target,
            recipe,
            model=None if model is None else make_model(model),
            progress=lambda read, total: progress.update(task, completed=read, total=total),
            **options,
        )
    _print(conversion)
    say(f"Written: {target}")


def _recipe_of(name: str | None, options: dict[str, object]) -> Any:
    """The recipe of --recipe and --option; None without one."""
    if name is None:
        if options:
            raise UsageError("--option without --recipe", expected="--recipe, which has the option")
        return None
    from ottava.recipes import get_recipe

    return get_recipe(name, **options)


def _amaxes(path: Path | None) -> dict[str, float] | None:
    """The numbers in a file of JSON."""
    if path is None:
        return None
    expected = 'a JSON object of numbers: {"model.layers.0.mlp.up_proj": 12.5}'
    with translated(f"--input-amaxes {path} cannot be read", expected, to=OptionError):
        value = json.loads(read_bytes(path))
        return {str(name): float(number) for name, number in value.items()}


def _export_published(
    source: Path, folder: Path, format: str, *, model: str | None, verify: bool, **options: Any
) -> None:
    """Write a checkpoint in a published format, and have it read again."""
    from ottava_integrations.checking import check_export
    from ottava_integrations.formats import schemes_of
    from ottava_integrations.sources import open_source
    from ottava_integrations.writing import export_model

    schemes_of(format)
    made = None if model is None else make_model(model)
    opened = open_source(source, made)
    report = export_model(
        opened.model, folder, format, config=opened.config, files=opened.files, **options
    )
    _print_export(report)
    say(f"Written: {folder}")
    if not verify:
        return
    same = {name: options[name] for name in ("recipe", "include", "exclude")}
    check = check_export(opened.model, folder, **same)
    _print_check(check)
    contracts = _recognized(folder, source)
    if contracts:
        say(contracts)
    if not check.is_equal:
        raise typer.Exit(1)


def _print_export(report: "ExportReport") -> None:
    """Print how many layers have which scheme, and what stays in high precision."""
    counts: dict[tuple[str, str, str], int] = {}
    for layer in report.layers.values():
        how = f"quantized by {layer.recipe}" if layer.recipe else "kept as they were"
        key = str(layer.scheme), how, layer.citation
        counts[key] = counts.get(key, 0) + 1
    rows = [(*key, str(count)) for key, count in counts.items()]
    columns = ("layers", "bytes", "contract", "number")
    console().print(table(f"Exported to {report.format}", columns, rows, right=("number",)))
    say(f"Inputs when served: {report.activations}; {decimal(report.nbytes)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in report.high_precision.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        say(f"In high precision, because {reason}: {', '.join(grouped(names))}")


def _print_check(check: "ExportCheck") -> None:
    """Print what another library reads."""
    unequal = len(check.different)
    say(
        f"{check.reader} decodes {check.weights - unequal} of {check.weights} weights to the same "
        "values"
    )
    for name, count in list(check.different.items())[:5]:
        say(f"  {name}: {count} values differ")
    if check.others:
        say(f"Tensors in high precision that differ: {', '.join(grouped(check.others))}")
    if check.logits is not None:
        say(f"Logits differ by {check.logits:.3g} of their norm from those of the model")
    else:
        say(f"Logits were not compared: {check.reason}")


def _recognized(folder: Path, source: Path) -> str:
    """What ``ottava verify`` says of an export, where it is installed and has a source."""
    if importlib.util.find_spec("ottava_verify") is None or not (source / "config.json").is_file():
        return ""
    from ottava_verify import verify_checkpoint

    report = verify_checkpoint(folder, source)
    equal = sum(finding.status == "equal" for finding in report.findings)
    contracts = sorted({finding.contract for finding in report.findings})
    return (
        f"ottava verify recognizes {equal} of {len(report.findings)} weights: "
        f"{'; '.join(contracts)}"
    )


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
