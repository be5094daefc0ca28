"""Files that commands write: no other file is lost by them."""

import contextlib
import os
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ottava.errors import OptionError, UsageError
from ottava.filesystem import AnyPath, check_file_target, replace_file

#: The suffixes of recipe files.
SUFFIXES = (".yaml", ".yml")
#: The option of commands that write files.
Force = Annotated[bool, typer.Option("--force", help="Replace files that are no such reports.")]
# This many bytes suffice to recognize a report.
_HEAD_BYTES = 1 << 16


class FileKind(NamedTuple):
    """A kind of file that a command writes: its name in errors, and the beginning of such files."""

    title: str
    head: re.Pattern[bytes] | None


#: An existing recipe file is never recognized, because replacing it could lose a user's changes.
RECIPE_FILE = FileKind("recipe file", None)


class Output(NamedTuple):
    """A file that an option of a command names; ``path`` is None without the option."""

    option: str
    path: Path | None
    kind: FileKind


def check_suffix(path: AnyPath, title: str = "the recipe file") -> None:
    """Refuse a recipe file whose name does not end in one of :data:`SUFFIXES`."""
    if not str(path).lower().endswith(SUFFIXES):
        raise OptionError(
            f"{title} is {path}", expected=f"a name that ends in {' or '.join(SUFFIXES)}"
        )


def check_outputs(
    outputs: Sequence[Output], inputs: Sequence[str | Path | None], force: bool
) -> None:
    """Check that the outputs of a command can be written without losing other files.

    ``inputs`` are what the command reads; ``force`` allows to replace files of another kind.

    Raises:
        OptionError: two outputs are one file, one is read as well, or a recipe file has another
            suffix.
        UsageError: a file exists, or cannot be written.
    """
    files = [(option, path, kind) for option, path, kind in outputs if path is not None]
    for option, path, kind in files:
        check_file_target(path)
        if kind is RECIPE_FILE:
            check_suffix(path, option)
        if any(os.path.exists(other) and _is_same(path, other) for other in inputs if other):
            raise OptionError(f"{option} is {path}, which is read", expected="another file")
    for (one, path, _), (other, second, _) in combinations(files, 2):
        if _is_same(path, second):
            raise OptionError(f"{one} and {other} are both {path}", expected="a file for each")
    for _, path, kind in files:
        if os.path.exists(path) and not force and not _is_of_kind(path, kind):
            expected = f"a new file, or a {kind.title}" if kind.head else "a new file"
            raise UsageError(f"{path} exists", expected=expected, remedy="--force replaces it")


def _is_same(path: Path, other: str | Path) -> bool:
    """Whether two paths lead to the same file, also through links."""
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def _is_of_kind(path: Path, kind: FileKind) -> bool:
    if kind.head is not None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            return kind.head.match(file.read(_HEAD_BYTES)) is not None
    return False


def write_text(path: AnyPath, text: str) -> None:
    """Write a file completely; or leave an existing one unchanged, and raise OptionError."""
    replace_file(path, text.encode())
