"""The registry: what the installed packages offer, and what was built of it by name."""

from __future__ import annotations

import contextlib
import os

from ottava.recipes import loader
from ottava.recipes.base import Recipe
from ottava.recipes.base import get_recipe as get_recipe
from ottava.recipes.discovery import canonical, disabled
from ottava.recipes.loader import get_quantizer_factory as get_quantizer_factory
from ottava.recipes.loader import is_path, specs
from ottava.recipes.ownership import FACTORY, RECIPE, PluginStatus
from ottava.recipes.spec import FactorySpec, RecipeSpec

# Recipes that were built with their defaults, for code that names a recipe again and again (a region in a loop), each
# with what tells its file from one that was written since.
defaults: dict[str, tuple[Recipe, tuple[int, int] | None]] = {}


def plugin_statuses() -> list[PluginStatus]:
    """Every plugin found, healthy or not, in a stable order.

    Raises:
        PluginError: a plugin is broken and ``OTTAVA_STRICT_PLUGINS`` is set.
        DuplicateRecipeError: a name is claimed twice and ``OTTAVA_STRICT_PLUGINS`` is set.
    """
    return list(loader.statuses())


def list_recipes() -> list[RecipeSpec]:
    """The recipes that can be used, by name. Neither torch nor a recipe is imported."""
    return specs(RECIPE)


def list_quantizer_factories() -> list[FactorySpec]:
    """The named quantizer factories that can be used, by name. Neither torch nor a factory is imported."""
    return specs(FACTORY)


def reload() -> None:
    """Forget what was loaded; the next question looks again."""
    loader.forget()
    defaults.clear()


def unknown_disabled() -> list[str]:
    """The names in ``OTTAVA_DISABLE_PLUGINS`` that no installed plugin has: most often misspelled."""
    return sorted(disabled() - {canonical(status.distribution) for status in loader.statuses()})


def remember_default(name: str) -> bool:
    """See that ``defaults`` has the recipe ``name``, of a file as it is now; raises as :func:`get_recipe`."""
    stamp = None
    if is_path(name):
        with contextlib.suppress(OSError):
            found = os.stat(name)
            stamp = found.st_mtime_ns, found.st_size
    if name not in defaults or defaults[name][1] != stamp:
        defaults[name] = get_recipe(name), stamp
    return True
