"""Runs the demo: checks the options, trains, reports."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TimeRemainingColumn

import ottava
from ottava.cli.output import PlainColumn, console, say
from ottava.errors import DeviceError, OptionError, OttavaError, UsageError, text_of
from ottava.filesystem import check_file_target
from ottava.kernels.products import product_dtype
from ottava.recipes.registry import RECIPE, plugin_statuses
from ottava_demo.data import Corpus, load_corpus
from ottava_demo.model import SIZES
from ottava_demo.report import FILES, Skipped, check_libraries, table, write
from ottava_demo.training import Run, train

_SEEDS = range(-(2**63), 2**63)
# Runs that will take longer than _LONG_MINUTES are announced once _FIRST_STEPS steps were timed.
_LONG_MINUTES = 10
_FIRST_STEPS = 3
_SHORTER = " --steps, --recipe and --size tiny make it shorter; Ctrl-C ends it."


def _device(name: str) -> str:
    """The device that the demo trains on for ``--device name``.

    Raises:
        DeviceError: there is no such device, or the demo does not know it.
    """
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
    if device.type == "cuda" and (device.index or 0) < gpus:
        return str(device)
    raise _unknown_device(name, gpus, is_gpu=device.type == "cuda")


def _unknown_device(name: str, gpus: int, *, is_gpu: bool) -> DeviceError:
    available = ["auto", "cpu"]
    if gpus:
        available += ["cuda", *(f"cuda:{number}" for number in range(gpus))]
    problem, remedy = f"device {name!r}", ""
    if is_gpu:
        problem += f", and torch sees {gpus or 'no'} GPU(s)"
    if is_gpu and not gpus:
        remedy = "check the driver, and that torch is built for CUDA"
    return DeviceError(problem, expected=f"one of {', '.join(available)}", remedy=remedy)


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
    offered_names = {
        spec.name for status in statuses for spec in status.offers if spec.kind == RECIPE
    }
    contested = {
        refusal.name for status in statuses for refusal in status.refused if refusal.kind == RECIPE
    }
    for name in sorted(offered_names | contested):
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


class _Forecast:
    """Says once how long all runs will take, if that is long.

    Args:
        progress: shows the runs.
        runs: the number of all runs.
        steps: the number of steps of each run.
    """

    def __init__(self, progress: Progress, runs: int, steps: int) -> None:
        self._progress, self._runs, self._steps = progress, runs, steps
        self._start = time.perf_counter()
        self._announced = False

    def update(self, task: Task, later_runs: int) -> None:
        """Called after each step of a run, which ``later_runs`` runs follow."""
        if self._announced:
            return
        minutes = self._minutes(task, later_runs)
        if minutes is not None and minutes > _LONG_MINUTES:
            self._progress.console.print(self._sentence(minutes), soft_wrap=True)
            self._announced = True

    def _minutes(self, task: Task, later_runs: int) -> int | None:
        """How long all runs take, if the later runs keep the pace of this one.

        Recipes differ several times in pace, so the first steps of each run are asked; None at any
        other step.
        """
        if task.speed is None or task.completed != min(1 + _FIRST_STEPS, self._steps):
            return None
        elapsed = time.perf_counter() - self._start
        later_steps = self._steps * (1 + later_runs) - task.completed
        return round((elapsed + later_steps / task.speed) / 60)

    def _sentence(self, minutes: int) -> str:
        hours, rest = divmod(minutes, 60)
        length = f"{hours} h {rest} min" if hours else f"{minutes} min"
        subject = f"{self._runs} runs" if self._runs > 1 else "the run"
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
    training = _Training(corpus, size=size, steps=steps, device=place, seed=seed)
    runs, failures = _train_all(training, names, are_required=bool(recipes))
    skipped += failures
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


@dataclass(frozen=True)
class _Training:
    """What all runs have in common; see :func:`ottava_demo.training.train`."""

    corpus: Corpus
    size: str
    steps: int
    device: str
    seed: int

    def run(self, recipe: str | None, progress: Callable[[float], None]) -> Run:
        """Train once, with a recipe or in BF16 alone."""
        return train(
            recipe,
            self.corpus,
            size=self.size,
            steps=self.steps,
            device=self.device,
            seed=self.seed,
            progress=progress,
        )


def _train_all(
    training: _Training, names: list[str], *, are_required: bool
) -> tuple[list[Run], list[Skipped]]:
    """Train in BF16 and in each recipe, and show the progress.

    Returns:
        The runs, and the recipes that failed, unless they are required: then the error is raised.
    """
    runs: list[Run] = []
    failures: list[Skipped] = []
    with _progress() as progress:
        forecast = _Forecast(progress, 1 + len(names), training.steps)
        for number, recipe in enumerate([None, *names]):
            task = progress.add_task(recipe or "bf16", total=training.steps, loss=math.nan)
            later_runs = len(names) - number

            def advance(loss: float, later_runs: int = later_runs, task: TaskID = task) -> None:
                progress.update(task, advance=1, loss=loss)
                forecast.update(progress.tasks[task], later_runs)

            try:
                runs.append(training.run(recipe, advance))
            except Exception as error:
                # A failing recipe that nobody asked for by name must not lose the other results.
                if recipe is None or are_required:
                    raise
                reason = f"failed in training: {type(error).__name__}: {text_of(error)}"
                failures.append(Skipped(recipe, reason))
                say(f"{recipe} {reason}", stderr=True)
    return runs, failures


def _progress() -> Progress:
    # A run's pace is the mean over all its steps, because a single step can take minutes.
    return Progress(
        PlainColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        PlainColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=console(),
        speed_estimate_period=math.inf,
        get_time=time.perf_counter,
    )
