"""The command ``ottava analyze``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TaskID, TaskProgressColumn

from ottava.cli.files import RECIPE_FILE, Force, Output, check_outputs
from ottava.cli.output import console, say
from ottava.errors import OptionError
from ottava_debug.output import progress_bar
from ottava_debug.references import call, resolve_loss

_Paths = Path | None
_TARGETS = "targets"
_THRESHOLD = 20.0
# Unit of the progress -> the title of its bar.
_WORDS = {"elements": "Weights", "steps": "Steps"}


def analyze(
    checkpoint: Annotated[
        _Paths,
        typer.Argument(
            help="A safetensors file, a folder of such, a file of torch.save, or a sharded "
            "checkpoint. With --model it may be left out: the weights are those of the model then."
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe, or the path of a recipe file; repeatable. By default all that need no "
            "options."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="module:callable, what makes the model, whose layers are looked at then."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Batches for the model, to look at real inputs and gradients: module:callable, "
            "what gives an iterable of them, or a file of tensors, one batch by the names of the "
            "model's arguments, and targets."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="What a batch's gradients are of: cross_entropy, mse, or module:callable, of the "
            "output and the targets. By default what the model gives as its loss."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="The most batches to take.")] = 3,
    threshold: Annotated[
        float, typer.Option(help="Decibels: where the SQNR is lower, a layer needs high precision.")
    ] = _THRESHOLD,
    rows: Annotated[
        int, typer.Option(min=1, help="How many tensors to show, the worst ones.")
    ] = 20,
    json_file: Annotated[_Paths, typer.Option("--json", help="Write the report as JSON.")] = None,
    html: Annotated[
        _Paths,
        typer.Option(help="Write the report as a page: one file that asks for nothing else."),
    ] = None,
    recipe_file: Annotated[
        _Paths,
        typer.Option(
            help="Write the suggested recipe file (.yaml): what needs it stays in high precision."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="The recipe of the suggested file. By default that which needs high precision "
            "least."
        ),
    ] = None,
    served: Annotated[
        _Paths,
        typer.Option(
            help="A published quantized checkpoint: compare the trainer's numerics, those of "
            "--model under --recipe, with the server's, layer by layer."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Say what each recipe would make of a checkpoint's tensors, and which layers should stay in
    BF16."""
    if served is not None:
        is_given = {
            "--loss": loss is not None,
            "--threshold": threshold != _THRESHOLD,
            "--recipe-file": recipe_file is not None,
            "--base": base is not None,
        }
        _check_alone([option for option in is_given if is_given[option]])
        _compare(checkpoint, served, recipe, model, data, steps, rows, json_file, html, force)
        return
    from ottava_debug.analysis import output
    from ottava_debug.analysis.analyze import analyze as measure

    outputs = (
        Output("--json", json_file, output.JSON),
        Output("--html", html, output.PAGE),
        Output("--recipe-file", recipe_file, RECIPE_FILE),
    )
    check_outputs(outputs, (checkpoint, data, base, *(recipe or ())), force)
    if base is not None and recipe and base not in recipe:
        raise OptionError(f"--base {base!r}", expected=f"one of {', '.join(recipe)}")
    function = resolve_loss(loss)
    with _progress() as progress:
        report = measure(
            checkpoint,
            recipes=recipe,
            model=None if model is None else call("--model", model),
            data=None if data is None else _batches(data, loss is not None),
            loss=function,
            steps=steps,
            threshold=threshold,
            progress=progress,
        )
    # This raises, before anything is shown, if ``base`` is not in the report.
    keeps = report.keeps(base or report.best_recipe())
    _show(report, rows)
    if json_file is not None:
        output.write_json(report, json_file)
    if html is not None:
        output.write_html(report, html)
    if recipe_file is not None:
        output.write_suggestion(report, recipe_file, base)
        if base is not None:
            say(f"{recipe_file} is {base} with {len(keeps)} layers in high precision.")
    for path in filter(None, (json_file, html, recipe_file)):
        say(f"Written: {path}")


def _check_alone(options: list[str]) -> None:
    """Check that none of the options that ``--served`` does not use is given."""
    if options:
        raise OptionError(
            f"--served with {', '.join(options)}",
            expected="none of these: a comparison has no gradients and suggests no recipe file",
        )


def _compare(
    checkpoint: Path | None,
    served: Path,
    recipes: list[str] | None,
    model: str | None,
    data: str | None,
    steps: int,
    rows: int,
    json_file: Path | None,
    html: Path | None,
    force: bool,
) -> None:
    """Compare a trainer with a server, for ``--served``."""
    if model is None or data is None:
        raise OptionError("--served without --model and --data", expected="both")
    if recipes is not None and len(recipes) > 1:
        raise OptionError("--served with several recipes", expected="the one of the training")
    import ottava
    from ottava_debug.analysis.captured import load_values
    from ottava_debug.analysis.sources import read
    from ottava_debug.served import output
    from ottava_debug.served.comparing import compare_served

    outputs = (Output("--json", json_file, output.JSON), Output("--html", html, output.PAGE))
    check_outputs(outputs, (checkpoint, served, data, *(recipes or ())), force)
    trainer = call("--model", model)
    if checkpoint is not None:
        load_values(trainer, read(checkpoint))
    if recipes:
        trainer = ottava.convert(trainer, recipes[0], exclude=ottava.HEADS)
    comparison = compare_served(trainer, served, _batches(data, False), steps=steps)
    console().print(output.layer_table(comparison, rows))
    for sentence in output.sentences(comparison, rows):
        say(sentence)
    if json_file is not None:
        output.write_json(comparison, json_file)
    if html is not None:
        output.write_html(comparison, html)
    for path in filter(None, (json_file, html)):
        say(f"Written: {path}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows the progress in a bar for each unit."""
    with progress_bar(TaskProgressColumn()) as bar:
        tasks: dict[str, TaskID] = {}

        def show(unit: str, done: int, total: int) -> None:
            if unit not in tasks:
                tasks[unit] = bar.add_task(_WORDS[unit], total=total)
            bar.update(tasks[unit], completed=done)

        yield show


def _batches(data: str, pairs: bool) -> Any:
    """The batches that ``--data`` names: those that a callable returns, or one from a file.

    With ``pairs`` a batch from a file is a pair with its targets, if the file has any.
    """
    from ottava.checkpoint import read_state

    if not Path(data).is_file():
        return call("--data", data)
    batch = dict(read_state(Path(data))[0])
    if pairs and _TARGETS in batch:
        return [(batch, batch.pop(_TARGETS))]
    return [batch]


def _show(report: Any, rows: int) -> None:
    from ottava_debug.analysis.terminal import sentences, summary_table, tensor_table

    console().print(summary_table(report))
    console().print(tensor_table(report, rows))
    for sentence in sentences(report, rows):
        say(sentence)
