"""Runs ``ottava analyze``: builds the objects that the options name, then shows and writes the
report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import TaskID, TaskProgressColumn

from ottava.cli.output import console, say
from ottava.errors import OptionError
from ottava_debug.analysis import output
from ottava_debug.analysis.analyze import analyze
from ottava_debug.analysis.terminal import sentences, summary_table, tensor_table
from ottava_debug.losses import LOSSES
from ottava_debug.output import RECIPE_FILE, Output, check_outputs, progress_bar
from ottava_debug.references import call, resolve
from ottava_integrations import read_state

_TARGETS = "targets"
_WORDS = {"elements": "Weights", "steps": "Steps"}


def run(
    checkpoint: Path | None,
    model: str | None,
    data: str | None,
    files: Mapping[str, Path | None],
    *,
    rows: int,
    base: str | None,
    force: bool,
    loss: str | None,
    **options: Any,
) -> None:
    """Analyze, then show and write the report.

    Errors are those of :func:`ottava_debug.analyze`; they are raised before anything is written.
    """
    recipe_file = files["recipe"]
    outputs = (
        Output("--json", files["json"], output.JSON),
        Output("--html", files["html"], output.PAGE),
        Output("--recipe-file", recipe_file, RECIPE_FILE),
    )
    check_outputs(outputs, (checkpoint, data, base, *(options["recipes"] or ())), force)
    if base is not None and options["recipes"] and base not in options["recipes"]:
        raise OptionError(f"--base {base!r}", expected=f"one of {', '.join(options['recipes'])}")
    function = loss if loss is None or loss in LOSSES else resolve("--loss", loss)
    with progress_bar(TaskProgressColumn()) as bar:
        tasks: dict[str, TaskID] = {}

        def show_progress(unit: str, done: int, total: int) -> None:
            if unit not in tasks:
                tasks[unit] = bar.add_task(_WORDS[unit], total=total)
            bar.update(tasks[unit], completed=done)

        report = analyze(
            checkpoint,
            model=None if model is None else call("--model", model),
            data=None if data is None else _batches(data, loss is not None),
            loss=function,
            progress=show_progress,
            **options,
        )
    # This raises, before anything is shown, if ``base`` is not in the report.
    keeps = report.keeps(base or report.best_recipe())
    console().print(summary_table(report))
    console().print(tensor_table(report, rows))
    for sentence in sentences(report, rows):
        say(sentence)
    if files["json"] is not None:
        output.write_json(report, files["json"])
    if files["html"] is not None:
        output.write_html(report, files["html"])
    if recipe_file is not None:
        output.write_suggestion(report, recipe_file, base)
        if base is not None:
            say(f"{recipe_file} is {base} with {len(keeps)} layers in high precision.")
    for path in filter(None, files.values()):
        say(f"Written: {path}")


def _batches(data: str, pairs: bool) -> Any:
    """The batches that ``--data`` names: those that a callable returns, or one from a file.

    With ``pairs`` a batch from a file is a pair with its targets, if the file has any.
    """
    if not Path(data).is_file():
        return call("--data", data)
    batch = dict(read_state(Path(data))[0])
    if pairs and _TARGETS in batch:
        return [(batch, batch.pop(_TARGETS))]
    return [batch]
