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
            name="blockwise",
            summary="FP8 with a float32 scale for each 1x128 elements, or 128x128 of weights",
            factory="ottava_blockwise.recipe:Float8BlockScaling",
            block_size=(1, 128),
            formats=("E4M3", "E5M2"),
            fake_quant_formats=("BLOCKWISEE4M3", "BLOCKWISEE5M2"),
        )
    ]
