"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, OptionError, UsageError
from ottava_mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from tests.layout_recipes import parts_of

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
recipe = partial(ottava.get_recipe, "mxfp8")


def quantizer(**options: Any) -> Any:
    return MXFP8Quantizer(**{"fp8_dtype": E4M3} | options)


def tensor(cls: Any = MXFP8Tensor, **replaced: Any) -> Any:
    return cls(**parts_of(quantizer()(torch.ones(33, 70)), fp8_dtype=E4M3) | replaced)


storage = partial(tensor, MXFP8TensorStorage)
ROUNDING = "scale_rounding is 'UP'.*'up' or 'floor'"
#: What is made, with which options, the error and words of it.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (recipe, {"fp8_format": "E9"}, OptionError, r"fp8_format is 'E9'.*E4M3, .*E5M2, .*HYBRID"),
    (recipe, {"fp8_format": E4M3}, OptionError, "fp8_format is torch.float8_e4m3fn"),
    (recipe, {"fp8_format": None}, OptionError, "fp8_format is None"),
    (recipe, {"with_2d_quantization": "yes"}, OptionError, "is 'yes'.*True or False"),
    (recipe, {"with_2d_quantization": None}, OptionError, "with_2d_quantization is None"),
    (recipe, {"scale_rounding": "UP"}, OptionError, ROUNDING),
    (recipe, {"scale_rounding": None}, OptionError, "scale_rounding is None"),
    (recipe, {"scale_rounding": True}, OptionError, "scale_rounding is True"),
    (recipe, {"margin": 0}, OptionError, "margin.*fp8_format"),
    (quantizer, {"fp8_dtype": torch.float16}, DTypeError, "float16.*float8_e4m3fn"),
    (quantizer, {"fp8_dtype": E8M0}, DTypeError, "e8m0"),
    (quantizer, {"fp8_dtype": "e4m3"}, DTypeError, "'e4m3'"),
    (quantizer, {"scale_rounding": "UP"}, OptionError, ROUNDING),
    (quantizer, {"scale_rounding": ["up"]}, OptionError, "scale_rounding"),
    (quantizer, {"with_2d_quantization": 1}, OptionError, "is 1.*True or False"),
    (quantizer, {"rowwise": "yes"}, OptionError, "rowwise is 'yes'"),
    (tensor, {"fp8_dtype": torch.float16}, DTypeError, "float16"),
    (tensor, {"with_2d_quantization": 1}, OptionError, "with_2d_quantization is 1"),
    (tensor, {"layout": None}, OptionError, "unknown keyword 'layout'.*fp8_dtype"),
    (tensor, {"rowwise_data": None}, UsageError, "rowwise_data is missing"),
    (storage, {"rowwise_data": None}, UsageError, "rowwise_data is missing"),
]


@pytest.mark.parametrize(("make", "options", "error", "words"), REFUSED)
def test_refused(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    assert make() is not None
    with pytest.raises(error, match=words):
        make(**options)
