"""Recipes of every kind, and the blocks of what they quantize."""

from __future__ import annotations

from ottava.formats import Format
from ottava_rowwise import Float8RowwiseScaling

BLOCKS = dict.fromkeys(("input", "weight", "grad_output"), (1, None))
RECIPES = {
    "default": Float8RowwiseScaling(),
    "powers of two": Float8RowwiseScaling(
        force_pow_2_scales=True, fp8_format=Format.HYBRID, amax_epsilon=1e-3
    ),
    "wgrad in high precision": Float8RowwiseScaling(wgrad_high_precision=True),
}
