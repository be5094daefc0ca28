"""The demo's table, picture, page and data."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from ottava.cli.demo.training import Run
from ottava.errors import UsageError

# Okabe and Ito's palette: told apart with any colour vision.
_COLOURS = ["#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Ottava demo</title>
<style>body{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}img{width:100%}
table{border-collapse:collapse}th,td{padding:.4rem .8rem;border-bottom:1px solid #ccc;text-align:right}
th:first-child,td:first-child{text-align:left}</style></head><body>
<h1>Ottava demo</h1><p>{{ summary }}</p>
<table><tr>{% for h in headings %}<th>{{ h }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
{% if skipped %}<p>Not run:</p><ul>{% for skip in skipped %}<li>{{ skip.name }}: {{ skip.reason }}</li>{% endfor %}</ul>
{% endif %}<p><img alt="Loss curves, and deviation from BF16 in percent" src="data:image/png;base64,{{ picture }}"></p>
</body></html>
"""

_HEADINGS = ["run", "train loss", "validation loss", "from BF16", "tokens/s", "saved for backward"]


@dataclass(frozen=True)
class Skipped:
    """A recipe or a plugin that was not trained, and why."""

    name: str
    reason: str


def check_libraries() -> None:
    """Raises UsageError when what draws the picture and the page is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"the demo needs {error.name}", remedy="pip install 'ottava[demo]'") from None


def deviation(run: Run, base: Run) -> float:
    """Validation loss against the base run's, in percent."""
    return 100.0 * (run.validation - base.validation) / base.validation


def _label(run: Run, base: Run) -> str:
    """A run's name; the base says how its products were computed."""
    return f"{run.name}, products in {run.products}" if run is base else run.name


def _peaks(runs: list[Run]) -> list[float]:
    """In MiB; on a CPU there are none."""
    return [run.peak_bytes / 2**20 for run in runs if run.peak_bytes is not None]


def headings(runs: list[Run]) -> list[str]:
    """Of the columns of :func:`rows`."""
    return [*_HEADINGS, *(["peak memory"] if _peaks(runs) else [])]


def rows(runs: list[Run]) -> list[list[str]]:
    """One row of text for each run; the first run is the base."""
    return [
        [
            _label(run, runs[0]),
            f"{sum(run.losses[-10:]) / len(run.losses[-10:]):.4f}",
            f"{run.validation:.4f}",
            f"{deviation(run, runs[0]):+.2f} %",
            f"{run.tokens_per_second:,.0f}",
            f"{run.saved_bytes / 2**20:.1f} MiB",
            *(f"{peak:.1f} MiB" for peak in _peaks([run])),
        ]
        for run in runs
    ]


def table(runs: list[Run], skipped: list[Skipped]) -> Table:
    """The table for the terminal; what was not run is named, its reason was told when it came up."""
    made = Table(title="Same seed, same batches")
    names = headings(runs)
    for index, heading in enumerate(names):
        made.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows(runs):
        made.add_row(*row)
    for skip in skipped:
        made.add_row(skip.name, "not run", *["-"] * (len(names) - 2))
    return made


def _smooth(values: list[float], width: int = 10) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def draw(runs: list[Run], path: Path) -> None:
    """Loss curves, and below them the deviation of the smoothed curves from BF16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 1.2], layout="constrained"
    )
    base = _smooth(runs[0].losses)
    for index, run in enumerate(runs):
        colour, smooth = _COLOURS[index % len(_COLOURS)], _smooth(run.losses)
        steps = range(1, len(smooth) + 1)
        top.plot(steps, run.losses, color=colour, alpha=0.2, linewidth=0.8)
        top.plot(
            steps, smooth, color=colour, linewidth=2, linestyle="-" if index == 0 else "--", label=_label(run, runs[0])
        )
        if index:
            bottom.plot(
                steps, [100 * (a - b) / b for a, b in zip(smooth, base, strict=True)], color=colour, linewidth=1.6
            )
    top.set_ylabel("training loss (nats a byte)")
    top.legend(frameon=False)
    top.set_title("A small GPT on the source code of Python's standard library")
    bottom.axhline(0, color="#888888", linewidth=0.8)
    bottom.set_ylabel("from BF16 (%)")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write(runs: list[Run], skipped: list[Skipped], out: Path, summary: str) -> None:
    """``loss.png``, ``index.html`` and ``results.json`` in the folder ``out``."""
    import jinja2

    draw(runs, out / "loss.png")
    picture = base64.b64encode((out / "loss.png").read_bytes()).decode()
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    html = page.render(summary=summary, headings=headings(runs), rows=rows(runs), skipped=skipped, picture=picture)
    (out / "index.html").write_text(html, encoding="utf-8")
    results = {
        "summary": summary,
        "runs": [asdict(run) for run in runs],
        "skipped": [asdict(skip) for skip in skipped],
    }
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
