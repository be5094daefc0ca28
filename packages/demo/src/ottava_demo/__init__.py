"""``ottava demo`` trains a small GPT on the standard library's source code.

It trains one model in BF16 and one under every recipe, and compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__version__ = "0.1.0"


def demo(
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe to train with, repeatable; by default every installed one that can be "
            "built."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 150,
    size: Annotated[str, typer.Option(help="Model size: tiny, small or medium.")] = "small",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[
        Path, typer.Option(help="Folder for the picture, the page and the results.")
    ] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and the batches.")] = 0,
) -> None:
    """Train a small GPT in BF16 and in every recipe, on the standard library's source code."""
    from ottava_demo.command import run_demo

    raise typer.Exit(
        run_demo(recipes=recipe, steps=steps, size=size, device=device, out=out, seed=seed)
    )
