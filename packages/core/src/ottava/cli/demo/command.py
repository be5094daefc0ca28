"""Runs the demo: checks the options, trains, reports."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

import ottava
from ottava.cli.demo.data import load_corpus
from ottava.cli.demo.model import SIZES
from ottava.cli.demo.report import check_libraries, table, write
from ottava.cli.demo.training import Run, train
from ottava.errors import DeviceError, OptionError


def _device(name: str) -> str:
    available = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    if name == "auto":
        return available[-1]
    if name not in available:
        raise DeviceError(f"device {name!r}", expected=f"auto or one of {', '.join(available)}")
    return name


def _advance(progress: Progress, task: TaskID, loss: float) -> None:
    progress.update(task, advance=1, loss=loss)


def run_demo(*, recipes: list[str] | None, steps: int, size: str, device: str, out: Path, seed: int) -> int:
    """Train BF16 and each recipe, print the table, write picture and page; 1 when a loss is not finite.

    Raises:
        OptionError, DeviceError, RecipeNotFoundError, UsageError: before anything is trained or written.
    """
    if size not in SIZES:
        raise OptionError(f"size {size!r}", expected=f"one of {', '.join(SIZES)}")
    if out.exists() and not out.is_dir():
        raise OptionError(f"--out {out} is a file", expected="a folder")
    place = _device(device)
    names = recipes or [spec.name for spec in ottava.list_recipes()]
    for name in names:
        ottava.get_recipe(name)
    check_libraries()
    corpus = load_corpus()

    console = Console()
    runs: list[Run] = []
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name in ["bf16", *names]:
            task = progress.add_task(name, total=steps, loss=math.nan)
            advance = partial(_advance, progress, task)
            recipe = None if name == "bf16" else name
            runs.append(train(recipe, corpus, size=size, steps=steps, device=place, seed=seed, progress=advance))
    console.print(table(runs))
    summary = f"{size} model, {steps} steps, seed {seed}, on {place}, torch {torch.__version__}."
    write(runs, out, summary)
    console.print(f"Picture {out / 'loss.png'}, page {out / 'index.html'}", soft_wrap=True)
    broken = [run.name for run in runs if not math.isfinite(run.validation)]
    if broken:
        console.print(f"Not finite: {', '.join(broken)}")
    return 1 if broken else 0
