"""Which name a new recipe may have, and what follows from it."""

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

#: Characters that a name may have at most: it is a part of file names, and of lines that people
#: read.
LONGEST = 40

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
# Modules and folders of the new package itself.
_OWN = ("conformance", "conftest", "tests")
_REMEDY = "choose one with a prefix of your own, as acme-rows"


@dataclass(frozen=True)
class Names:
    """A recipe's name, and what is named after it: its module, its distribution, its format of fake
    quantization."""

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
    """What follows from ``name``, if a recipe may have it that is written to ``target``.

    Raises:
        OptionError: it is no name for a recipe, or none for a module.
        UsageError: something that is installed has it.
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
    for refused, what in (
        (keyword.iskeyword(package), "is a keyword of Python"),
        (package in _OWN, "is what a part of the package is called"),
        (
            package == "ottava" or package.startswith("ottava_"),
            "would be taken for a module of Ottava's own",
        ),
        (package in sys.stdlib_module_names, "is a module of Python's standard library"),
    ):
        if refused:
            raise OptionError(f"{package!r} {what}", expected="another name", remedy=_REMEDY)
    owner = _owner(names, target)
    if owner is not None:
        raise UsageError(
            owner, expected="a name of its own", remedy=f"{_REMEDY}, or uninstall the other"
        )
    return names


def _owner(names: Names, target: Path) -> str | None:
    """What is installed under one of the names, in words."""
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
        found = distribution(names.distribution)
    except PackageNotFoundError:
        return None
    return f"{found.metadata['Name']} {found.version} is installed already"


def _is_importable(package: str, target: Path) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        # A module that is there without a spec is there.
        return package in sys.modules
    if spec is None:
        return False
    # An empty folder looks like a package without code where the current folder is searched: the
    # target may be one.
    places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    return spec.origin is not None or places != [target.resolve()]
