"""The conformance kit on the reference of current scaling, and on recipes that are put together."""

from __future__ import annotations

import pytest
import torch

import ottava
from ottava import QuantizerRole
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CustomRecipe,
    HybridQuantizer,
    IdentityQuantizer,
)
from ottava_testing import RecipeConformance


def by_usage(role: QuantizerRole) -> HybridQuantizer:
    """E4M3 rowwise, E5M2 columnwise."""
    rows, columns = (
        CurrentScalingQuantizerRef(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    )
    return HybridQuantizer(rows, columns)


def identity(role: QuantizerRole) -> IdentityQuantizer:
    return IdentityQuantizer()


@pytest.mark.compiled_together
class TestCustom(RecipeConformance):
    recipe = "custom"


@pytest.mark.variant
class TestHybrid(RecipeConformance):
    def make_recipe(self) -> ottava.Recipe:
        return CustomRecipe(by_usage)


@pytest.mark.variant
class TestIdentity(RecipeConformance):
    def make_recipe(self) -> ottava.Recipe:
        return CustomRecipe(identity)
