"""The conformance kit on this recipe."""

from __future__ import annotations

import pytest

from ottava_testing import RecipeConformance


# The checks of a class on several processes share a launch.
@pytest.mark.xdist_group("TestDelayed")
class TestDelayed(RecipeConformance):
    recipe = "delayed"
