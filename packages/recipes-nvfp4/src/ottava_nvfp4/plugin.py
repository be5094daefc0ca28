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
            name="nvfp4",
            summary="FP4 in blocks of 16 with E4M3 scales, and one scale for the tensor",
            factory="ottava_nvfp4.recipe:NVFP4BlockScaling",
            block_size=(1, 16),
            formats=("E2M1",),
            fake_quant_formats=("NVFP4",),
            relative_error=0.3,
            stochastic=True,
            second_level=True,
            shows_nan=False,
        )
    ]
