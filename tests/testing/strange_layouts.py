"""Recipes whose layouts nothing first-party has: all that is known of them is a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ottava import GridQuantizer, Layout, QuantizerRole, Recipe, RecipeSpec


@dataclass(frozen=True)
class Int8Blocks(Recipe):
    """INT8 in blocks of 8 rows and 64 columns, whose scales are powers of two."""

    name: ClassVar[str] = "int8-blocks"
    layout: ClassVar[Layout] = Layout(torch.int8, (8, 64), rounding="floor")

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> GridQuantizer:
        return GridQuantizer(self.layout)

    def fake_quantizer(self, fp8_format: str) -> GridQuantizer | None:
        return GridQuantizer(self.layout, columnwise=False) if fp8_format == self.name else None


@dataclass(frozen=True)
class Columns(Int8Blocks):
    """E5M2 with a float32 scale for each column."""

    name: ClassVar[str] = "e5m2-columns"
    layout: ClassVar[Layout] = Layout(torch.float8_e5m2, (None, 1))


SPECS = {
    recipe: RecipeSpec(
        name=recipe.name,
        summary=str(recipe.__doc__),
        factory=f"tests.testing.strange_layouts:{recipe.__name__}",
        block_size=recipe.layout.block,
        formats=(formats,),
        fake_quant_formats=(recipe.name,),
    )
    for recipe, formats in ((Int8Blocks, "INT8"), (Columns, "E5M2"))
}
