"""The conformance kit on this recipe, with every kind of scales and elements."""

from __future__ import annotations

import pytest

from ottava.formats import Format
from ottava_testing import RecipeConformance


# The checks of a class on several processes share a launch.
@pytest.mark.xdist_group("TestRowwise")
class TestRowwise(RecipeConformance):
    recipe = "rowwise"


@pytest.mark.xdist_group("TestPowersOfTwo")
class TestPowersOfTwo(RecipeConformance):
    recipe = "rowwise"
    options = {  # noqa: RUF012
        "fp8_format": Format.HYBRID,
        "force_pow_2_scales": True,
        "amax_epsilon": 1e-6,
    }


@pytest.mark.xdist_group("TestWgrad")
class TestWgrad(RecipeConformance):
    recipe = "rowwise"
    options = {"wgrad_high_precision": True}  # noqa: RUF012
