"""The conformance kit on this recipe."""

from __future__ import annotations

import pytest

from ottava_testing import RecipeConformance


@pytest.mark.compiled_together
class TestNVFP4(RecipeConformance):
    recipe = "nvfp4"


@pytest.mark.slow
@pytest.mark.variant
class TestPlain(RecipeConformance):
    recipe = "nvfp4"
    options = {"disable_rht": True, "disable_stochastic_rounding": True}  # noqa: RUF012


@pytest.mark.slow
@pytest.mark.variant
class TestRowScaled(RecipeConformance):
    recipe = "nvfp4"
    options = {"row_scaled_activation": True}  # noqa: RUF012


@pytest.mark.slow
@pytest.mark.variant
class TestFourOverSix(RecipeConformance):
    recipe = "nvfp4"
    options = {"four_over_six": "all", "disable_rht": True}  # noqa: RUF012
