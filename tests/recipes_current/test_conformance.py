"""The conformance kit on this recipe."""

from __future__ import annotations

import pytest

from ottava.formats import Format
from ottava_testing import RecipeConformance


@pytest.mark.compiled_together
class TestCurrent(RecipeConformance):
    recipe = "current"


@pytest.mark.variant
class TestPowersOfTwo(RecipeConformance):
    recipe = "current"
    options = {"force_pow_2_scales": True, "fp8_format": Format.E4M3}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardHighPrecision(RecipeConformance):
    recipe = "current"
    options = {"backward": "high_precision"}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardDequantized(RecipeConformance):
    recipe = "current"
    options = {"backward": "dequantized"}  # noqa: RUF012
