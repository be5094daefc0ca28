"""The command ``ottava bisect``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from ottava.cli.files import RECIPE_FILE, Force, Output, check_outputs, write_text
from ottava.cli.output import Json, console, say, show_json, table
from ottava_debug.output import progress_bar
from ottava_debug.references import call, resolve_loss


def bisect(
    BUNDLE: Annotated[Path, typer.Argument(help="What ottava_bisect.capture wrote.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="module:callable, what makes the model, converted or not. Without it products "
            "are looked at alone."
        ),
    ] = None,
    measure: Annotated[
        str, typer.Option(help="loss, grad-norm or grad-distance.")
    ] = "grad-distance",
    loss: Annotated[
        str | None,
        typer.Option(
            help="cross_entropy, mse, or module:callable that is called with the model's output "
            "and the targets."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Replay under this recipe, or recipe file, instead of the captured one."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="The distance from high precision that is right.")
    ] = None,
    max_replays: Annotated[int, typer.Option(help="Stop after so many replays.")] = 200,
    recipe_file: Annotated[
        Path | None,
        typer.Option(
            help="Write the recipe file (.yaml) that keeps what was found in high precision."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Find the layer, the tensor and the direction whose quantization breaks a captured step."""
    from ottava_bisect.bundle import Bundle
    from ottava_bisect.search.bisect import bisect as search
    from ottava_bisect.search.page import PAGE, page

    outputs = Output("--recipe-file", recipe_file, RECIPE_FILE), Output("--html", html, PAGE)
    check_outputs(outputs, (BUNDLE, recipe), force)
    step = Bundle.read(BUNDLE)
    function = resolve_loss(loss)
    own_model = None if model is None else call("--model", model)
    # The number of replays is an estimate, which gets better as the search goes on.
    with progress_bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        unit = "Products" if own_model is None else "Replays, about"
        task = progress.add_task(unit, total=None)
        report = search(
            step,
            own_model,
            measure=measure,
            loss=function,
            recipe=recipe,
            tolerance=tolerance,
            max_replays=max_replays,
            progress=lambda count, total: progress.update(task, completed=count, total=total),
        )
    if recipe_file is not None and report.recipe_file:
        write_text(recipe_file, report.recipe_file)
    if html is not None:
        write_text(html, page(report, BUNDLE.name))
    if as_json:
        show_json(report.as_json())
    else:
        _show(report, recipe_file, html)
    raise typer.Exit(0 if report.solved else 1)


def _show(report: Any, recipe_file: Path | None, html: Path | None) -> None:
    from ottava_bisect.search.report import COLUMNS

    say(f"{report.sentence()}.")
    if report.findings:
        console().print(table("What breaks the step", COLUMNS, report.rows(), right=COLUMNS[3:]))
    for sentence in report.reasons():
        say(sentence)
    for note in report.notes:
        say(f"Note: {note}.")
    if report.verified is not None:
        say(f"Under the recipe file the distance is {report.verified:.4g}.")
    if report.recipe_file and recipe_file is None:
        text = "The recipe file that keeps them in high precision (--recipe-file writes it):"
        say(f"{text}\n\n{report.recipe_file}", lines=True)
    if recipe_file is not None and report.recipe_file:
        say(f"Written: {recipe_file}")
    if html is not None:
        say(f"Written: {html}")
    replays = f"{report.replays} replays, " if report.replays else ""
    say(f"{replays}{report.seconds:.1f} s")
