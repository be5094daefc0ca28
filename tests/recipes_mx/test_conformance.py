"""The conformance kit on this recipe, with every kind of elements."""

from __future__ import annotations

import dataclasses

import pytest

import ottava
from ottava import RecipeSpec
from ottava_testing import RecipeConformance

(SPEC,) = (spec for spec in ottava.list_recipes() if spec.name == "mx")


def finer(element: str) -> RecipeSpec:
    """What the recipe promises with elements of more bits."""
    return dataclasses.replace(SPEC, relative_error=0.06, fake_quant_formats=(element,))


@pytest.mark.compiled_together
class TestMXFP4(RecipeConformance):
    recipe = "mx"


@pytest.mark.slow
@pytest.mark.variant
class TestMXFP6(RecipeConformance):
    recipe = "mx"
    options = {"element": "MXFP6E2M3"}  # noqa: RUF012
    spec = finer("MXFP6E2M3")


@pytest.mark.slow
@pytest.mark.variant
class TestMXINT8(RecipeConformance):
    recipe = "mx"
    options = {"element": "MXINT8"}  # noqa: RUF012
    spec = finer("MXINT8")


@pytest.mark.slow
@pytest.mark.variant
class TestRotated(RecipeConformance):
    recipe = "mx"
    options = {"rotation": 32, "stochastic_rounding": True}  # noqa: RUF012
    expected_failures = {  # noqa: RUF012
        "zeros": "rotating spreads a single zero over its group",
        "large-values": "the sums of a rotation overflow near the largest float32",
    }


@pytest.mark.slow
@pytest.mark.variant
class TestSquares(RecipeConformance):
    recipe = "mx"
    options = {"with_2d_quantization": True}  # noqa: RUF012
    expected_failures = {  # noqa: RUF012
        "optimizer-steps": "32 x 32 values of four bits with one scale lose equal steps of AdamW"
    }
