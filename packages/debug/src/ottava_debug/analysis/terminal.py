"""The report in a terminal."""

from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from ottava.cli.output import escaped, grouped, table
from ottava_debug.analysis.report import Analysis, Noise, Summary, most_underflow

#: Marks the cells of tensors that need high precision.
MARK = "!"


def decibels(value: float) -> str:
    """dB as text, such as ``"31.5"``; ``"exact"`` for inf and ``"broken"`` for -inf."""
    if value == float("inf"):
        return "exact"
    if value == -float("inf"):
        return "broken"
    return f"{value:.1f}"


def percent(value: float | None) -> str:
    """A percentage as text, such as ``"0.03 %"``; only zero is shown as ``"0"``."""
    if value is None:
        return "not known"
    if value == 0:
        return "0"
    return "< 0.01 %" if value < 0.01 else f"{value:.2f} %"


def losses(summary: Summary) -> tuple[str, ...]:
    """The losses of all tensors under a recipe, as texts."""
    return (
        decibels(summary.sqnr),
        decibels(summary.lowest_sqnr),
        percent(summary.underflow),
        percent(summary.saturation),
    )


def summary_table(report: Analysis) -> Table:
    """One row for each recipe."""
    heads = ("recipe", "SQNR (dB)", "lowest", "underflow", "saturation", "layers to keep")
    rows = [
        (summary.recipe, *losses(summary), f"{len(summary.kept)} of {len(report.layers)}")
        for summary in report.summaries()
    ]
    return table(
        "Recipes: the middle tensor's SQNR, and the worst of all tensors",
        heads,
        rows,
        right=heads[1:],
    )


def tensor_table(report: Analysis, rows: int) -> Table:
    """The worst tensors under any recipe, at most ``rows`` of them."""
    worst = Table(
        title=f"The worst tensors, each under its worst recipe ({MARK}: needs high precision)"
    )
    worst.add_column("layer (tensor, recipe)", overflow="fold")
    for head in ("SQNR (dB)", "underflow", "saturated", "cosine"):
        worst.add_column(head, no_wrap=True, justify="right")
    for tensor, name in report.worst(rows):
        title = f"{tensor.layer or '(root)'} ({tensor.role}, {name})"
        worst.add_row(escaped(title), *_cells(tensor.noise[name], report.threshold))
    return worst


def _cells(noise: Noise, threshold: float) -> tuple[str, ...]:
    mark = f" {MARK}" if noise.complaint(threshold) else ""
    if noise.error:
        return "fails" + mark, "", "", ""
    return (
        decibels(noise.sqnr) + mark,
        percent(noise.underflow),
        percent(noise.saturation),
        f"{noise.cosine:.4f}",
    )


def sentences(report: Analysis, rows: int) -> Iterator[str]:
    """The sentences below the tables."""
    if len(report.tensors) > rows:
        yield (
            f"{len(report.tensors) - rows} more tensors are not shown: --rows shows more, "
            f"--html and --json all."
        )
    limit = most_underflow(report.threshold)
    below = f"the SQNR is below {report.threshold:g} dB or underflow above {limit:.1f} %"
    yield f"A layer needs high precision where {below}."
    yield from notes(report)
    best = report.best_recipe()
    keeps = report.keeps(best)
    yield f"Suggested: {best}, with {len(keeps)} of {len(report.layers)} layers in high precision."
    if reason := report.why_best():
        yield reason
    for keep in keeps[:rows]:
        yield f"  {keep.layer or '(root)'}: {keep.reason}"


def notes(report: Analysis) -> Iterator[str]:
    """Notes on values that no recipe can mend, on tensors that were left out, in groups, and on
    recipes that failed."""
    for tensor in report.tensors:
        if tensor.not_finite:
            title = f"{tensor.layer or '(root)'} ({tensor.role})"
            yield (
                f"{title}: {tensor.not_finite} of {tensor.count} values are NaN or infinite, in "
                f"high precision too."
            )
    for reason, count in Counter(skip.reason for skip in report.skipped).items():
        names = grouped([skip.name for skip in report.skipped if skip.reason == reason])
        text = ", ".join(names[:4])
        if len(names) > 4:
            text += f" and {len(names) - 4} more"
        yield f"Left out ({count}), {reason}: {text}"
    for skip in report.unavailable:
        yield f"Recipe {skip.name} left out: {skip.reason}"
