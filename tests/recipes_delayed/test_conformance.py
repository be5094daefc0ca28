"""The conformance kit on this recipe."""

from __future__ import annotations

import pytest

from ottava_testing import RecipeConformance


class TestDelayed(RecipeConformance):
    recipe = "delayed"


@pytest.mark.slow
class TestBackwardHighPrecision(RecipeConformance):
    recipe = "delayed"
    options = {"backward": "high_precision"}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardDequantized(RecipeConformance):
    recipe = "delayed"
    options = {"backward": "dequantized"}  # noqa: RUF012
