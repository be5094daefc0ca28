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
from tests.samples import wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ELEMENT = {"fp8_dtype": (E5M2, torch.int8)}
# Each option with another value than the default, and with one that is refused.
OPTIONS: dict[Any, dict[str, tuple[Any, Any]]] = {
    Float8CurrentScalingQuantizer: {"force_pow_2_scales": (True, 1), "amax_epsilon": (2e9, -1.0)},
    MXFP8Quantizer: {"with_2d_quantization": (True, 1), "scale_rounding": ("floor", "down")},
    Float8BlockQuantizer: {
        "force_pow_2_scales": (False, 0),
        "amax_epsilon": (2e9, "2"),
        "block_scaling_dim": (1, 3),
    },
    Float8RowwiseQuantizer: {
        "force_pow_2_scales": (True, None),
        "amax_epsilon": (2e9, float("inf")),
    },
}


def bytes_of(quantizer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [part for part in quantizer.quantize(x).inner_list() if part is not None]


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_options_that_are_set_later(cls: Any) -> None:
    x = wide(40, 200, seed=0)
    for name, (value, wrong) in (ELEMENT | OPTIONS[cls]).items():
        quantizer = cls(E4M3)
        quantizer.quantize(x)
        before = quantizer.copy()
        with pytest.raises(OttavaError):
            setattr(quantizer, name, wrong)
        assert quantizer == before, name
        setattr(quantizer, name, value)
        expected = cls(**{"fp8_dtype": E4M3, name: value})
        assert quantizer == expected != before, name
        assert_same(bytes_of(quantizer, x), bytes_of(expected, x), note=name)


def test_requantization_is_safe_where_the_same_input_gives_the_same_result() -> None:
    assert all(cls(E4M3).is_requantization_safe() for cls in OPTIONS)
    assert not Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3).is_requantization_safe()
