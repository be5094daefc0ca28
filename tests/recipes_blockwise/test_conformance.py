"""The conformance kit on this recipe, with every kind of blocks, scales and elements."""

from __future__ import annotations

import pytest

from ottava.formats import Format
from ottava_testing import RecipeConformance


@pytest.mark.compiled_together
class TestBlockwise(RecipeConformance):
    recipe = "blockwise"


@pytest.mark.variant
class TestHybrid(RecipeConformance):
    recipe = "blockwise"
    options = {"fp8_format": Format.HYBRID, "force_pow_2_scales": False}  # noqa: RUF012


@pytest.mark.variant
class TestRows(RecipeConformance):
    recipe = "blockwise"
    options = {  # noqa: RUF012
        "w_block_scaling_dim": 1,
        "force_pow_2_scales": False,
        "amax_epsilon": 1e-6,
    }


@pytest.mark.variant
class TestSquares(RecipeConformance):
    recipe = "blockwise"
    options = {  # noqa: RUF012
        "x_block_scaling_dim": 2,
        "grad_block_scaling_dim": 2,
        "fp8_format": Format.E5M2,
    }


@pytest.mark.slow
class TestBackwardHighPrecision(RecipeConformance):
    recipe = "blockwise"
    options = {"backward": "high_precision"}  # noqa: RUF012


@pytest.mark.slow
class TestBackwardDequantized(RecipeConformance):
    recipe = "blockwise"
    options = {"backward": "dequantized"}  # noqa: RUF012
