"""The demo's table, picture, page and data."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from ottava.cli import output
from ottava.errors import UsageError
from ottava_demo.training import Run

# Okabe and Ito's palette, whose colours can be told apart with any colour vision. Grey and brown
# take the place of its yellow, which is hard to see on white.
_COLOURS = ["#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"]
_COLOURS += ["#999999", "#6B3E26"]
# Number of steps over which the table and the curves average losses.
_AVERAGED = 10
_PEAK = "peak memory"
#: Names of the files that :func:`write` makes.
FILES = ("loss.png", "index.html", "results.json")


@dataclass(frozen=True)
class Skipped:
    """A recipe or a plugin that was not trained, and the reason."""

    name: str
    reason: str


def check_libraries() -> None:
    """Check that the libraries that draw the picture and the page are installed.

    Raises:
        UsageError: one of them is not.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the demo needs {error.name}", remedy="pip install 'ottava[demo]'"
        ) from None


def deviation(run: Run, base: Run) -> float:
    """How far the validation loss of ``run`` is from that of ``base``, in percent of the latter."""
    return 100.0 * (run.validation - base.validation) / base.validation


def _label(run: Run, base: Run) -> str:
    """A run's name, and for the base run also the dtype of its products."""
    return f"{run.name}, products in {run.products}" if run is base else run.name


# Heading -> function of a run and the base run that gives the text of the cell.
_COLUMNS: dict[str, Callable[[Run, Run], str]] = {
    "run": _label,
    "train loss": lambda run, base: f"{fmean(run.losses[-_AVERAGED:]):.4f}",
    "validation loss": lambda run, base: f"{run.validation:.4f}",
    "from BF16": lambda run, base: f"{deviation(run, base):+.2f} %",
    "tokens/s": lambda run, base: f"{run.tokens_per_second:,.0f}",
    "saved for backward": lambda run, base: f"{run.saved_bytes / 2**20:.1f} MiB",
    _PEAK: lambda run, base: f"{(run.peak_bytes or 0) / 2**20:.1f} MiB",
}


def headings(runs: list[Run]) -> list[str]:
    """Headings of the columns of :func:`rows`; on a CPU there is none for peak memory."""
    return [heading for heading in _COLUMNS if heading != _PEAK or runs[0].peak_bytes is not None]


def rows(runs: list[Run]) -> list[list[str]]:
    """One row of text for each run; the first run is the base."""
    return [[_COLUMNS[heading](run, runs[0]) for heading in headings(runs)] for run in runs]


def table(runs: list[Run], skipped: list[Skipped]) -> Table:
    """The table for the terminal.

    It only names what was not run, because the reason was printed when the run was skipped.
    """
    names = headings(runs)
    left_out = [[skip.name, "not run", *["-"] * (len(names) - 2)] for skip in skipped]
    return output.table("Same seed, same batches", names, rows(runs) + left_out, right=names[1:])


def draw(runs: list[Run], path: Path) -> None:
    """Draw loss curves, and below them the deviation of the smoothed curves from BF16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    smoothed = [
        [fmean(run.losses[max(0, n - _AVERAGED) : n]) for n in range(1, len(run.losses) + 1)]
        for run in runs
    ]
    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
    }
    with pyplot.rc_context(style):
        figure, (top, bottom) = pyplot.subplots(
            2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 1.2], layout="constrained"
        )
        for index, (run, smooth) in enumerate(zip(runs, smoothed, strict=True)):
            colour = _COLOURS[index % len(_COLOURS)]
            steps = range(1, len(smooth) + 1)
            dash = "--" if index else "-"
            top.plot(steps, run.losses, color=colour, alpha=0.2, linewidth=0.8)
            top.plot(
                steps, smooth, color=colour, linewidth=2, linestyle=dash, label=_label(run, runs[0])
            )
            if index:
                percent = [100 * (a - b) / b for a, b in zip(smooth, smoothed[0], strict=True)]
                bottom.plot(steps, percent, color=colour, linewidth=1.6)
        top.set(
            ylabel="training loss (nats a byte)",
            title="A small GPT on the source code of Python's standard library",
        )
        top.legend(frameon=False)
        bottom.set(ylabel="from BF16 (%)", xlabel="step")
        bottom.axhline(0, color="#888888", linewidth=0.8)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def write(runs: list[Run], skipped: list[Skipped], out: Path, summary: str) -> None:
    """Write ``loss.png``, ``index.html`` and ``results.json`` into the folder ``out``."""
    import jinja2

    draw(runs, out / "loss.png")
    picture = base64.b64encode((out / "loss.png").read_bytes()).decode()
    pages = jinja2.Environment(loader=jinja2.PackageLoader("ottava_demo", "."), autoescape=True)
    html = pages.get_template("page.html").render(
        summary=summary, headings=headings(runs), rows=rows(runs), skipped=skipped, picture=picture
    )
    (out / "index.html").write_text(html, encoding="utf-8")
    results = {
        "summary": summary,
        "runs": [asdict(run) for run in runs],
        "skipped": [asdict(skip) for skip in skipped],
    }
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
