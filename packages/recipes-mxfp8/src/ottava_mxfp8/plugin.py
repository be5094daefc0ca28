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
            name="mxfp8",
            summary="FP8 in blocks of 32 that share a power of two (OCP MX)",
            factory="ottava_mxfp8.recipe:MXFP8BlockScaling",
            block_size=(1, 32),
            formats=("E4M3", "E5M2"),
            fake_quant_formats=("MXFP8E4M3", "MXFP8E5M2"),
        )
    ]
