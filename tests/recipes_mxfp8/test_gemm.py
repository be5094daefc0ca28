"""Products of MXFP8 operands against float64 on the decoded ones, and beyond float32's range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ottava
from ottava.gemm import gemm
from ottava.kernels.backends import use_backend
from ottava_mxfp8 import MXFP8Quantizer
from tests.recipes_mxfp8.products import (
    E4M3,
    E5M2,
    SHAPES,
    PerTensor,
    bf16_product,
    decoded,
    expected,
    operands,
    relative_error,
)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", SHAPES)
def test_no_less_exact_than_a_bf16_product_of_the_same_operands(
    kind: str, fp8_dtype: torch.dtype, backend: str
) -> None:
    a, b = operands(kind, fp8_dtype)
    exact, theirs = expected(a, b, kind), bf16_product(a, b, kind)
    with use_backend(backend):
        narrow, wide = (
            gemm(a, b, kind, out_dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
        )
    assert narrow.dtype == torch.bfloat16
    assert relative_error(narrow, exact) <= relative_error(theirs, exact)
    assert relative_error(wide, exact) < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_sizes(data: Any) -> None:
    kind = data.draw(st.sampled_from(list(SHAPES)))
    m, n, k = (data.draw(st.integers(0, 70)) for _ in range(3))
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    quantizer = MXFP8Quantizer(E4M3)
    a, b = (quantizer(torch.randn(shape, generator=generator)) for shape in shapes)
    got = gemm(a, b, kind, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), expected(a, b, kind), rtol=0, atol=1e-4)


def test_bias_out_and_accumulation() -> None:
    a, b = operands("fprop")
    bias = torch.randn(80)
    exact = expected(a, b, "fprop") + bias.double()
    assert relative_error(gemm(a, b, "fprop", out_dtype=torch.float32, bias=bias), exact) < 1e-6
    out = torch.ones(96, 80)
    assert gemm(a, b, "fprop", bias=bias, out=out, accumulate=True) is out
    assert relative_error(out, exact + 1) < 1e-6


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 96, 512), (1, 1, 1), (3, 70, 0), (0, 5, 40), (4, 0, 40), (33, 7, 1030)]
)
def test_sums_begin_with_the_bias(m: int, n: int, k: int, bias_dtype: torch.dtype) -> None:
    """Bytes of what torch does where somebody looks on, as of compiled code."""
    quantizer, bias = MXFP8Quantizer(E4M3), torch.randn(n).to(bias_dtype)
    a, b = quantizer(torch.randn(m, k)), quantizer(torch.randn(n, k))
    made = gemm(a, b, "fprop", out_dtype=torch.float32, bias=bias)
    with torch.profiler.profile():
        assert torch.equal(made, gemm(a, b, "fprop", out_dtype=torch.float32, bias=bias))
    assert torch.equal(made, torch.addmm(bias.float(), a.dequantize(), b.dequantize().t()))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("other", ["dense", "per tensor"])
def test_one_operand_of_another_kind(kind: str, other: str) -> None:
    """A scale of another recipe is applied once."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(shape, generator=generator) for shape in SHAPES[kind])
    block = MXFP8Quantizer(E4M3)(x)
    plain = y.bfloat16() if other == "dense" else PerTensor(E4M3).make(y, 0.3)
    exact = expected(block, plain, kind)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        got = gemm(block, plain, kind, out_dtype=dtype)
        assert relative_error(got, exact) < bound, dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_into_a_product(dtype: torch.dtype) -> None:
    x, y = torch.randn(96, 64) * 2.0**12, torch.randn(80, 64) * 2.0**12
    dense = torch.randn(80, 64)
    quantizer = MXFP8Quantizer(E4M3)
    a, b = quantizer(x), quantizer(y)
    outside = [gemm(a, other, "fprop", out_dtype=torch.float32) for other in (b, dense)]
    with torch.autocast("cpu", dtype=dtype):
        inside = [gemm(a, other, "fprop", out_dtype=torch.float32) for other in (b, dense)]
    for mine, theirs in zip(inside, outside, strict=True):
        assert torch.equal(mine, theirs)


def test_a_backward_pass_inside_autocast() -> None:
    torch.manual_seed(0)
    layer = ottava.nn.Linear(64, 48, recipe="mxfp8")
    grads = []
    for inside in (False, True):
        layer.zero_grad()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = (layer(x) * 2.0**14).square().sum()
        with torch.autocast("cpu", dtype=torch.float16, enabled=inside):
            loss.backward()
        grads.append((x.grad, layer.weight.grad))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


def test_nan_stays_in_its_row() -> None:
    x, y = torch.randn(96, 64), torch.randn(80, 64)
    x[7, 5] = float("nan")
    got = gemm(MXFP8Quantizer(E4M3)(x), MXFP8Quantizer(E4M3)(y), "fprop", out_dtype=torch.float32)
    assert got[7].isnan().all()
    assert not got[torch.arange(96) != 7].isnan().any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("exponents", [(-140, 120), (120, -140), (-130, 0), (126, 0), (-70, -70)])
def test_products_beyond_float32_are_those_of_the_decoded_values(
    exponents: tuple[int, int], backend: str
) -> None:
    """Subnormal numbers, zeros and infinities that decoding gives are multiplied as IEEE float32
    has it."""
    generator = torch.Generator().manual_seed(7)
    quantizer = MXFP8Quantizer(E4M3)
    a, b = (
        quantizer(
            torch.randn(shape, generator=generator)
            * 2.0 ** max(exponent, -120)
            * 2.0 ** min(exponent + 120, 0)
        )
        for shape, exponent in zip(SHAPES["fprop"], exponents, strict=True)
    )
    left, right = (x.dequantize(torch.float32) for x in (a, b))
    assert torch.equal(left.double()[left.isfinite()], decoded(a, False)[left.isfinite()])
    with use_backend(backend):
        got = gemm(a, b, "fprop", out_dtype=torch.float32)
    torch.testing.assert_close(got, left @ right.t(), rtol=0, atol=0, equal_nan=True)


def test_compiled_products_equal_eager_ones() -> None:
    def run(pairs: Any) -> list[torch.Tensor]:
        return [gemm(a, b, kind) for kind, (a, b) in zip(SHAPES, pairs, strict=True)]

    usual = [operands(kind) for kind in SHAPES]
    tiny = [MXFP8Quantizer(E4M3)(torch.randn(shapes[0]) * 2.0**-130) for shapes in SHAPES.values()]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for pairs in (usual, [(left, right) for left, (_, right) in zip(tiny, usual, strict=True)]):
        for kind, mine, theirs in zip(SHAPES, compiled(pairs), run(pairs), strict=True):
            assert torch.equal(mine, theirs), kind
