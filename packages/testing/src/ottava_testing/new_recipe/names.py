"""The name of a new recipe: which names are allowed, and what else is named after it."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ottava.errors import OptionError, UsageError
from ottava.recipes.registry import DISTRIBUTION_PREFIX, RECIPE, plugin_statuses

#: The largest number of characters in a name, because names appear in file names and in lines that
#: people read.
LONGEST = 40

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
# Names of modules and folders in the new package itself.
_OWN = ("conformance", "conftest", "tests")
_REMEDY = "choose one with a prefix of your own, as acme-rows"


@dataclass(frozen=True)
class Names:
    """A recipe's name, and all that is named after it.

    That is its module, its distribution, and its format of fake quantization.
    """

    recipe: str

    @property
    def package(self) -> str:
        return self.recipe.replace("-", "_")

    @property
    def distribution(self) -> str:
        return DISTRIBUTION_PREFIX + self.recipe

    @property
    def format(self) -> str:
        return f"{self.package.upper()}_INT8"


def checked_names(name: str, target: Path) -> Names:
    """The names that follow from ``name``, for a new recipe that is written to ``target``.

    Raises:
        OptionError: the name is not allowed for a recipe or for a module.
        UsageError: something that is installed has the name.
    """
    if len(name) > LONGEST:
        raise OptionError(
            f"the name {name[:LONGEST]!r}… has {len(name)} characters",
            expected=f"at most {LONGEST}",
        )
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"the name {name!r}",
            expected="lower-case letters, digits, - and _, a letter first, and no - or _ last or "
            "after another",
            remedy=_REMEDY,
        )
    names = Names(name)
    package = names.package
    for refused, reason in (
        (keyword.iskeyword(package), "is a keyword of Python"),
        (package in _OWN, "is the name of a module or folder in the package"),
        (
            package == "ottava" or package.startswith("ottava_"),
            "would be taken for a module of Ottava's own",
        ),
        (package in sys.stdlib_module_names, "is a module of Python's standard library"),
    ):
        if refused:
            raise OptionError(f"{package!r} {reason}", expected="another name", remedy=_REMEDY)
    owner = _owner(names, target)
    if owner is not None:
        raise UsageError(
            owner, expected="a name of its own", remedy=f"{_REMEDY}, or uninstall the other"
        )
    return names


def _owner(names: Names, target: Path) -> str | None:
    """A sentence about what is installed under one of the names; None where nothing is."""
    if _is_importable(names.package, target):
        return (
            f"a module {names.package!r} is installed already, and one of the two would hide "
            f"the other"
        )
    for status in plugin_statuses():
        offered = {
            offer.name for offer in (*status.offers, *status.refused) if offer.kind == RECIPE
        }
        if names.recipe in offered:
            return (
                f"a recipe {names.recipe!r} is installed already, of {status.distribution} "
                f"{status.version}"
            )
    try:
        owner = distribution(names.distribution)
    except PackageNotFoundError:
        return None
    return f"{owner.metadata['Name']} {owner.version} is installed already"


def _is_importable(package: str, target: Path) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        # find_spec raises for a module that was imported and has no spec; it counts as importable.
        return package in sys.modules
    if spec is None:
        return False
    # If Python searches the current folder, an empty target folder looks like a namespace package.
    folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
    return spec.origin is not None or folders != [target.resolve()]
