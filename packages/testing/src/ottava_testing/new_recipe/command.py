"""Writes a recipe package, either all of its files or none."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ottava.cli.output import say
from ottava.errors import OptionError, UsageError
from ottava.filesystem import Partial
from ottava_testing.new_recipe.names import Names, checked_names
from ottava_testing.new_recipe.rendering import render

_ANOTHER = "choose another with --out"


def _check_target(target: Path) -> None:
    """Check that nothing would be overwritten, and that the folder around the target exists.

    Raises:
        UsageError: the target is a folder with files, or no folder.
        OptionError: there is no folder around it.
    """
    is_folder = target.is_dir() and not target.is_symlink()
    problem = ""
    if is_folder and any(target.iterdir()):
        problem = f"{target} has files in it"
    elif not is_folder and os.path.lexists(target):
        problem = f"{target} exists"
    if problem:
        raise UsageError(problem, expected="a folder that is new or empty", remedy=_ANOTHER)
    parent = target.absolute().parent
    if not parent.is_dir():
        raise OptionError(
            f"there is no folder {parent}",
            expected="a place for the new folder",
            remedy="make it first",
        )


def write_package(contents: dict[str, str], target: Path) -> None:
    """Write the files to ``target``, a folder that is new or empty, or leave everything as it was.

    Args:
        contents: text by path in the package.
        target: the folder.

    Raises:
        OSError: the folder cannot be written, or another program made a file there meanwhile.
    """
    with Partial(target) as aside:
        for path, text in contents.items():
            file = aside.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        # An existing folder is filled and not replaced, because the user may be in it.
        is_new = not target.exists()
        written_files: list[Path] = []
        try:
            target.mkdir(exist_ok=True)
            for entry in sorted(aside.path.iterdir()):
                destination = target / entry.name
                if os.path.lexists(destination):
                    raise FileExistsError(f"{destination} exists")
                os.rename(entry, destination)
                written_files.append(destination)
        except BaseException:
            for destination in written_files:
                if destination.is_dir():
                    shutil.rmtree(destination)
                else:
                    destination.unlink()
            if is_new:
                target.rmdir()
            raise


def _advice(names: Names, target: Path) -> str:
    return f"""\
Written: {target}, the recipe {names.recipe!r}: INT8, one scale for each row.

Next:
  cd {shlex.quote(str(target))}
  pip install -e ".[test]"
  pytest                              # its own tests and the conformance kit
  ottava recipes                      # {names.recipe} is listed
  ottava demo --recipe {names.recipe}

Put your own scheme into src/{names.package}/recipe.py, where it says "Your scheme", and its
promises into src/{names.package}/plugin.py. README.md shows classes for schemes that no layout
describes. Choose a license before you publish, because the package has none yet."""


def new_recipe(
    NAME: Annotated[
        str, typer.Argument(help="The recipe's name: lower-case letters, digits, - and _.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to write, new or empty; by default one named NAME."),
    ] = None,
) -> None:
    """Write a package with a recipe of your own: a working scheme to start from, its tests and its
    CI file."""
    target = Path(NAME) if out is None else out
    names = checked_names(NAME, target)
    try:
        _check_target(target)
        write_package(render(names), target)
    except OSError as error:
        raise OptionError(
            f"{target} cannot be written: {error.strerror or error}",
            expected="a folder that can be made, and written to",
            remedy=_ANOTHER,
        ) from error
    say(_advice(names, target), lines=True)
