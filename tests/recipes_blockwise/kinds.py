"""Recipes of every kind, and the blocks of what they quantize."""

from __future__ import annotations

from ottava.formats import Format
from ottava_blockwise import Float8BlockScaling

DIMS = {1: (1, 128), 2: (128, 128)}
RECIPES = {
    "default": Float8BlockScaling(),
    "no powers of two": Float8BlockScaling(force_pow_2_scales=False, fp8_format=Format.HYBRID),
    "rows alone": Float8BlockScaling(w_block_scaling_dim=1, amax_epsilon=1e-3),
    "squares alone": Float8BlockScaling(
        x_block_scaling_dim=2, grad_block_scaling_dim=2, force_pow_2_scales=False
    ),
}


def blocks(recipe: Float8BlockScaling) -> dict[str, tuple[int, int]]:
    dims = recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim
    return {
        role: DIMS[dim] for role, dim in zip(("input", "weight", "grad_output"), dims, strict=True)
    }
