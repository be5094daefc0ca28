"""The conformance kit on this recipe."""

from __future__ import annotations

import pytest

from ottava.formats import Format
from ottava_testing import RecipeConformance


# The checks of a class on several processes share a launch.
@pytest.mark.xdist_group("TestMXFP8")
class TestMXFP8(RecipeConformance):
    recipe = "mxfp8"


@pytest.mark.xdist_group("TestSquares")
class TestSquares(RecipeConformance):
    recipe = "mxfp8"
    options = {"with_2d_quantization": True, "fp8_format": Format.HYBRID}  # noqa: RUF012
