"""The recipe's options, what the package announces and fake quantization."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.debug import fake_quantize
from ottava.errors import OptionError
from ottava.formats import Format
from ottava_blockwise import Float8BlockQuantizer, Float8BlockScaling
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, wide

FORMATS = {"BLOCKWISEE4M3": E4M3, "BLOCKWISEE5M2": E5M2}


def test_defaults_and_options_reach_the_quantizers() -> None:
    recipe = ottava.get_recipe("blockwise")
    assert recipe == Float8BlockScaling()
    expected = {"input": (E4M3, 1), "weight": (E4M3, 2), "grad_output": (E4M3, 1)}
    assert {
        role: (q.fp8_dtype, q.block_scaling_dim)
        for role in expected
        for q in [recipe.quantizer(role)]
    } == expected
    recipe = Float8BlockScaling(
        fp8_format=Format.HYBRID,
        force_pow_2_scales=False,
        amax_epsilon=1e-4,
        x_block_scaling_dim=2,
        w_block_scaling_dim=1,
        grad_block_scaling_dim=2,
    )
    expected = {"input": (E4M3, 2), "weight": (E4M3, 1), "grad_output": (E5M2, 2)}
    for role, (fp8_dtype, dim) in expected.items():
        made = Float8BlockQuantizer(
            fp8_dtype, amax_epsilon=1e-4, force_pow_2_scales=False, block_scaling_dim=dim
        )
        assert recipe.quantizer(role) == made


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fp8_format", "E9"),
        ("force_pow_2_scales", 1),
        ("amax_epsilon", -1.0),
        ("x_block_scaling_dim", 0),
        ("w_block_scaling_dim", True),
        ("grad_block_scaling_dim", 2.0),
    ],
)
def test_wrong_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(OptionError, match=field.removeprefix("amax_")):
        ottava.get_recipe("blockwise", **{field: value})


def test_the_spec() -> None:
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "blockwise")
    assert (spec.block_size, spec.formats, spec.stateful) == ((1, 128), ("E4M3", "E5M2"), False)
    assert set(spec.fake_quant_formats) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quantization_is_that_of_blocks_along_rows(name: str, dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (1,), (33, 260), (2, 5, 130)):
        x = wide(*shape, dtype=dtype, sigma=2.0).requires_grad_()
        got = fake_quantize(x, name)
        assert_same(
            got,
            Float8BlockQuantizer(FORMATS[name], columnwise=False, block_scaling_dim=1)(
                x.detach()
            ).dequantize(),
        )
        got.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
