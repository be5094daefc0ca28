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
            name="rowwise",
            summary="FP8 with a float32 scale for each row that a GEMM sums over",
            factory="ottava_rowwise.recipe:Float8RowwiseScaling",
            block_size=(1, None),
            formats=("E4M3", "E5M2"),
            fake_quant_formats=("ROWWISEE4M3", "ROWWISEE5M2"),
        )
    ]
