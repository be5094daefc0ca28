"""The hooks by which a package offers recipes, found through entry points of the group
``ottava``."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from ottava.recipes.spec import FactorySpec, RecipeSpec

PROJECT = "ottava"  # of the hooks, and the group of the entry points

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a plugin's implementation of a hook.
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ottava_recipes() -> Iterable[RecipeSpec]:
    """The recipes of this package. Must import neither torch nor the recipes themselves."""
    return ()


@hookspec
def ottava_quantizer_factories() -> Iterable[FactorySpec]:
    """The named quantizer factories of this package. Must import neither torch nor the factories
    themselves."""
    return ()
