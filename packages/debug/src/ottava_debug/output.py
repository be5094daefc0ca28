"""Pages and progress bars of the commands."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jinja2
from rich.progress import BarColumn, Progress, ProgressColumn, TimeRemainingColumn

from ottava.cli.output import PlainColumn, console


def rendered(package: str, **values: Any) -> str:
    """``page.html`` of a package, filled with ``values``, which are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(values)


@contextlib.contextmanager
def progress_bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """A progress bar in a terminal, which disappears at the end.

    ``columns`` stand between the bar and the remaining time.
    """
    # The bar goes to standard error, so that standard output has only the results.
    terminal = console(stderr=True)
    with Progress(
        PlainColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=terminal,
        disable=not terminal.is_terminal,
        transient=True,
    ) as progress:
        yield progress
