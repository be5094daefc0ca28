"""Recipes with layouts that nothing first-party has conform, and are short."""

from __future__ import annotations

from pathlib import Path

import pytest
import strange_layouts

from ottava import Recipe
from ottava_testing import check_recipe

RECIPES = list(strange_layouts.SPECS)
BY_NAME = pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])


@BY_NAME
def test_the_kit_passes(recipe: type[Recipe]) -> None:
    report = check_recipe(recipe(), spec=strange_layouts.SPECS[recipe], skip_slow=True)
    assert report.ok, str(report)
    passed = {result.name for result in report.results if result.outcome == "passed"}
    assert "fake-quantization" in passed


@pytest.mark.slow
@BY_NAME
def test_the_whole_kit_passes(recipe: type[Recipe]) -> None:
    report = check_recipe(recipe(), spec=strange_layouts.SPECS[recipe])
    assert report.ok, str(report)
    passed = {result.name for result in report.results if result.outcome == "passed"}
    ranks = {"fsdp2", "fsdp2-quantized-weights", "sharded-master-weights"}
    assert ranks | {"fake-quantization", "compile"} <= passed


def test_they_are_short_and_know_public_names_alone() -> None:
    source = Path(strange_layouts.__file__).read_text()
    assert len(source.splitlines()) <= 60
    assert [line for line in source.splitlines() if "ottava" in line and "import" in line] == [
        "from ottava import GridQuantizer, Layout, QuantizerRole, Recipe, RecipeSpec"
    ]
