"""What the commands share: their progress, and the files that they write."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from ottava.cli.output import console
from ottava.errors import OptionError, translated
from ottava.filesystem import AnyPath, check_file_target, open_text

#: What the names of recipe files in YAML end in.
SUFFIXES = (".yaml", ".yml")


def check_suffix(path: AnyPath, what: str = "the recipe file") -> None:
    """OptionError where the name of a recipe file is none of YAML."""
    if not str(path).lower().endswith(SUFFIXES):
        raise OptionError(f"{what} is {path}", expected=f"a name that ends in {' or '.join(SUFFIXES)}")


def check_targets(recipe_file: Path | None, *others: Path | None) -> None:
    """See that files which a command is to write can be; raises as :func:`check_suffix`, and UsageError."""
    for path in filter(None, (recipe_file, *others)):
        check_file_target(path)
    if recipe_file is not None:
        check_suffix(recipe_file, "--recipe-file")


def write_text(path: AnyPath, text: str) -> None:
    """Write a file; OptionError where that fails."""
    with translated(f"{path} cannot be written", "a file in an existing folder", to=OptionError, of=OSError):
        with open_text(path) as file:
            file.write(text)


def rendered(package: str, **values: Any) -> str:
    """``page.html`` of a package, with values, which are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(values)


def plain(value: Any) -> Any:
    """Data as JSON has them: what is not finite is the text ``"inf"``, ``"-inf"`` or ``"nan"``."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def progress_bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """A bar in a terminal, gone at the end; ``columns`` stand between it and the time that is left."""
    # On standard error, so that what is printed alone can be kept.
    bar = console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=bar, disable=not bar.is_terminal, transient=True) as progress:
        yield progress
