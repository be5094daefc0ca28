"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, OptionError, ShapeError
from ottava_rowwise import Float8RowwiseQuantizer, Float8RowwiseTensor
from tests.layout_recipes import parts_of

E4M3 = torch.float8_e4m3fn
recipe = partial(ottava.get_recipe, "rowwise")


def quantizer(**options: Any) -> Any:
    return Float8RowwiseQuantizer(**{"fp8_dtype": E4M3} | options)


def tensor(**replaced: Any) -> Any:
    q = quantizer()(torch.ones(200, 300))
    return Float8RowwiseTensor(**parts_of(q, layout=q.grid_layout) | replaced)


TURNED, HALF = torch.ones(1, 200), torch.ones(1, 300).half()
#: What is made, with which options, the error and words of it.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (recipe, {"fp8_format": "E9"}, OptionError, "fp8_format is 'E9'.*HYBRID"),
    (recipe, {"force_pow_2_scales": 1}, OptionError, "force_pow_2_scales is 1.*True or False"),
    (recipe, {"amax_epsilon": -1.0}, OptionError, "epsilon"),
    (recipe, {"wgrad_high_precision": 1}, OptionError, "precision is 1.*True or False"),
    (recipe, {"margin": 0}, OptionError, "margin.*fp8_format"),
    (quantizer, {"fp8_dtype": torch.int8}, DTypeError, "int8"),
    (quantizer, {"force_pow_2_scales": 1}, OptionError, "is 1"),
    (quantizer, {"amax_epsilon": -1.0}, OptionError, "epsilon"),
    (tensor, {"rowwise_scale_inv": TURNED}, ShapeError, r"\(1, 200\).*\(200, 1\)"),
    (tensor, {"columnwise_scale_inv": HALF}, DTypeError, "float16"),
]


@pytest.mark.parametrize(("make", "options", "error", "words"), REFUSED)
def test_refused(make: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    assert make() is not None
    with pytest.raises(error, match=words):
        make(**options)
