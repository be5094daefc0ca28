"""The conformance kit on ``ServedRecipe``: one quantizer for both sides, two, or rows alone."""

import pytest

import ottava
from ottava import RecipeSpec
from ottava_integrations import ServedRecipe
from ottava_testing import RecipeConformance


def promises(*, eight_bits: bool = True) -> RecipeSpec:
    """The spec that the recipe would have if it were installed by name."""
    return RecipeSpec(
        name="served",
        summary="The forward pass of a published format",
        factory="ottava_integrations.served:ServedRecipe",
        formats=("E4M3",),
        relative_error=0.1 if eight_bits else 0.3,
        stochastic=not eight_bits,
        second_level=not eight_bits,
        shows_nan=eight_bits,
    )


@pytest.mark.variant
class TestBlocks(RecipeConformance):
    spec = promises()

    def make_recipe(self) -> ottava.Recipe:
        return ServedRecipe("fp8")


@pytest.mark.variant
class TestHybrid(RecipeConformance):
    spec = promises()

    def make_recipe(self) -> ottava.Recipe:
        return ServedRecipe("float-quantized", training="mxfp8")


@pytest.mark.slow
@pytest.mark.variant
class TestWeightsAlone(RecipeConformance):
    spec = promises(eight_bits=False)

    def make_recipe(self) -> ottava.Recipe:
        return ServedRecipe("nvfp4-pack-quantized")
