"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import OptionError, ShapeError, UsageError
from ottava_nvfp4 import NVFP4Quantizer, NVFP4Tensor
from tests.layout_recipes import parts_of

recipe, quantizer = partial(ottava.get_recipe, "nvfp4"), NVFP4Quantizer


def tensor(**replaced: Any) -> Any:
    q = quantizer()(torch.ones(33, 70))
    return NVFP4Tensor(**parts_of(q, layout=q.grid_layout, shape=(33, 70)) | replaced)


BEST: dict[str, Any] = {"four_over_six": True}
SQUARES: dict[str, Any] = {"with_2d_quantization": True}
#: Options of the recipe, and words of the error.
OF_RECIPE: list[tuple[dict[str, Any], str]] = [
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
    ({"nvfp4_4over6": ""}, "four_over_six is ''"),
    ({"nvfp4_4over6_err_mode": 1}, "four_over_six_error is 1"),
    ({"margin": 0}, "margin.*disable_rht"),
]
OF_QUANTIZER: list[tuple[dict[str, Any], str]] = [
    ({"with_rht": 1}, "with_rht is 1.*True or False"),
    ({"stochastic_rounding": "yes"}, "stochastic_rounding is 'yes'"),
    (BEST | {"four_over_six_bound": 1}, "four_over_six_bound is 1"),
    (BEST | {"with_rht": True}, "candidates together with a rotation"),
    (BEST | {"stochastic_rounding": True}, "candidates together with stoch"),
    (SQUARES | {"with_rht": True}, "both directions hold the same"),
    (SQUARES | {"row_scaled": True}, "second_level='row' with blocks of"),
    ({"rowwise": "yes"}, "rowwise is 'yes'"),
]
#: What is made, with which options, the error and words of it.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *((recipe, options, OptionError, words) for options, words in OF_RECIPE),
    *((quantizer, options, OptionError, words) for options, words in OF_QUANTIZER),
    (tensor, {"shape": (33, 68)}, ShapeError, "rowwise_data of a tensor of shape.*33, 34"),
    (tensor, {"amax_rowwise": None}, UsageError, "amax_rowwise is missing"),
    (tensor, {"rowwise_data": None}, UsageError, "rowwise_data is missing"),
    (tensor, {"amax_columnwise": torch.ones(70)}, ShapeError, "amax"),
    (tensor, {"fp8_dtype": torch.uint8}, OptionError, "unknown keyword 'fp8_dtype'"),
]


@pytest.mark.parametrize(("make", "options", "error", "words"), REFUSED)
def test_refused(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    assert make() is not None
    with pytest.raises(error, match=words):
        make(**options)
