"""Options that are refused by the recipe and by the quantizer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

import ottava
from ottava.distributed import quantize_master_weights
from ottava.errors import DeviceError, DTypeError, OptionError, UsageError
from ottava_current import Float8CurrentScalingQuantizer

E4M3 = torch.float8_e4m3fn
recipe = partial(ottava.get_recipe, "current")


def quantizer(**options: Any) -> Any:
    return Float8CurrentScalingQuantizer(**{"fp8_dtype": E4M3} | options)


#: What is made, with which options, the error and words of it.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (recipe, {"fp8_format": "E9"}, OptionError, "fp8_format is 'E9'.*HYBRID"),
    (recipe, {"amax_epsilon": math.nan}, OptionError, "epsilon"),
    (recipe, {"force_pow_2_scales": 2}, OptionError, "force_pow_2_scales is 2.*True or False"),
    (recipe, {"with_amax_reduction": None}, OptionError, "with_amax_reduction is None"),
    (recipe, {"format": "E4M3"}, OptionError, "format.*fp8_format"),
    (quantizer, {"fp8_dtype": torch.float16}, DTypeError, "float16.*float8_e4m3fn"),
    (quantizer, {"amax_epsilon": -1.0}, OptionError, "epsilon"),
    (quantizer, {"force_pow_2_scales": 2}, OptionError, "force_pow_2_scales is 2"),
    (quantizer, {"with_amax_reduction": 1}, OptionError, "with_amax_reduction is 1"),
    (quantizer, {"device": "bogus"}, DeviceError, "bogus"),
    (quantizer, {"amax_reduction_group": 3}, OptionError, "the group is"),
]


@pytest.mark.parametrize(("make", "options", "error", "words"), REFUSED)
def test_refused(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    assert make() is not None
    with pytest.raises(error, match=words):
        make(**options)


@pytest.mark.parametrize("option", [{"force_pow_2_scales": True}, {"amax_epsilon": 1.0}])
def test_master_weights_of_other_options(option: dict[str, Any]) -> None:
    weights = [each(torch.zeros(2)) for each in (quantizer(), quantizer(**option))]
    with pytest.raises(OptionError, match=f"{next(iter(option))} is .* for weight 1"):
        quantize_master_weights(weights, [torch.ones(2)] * 2, None)


def test_reduction_without_a_process_group() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        quantizer(with_amax_reduction=True)(torch.ones(2))
