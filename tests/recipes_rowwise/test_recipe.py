"""The recipe's options, what the package announces and fake quantization."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.debug import fake_quantize
from ottava.errors import OptionError
from ottava.formats import Format
from ottava_rowwise import Float8RowwiseQuantizer, Float8RowwiseScaling
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, wide

FORMATS = {"ROWWISEE4M3": E4M3, "ROWWISEE5M2": E5M2}


def test_defaults_and_options_reach_the_quantizers() -> None:
    recipe = ottava.get_recipe("rowwise")
    assert recipe == Float8RowwiseScaling()
    assert {recipe.quantizer(role).fp8_dtype for role in ("input", "weight", "grad_output")} == {
        E4M3
    }
    recipe = Float8RowwiseScaling(
        fp8_format=Format.HYBRID, force_pow_2_scales=True, amax_epsilon=1e-4
    )
    for role, fp8_dtype in (("input", E4M3), ("weight", E4M3), ("grad_output", E5M2)):
        assert recipe.quantizer(role) == Float8RowwiseQuantizer(
            fp8_dtype, amax_epsilon=1e-4, force_pow_2_scales=True
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fp8_format", "E9"),
        ("force_pow_2_scales", 1),
        ("amax_epsilon", -1.0),
        ("wgrad_high_precision", None),
    ],
)
def test_wrong_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(OptionError, match=field.removeprefix("amax_")):
        ottava.get_recipe("rowwise", **{field: value})


def test_the_spec() -> None:
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "rowwise")
    assert (spec.block_size, spec.formats, spec.stateful) == ((1, None), ("E4M3", "E5M2"), False)
    assert set(spec.fake_quant_formats) == set(FORMATS)


def test_an_explanation_says_what_stays_in_high_precision() -> None:
    recipe = Float8RowwiseScaling(wgrad_high_precision=True)
    for role in ("input", "grad_output"):
        assert recipe.explain(role).rowwise == "rowwise E4M3"
        assert recipe.explain(role).columnwise == "high precision"
    assert recipe.explain("weight").columnwise == "rowwise E4M3"
    assert Float8RowwiseScaling().explain("input").columnwise == "rowwise E4M3"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quantization_is_that_of_rows(name: str, dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (1,), (33, 260), (2, 5, 130)):
        x = wide(*shape, dtype=dtype, sigma=2.0).requires_grad_()
        got = fake_quantize(x, name)
        assert_same(
            got, Float8RowwiseQuantizer(FORMATS[name], columnwise=False)(x.detach()).dequantize()
        )
        got.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
