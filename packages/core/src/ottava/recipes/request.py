"""``QuantizerRequest``: what a quantizer factory returns where a layer's state is to make the quantizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ottava.recipes.base import Recipe


@dataclass(frozen=True)
class QuantizerRequest:
    """Asks for what ``recipe`` would use for the role.

    A recipe that keeps state (delayed scaling, say) cannot be served by a quantizer that a factory makes: its state
    belongs to the layer. The layer answers the requests that name equal recipes with one state.

    Attributes:
        recipe: a recipe; the name of an installed one is built with its defaults.

    Raises:
        DTypeError, RecipeNotFoundError: ``recipe`` is no recipe.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        from ottava.recipes.base import as_recipe

        object.__setattr__(self, "recipe", as_recipe(self.recipe))
