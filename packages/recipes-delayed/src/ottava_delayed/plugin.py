"""The entry point, which names the recipe without importing it."""

from __future__ import annotations

from collections.abc import Iterable

from ottava.recipes.hookspecs import hookimpl
from ottava.recipes.spec import RecipeSpec


@hookimpl
def ottava_recipes() -> Iterable[RecipeSpec]:
    """The recipes of this package."""
    return [
        RecipeSpec(
            name="delayed",
            summary="Per-tensor FP8, the scale from the amaxes of past steps",
            factory="ottava_delayed.recipe:DelayedScaling",
            stateful=True,
            needs_reduction=True,
            formats=("E4M3", "E5M2"),
        )
    ]
