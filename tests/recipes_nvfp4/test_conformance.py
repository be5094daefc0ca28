"""The conformance kit on this recipe."""

from __future__ import annotations

from ottava_testing import RecipeConformance


class TestNVFP4(RecipeConformance):
    recipe = "nvfp4"
