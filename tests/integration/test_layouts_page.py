"""The drawing of layouts, and the page around it, say what the layouts say."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import ottava
from benchmarks import grids
from ottava import Float8Tensor, Layout
from ottava.formats import ELEMENT_NAMES
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

    def shape(text: str) -> tuple[int, ...]:
        sizes: tuple[int, ...] = eval(f"({text},)".replace("/", "//"), {"M": M, "K": K})
        return sizes

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


def test_every_field_is_on_the_page_with_its_default() -> None:
    written = {
        field.name: "required" if field.default is MISSING else f"`{field.default!r}`"
        for field in fields(Layout)
        if field.init
    }
    found = re.findall(r"^\| `(\w+)` \| (required|`.*?`) \|", PAGE, re.M)
    assert [(name, word.replace('"', "'")) for name, word in found] == list(written.items())


def test_the_elements_and_blocks_of_recipes() -> None:
    table = re.findall(r"^\| (\[`.*?) \| (.*?) \| (.*?) \|", PAGE, re.M)
    found = {
        name: (tuple(elements.split(", ")), re.split(", | for", block)[0])
        for names, elements, block in table
        for name in re.findall(r"`(\w+)`", names)
    }
    specs = [spec for spec in ottava.list_recipes() if spec.name != "custom"]
    wanted = {
        spec.name: (
            spec.formats,
            " × ".join(str(size or "all") for size in spec.block_size or (None, None)),
        )
        for spec in specs
    }
    assert found == wanted


def test_the_elements_of_four_and_six_bits() -> None:
    page = (ROOT / "docs" / "four-bits.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (\d) \| (.*?) \| (.*?) \|$", page, re.M)
    assert [name for name, *_ in table] == ["E2M1", "E2M3", "E3M2", "INT4", "MXINT8", "MXINT8S"]
    for name, bits, numbers, nan in table:
        fmt = ELEMENT_NAMES[name]
        assert int(bits) == fmt.bits
        written = {abs(Fraction(number)) for number in re.findall(r"[\d./]+", numbers)}
        # The last line says that its numbers are those of the line before.
        assert Fraction(fmt.max) in written or numbers.startswith("the same")
        if nan[0].isdigit():
            assert Fraction(nan) == Fraction(fmt.max)
        else:
            assert nan == f"NaN, the code {fmt.nan_code - 2**fmt.bits}"
