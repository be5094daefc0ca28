"""Runs the demo: checks the options, trains, reports."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TimeRemainingColumn

import ottava
from ottava.cli.output import PlainColumn, console, say
from ottava.errors import DeviceError, OptionError, OttavaError, UsageError, text_of
from ottava.filesystem import check_file_target
from ottava.kernels.products import product_dtype
from ottava.recipes.registry import RECIPE, plugin_statuses
from ottava_demo.data import load_corpus
from ottava_demo.model import SIZES
from ottava_demo.report import FILES, Skipped, check_libraries, table, write
from ottava_demo.training import Run, train

_SEEDS = range(-(2**63), 2**63)
# Runs that will take longer than _LONG_MINUTES are announced once _FIRST_STEPS steps were timed.
_LONG_MINUTES = 10
_FIRST_STEPS = 3
_SHORTER = " --steps, --recipe and --size tiny make it shorter; Ctrl-C ends it."


def _device(name: str) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        # The code below refuses meta, like every other device that the demo does not know.
        device = torch.device("meta")
    if device.type == "cpu":
        return "cpu"
    cuda = device.type == "cuda"
    if cuda and (device.index or 0) < gpus:
        return str(device)
    available = ["auto", "cpu"]
    if gpus:
        available += ["cuda", *(f"cuda:{number}" for number in range(gpus))]
    problem = f"device {name!r}"
    if cuda:
        problem += f", and torch sees {gpus or 'no'} GPU(s)"
    raise DeviceError(
        problem,
        expected=f"one of {', '.join(available)}",
        remedy="check the driver, and that torch is built for CUDA" if cuda and not gpus else "",
    )


def _choose(requested: list[str] | None) -> tuple[list[str], list[Skipped]]:
    """The names of the recipes to train, and the installed recipes that cannot be built.

    Raises:
        OttavaError: a requested recipe cannot be built.
    """
    if requested:
        names = list(dict.fromkeys(requested))
        for name in names:
            ottava.get_recipe(name)
        return names, []
    names = []
    statuses = plugin_statuses()
    skipped = [
        Skipped(status.name, status.error) for status in statuses if status.status == "broken"
    ]
    listed = {spec.name for status in statuses for spec in status.offers if spec.kind == RECIPE}
    contested = {
        refusal.name for status in statuses for refusal in status.refused if refusal.kind == RECIPE
    }
    for name in sorted(listed | contested):
        try:
            ottava.get_recipe(name)
        except OttavaError as error:
            skipped.append(Skipped(name, text_of(error)))
        else:
            names.append(name)
    return names, skipped


def _make_folder(out: Path) -> None:
    """Make the folder and check that its files can be written, before minutes are spent training.

    Raises:
        OptionError: the folder or one of its files cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(b"x")
        for name in FILES:
            check_file_target(out / name)
    except OSError as error:
        raise OptionError(
            f"--out {out} cannot be written: {error.strerror}",
            expected="a folder that exists or can be made, and can be written to",
        ) from error


def _forecast(task: Task, runs: int, left: int, elapsed: float) -> str | None:
    """A sentence about how long all runs will take; None where that is short or not known yet.

    Recipes differ several times in pace, so a forecast is made from the first steps of each run.
    It assumes that the ``left`` runs after the one of ``task`` keep its pace. ``elapsed`` is in
    seconds.
    """
    steps = task.total or 0
    if task.speed is None or task.completed != min(1 + _FIRST_STEPS, steps):
        return None
    minutes = round((elapsed + (steps * (1 + left) - task.completed) / task.speed) / 60)
    if minutes <= _LONG_MINUTES:
        return None
    length = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    subject = f"{runs} runs" if runs > 1 else "the run"
    return f"At the pace of these steps {subject} will take about {length}.{_SHORTER}"


def run_demo(
    *, recipes: list[str] | None, steps: int, size: str, device: str, out: Path, seed: int
) -> int:
    """Train in BF16 and in each recipe, print the table, and write the picture and the page.

    With ``recipes`` None every installed recipe is trained, and one that fails is reported and left
    out. All options are checked before anything is trained.

    Returns:
        The exit code: 1 when a validation loss is not finite or a run failed, otherwise 0.

    Raises:
        OptionError, DeviceError: an option is wrong.
        UsageError: a library is missing, or the results cannot be written.
    """
    if size not in SIZES:
        raise OptionError(f"size {size!r}", expected=f"one of {', '.join(SIZES)}")
    if seed not in _SEEDS:
        raise OptionError(f"seed {seed}", expected="a number of 64 bits, with sign")
    place = _device(device)
    names, skipped = _choose(recipes)
    for skip in skipped:
        say(f"skipped {skip.name}: {skip.reason}", stderr=True)
    check_libraries()
    # This raises, before the folder is made, if the environment variable names no dtype.
    product_dtype(torch.bfloat16, torch.device(place))
    corpus = load_corpus()
    _make_folder(out)

    runs: list[Run] = []
    columns = (
        PlainColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        PlainColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    failures = 0
    announced = False
    # A run's pace is the mean over all its steps, because a single step can take minutes.
    with Progress(
        *columns, console=console(), speed_estimate_period=math.inf, get_time=time.perf_counter
    ) as progress:
        start = time.perf_counter()
        for number, recipe in enumerate([None, *names]):
            task = progress.add_task(recipe or "bf16", total=steps, loss=math.nan)

            def advance(loss: float, number: int = number, task: TaskID = task) -> None:
                nonlocal announced
                progress.update(task, advance=1, loss=loss)
                if announced:
                    return
                left = len(names) - number
                elapsed = time.perf_counter() - start
                forecast = _forecast(progress.tasks[task], 1 + len(names), left, elapsed)
                if forecast is not None:
                    progress.console.print(forecast, soft_wrap=True)
                    announced = True

            try:
                runs.append(
                    train(
                        recipe,
                        corpus,
                        size=size,
                        steps=steps,
                        device=place,
                        seed=seed,
                        progress=advance,
                    )
                )
            except Exception as error:
                # A failing recipe that nobody asked for by name must not lose the other results.
                if recipe is None or recipes:
                    raise
                failures += 1
                skipped.append(
                    Skipped(recipe, f"failed in training: {type(error).__name__}: {text_of(error)}")
                )
                say(f"{recipe} {skipped[-1].reason}", stderr=True)
    console().print(table(runs, skipped))
    summary = f"{size} model, {steps} steps, seed {seed}, on {place}, torch {torch.__version__}."
    try:
        write(runs, skipped, out, summary)
    except OSError as error:
        raise UsageError(f"the results cannot be written to {out}: {error}") from error
    say(f"Picture {out / 'loss.png'}, page {out / 'index.html'}")
    broken = [run.name for run in runs if not math.isfinite(run.validation)]
    if broken:
        say(f"Not finite: {', '.join(broken)}")
    return 1 if broken or failures else 0
