"""Options of quantizers that are set after construction: as if they had been given to the
constructor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottava.errors import OttavaError
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_rowwise import Float8RowwiseQuantizer
from tests.comparing import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Class, and each option with another value than the default, and with one that is refused.
OPTIONS = [
    (Float8CurrentScalingQuantizer, {"force_pow_2_scales": (True, 1), "amax_epsilon": (2, -1.0)}),
    (MXFP8Quantizer, {"with_2d_quantization": (True, 1), "scale_rounding": ("floor", "down")}),
    (
        Float8BlockQuantizer,
        {"force_pow_2_scales": (False, 0), "amax_epsilon": (2, "2"), "block_scaling_dim": (1, 3)},
    ),
    (
        Float8RowwiseQuantizer,
        {"force_pow_2_scales": (True, None), "amax_epsilon": (2, float("inf"))},
    ),
]
CASES = [
    pytest.param(cls, name, *values, id=f"{cls.__name__}-{name}")
    for cls, options in OPTIONS
    for name, values in ({"fp8_dtype": (E5M2, torch.int8)} | options).items()
]
X = (
    torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    * torch.logspace(-3, 3, 40)[:, None]
)


def _inner(tensor: Any) -> list[torch.Tensor | None]:
    return [
        None if part is None else part.reshape(-1).view(torch.uint8) for part in tensor.inner_list()
    ]


@pytest.mark.parametrize(("cls", "name", "value", "wrong"), CASES)
def test_options_that_are_set_later(cls: Any, name: str, value: Any, wrong: Any) -> None:
    quantizer = cls(E4M3)
    quantizer.quantize(X)
    before = quantizer.copy()
    with pytest.raises(OttavaError):
        setattr(quantizer, name, wrong)
    assert quantizer == before
    setattr(quantizer, name, value)
    built = cls(**{"fp8_dtype": E4M3, name: value})
    assert quantizer == built
    assert quantizer != before
    for given, expected in zip(
        _inner(quantizer.quantize(X)), _inner(built.quantize(X)), strict=True
    ):
        assert_same(given, expected)
    values = quantizer.quantize(X).dequantize()
    assert (values - X).abs().max() <= 0.3 * X.abs().max()


def test_requantization_is_safe_where_the_same_input_gives_the_same_result() -> None:
    for cls, _ in OPTIONS:
        assert cls(E4M3).is_requantization_safe()
    assert not Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3).is_requantization_safe()
