"""What the commands share: their progress, and the files that they write."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jinja2
import typer
from rich.progress import BarColumn, Progress, ProgressColumn, TimeRemainingColumn

from ottava.cli.output import PlainColumn, console
from ottava.errors import OptionError, UsageError, translated
from ottava.filesystem import AnyPath, Partial, as_path, check_file_target, mode_of, write_new

#: What the names of recipe files in YAML end in.
SUFFIXES = (".yaml", ".yml")
#: The option of commands that write files.
Force = Annotated[bool, typer.Option("--force", help="Replace files that are no such reports.")]
# So much of a file tells whether it is a report.
_HEAD_BYTES = 1 << 16


class FileKind(NamedTuple):
    """A kind of files that a command writes.

    Attributes:
        title: what errors call it.
        head: matches the beginning of such a file; None where an existing one may have been edited.
    """

    title: str
    head: re.Pattern[bytes] | None


#: Whoever edits a recipe file would lose that.
RECIPE_FILE = FileKind("recipe file", None)


class Output(NamedTuple):
    """A file that a command is to write: the option that names it, where it is, and what it will
    be."""

    option: str
    path: Path | None
    kind: FileKind


def check_suffix(path: AnyPath, what: str = "the recipe file") -> None:
    """OptionError where the name of a recipe file is none of YAML."""
    if not str(path).lower().endswith(SUFFIXES):
        raise OptionError(
            f"{what} is {path}", expected=f"a name that ends in {' or '.join(SUFFIXES)}"
        )


def check_outputs(
    outputs: Sequence[Output], inputs: Sequence[str | Path | None], force: bool
) -> None:
    """See that the files which a command is to write can be, and that nothing is lost by it.

    Args:
        outputs: the files; those without a path are not written.
        inputs: what the command reads: files, folders, and names of what is no file.
        force: whether files are replaced that are not of the same kind.

    Raises:
        OptionError: two outputs are one file, one is read as well, or a recipe file has another
            suffix.
        UsageError: a file exists, or cannot be written.
    """
    written = [(option, path, kind) for option, path, kind in outputs if path is not None]
    for option, path, kind in written:
        check_file_target(path)
        if kind is RECIPE_FILE:
            check_suffix(path, option)
        if any(os.path.exists(read) and _is_same(path, read) for read in inputs if read):
            raise OptionError(f"{option} is {path}, which is read", expected="another file")
    for (one, path, _), (other, second, _) in combinations(written, 2):
        if _is_same(path, second):
            raise OptionError(f"{one} and {other} are both {path}", expected="a file for each")
    for _, path, kind in written:
        if os.path.exists(path) and not force and not _is_of_kind(path, kind):
            expected = f"a new file, or a {kind.title}" if kind.head else "a new file"
            raise UsageError(f"{path} exists", expected=expected, remedy="--force replaces it")


def _is_same(path: Path, other: str | Path) -> bool:
    """Whether two paths lead to one file, by links too."""
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def _is_of_kind(path: Path, kind: FileKind) -> bool:
    if kind.head is not None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            return kind.head.match(file.read(_HEAD_BYTES)) is not None
    return False


def write_text(path: AnyPath, text: str) -> None:
    """Write a file whole, or leave what is there; OptionError where that fails."""
    expected = "a file in an existing folder, and room"
    with translated(f"{path} cannot be written", expected, to=OptionError, of=OSError):
        place = Path(os.path.realpath(as_path(path)))
        if os.path.lexists(place) and not place.is_file():
            raise FileExistsError("it is no regular file")
        with Partial(place) as partial:
            new_file = mode_of(partial.path) or 0
            mode = mode_of(place)
            write_new(
                partial.path / "text", text.encode(), new_file & 0o666 if mode is None else mode
            )
            partial.put_file("text")


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
    """A bar in a terminal, gone at the end; ``columns`` stand between it and the time that is
    left."""
    # On standard error, so that what is printed alone can be kept.
    bar = console(stderr=True)
    shown = (PlainColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=bar, disable=not bar.is_terminal, transient=True) as progress:
        yield progress
