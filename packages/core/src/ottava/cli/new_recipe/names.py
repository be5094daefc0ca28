"""Which name a new recipe may have, and what follows from it."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from ottava.errors import OptionError, UsageError
from ottava.recipes.discovery import canonical
from ottava.recipes.ownership import OWNER_PREFIX, RECIPE
from ottava.recipes.registry import plugin_statuses

#: Characters that a name may have at most: it is a part of file names, and of lines that people read.
LONGEST = 40

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
# Modules and folders of the new package itself.
_OWN = ("conformance", "conftest", "tests")
_EXAMPLE = "one with a prefix of your own, as acme-rows"


@dataclass(frozen=True)
class Names:
    """A recipe's name and what is named after it.

    Attributes:
        recipe: how users ask for it.
        package: the module that is imported.
        distribution: the name for package indexes; the one that owns the recipe's name.
        format: the name of its format for fake quantization.
    """

    recipe: str

    @property
    def package(self) -> str:
        return self.recipe.replace("-", "_")

    @property
    def distribution(self) -> str:
        return OWNER_PREFIX + self.recipe

    @property
    def format(self) -> str:
        return f"{self.package.upper()}_INT8"


def checked_names(name: str, target: Path) -> Names:
    """What follows from ``name``, if a new recipe may have it.

    Args:
        target: the folder that the package is to be written to.

    Raises:
        OptionError: it is no name for a recipe, or none for a module.
        UsageError: something that is installed has it.
    """
    if len(name) > LONGEST:
        raise OptionError(f"the name {name[:LONGEST]!r}… has {len(name)} characters", expected=f"at most {LONGEST}")
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"the name {name!r}",
            expected="lower-case letters, digits, - and _, a letter first, and no - or _ last or after another",
            remedy=f"choose {_EXAMPLE}",
        )
    names = Names(name)
    _check_module(names.package, target)
    _check_installed(names)
    return names


def _check_module(package: str, target: Path) -> None:
    remedy = f"choose {_EXAMPLE}"
    if keyword.iskeyword(package):
        raise OptionError(f"{package!r} is a keyword of Python", expected="a name that can be imported", remedy=remedy)
    if package in _OWN:
        raise OptionError(f"{package!r} is what a part of the package is called", expected="another", remedy=remedy)
    if package == "ottava" or package.startswith("ottava_"):
        raise OptionError(
            f"the module {package!r} would be taken for one of Ottava's own", expected="a name that does not begin so"
        )
    if package in sys.stdlib_module_names:
        raise OptionError(
            f"{package!r} is a module of Python's standard library", expected="a name of its own", remedy=remedy
        )
    if _is_importable(package, target):
        raise UsageError(
            f"a module {package!r} is installed already, and one of the two would hide the other",
            expected="a name of its own",
            remedy=f"choose {_EXAMPLE}, or uninstall the other",
        )


def _is_importable(package: str, target: Path) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        # A module that is there without a spec is there.
        return package in sys.modules
    if spec is None:
        return False
    # An empty folder looks like a package without code where the current folder is searched: the target may be one.
    places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    return spec.origin is not None or places != [target.resolve()]


def _installed(distribution: str) -> Distribution | None:
    for found in distributions():
        name = found.metadata["Name"] if found.metadata is not None else None
        if name and canonical(name) == canonical(distribution):
            return found
    return None


def _check_installed(names: Names) -> None:
    for status in plugin_statuses():
        offered = {spec.name for spec in status.recipes} | {r.name for r in status.refused if r.kind == RECIPE}
        if names.recipe in offered:
            raise UsageError(
                f"a recipe {names.recipe!r} is installed already, of {status.distribution} {status.version}",
                expected="a name of its own",
                remedy=f"choose {_EXAMPLE}",
            )
    found = _installed(names.distribution)
    if found is not None:
        raise UsageError(
            f"{found.metadata['Name']} {found.version} is installed already, and owns the name {names.recipe!r}",
            expected="a name of its own",
            remedy=f"choose {_EXAMPLE}",
        )
