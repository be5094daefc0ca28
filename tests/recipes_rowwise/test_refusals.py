"""Options that are refused by the recipe, the quantizer and the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, OptionError, ShapeError
from ottava_rowwise import Float8RowwiseQuantizer, Float8RowwiseTensor

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("fp8_format", "E9", "fp8_format is 'E9'.*HYBRID"),
        ("force_pow_2_scales", 1, "force_pow_2_scales is 1.*True or False"),
        ("amax_epsilon", -1.0, "epsilon"),
        ("wgrad_high_precision", None, "wgrad_high_precision is None.*True or False"),
        ("margin", 0, "margin.*fp8_format"),
    ],
)
def test_recipe(field: str, value: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        ottava.get_recipe("rowwise", **{field: value})


def test_quantizer_and_tensors() -> None:
    q = Float8RowwiseQuantizer(E4M3)(torch.ones(200, 300))
    parts = {i.argument: t for i, t in zip(q.inner_tensors, q.inner_list(), strict=True)}
    parts |= {"dtype": torch.float32, "layout": q.grid_layout}
    assert Float8RowwiseTensor(**parts).shape == (200, 300)
    for error, match, make in (
        (DTypeError, "int8", lambda: Float8RowwiseQuantizer(torch.int8)),
        (OptionError, "is 1", lambda: Float8RowwiseQuantizer(E4M3, force_pow_2_scales=1)),
        (OptionError, "epsilon", lambda: Float8RowwiseQuantizer(E4M3, amax_epsilon=-1.0)),
        (
            ShapeError,
            r"\(1, 200\).*\(200, 1\)",
            lambda: Float8RowwiseTensor(**parts | {"rowwise_scale_inv": torch.ones(1, 200)}),
        ),
        (
            DTypeError,
            "float16",
            lambda: Float8RowwiseTensor(
                **parts | {"columnwise_scale_inv": torch.ones(1, 300).half()}
            ),
        ),
    ):
        with pytest.raises(error, match=match):
            make()
