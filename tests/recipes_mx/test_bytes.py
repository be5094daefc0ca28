"""The layouts of the roles, bytes that are worked out by hand, and the names of MX tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ottava
from ottava import Layout
from ottava.recipes.role import QuantizerRole
from ottava_mx import MXBlockScaling, MXQuantizer, MXTensor
from tests.comparing import assert_same
from tests.layout_recipes import assert_fake_quantizes, assert_made_of
from tests.samples import wide

E8M0 = torch.float8_e8m0fnu
#: The formats, and their elements in layouts.
ELEMENTS = {
    "MXFP4": "E2M1",
    "MXFP6E2M3": "E2M3",
    "MXFP6E3M2": "E3M2",
    "MXINT8": "MXINT8",
    "MXINT8S": "MXINT8S",
}
SQUARES = {"shared": (32, 32)}


def layout(element: str = "E2M1", rounding: str = "even", **fields: Any) -> Layout:
    return Layout(element, (1, 32), E8M0, rounding, columnwise="transposed", **fields)


#: Options, and the layouts of inputs, weights and gradients.
ROLES: dict[str, tuple[dict[str, Any], Layout, Layout, Layout]] = {
    "default": ({}, layout(), layout(), layout()),
    "other gradients": (
        {"element": "MXFP6E2M3", "grad_element": "MXFP6E3M2", "scale_rounding": "up"},
        *(layout("E2M3", "up"), layout("E2M3", "up"), layout("E3M2", "up")),
    ),
    "squares": ({"with_2d_quantization": True}, layout(), layout(**SQUARES), layout()),
    "random": ({"stochastic_rounding": True}, layout(), layout(), layout(stochastic=True)),
}


@pytest.mark.parametrize("case", ROLES)
def test_the_layout_of_each_role(case: str) -> None:
    options, *layouts = ROLES[case]
    recipe = MXBlockScaling(**options)
    roles = zip(("input", "weight", "grad_output"), layouts, strict=True)
    for role, expected in (*roles, ("grad_input", layouts[2])):
        for asked in (role, QuantizerRole("linear", role, "block.0")):
            quantizer = recipe.quantizer(asked)
            assert type(quantizer) is MXQuantizer
            assert quantizer.layout == expected


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_operands_of_the_backward_pass_are_rotated_alike(size: int) -> None:
    """Both its products read the gradient, by rows and by columns."""
    recipe = MXBlockScaling(rotation=size)
    rotations = [recipe.quantizer(role).layout.rotation for role in ("input", "weight")]
    rotations.append(recipe.quantizer("grad_output").layout.rotation)
    assert [r.directions for r in rotations] == ["columnwise", "columnwise", "both"]
    # The first bits of the fractional part of pi.
    bits = int("243F6A8885A308D313198A2E03707344", 16)
    assert {(r.size, r.signs) for r in rotations} == {(size, bits % 2**size)}


def test_defaults_and_spec() -> None:
    recipe = ottava.get_recipe("mx")
    assert recipe == MXBlockScaling("MXFP4", None, "even", False, False, 0)
    assert recipe != MXBlockScaling("MXINT8")
    assert hash(recipe) == hash(MXBlockScaling())
    assert (recipe.name, recipe.stateful) == ("mx", False)
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "mx")
    assert (spec.block_size, spec.formats) == ((1, 32), ("E2M1", "E2M3", "E3M2", "MXINT8"))
    assert (spec.shows_nan, spec.stochastic, spec.second_level) == (False, False, False)
    assert spec.fake_quant_formats == ("MXFP4", "MXFP6E2M3", "MXFP6E3M2", "MXINT8", "MXINT8S")


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
def test_tensors_have_names_for_their_parts(element: str, square: bool) -> None:
    """Elements of four bits share a byte, and ragged edges are smaller blocks."""
    quantizer = MXQuantizer(element, with_2d_quantization=square)
    assert quantizer.layout.element == ELEMENTS[element]
    q: Any = quantizer(wide(2, 33, 71, dtype=torch.bfloat16))
    assert (q.shape, q.dtype) == ((2, 33, 71), torch.bfloat16)
    shapes = {
        "rowwise_data": (2, 33, 36) if element == "MXFP4" else (2, 33, 71),
        "rowwise_scale_inv": (66, 3),
        "columnwise_data": (71, 33) if element == "MXFP4" else (71, 2, 33),
        "columnwise_scale_inv": (71, 3),
    }
    made = assert_made_of(q, MXTensor, shapes, shape=(2, 33, 71), layout=q.grid_layout)
    assert made.rowwise_serves_columnwise is square


def test_blocks_of_four_bits_by_hand() -> None:
    """``even`` adds a quarter of the mantissa's range to the amax, and takes the exponent less 2.

    6.5 is 1.625 · 2^2, and stays below 2^3: the scale is 2^0, code 127, and 6.5 is clamped to 6.
    7 is 1.75 · 2^2, and reaches 2^3: the scale is 2^1, and 7 / 2 is a tie that goes to 4. The
    magnitudes of E2M1 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, by code; NaN becomes 6.
    """
    x = torch.zeros(2, 32)
    x[0, :6] = torch.tensor([6.5, -2.6, 0.25, 0.75, -0.1, math.nan])
    x[1, :4] = torch.tensor([7.0, -5.0, 1.0, 0.4])
    q = MXQuantizer(columnwise=False)(x)
    assert q._rowwise_scale_inv.tolist() == [[127], [128]]
    # 6 -3 0 1 -0 6, and 4 -2 0.5 0: -2.5 is a tie, and 0.2 is nearer to 0.
    assert q._rowwise_data[:, :3].tolist() == [[0xD7, 0x20, 0x78], [0xC6, 0x01, 0x00]]
    assert not q._rowwise_data[:, 3:].any()
    values = [[6, -3, 0, 1, -0.0, 6], [8, -4, 1, 0, 0, 0]]
    assert_same(q.dequantize()[:, :6], torch.tensor(values))


@pytest.mark.parametrize(
    ("element", "values", "codes", "scale"),
    [
        # 7.5 is 1.875 · 2^2: the scale is 2^0. Steps of 0.125 below 2, 0.25 below 4, 0.5 above.
        ("MXFP6E2M3", [7.5, -1.0, 0.125, 1.1], [0x1F, 0x28, 0x01, 0x09], 127),
        # 28 is 1.75 · 2^4: the scale is 2^0. 0.3 is nearest to 0.3125, 1.25 · 2^-2.
        ("MXFP6E3M2", [28.0, -0.0625, 0.3, 5.0], [0x1F, 0x21, 0x05, 0x15], 127),
        # 1.5 has the exponent 0: the scale is 2^0, and the step 2^-6.
        ("MXINT8", [1.5, -1.0, 0.25, -0.015625], [0x60, 0xC0, 0x10, 0xFF], 127),
        # The least code, -2, is used by one of both formats of integers.
        ("MXINT8", [-1.999, 1.999, 0.0, 0.0], [0x80, 0x7F, 0, 0], 127),
        ("MXINT8S", [-1.999, 1.999, 0.0, 0.0], [0x81, 0x7F, 0, 0], 127),
    ],
)
def test_other_elements_by_hand(
    element: str, values: list[float], codes: list[int], scale: int
) -> None:
    q = MXQuantizer(element, columnwise=False, scale_rounding="floor")(torch.tensor([values]))
    assert q._rowwise_data.tolist() == [codes]
    assert q._rowwise_scale_inv.tolist() == [[scale]]


@pytest.mark.parametrize(
    ("rule", "codes"),
    [
        # The least scale that clamps nothing: 6 is the largest number.
        ("up", [127, 128, 128, 128, 128, 128]),
        # The exponent less 2.
        ("floor", [127, 127, 127, 127, 128, 128]),
        # The same, of the amax rounded to a mantissa of one bit.
        ("even", [127, 127, 128, 128, 128, 128]),
        # log2(amax / 6) is above 0.5 from 8.49 on.
        ("nearest", [127, 127, 127, 127, 127, 128]),
    ],
)
def test_rules_from_an_amax_to_a_scale(rule: str, codes: list[int]) -> None:
    x = torch.tensor([[6.0], [6.99], [7.0], [7.99], [8.48], [8.49]])
    q = MXQuantizer(columnwise=False, scale_rounding=rule)(x)
    assert q._rowwise_scale_inv.flatten().tolist() == codes


@pytest.mark.parametrize("name", ELEMENTS)
def test_fake_quantization_is_that_of_blocks_along_rows(name: str) -> None:
    recipe = MXBlockScaling(scale_rounding="floor")
    assert recipe.fake_quantizer(name).layout == layout(ELEMENTS[name], "floor")
    assert recipe.fake_quantizer("NVFP4") is None
    # MXINT8S is an option of the recipe, and no format of its own.
    if name != "MXINT8S":
        assert_fake_quantizes(name, layout(ELEMENTS[name]))
