"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, OptionError, UsageError
from ottava_mxfp8 import MXFP8BlockScaling, MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fp8_format": "E9"}, r"fp8_format is 'E9'.*E4M3, .*E5M2, .*HYBRID"),
        ({"fp8_format": E4M3}, "fp8_format is torch.float8_e4m3fn"),
        ({"fp8_format": None}, "fp8_format is None"),
        ({"with_2d_quantization": "yes"}, "with_2d_quantization is 'yes'.*True or False"),
        ({"with_2d_quantization": None}, "with_2d_quantization is None"),
        ({"scale_rounding": "nearest"}, "scale_rounding is 'nearest'.*'up' or 'floor'"),
        ({"scale_rounding": None}, "scale_rounding is None"),
        ({"scale_rounding": True}, "scale_rounding is True"),
    ],
)
def test_recipe(options: dict[str, Any], match: str) -> None:
    for make in (MXFP8BlockScaling, lambda **options: ottava.get_recipe("mxfp8", **options)):
        with pytest.raises(OptionError, match=match):
            make(**options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(OptionError, match=r"margin.*fp8_format"):
        ottava.get_recipe("mxfp8", margin=0)


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (DTypeError, {"fp8_dtype": torch.float16}, "float16.*float8_e4m3fn"),
        (DTypeError, {"fp8_dtype": torch.float8_e8m0fnu}, "e8m0"),
        (DTypeError, {"fp8_dtype": "e4m3"}, "'e4m3'"),
        (OptionError, {"scale_rounding": "UP"}, "scale_rounding is 'UP'.*'up' or 'floor'"),
        (OptionError, {"scale_rounding": ["up"]}, "scale_rounding"),
        (OptionError, {"with_2d_quantization": 1}, "with_2d_quantization is 1.*True or False"),
        (OptionError, {"rowwise": "yes"}, "rowwise is 'yes'"),
    ],
)
def test_quantizer(error: type[Exception], options: dict[str, Any], match: str) -> None:
    with pytest.raises(error, match=match):
        MXFP8Quantizer(**{"fp8_dtype": E4M3} | options)


@pytest.mark.parametrize("cls", [MXFP8Tensor, MXFP8TensorStorage])
def test_tensors(cls: Any) -> None:
    q = MXFP8Quantizer(E4M3)(torch.ones(33, 70))
    parts = {i.argument: t for i, t in zip(q.inner_tensors, q.inner_list(), strict=True)}
    parts |= {"dtype": torch.float32, "fp8_dtype": E4M3}
    assert cls(**parts).shape == (33, 70)
    for error, replaced, match in (
        (DTypeError, {"fp8_dtype": torch.float16}, "float16"),
        (OptionError, {"with_2d_quantization": 1}, "with_2d_quantization is 1"),
        (OptionError, {"layout": q.grid_layout}, "unknown keyword 'layout'.*fp8_dtype"),
        (UsageError, {"rowwise_data": None}, "rowwise_data is missing"),
    ):
        with pytest.raises(error, match=match):
            cls(**parts | replaced)
