"""The entry point."""

from ottava import FactorySpec, RecipeSpec, hookimpl


@hookimpl
def ottava_recipes() -> list[RecipeSpec]:
    """One recipe: a scale for each row."""
    return [
        RecipeSpec(
            name="acme-rows",
            summary="E4M3 by row",
            factory="acme_fp8.recipe:AcmeRows",
            block_size=(1, None),
            quantized_weights=False,
        )
    ]


@hookimpl
def ottava_quantizer_factories() -> list[FactorySpec]:
    """One factory: a scale for each row of weights."""
    return [
        FactorySpec(
            name="acme-weights", summary="Weights by row", factory="acme_fp8.recipe:weights_by_row"
        )
    ]
