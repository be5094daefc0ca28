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
            name="mx",
            summary="MXFP4, MXFP6 or MXINT8: blocks of 32 that share a power of two (OCP MX)",
            factory="ottava_mx.recipe:MXBlockScaling",
            block_size=(1, 32),
            formats=("E2M1", "E2M3", "E3M2", "MXINT8"),
            fake_quant_formats=("MXFP4", "MXFP6E2M3", "MXFP6E3M2", "MXINT8", "MXINT8S"),
            relative_error=0.3,
            shows_nan=False,
        )
    ]
