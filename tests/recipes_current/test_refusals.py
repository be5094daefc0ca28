"""Options that are refused by the recipe and by the quantizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DeviceError, DTypeError, OptionError, UsageError
from ottava_current import Float8CurrentScalingQuantizer

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("fp8_format", "E9", "fp8_format is 'E9'.*HYBRID"),
        ("amax_epsilon", math.nan, "epsilon"),
        ("force_pow_2_scales", 2, "force_pow_2_scales is 2.*True or False"),
        ("with_amax_reduction", None, "with_amax_reduction is None"),
        ("format", "E4M3", "format.*fp8_format"),
    ],
)
def test_recipe(field: str, value: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        ottava.get_recipe("current", **{field: value})


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (DTypeError, {"fp8_dtype": torch.float16}, "float16.*float8_e4m3fn"),
        (OptionError, {"amax_epsilon": -1.0}, "epsilon"),
        (OptionError, {"force_pow_2_scales": 2}, "force_pow_2_scales is 2"),
        (OptionError, {"with_amax_reduction": 1}, "with_amax_reduction is 1"),
        (DeviceError, {"device": "bogus"}, "bogus"),
    ],
)
def test_quantizer(error: type[Exception], options: dict[str, Any], match: str) -> None:
    with pytest.raises(error, match=match):
        Float8CurrentScalingQuantizer(**{"fp8_dtype": E4M3} | options)


def test_reduction_without_a_process_group() -> None:
    quantizer = Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    with pytest.raises(UsageError, match="init_process_group"):
        quantizer(torch.ones(2))
