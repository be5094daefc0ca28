"""The conformance kit on this recipe."""

from __future__ import annotations

import pytest

from ottava.formats import Format
from ottava_testing import RecipeConformance


@pytest.mark.compiled_together
class TestMXFP8(RecipeConformance):
    recipe = "mxfp8"


@pytest.mark.variant
class TestSquares(RecipeConformance):
    recipe = "mxfp8"
    options = {"with_2d_quantization": True, "fp8_format": Format.HYBRID}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardHighPrecision(RecipeConformance):
    recipe = "mxfp8"
    options = {"backward": "high_precision"}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardDequantized(RecipeConformance):
    recipe = "mxfp8"
    options = {"backward": "dequantized"}  # noqa: RUF012
