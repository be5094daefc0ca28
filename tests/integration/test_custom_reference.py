"""The reference of current scaling and ``recipes-current``: the same bytes for every input, the
same training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import kernels
from ottava_current import Float8CurrentScalingQuantizer
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CustomRecipe,
    by_layer,
    current_scaling_ref_quantizer_factory,
    mirror,
)
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES
from ottava_demo.training import Trainee

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = [(False, 0.0), (True, 0.0), (False, 1e-3), (True, 1e-3)]


def assert_same(x: torch.Tensor, quant_dtype: torch.dtype, pow_2: bool, eps: float) -> None:
    reference = CurrentScalingQuantizerRef(quant_dtype, pow_2_scales=pow_2, eps=eps)(x)
    tensor = Float8CurrentScalingQuantizer(quant_dtype, force_pow_2_scales=pow_2, amax_epsilon=eps)(
        x
    )
    assert torch.equal(reference.data.view(torch.uint8), tensor._data)
    assert torch.equal(reference.scale.view(torch.int32), tensor._scale_inv[0].view(torch.int32))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one, other = reference.dequantize(dtype), tensor.dequantize(dtype)
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))


@pytest.mark.parametrize("quant_dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("pow_2", "eps"), OPTIONS)
def test_every_16_bit_value(quant_dtype: torch.dtype, pow_2: bool, eps: float) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.bfloat16, torch.float16):
        every = patterns.view(dtype)
        assert_same(every, quant_dtype, pow_2, eps)
        finite = every[every.isfinite()]
        assert_same(finite, quant_dtype, pow_2, eps)
        # Each exponent's own scale.
        for part in finite.float().abs().sort().values.to(dtype).split(2048):
            assert_same(part, quant_dtype, pow_2, eps)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("quant_dtype", [E4M3, E5M2])
def test_the_scale_of_any_amax(quant_dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    bits = torch.randint(0, 2**31 - 1, (count,), dtype=torch.int32)
    special = torch.tensor([0.0, 1e-45, 1.2e-38, 448.0, 57344.0, 3.4e38, math.inf, math.nan])
    for amax in torch.cat([special, bits.view(torch.float32)]):
        for pow_2, eps in OPTIONS:
            assert_same(amax.reshape(1), quant_dtype, pow_2, eps)


@given(
    values=st.lists(st.floats(width=32), min_size=0, max_size=30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    quant_dtype=st.sampled_from([E4M3, E5M2]),
    options=st.sampled_from(OPTIONS),
    columns=st.sampled_from([1, 2, 3, 5]),
    turned=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_values(
    values: Any, dtype: Any, quant_dtype: Any, options: Any, columns: int, turned: bool
) -> None:
    x = (
        torch.tensor(values[: len(values) // columns * columns], dtype=torch.float32)
        .to(dtype)
        .view(-1, columns)
    )
    assert_same(x.t() if turned else x, quant_dtype, *options)


def losses(recipe: Any, dtype: torch.dtype, steps: int = 6) -> list[float]:
    """Training of the demo's model; every linear layer of the blocks runs under the recipe."""
    size, corpus, generator = SIZES["tiny"], load_corpus(), torch.Generator().manual_seed(1)
    trainee = Trainee(recipe, size=size, dtype=dtype)
    return [
        trainee.step(batch(corpus.train, size.batch, size.length, generator)) for _ in range(steps)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_training_is_the_same(dtype: torch.dtype) -> None:
    with kernels.use_backend("reference"):
        current = losses("current", dtype)
        reference = losses(CustomRecipe(current_scaling_ref_quantizer_factory), dtype)
    assert reference == current
    assert current[-1] < current[0]
    # What is compared depends on the quantization.
    with kernels.use_backend("reference"):
        assert losses("mxfp8", dtype) != current


def test_in_float32_the_kernels_training_is_the_same() -> None:
    assert losses("custom", torch.float32) == losses("current", torch.float32)


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "custom"])
def test_a_mirror_trains_as_its_recipe(name: str) -> None:
    expected = losses(name, torch.bfloat16, 6)
    assert losses(CustomRecipe(mirror(name)), torch.bfloat16, 6) == expected
    assert (
        losses(CustomRecipe(by_layer({"blocks.*": name}, "identity")), torch.bfloat16, 6)
        == expected
    )
