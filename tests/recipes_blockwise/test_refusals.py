"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, OptionError, ShapeError
from ottava_blockwise import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("fp8_format", "E9", "fp8_format is 'E9'.*HYBRID"),
        ("force_pow_2_scales", 1, "force_pow_2_scales is 1.*True or False"),
        ("amax_epsilon", -1.0, "epsilon"),
        ("x_block_scaling_dim", 0, r"x_block_scaling_dim is 0.*1 x 128.*128 x 128"),
        ("w_block_scaling_dim", True, "w_block_scaling_dim is True"),
        ("grad_block_scaling_dim", 2.0, "grad_block_scaling_dim is 2.0"),
        ("margin", 0, "margin.*fp8_format"),
    ],
)
def test_recipe(field: str, value: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        ottava.get_recipe("blockwise", **{field: value})


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (DTypeError, {"fp8_dtype": torch.int8}, "int8"),
        (OptionError, {"block_scaling_dim": 3}, "block_scaling_dim is 3"),
        (OptionError, {"block_scaling_dim": True}, "block_scaling_dim is True"),
        (OptionError, {"force_pow_2_scales": 1}, "force_pow_2_scales is 1"),
        (OptionError, {"amax_epsilon": -1.0}, "epsilon"),
    ],
)
def test_quantizer(error: type[Exception], options: dict[str, Any], match: str) -> None:
    with pytest.raises(error, match=match):
        Float8BlockQuantizer(**{"fp8_dtype": E4M3} | options)


@pytest.mark.parametrize("cls", [Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage])
def test_tensors(cls: Any) -> None:
    q = Float8BlockQuantizer(E4M3)(torch.ones(200, 300))
    parts = {
        "rowwise_data": q._rowwise_data,
        "rowwise_scale_inv": q._rowwise_scale_inv,
        "dtype": torch.float32,
        "fp8_dtype": E4M3,
    }
    assert cls(**parts).shape == (200, 300)
    for error, replaced, match in (
        (DTypeError, {"fp8_dtype": torch.int8}, "int8"),
        (ShapeError, {"block_scaling_dim": 1}, r"\(2, 3\).*\(200, 3\)"),
        (OptionError, {"block_scaling_dim": 0}, "block_scaling_dim is 0"),
        (OptionError, {"pow_2_scales": 1}, "pow_2_scales is 1"),
        (DTypeError, {"rowwise_scale_inv": q._rowwise_scale_inv.half()}, "float16"),
    ):
        with pytest.raises(error, match=match):
            cls(**parts | replaced)
