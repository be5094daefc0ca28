"""The drawing of layouts, and the page around it, say what the layouts say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import grids
from ottava import Float8Tensor, Layout
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_rowwise import Float8RowwiseQuantizer

ROOT = Path(__file__).parents[2]

PAGE = (ROOT / "docs" / "layouts.md").read_text()
M, K = 256, 384


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", grids.LAYOUTS)
def test_the_shapes_that_are_written(name: str, columnwise: bool) -> None:
    layout = grids.LAYOUTS[name]
    data, scales = re.findall(r"\[(.*?)\]", grids.shapes(layout, columnwise))
    sizes = {"M": M, "K": K}

    def shape(text: str) -> tuple[int, ...]:
        sides = [side.split("/") for side in text.split(", ")]
        return tuple(
            sizes.get(side[0], 1) // int(side[1] if len(side) > 1 else 1) for side in sides
        )

    assert shape(data) == layout.data_shape((M, K), columnwise)
    assert shape(scales) == layout.scale_shape((M, K), columnwise)


@pytest.mark.parametrize(
    ("name", "columnwise", "scales"),
    [
        ("per tensor", False, 1),
        ("by row", False, grids.ROWS),
        ("by row", True, grids.COLUMNS),
        ("MXFP8, 32 × 32", True, 2 * 3),
        ("blockwise, 1 × 128", True, grids.COLUMNS * 2),
        ("a stranger's INT8, 8 × 64", False, 4 * 3),
        ("a stranger's INT8, 8 × 64", True, 2 * 6),
    ],
)
def test_the_blocks_that_are_drawn(name: str, columnwise: bool, scales: int) -> None:
    drawn = grids.blocks(grids.LAYOUTS[name], columnwise)
    assert len({block for row in drawn for block in row}) == scales


def test_first_party_layouts_are_those_that_are_drawn() -> None:
    e4m3 = torch.float8_e4m3fn
    own: dict[str, Layout] = {
        "by row": Float8RowwiseQuantizer(e4m3).layout,
        "MXFP8, 1 × 32": MXFP8Quantizer(e4m3).layout,
        "MXFP8, 32 × 32": MXFP8Quantizer(e4m3, with_2d_quantization=True).layout,
        "blockwise, 1 × 128": Float8BlockQuantizer(e4m3, block_scaling_dim=1).layout,
        "blockwise, 128 × 128": Float8BlockQuantizer(e4m3, block_scaling_dim=2).layout,
    }
    tensor = Float8CurrentScalingQuantizer(e4m3)(torch.ones(4, 4))
    assert isinstance(tensor, Float8Tensor)
    own["per tensor"] = tensor.grid_layout
    for name, layout in own.items():
        drawn = grids.LAYOUTS[name]
        fields = ("element", "block", "scale", "columnwise", "shared")
        assert [getattr(layout, f) for f in fields] == [getattr(drawn, f) for f in fields], name


def test_every_field_is_on_the_page() -> None:
    fields = [name for name in Layout.__dataclass_fields__ if name != "text"]
    assert re.findall(r"^\| `(\w+)` \| (?:required|`)", PAGE, re.M) == fields
