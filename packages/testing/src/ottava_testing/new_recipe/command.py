"""Writes the package, all of it or nothing."""

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
    """Refuse to overwrite anything, and to make the folder around the new one."""
    folder = target.is_dir() and not target.is_symlink()
    if (os.path.lexists(target) and not folder) or (folder and any(target.iterdir())):
        what = f"{target} has files in it" if folder else f"{target} exists"
        raise UsageError(what, expected="a folder that is new or empty", remedy=_ANOTHER)
    parent = target.absolute().parent
    if not parent.is_dir():
        raise OptionError(
            f"there is no folder {parent}",
            expected="a place for the new folder",
            remedy="make it first",
        )


def write_package(contents: dict[str, str], target: Path) -> None:
    """Write the files to ``target``, a folder that is new or empty, or leave everything as it was.

    Raises:
        OSError: it cannot be written, or something else came to be there meanwhile.
    """
    with Partial(target) as aside:
        for path, text in contents.items():
            file = aside.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
        # One that is there may be the folder that the user is in: it is filled.
        made, moved = not target.exists(), list[Path]()
        try:
            target.mkdir(exist_ok=True)
            for entry in sorted(aside.path.iterdir()):
                place = target / entry.name
                if os.path.lexists(place):
                    raise FileExistsError(f"{place} exists")
                os.rename(entry, place)
                moved.append(place)
        except BaseException:
            for place in moved:
                shutil.rmtree(place) if place.is_dir() else place.unlink()
            if made:
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

Your own scheme goes into src/{names.package}/recipe.py, where it says "Your scheme"; \
what it promises, into
src/{names.package}/plugin.py. README.md shows classes of one's own, for what a layout cannot say.
Choose a license before you publish: the package has none yet."""


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
