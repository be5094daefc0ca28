"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.errors import OptionError, ShapeError, UsageError
from ottava_nvfp4 import NVFP4BlockScaling, NVFP4Quantizer, NVFP4Tensor


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"disable_rht": "yes"}, "disable_rht is 'yes'.*True or False"),
        ({"disable_stochastic_rounding": None}, "disable_stochastic_rounding is None"),
        ({"disable_2d_quantization": 1}, "disable_2d_quantization is 1"),
        ({"row_scaled_activation": 0}, "row_scaled_activation is 0"),
        ({"four_over_six": "inputs"}, "four_over_six is 'inputs'.*none, weights, activations, all"),
        ({"four_over_six": True}, "four_over_six is True"),
        ({"four_over_six_bound": 512}, "four_over_six_bound is 512.*one of 256, 448"),
        ({"four_over_six_bound": 256.0}, "four_over_six_bound is 256.0"),
        ({"four_over_six_error": "mae"}, "four_over_six_error is 'mae'.*one of MAE, MSE"),
        ({"four_over_six": "all"}, "four_over_six='all' with the Hadamard.*disable_rht=True"),
        ({"four_over_six": "activations"}, "'activations' with the Hadamard.*'weights'"),
        ({"nvfp4_4over6": "best"}, "four_over_six is 'best'"),
        ({"nvfp4_4over6_err_mode": 1}, "four_over_six_error is 1"),
    ],
)
def test_recipe(options: dict[str, Any], match: str) -> None:
    for make in (NVFP4BlockScaling, lambda **options: ottava.get_recipe("nvfp4", **options)):
        with pytest.raises(OptionError, match=match):
            make(**options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(OptionError, match=r"margin.*disable_rht"):
        ottava.get_recipe("nvfp4", margin=0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"with_rht": 1}, "with_rht is 1.*True or False"),
        ({"stochastic_rounding": "yes"}, "stochastic_rounding is 'yes'"),
        ({"four_over_six": True, "four_over_six_bound": 1}, "four_over_six_bound is 1"),
        ({"four_over_six": True, "with_rht": True}, "candidates together with a rotation"),
        ({"four_over_six": True, "stochastic_rounding": True}, "candidates together with stoch"),
        ({"with_2d_quantization": True, "with_rht": True}, "both directions hold the same"),
        ({"with_2d_quantization": True, "row_scaled": True}, "second_level='row' with blocks of"),
        ({"rowwise": "yes"}, "rowwise is 'yes'"),
    ],
)
def test_quantizer(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        NVFP4Quantizer(**options)


def test_tensors() -> None:
    q = NVFP4Quantizer()(torch.ones(33, 70))
    parts = {i.argument: t for i, t in zip(q.inner_tensors, q.inner_list(), strict=True)}
    parts |= {"dtype": torch.float32, "layout": q.grid_layout, "shape": (33, 70)}
    assert NVFP4Tensor(**parts).shape == (33, 70)
    for error, replaced, match in (
        (ShapeError, {"shape": (33, 68)}, "rowwise_data of a tensor of shape.*33, 34"),
        (UsageError, {"amax_rowwise": None}, "amax_rowwise is missing"),
        (UsageError, {"rowwise_data": None}, "rowwise_data is missing"),
        (ShapeError, {"amax_columnwise": torch.ones(70)}, "amax"),
        (OptionError, {"fp8_dtype": torch.float8_e4m3fn}, "unknown keyword 'fp8_dtype'"),
    ):
        with pytest.raises(error, match=match):
            NVFP4Tensor(**parts | replaced)
