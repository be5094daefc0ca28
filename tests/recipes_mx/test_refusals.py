"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import OptionError, RecipeNotFoundError, ShapeError, UsageError
from ottava.gemm import gemm
from ottava_mx import MXQuantizer, MXTensor
from tests.layout_recipes import parts_of

OF_BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"element": "FP4"}, OptionError, "element is 'FP4'.*MXFP4, MXFP6E2M3, MXFP6E3M2, MXINT8"),
    ({"element": None}, OptionError, "element is None"),
    ({"scale_rounding": "UP"}, OptionError, "scale_rounding is 'UP'.*up, floor, even, nearest"),
    ({"scale_rounding": True}, OptionError, "scale_rounding is True"),
    (
        {"with_2d_quantization": "yes"},
        OptionError,
        "with_2d_quantization is 'yes'.*True(, | or )False",
    ),
    ({"stochastic_rounding": 1}, OptionError, "stochastic_rounding is 1"),
    ({"rotation": 8}, OptionError, r"rotation is 8.*0, 16, 32, 64, 128"),
    ({"rotation": True}, OptionError, "rotation is True"),
]


recipe, quantizer = partial(ottava.get_recipe, "mx"), MXQuantizer


def tensor(**replaced: Any) -> Any:
    q = quantizer()(torch.ones(33, 70))
    return MXTensor(**parts_of(q, layout=q.grid_layout, shape=(33, 70)) | replaced)


ROTATED_SQUARES: dict[str, Any] = {"rotation": 32, "with_2d_quantization": True}
#: What is made, with which options, the error and words of it.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *((make, *of_both) for make in (recipe, quantizer) for of_both in OF_BOTH),
    (recipe, {"grad_element": "E2M1"}, OptionError, "grad_element is 'E2M1'"),
    (recipe, ROTATED_SQUARES, OptionError, "rotation=32 with with_2d_quantization"),
    (recipe, {"margin": 0}, OptionError, "margin.*element"),
    (quantizer, {"rotated": "rows"}, OptionError, "is 'rows'.*rowwise, columnwise, both"),
    (quantizer, ROTATED_SQUARES, OptionError, "both directions hold the same"),
    (quantizer, {"rowwise": "yes"}, OptionError, "rowwise is 'yes'"),
    (tensor, {"shape": (33, 68)}, ShapeError, "rowwise_data of a tensor of shape.*33, 34"),
    (tensor, {"rowwise_data": None}, UsageError, "rowwise_data is missing"),
    (tensor, {"amax_rowwise": torch.ones(())}, UsageError, "without a second level"),
    (tensor, {"element": "MXFP4"}, OptionError, "unknown keyword 'element'"),
]


@pytest.mark.parametrize(("make", "options", "error", "words"), REFUSED)
def test_refused(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    assert make() is not None
    with pytest.raises(error, match=words):
        make(**options)


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
