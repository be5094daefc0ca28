"""The command ``ottava analyze``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ottava_debug.output import Force

_Paths = Path | None


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
    ] = 20.0,
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
    force: Force = False,
) -> None:
    """Say what each recipe would make of a checkpoint's tensors, and which layers should stay in
    BF16."""
    from ottava_debug.analysis.running import run

    options: dict[str, Any] = {
        "recipes": recipe,
        "loss": loss,
        "steps": steps,
        "threshold": threshold,
    }
    files = {"json": json_file, "html": html, "recipe": recipe_file}
    run(checkpoint, model, data, files, rows=rows, base=base, force=force, **options)
