"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from functools import partial
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
from tests.layout_recipes import parts_of

E4M3 = torch.float8_e4m3fn
recipe = partial(ottava.get_recipe, "blockwise")


def quantizer(**options: Any) -> Any:
    return Float8BlockQuantizer(**{"fp8_dtype": E4M3} | options)


def tensor(cls: Any = Float8BlockwiseQTensor, **replaced: Any) -> Any:
    q = quantizer(columnwise=False)(torch.ones(200, 300))
    return cls(**parts_of(q, fp8_dtype=E4M3) | replaced)


storage = partial(tensor, Float8BlockwiseQTensorStorage)
HALF = torch.ones(2, 3).half()
#: What is made, with which options, the error and words of it.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (recipe, {"fp8_format": "E9"}, OptionError, "fp8_format is 'E9'.*HYBRID"),
    (recipe, {"force_pow_2_scales": 1}, OptionError, "force_pow_2_scales is 1.*True or False"),
    (recipe, {"amax_epsilon": -1.0}, OptionError, "epsilon"),
    (recipe, {"x_block_scaling_dim": 0}, OptionError, "x_block_scaling_dim is 0.*1 x.*128 x 128"),
    (recipe, {"w_block_scaling_dim": True}, OptionError, "w_block_scaling_dim is True"),
    (recipe, {"grad_block_scaling_dim": 2.0}, OptionError, "grad_block_scaling_dim is 2.0"),
    (recipe, {"margin": 0}, OptionError, "margin.*fp8_format"),
    (quantizer, {"fp8_dtype": torch.int8}, DTypeError, "int8"),
    (quantizer, {"block_scaling_dim": 3}, OptionError, "block_scaling_dim is 3"),
    (quantizer, {"block_scaling_dim": True}, OptionError, "block_scaling_dim is True"),
    (quantizer, {"force_pow_2_scales": 1}, OptionError, "force_pow_2_scales is 1"),
    (quantizer, {"amax_epsilon": -1.0}, OptionError, "epsilon"),
    (tensor, {"fp8_dtype": torch.int8}, DTypeError, "int8"),
    (tensor, {"block_scaling_dim": 1}, ShapeError, r"\(2, 3\).*\(200, 3\)"),
    (tensor, {"block_scaling_dim": 0}, OptionError, "block_scaling_dim is 0"),
    (tensor, {"pow_2_scales": 1}, OptionError, "pow_2_scales is 1"),
    (tensor, {"rowwise_scale_inv": HALF}, DTypeError, "float16"),
    (storage, {"pow_2_scales": 1}, OptionError, "pow_2_scales is 1"),
]


@pytest.mark.parametrize(("make", "options", "error", "words"), REFUSED)
def test_refused(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    assert make() is not None
    with pytest.raises(error, match=words):
        make(**options)
