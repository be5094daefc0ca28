"""The entry point: names the recipe and the quantizer factories without importing them."""

from __future__ import annotations

from collections.abc import Iterable

from ottava.recipes.hookspecs import hookimpl
from ottava.recipes.spec import FactorySpec, RecipeSpec


@hookimpl
def ottava_recipes() -> Iterable[RecipeSpec]:
    """The recipes of this package."""
    return [
        RecipeSpec(
            name="custom",
            summary="Quantizers of a factory or a file; by itself the reference of current scaling",
            factory="ottava_custom.recipe:build",
            formats=("E4M3", "E5M2"),
            relative_error=0.1,
            file_suffixes=(".yaml", ".yml", ".toml"),
        )
    ]


@hookimpl
def ottava_quantizer_factories() -> Iterable[FactorySpec]:
    """The named quantizer factories of this package."""
    return [
        FactorySpec(
            name="current-ref",
            summary="Current scaling written out in plain PyTorch, products included",
            factory="ottava_custom.factories:current_scaling_ref_quantizer_factory",
        ),
        FactorySpec(
            name="identity",
            summary="High precision: nothing is quantized",
            factory="ottava_custom.factories:identity_factory",
        ),
    ]
