"""``MXFP8BlockScaling``: what it says, and the quantizers that it makes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

import ottava
from ottava.errors import OptionError
from ottava.formats import Format
from ottava.recipes.role import QuantizerRole
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Quantizer
from tests.recipes_mxfp8.layers import E4M3, E5M2


def test_the_recipe_is_found_and_described() -> None:
    (spec,) = [spec for spec in ottava.list_recipes() if spec.name == "mxfp8"]
    assert spec.block_size == (1, 32)
    assert spec.formats == ("E4M3", "E5M2")
    assert spec.fake_quant_formats == ("MXFP8E4M3", "MXFP8E5M2")
    assert not spec.stateful
    assert not spec.needs_reduction
    assert "block 1x32" in spec.capabilities
    assert ottava.get_recipe("mxfp8") == MXFP8BlockScaling()
    made = ottava.get_recipe(
        "mxfp8", fp8_format=Format.HYBRID, with_2d_quantization=True, scale_rounding="floor"
    )
    assert made == MXFP8BlockScaling(Format.HYBRID, True, "floor")
    assert made.name == "mxfp8"
    assert not made.stateful
    defaults = {field.name: field.default for field in dataclasses.fields(MXFP8BlockScaling)}
    assert defaults == {
        "fp8_format": Format.E4M3,
        "with_2d_quantization": False,
        "scale_rounding": "up",
    }


def test_recipes_are_values() -> None:
    one, two = MXFP8BlockScaling(), MXFP8BlockScaling(scale_rounding="floor")
    assert one == MXFP8BlockScaling()
    assert hash(one) == hash(MXFP8BlockScaling())
    assert one != two
    assert copy.deepcopy(two) == two
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.scale_rounding = "floor"  # type: ignore[misc]


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("rounding", ["up", "floor"])
def test_quantizers_by_role(fmt: Format, square: bool, rounding: str) -> None:
    """Gradients have the format of the backward pass; weights alone have squares."""
    recipe = MXFP8BlockScaling(fp8_format=fmt, with_2d_quantization=square, scale_rounding=rounding)
    formats = {
        Format.E4M3: (E4M3, E4M3),
        Format.E5M2: (E5M2, E5M2),
        Format.HYBRID: (E4M3, E5M2),
    }[fmt]
    for role in ("input", "weight", "output", "grad_output", "grad_input"):
        for asked in (role, QuantizerRole("linear", role, "block.0")):
            quantizer = recipe.quantizer(asked)
            assert quantizer == MXFP8Quantizer(
                formats[role.startswith("grad")],
                with_2d_quantization=square and role == "weight",
                scale_rounding=rounding,
            )
    for name, fp8_dtype in (("MXFP8E4M3", E4M3), ("MXFP8E5M2", E5M2)):
        fake = recipe.fake_quantizer(name)
        assert isinstance(fake, MXFP8Quantizer)
        assert fake.fp8_dtype == fp8_dtype
        assert fake.scale_rounding == rounding
        assert fake.rowwise_usage
        assert not fake.with_2d_quantization
    for name in ("FP8E4M3", "mxfp8e4m3", "", "MXFP8"):
        assert recipe.fake_quantizer(name) is None


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "format text": (r"fp8_format is 'E9'.*E4M3, .*E5M2, .*HYBRID", {"fp8_format": "E9"}),
    "format dtype": ("fp8_format is torch.float8_e4m3fn", {"fp8_format": E4M3}),
    "format None": ("fp8_format is None", {"fp8_format": None}),
    "squares": ("with_2d_quantization is 'yes'.*True or False", {"with_2d_quantization": "yes"}),
    "squares None": ("with_2d_quantization is None", {"with_2d_quantization": None}),
    "rounding": ("scale_rounding is 'nearest'.*'up' or 'floor'", {"scale_rounding": "nearest"}),
    "rounding None": ("scale_rounding is None", {"scale_rounding": None}),
    "rounding bool": ("scale_rounding is True", {"scale_rounding": True}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case: str) -> None:
    message, options = BAD[case]
    with pytest.raises(OptionError, match=message):
        MXFP8BlockScaling(**options)
    with pytest.raises(OptionError, match=message):
        ottava.get_recipe("mxfp8", **options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(OptionError, match=r"margin.*fp8_format"):
        ottava.get_recipe("mxfp8", margin=0)
