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
            name="current",
            summary="Per-tensor FP8, the scale from the tensor's own amax",
            factory="ottava_current.recipe:Float8CurrentScaling",
            formats=("E4M3", "E5M2"),
            fake_quant_formats=("FP8E4M3", "FP8E5M2"),
        )
    ]
