"""The layouts of the roles, bytes that are worked out by hand, and the names of NVFP4 tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ottava
from ottava import Layout
from ottava.kernels import fixed_seed
from ottava.layout import Rotation
from ottava.recipes.role import QuantizerRole
from ottava_nvfp4 import NVFP4BlockScaling, NVFP4Quantizer, NVFP4Tensor
from tests.comparing import assert_same
from tests.layout_recipes import assert_fake_quantizes, assert_made_of
from tests.samples import wide

E4M3 = torch.float8_e4m3fn
#: The signs + + + - + - - - - - - + - + - -, the first one lowest.
RHT = Rotation(16, 0b1101011111101000, "columnwise")


def layout(rows: int = 1, **fields: Any) -> Layout:
    fields = {"second_level": "tensor"} | fields
    return Layout("E2M1", (rows, 16), E4M3, columnwise="transposed", **fields)


RANDOM, BEST = {"stochastic": True}, {"candidates": (1.0, 1.5), "bound": 256, "error": "MAE"}
#: Options, and the layouts of inputs, weights and gradients.
ROLES: dict[str, tuple[dict[str, Any], Layout, Layout, Layout]] = {
    "default": ({}, layout(rotation=RHT), layout(16), layout(rotation=RHT, **RANDOM)),
    "no transform": ({"disable_rht": True}, layout(), layout(16), layout(**RANDOM)),
    "to nearest": (
        {"disable_stochastic_rounding": True},
        *(layout(rotation=RHT), layout(16), layout(rotation=RHT)),
    ),
    "no squares": (
        {"disable_2d_quantization": True},
        *(layout(rotation=RHT), layout(), layout(rotation=RHT, **RANDOM)),
    ),
    "row-scaled": (
        {"row_scaled_activation": True},
        *(layout(second_level="row", rotation=RHT), layout(16), layout(rotation=RHT, **RANDOM)),
    ),
    "best weights": (
        {"four_over_six": "weights"},
        *(layout(rotation=RHT), layout(16, **BEST), layout(rotation=RHT, **RANDOM)),
    ),
    "best inputs": (
        {"four_over_six": "activations", "disable_rht": True},
        *(layout(**BEST), layout(16), layout(**RANDOM)),
    ),
    "best of all": (
        {
            "four_over_six": "all",
            "disable_rht": True,
            "four_over_six_bound": 448,
            "four_over_six_error": "MSE",
        },
        layout(**BEST | {"bound": 448, "error": "MSE"}),
        layout(16, **BEST | {"bound": 448, "error": "MSE"}),
        layout(**RANDOM),
    ),
}


@pytest.mark.parametrize("case", ROLES)
def test_the_layout_of_each_role(case: str) -> None:
    options, *layouts = ROLES[case]
    recipe = NVFP4BlockScaling(**options)
    roles = zip(("input", "weight", "grad_output"), layouts, strict=True)
    for role, expected in (*roles, ("grad_input", layouts[2])):
        for asked in (role, QuantizerRole("linear", role, "block.0")):
            quantizer = recipe.quantizer(asked)
            assert type(quantizer) is NVFP4Quantizer
            assert quantizer.layout == expected


def test_defaults_and_spec() -> None:
    recipe = ottava.get_recipe("nvfp4")
    assert recipe == NVFP4BlockScaling(False, False, False, False, "none", 256, "MAE")
    assert recipe != NVFP4BlockScaling(disable_rht=True)
    assert hash(recipe) == hash(NVFP4BlockScaling())
    assert (recipe.name, recipe.stateful) == ("nvfp4", False)
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "nvfp4")
    assert (spec.block_size, spec.formats) == ((1, 16), ("E2M1",))
    assert spec.capabilities[-2:] == ("two levels of scales", "stochastic")
    assert (spec.shows_nan, spec.deterministic) == (False, True)
    assert spec.fake_quant_formats == ("NVFP4",)


def test_the_names_of_transformer_engine() -> None:
    """A recipe is the same by either names, and says the fields by its own."""
    mine = NVFP4BlockScaling(
        disable_rht=True, four_over_six="all", four_over_six_bound=448, four_over_six_error="MSE"
    )
    theirs = NVFP4BlockScaling(
        disable_rht=True,
        nvfp4_4over6="all",
        nvfp4_4over6_e4m3_use_256=False,
        nvfp4_4over6_err_mode="MSE",
    )
    assert mine == theirs
    assert hash(mine) == hash(theirs)
    assert theirs.four_over_six_bound == 448
    assert NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256=True) == NVFP4BlockScaling()


@pytest.mark.parametrize("square", [False, True])
def test_tensors_have_names_for_their_parts(square: bool) -> None:
    """Two elements share a byte, and ragged edges are smaller blocks."""
    quantizer = NVFP4Quantizer(with_2d_quantization=square)
    q: Any = quantizer(wide(2, 33, 71, dtype=torch.bfloat16))
    assert (q.shape, q.dtype) == ((2, 33, 71), torch.bfloat16)
    shapes: dict[str, tuple[int, ...]] = {
        "rowwise_data": (2, 33, 36),
        "rowwise_scale_inv": (5, 5) if square else (66, 5),
        "amax_rowwise": (),
        "columnwise_data": (71, 33),
        "columnwise_scale_inv": (5, 5) if square else (71, 5),
        "amax_columnwise": (),
    }
    made = assert_made_of(q, NVFP4Tensor, shapes, shape=(2, 33, 71), layout=quantizer.layout)
    assert made.rowwise_serves_columnwise is square
    rows = NVFP4Quantizer(row_scaled=True)(wide(33, 71))
    assert [tuple(t.shape) for t in (rows._amax_rowwise, rows._amax_columnwise)] == [(33,), (71,)]
    padded = NVFP4Quantizer(with_rht=True)(wide(33, 71))
    assert tuple(padded._columnwise_data.shape) == (71, 24)
    assert tuple(padded._columnwise_scale_inv.shape) == (71, 3)


def test_two_blocks_by_hand() -> None:
    """The amax of the tensor is 6, so that S = 2688 / 6 = 448, and S / 6 = 74.67.

    The first block has the amax 6. Its scale is 6 · 74.67 = 448, 0x7E in E4M3, and its elements are
    multiplied by 448 / 448. The magnitudes of E2M1 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, by code::

        value    6  3  1.4 -0.6  0.2 -0.2  0.3 1.2  1.8 -2.6  3.4 3.6 -4.9 5.1  0.8 NaN
        nearest  6  3  1.5 -0.5    0   -0  0.5   1    2   -3    3   4   -4   6    1   6
        code     7  5    3    9    0    8    1   2    4    D    5   6    E   7    2   7
        byte      57      93        80       21        D4       65       7E        72

    The second block has the amax 0.75. Its scale is 0.75 · 74.67 = 56, 1.75 · 2^5, which is 0x66 in
    E4M3, and its elements are multiplied by 448 / 56 = 8.
    """
    first = [6, 3, 1.4, -0.6, 0.2, -0.2, 0.3, 1.2, 1.8, -2.6, 3.4, 3.6, -4.9, 5.1, 0.8, math.nan]
    second = [0.75, 0.5, -0.25, 0.0625]
    q = NVFP4Quantizer(columnwise=False)(torch.tensor([[*first, *second]]))
    data = [0x57, 0x93, 0x80, 0x21, 0xD4, 0x65, 0x7E, 0x72, 0x67, 0x1C]
    assert q._rowwise_data.tolist() == [data]
    assert q._rowwise_scale_inv.tolist() == [[0x7E, 0x66]]
    assert q._amax_rowwise.item() == 6.0
    nearest = [6, 3, 1.5, -0.5, 0, -0.0, 0.5, 1, 2, -3, 3, 4, -4, 6, 1, 6, *second]
    torch.testing.assert_close(q.dequantize(), torch.tensor([nearest]), rtol=1e-6, atol=0)


def test_a_transformed_column_by_hand() -> None:
    """Row 3 of the matrix of Hadamard is + - - + four times, and the third sign is minus.

    So 4 becomes -1 1 1 -1 four times, with an amax of 1. The scale is 448, and the elements are -6,
    code F, and 6, code 7.
    """
    x = torch.zeros(16, 1)
    x[3] = 4.0
    q = NVFP4Quantizer(rowwise=False, with_rht=True)(x)
    assert q._columnwise_data.tolist() == [[0x7F, 0xF7] * 4]
    assert q._columnwise_scale_inv.tolist() == [[0x7E]]
    assert q._amax_columnwise.item() == 1.0
    torch.testing.assert_close(q.dequantize(), x)


def test_the_better_scale_by_hand() -> None:
    """4-over-6 takes the scale that maps 4 to 4, because its elements are exact.

    The bound is 256, so S = 256 · 6 / 4 = 384, and the scale that maps to 6 is 4 / 6 · 384 = 256.
    With it 3 becomes 4.5, between 4 and 6. The one that maps to 4 is 384, 0x7C.
    """
    x = torch.tensor([[4.0, 3.0, -2.0, 1.0] * 4])
    q = NVFP4Quantizer(columnwise=False, four_over_six=True)(x)
    assert q._rowwise_data.tolist() == [[0x56, 0x2C] * 4]
    assert q._rowwise_scale_inv.tolist() == [[0x7C]]
    torch.testing.assert_close(q.dequantize(), x)


def test_random_rounding_goes_to_neighbours_in_proportion() -> None:
    """2.25 lies between 2 and 3, at a quarter."""
    x = torch.full((64, 16), 2.25)
    x[:, 0] = 6.0
    quantizer = NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
    with fixed_seed(1):
        values = quantizer(x).dequantize()
        assert_same(values, quantizer(x).dequantize())
    assert sorted(set(values[:, 1:].round(decimals=4).flatten().tolist())) == [2.0, 3.0]
    assert 0.2 < float((values[:, 1:] > 2.5).float().mean()) < 0.3
    with fixed_seed(2):
        assert not torch.equal(quantizer(x).dequantize(), values)


def test_fake_quantization_is_that_of_blocks_along_rows() -> None:
    assert_fake_quantizes("NVFP4", layout())
    assert NVFP4BlockScaling().fake_quantizer("MXFP4") is None
