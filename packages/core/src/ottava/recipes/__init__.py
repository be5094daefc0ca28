"""Recipes: what they are, where they come from, and the regions they run in. Names are resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Explanation": "ottava.recipes.explanation",
    "FactorySpec": "ottava.recipes.spec",
    "QuantizerRequest": "ottava.recipes.base",
    "QuantizerRole": "ottava.recipes.role",
    "Recipe": "ottava.recipes.base",
    "RecipeRule": "ottava.recipes.explanation",
    "RecipeSpec": "ottava.recipes.spec",
    "RecipeState": "ottava.recipes.state",
    "autocast": "ottava.recipes.region",
    "get_quantizer_factory": "ottava.recipes.registry",
    "get_recipe": "ottava.recipes.base",
    "hookimpl": "ottava.recipes.hookspecs",
    "list_quantizer_factories": "ottava.recipes.registry",
    "list_recipes": "ottava.recipes.registry",
    "plugin_statuses": "ottava.recipes.registry",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava.recipes' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava.recipes.base import QuantizerRequest as QuantizerRequest
    from ottava.recipes.base import Recipe as Recipe
    from ottava.recipes.base import get_recipe as get_recipe
    from ottava.recipes.explanation import Explanation as Explanation
    from ottava.recipes.explanation import RecipeRule as RecipeRule
    from ottava.recipes.hookspecs import hookimpl as hookimpl
    from ottava.recipes.region import autocast as autocast
    from ottava.recipes.registry import get_quantizer_factory as get_quantizer_factory
    from ottava.recipes.registry import list_quantizer_factories as list_quantizer_factories
    from ottava.recipes.registry import list_recipes as list_recipes
    from ottava.recipes.registry import plugin_statuses as plugin_statuses
    from ottava.recipes.role import QuantizerRole as QuantizerRole
    from ottava.recipes.spec import FactorySpec as FactorySpec
    from ottava.recipes.spec import RecipeSpec as RecipeSpec
    from ottava.recipes.state import RecipeState as RecipeState
