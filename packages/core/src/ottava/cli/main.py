"""The typer application. Commands import what they need when they run: listing recipes never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import ottava
from ottava.errors import OttavaError, UsageError, text_of

app = typer.Typer(no_args_is_help=True, add_completion=False, help="FP8 training for PyTorch.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextmanager
def _told() -> Iterator[None]:
    """An error that Ottava raises on purpose is told in its own words, with exit code 2."""
    try:
        yield
    except OttavaError as error:
        typer.echo(f"error: {text_of(error)}", err=True)
        raise typer.Exit(2) from None


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ottava {ottava.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FP8 training for PyTorch."""


@app.command()
def recipes(
    as_json: Json = False,
    explain: Annotated[
        str | None,
        typer.Option(help="Say which layer and role gets what under a recipe: a name, or the path of a recipe file."),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(help="With --explain: a layer's name, repeatable; by default those of the demo's model."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="With --explain: a file or folder of tensors whose layers to ask about.")
    ] = None,
) -> None:
    """List the installed recipes and quantizer factories, and the packages that are broken."""
    with _told():
        if explain is not None:
            from ottava.cli.explain import show_explanation

            show_explanation(explain, layer or [], checkpoint, as_json)
            return
        given = [option for option, value in (("--layer", layer), ("--checkpoint", checkpoint)) if value]
        if given:
            raise UsageError(f"{' and '.join(given)} without --explain", remedy="say which recipe: --explain NAME")
        from ottava.cli.recipes import show_recipes

        show_recipes(as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check versions, kernel backends, plugins, recipes and the kernels themselves; exit code 1 when one is wrong."""
    from ottava.cli.doctor import run_doctor

    with _told():
        raise typer.Exit(run_doctor(as_json))


@app.command()
def demo(
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="A recipe to train with, repeatable; by default every installed one that can be built."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 150,
    size: Annotated[str, typer.Option(help="Model size: tiny, small or medium.")] = "small",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the picture, the page and the results.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and the batches.")] = 0,
) -> None:
    """Train a small GPT in BF16 and in every recipe, on the standard library's source code."""
    from ottava.cli.demo.command import run_demo

    with _told():
        raise typer.Exit(run_demo(recipes=recipe, steps=steps, size=size, device=device, out=out, seed=seed))


@app.command()
def export(
    IN: Annotated[
        Path,
        typer.Argument(
            help="A safetensors file, a folder with several, a file of torch.save, or a sharded checkpoint."
        ),
    ],
    OUT: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    recipe: Annotated[str, typer.Option(help="An installed recipe, or bf16, fp16 or fp32.")],
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the recipe, key=value; may be given again.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="A pattern of the tensors to convert; may be given again.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="A pattern of tensors not to convert; may be given again.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="module:callable, what makes the model: the weights that convert would quantize are chosen. "
            "--include and --exclude are then of modules."
        ),
    ] = None,
    columnwise: Annotated[
        bool, typer.Option("--columnwise", help="Write columnwise data of the recipe too, for training to go on.")
    ] = False,
    prefix: Annotated[
        str, typer.Option(help="Take only tensors whose names begin with it, and take it off: model. for example.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Convert the tensors of a file to another recipe, or to high precision, one by one."""
    from ottava.cli.export import run_export

    with _told():
        run_export(
            source=IN,
            target=OUT,
            recipe=recipe,
            options=option,
            include=include,
            exclude=exclude,
            model=model,
            columnwise=columnwise,
            prefix=prefix,
            force=force,
        )


@app.command("new-recipe")
def new_recipe(
    NAME: Annotated[str, typer.Argument(help="The recipe's name: lower-case letters, digits, - and _.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder to write, new or empty; by default one named NAME.")
    ] = None,
) -> None:
    """Write a package with a recipe of your own: a working scheme to start from, its tests and its CI file."""
    from ottava.cli.new_recipe.command import run_new_recipe

    with _told():
        run_new_recipe(NAME, out)


@app.command("check-recipe")
def check_recipe(
    NAME: Annotated[str | None, typer.Argument(help="An installed recipe, or the path of a recipe file.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="A check to run; may be given again. By default all.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave out what compiles or starts processes.")] = False,
    expect_failure: Annotated[
        list[str] | None, typer.Option(help="A check that has to fail, CHECK=REASON; may be given again.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the recipe, key=value; may be given again.")
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="The name of a layer, for recipes that go by names; may be given again.")
    ] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks, and run none.")] = False,
    as_json: Json = False,
) -> None:
    """Run the conformance kit (ottava-testing) on a recipe; exit code 1 when a check fails."""
    from ottava.cli.check_recipe import run_checks, show_checks

    with _told():
        if list_checks:
            show_checks(as_json)
            return
        if NAME is None:
            raise UsageError("no recipe is named", expected="the name of an installed recipe, or --list")
        code = run_checks(
            recipe=NAME,
            options=option or [],
            checks=check or [],
            fast=fast,
            expected_failures=expect_failure or [],
            layers=layer or [],
            as_json=as_json,
        )
        raise typer.Exit(code)
