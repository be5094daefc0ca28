"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.errors import OptionError, RecipeNotFoundError, ShapeError, UsageError
from ottava.gemm import gemm
from ottava_mx import MXBlockScaling, MXQuantizer, MXTensor

OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"element": "FP4"}, "element is 'FP4'.*MXFP4, MXFP6E2M3, MXFP6E3M2, MXINT8"),
    ({"element": None}, "element is None"),
    ({"scale_rounding": "UP"}, "scale_rounding is 'UP'.*up, floor, even, nearest"),
    ({"scale_rounding": True}, "scale_rounding is True"),
    ({"with_2d_quantization": "yes"}, "with_2d_quantization is 'yes'.*True(, | or )False"),
    ({"stochastic_rounding": 1}, "stochastic_rounding is 1"),
    ({"rotation": 8}, r"rotation is 8.*0, 16, 32, 64, 128"),
    ({"rotation": True}, "rotation is True"),
]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *OF_BOTH,
        ({"grad_element": "E2M1"}, "grad_element is 'E2M1'"),
        ({"rotation": 32, "with_2d_quantization": True}, "rotation=32 with with_2d_quantization"),
    ],
)
def test_recipe(options: dict[str, Any], match: str) -> None:
    for make in (MXBlockScaling, lambda **options: ottava.get_recipe("mx", **options)):
        with pytest.raises(OptionError, match=match):
            make(**options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(OptionError, match=r"margin.*element"):
        ottava.get_recipe("mx", margin=0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *OF_BOTH,
        ({"rotated": "rows"}, "rotated is 'rows'.*rowwise, columnwise, both"),
        ({"rotation": 32, "with_2d_quantization": True}, "both directions hold the same"),
        ({"rowwise": "yes"}, "rowwise is 'yes'"),
    ],
)
def test_quantizer(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        MXQuantizer(**options)


def test_tensors() -> None:
    q = MXQuantizer()(torch.ones(33, 70))
    parts = {i.argument: t for i, t in zip(q.inner_tensors, q.inner_list(), strict=True)}
    parts |= {"dtype": torch.float32, "layout": q.grid_layout, "shape": (33, 70)}
    assert MXTensor(**parts).shape == (33, 70)
    for error, replaced, match in (
        (ShapeError, {"shape": (33, 68)}, "rowwise_data of a tensor of shape.*33, 34"),
        (UsageError, {"rowwise_data": None}, "rowwise_data is missing"),
        (UsageError, {"amax_rowwise": torch.ones(())}, "without a second level"),
        (OptionError, {"element": "MXFP4"}, "unknown keyword 'element'"),
    ):
        with pytest.raises(error, match=match):
            MXTensor(**parts | replaced)


def test_products_of_operands_that_are_rotated_otherwise() -> None:
    rotated, other, plain = (
        MXQuantizer(rotation=size, rotated="both")(torch.ones(32, 32)) for size in (32, 16, 0)
    )
    for a, b, match in (
        (rotated, plain, "fprop of an operand that is rotated .* one that is not rotated"),
        (rotated, other, "groups of 32 .* and one that is rotated in groups of 16"),
    ):
        with pytest.raises(UsageError, match=match):
            gemm(a, b, "fprop", out_dtype=torch.float32)


@pytest.mark.parametrize("name", ["mxfp4", "MXFP6", "mxint8"])
def test_the_name_of_a_format_leads_to_the_recipe(name: str) -> None:
    with pytest.raises(RecipeNotFoundError, match=f"recipe '{name}'.*use 'mx', which has a format"):
        ottava.get_recipe(name)
