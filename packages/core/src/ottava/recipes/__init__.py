"""Recipes: what they are, where they come from, and the regions they run in."""

from typing import Any

from ottava.recipes.base import QuantizerRequest as QuantizerRequest
from ottava.recipes.base import Recipe as Recipe
from ottava.recipes.base import get_recipe as get_recipe
from ottava.recipes.explanation import Explanation as Explanation
from ottava.recipes.explanation import RecipeRule as RecipeRule
from ottava.recipes.hookspecs import hookimpl as hookimpl
from ottava.recipes.registry import get_quantizer_factory as get_quantizer_factory
from ottava.recipes.registry import list_quantizer_factories as list_quantizer_factories
from ottava.recipes.registry import list_recipes as list_recipes
from ottava.recipes.registry import plugin_statuses as plugin_statuses
from ottava.recipes.role import QuantizerRole as QuantizerRole
from ottava.recipes.spec import FactorySpec as FactorySpec
from ottava.recipes.spec import RecipeSpec as RecipeSpec
from ottava.recipes.state import RecipeState as RecipeState


def __getattr__(name: str) -> Any:
    # Its module imports torch, which listing recipes does without.
    if name == "autocast":
        from ottava.recipes.region import autocast

        return autocast
    raise AttributeError(f"module 'ottava.recipes' has no attribute {name!r}")
