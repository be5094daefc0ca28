"""Recipes: what they are, where they come from, and the regions they run in."""

from typing import TYPE_CHECKING, Any

from ottava.recipes.base import QuantizerRequest, Recipe, get_recipe
from ottava.recipes.hookspecs import hookimpl
from ottava.recipes.registry import get_quantizer_factory, list_quantizer_factories, list_recipes, plugin_statuses
from ottava.recipes.role import Explanation, QuantizerRole, RecipeRule
from ottava.recipes.spec import FactorySpec, RecipeSpec
from ottava.recipes.state import RecipeState

if TYPE_CHECKING:
    from ottava.recipes.region import autocast

__all__ = [
    "Explanation",
    "FactorySpec",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "RecipeRule",
    "RecipeSpec",
    "RecipeState",
    "autocast",
    "get_quantizer_factory",
    "get_recipe",
    "hookimpl",
    "list_quantizer_factories",
    "list_recipes",
    "plugin_statuses",
]


def __getattr__(name: str) -> Any:
    # Its module imports torch, which listing recipes does without.
    if name == "autocast":
        from ottava.recipes.region import autocast

        return autocast
    raise AttributeError(f"module 'ottava.recipes' has no attribute {name!r}")
