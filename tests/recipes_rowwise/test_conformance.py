"""The conformance kit on this recipe, with every kind of scales and elements."""

from __future__ import annotations

import pytest

from ottava.formats import Format
from ottava_testing import RecipeConformance


@pytest.mark.compiled_together
class TestRowwise(RecipeConformance):
    recipe = "rowwise"


@pytest.mark.variant
class TestPowersOfTwo(RecipeConformance):
    recipe = "rowwise"
    options = {  # noqa: RUF012
        "fp8_format": Format.HYBRID,
        "force_pow_2_scales": True,
        "amax_epsilon": 1e-6,
    }


@pytest.mark.variant
class TestWgrad(RecipeConformance):
    recipe = "rowwise"
    options = {"wgrad_high_precision": True}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardHighPrecision(RecipeConformance):
    recipe = "rowwise"
    options = {"backward": "high_precision"}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardDequantized(RecipeConformance):
    recipe = "rowwise"
    options = {"backward": "dequantized"}  # noqa: RUF012
