"""Recipes: what they are, where they come from, and the regions they run in."""

from ottava.recipes.base import QuantizerRequest, Recipe, get_recipe
from ottava.recipes.hookspecs import hookimpl
from ottava.recipes.registry import (
    get_quantizer_factory,
    list_quantizer_factories,
    list_recipes,
    plugin_statuses,
)
from ottava.recipes.role import Explanation, QuantizerRole, RecipeRule
from ottava.recipes.spec import FactorySpec, RecipeSpec
from ottava.recipes.state import RecipeState

__all__ = [
    "Explanation",
    "FactorySpec",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "RecipeRule",
    "RecipeSpec",
    "RecipeState",
    "get_quantizer_factory",
    "get_recipe",
    "hookimpl",
    "list_quantizer_factories",
    "list_recipes",
    "plugin_statuses",
]
