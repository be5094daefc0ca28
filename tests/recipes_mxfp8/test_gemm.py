"""Products of MXFP8 operands against float64 on the decoded ones, inside and beyond bfloat16's exponents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ottava
from ottava.gemm import gemm
from ottava.kernels import mx_ops
from ottava.kernels.backends import use_backend
from ottava_mxfp8 import MXFP8Quantizer
from tests.cases import told
from tests.recipes_mxfp8.products import (
    E4M3,
    E5M2,
    EXTREMES,
    PARTS,
    SHAPES,
    PerTensor,
    bf16_product,
    error_of_rows,
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
        narrow, wide = (gemm(a, b, kind, out_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
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


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("other", ["dense", "per tensor"])
@pytest.mark.parametrize("beyond", [False, True])
def test_one_operand_of_another_kind(kind: str, other: str, beyond: bool) -> None:
    """A scale of another recipe is applied once, also to lines that are computed again."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(shape, generator=generator) for shape in SHAPES[kind])
    if beyond:
        # The other operand brings the lines that are computed again back into range.
        x[:33] *= 2.0**-128
        y *= 2.0**100
    block = MXFP8Quantizer(E4M3)(x)
    plain = y.bfloat16() if other == "dense" else PerTensor(E4M3).make(y, 0.3 * 2.0 ** (100 if beyond else 0))
    exact = expected(block, plain, kind)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        got = gemm(block, plain, kind, out_dtype=dtype)
        assert torch.isfinite(got).all()
        assert bool((exact.norm(dim=1) > 2.0**-100).all())
        assert float(error_of_rows(got, exact).max()) < bound, dtype


def test_bias_on_lines_that_are_computed_again() -> None:
    x, y, bias = torch.randn(40, 64), torch.randn(70, 64), torch.randn(70)
    x[3] *= 2.0**-130
    y[[5, 66]] *= 2.0**-130
    a, b = MXFP8Quantizer(E4M3)(x), MXFP8Quantizer(E4M3)(y)
    exact = expected(a, b, "fprop") + bias.double()
    assert relative_error(gemm(a, b, "fprop", out_dtype=torch.float32, bias=bias), exact) < 1e-6
    assert relative_error(gemm(a, b, "fprop", bias=bias), exact) < 2.0**-8


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("exponents", [(125, -120), (-120, 122)])
def test_another_kind_of_scale_brings_the_product_back(kind: str, exponents: tuple[int, int]) -> None:
    """Before the scale of a whole tensor is applied, the product is far beyond float32."""
    generator = torch.Generator().manual_seed(5)
    x, y = (1 + torch.rand(shape, generator=generator) for shape in SHAPES[kind])
    block = MXFP8Quantizer(E4M3)(x * 2.0 ** exponents[0])
    plain = PerTensor(E4M3).make(y * 2.0 ** exponents[1], 2.0 ** (exponents[1] - 7))
    for a, b, name in ((block, plain, kind), (plain, block, kind)):
        if a is plain and kind != "fprop":
            continue
        exact = expected(a, b, name)
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):
            assert relative_error(gemm(a, b, name, out_dtype=dtype), exact) < bound


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


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_values_beyond_bfloat16(kind: str, extreme: str) -> None:
    """The other operand brings the products back into range: they are then as exact as any."""
    checked = []
    for part in PARTS:
        with told(part):
            checked.append(check_beyond(kind, extreme, part))
    assert any(checked)


def check_beyond(kind: str, extreme: str, part: str) -> bool:
    """Whether there were rows that are not too small to tell how exact they are."""
    checked = False
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(shape, generator=generator) for shape in SHAPES[kind])
    x[PARTS[part]] = EXTREMES[extreme](x[PARTS[part]])
    y *= 2.0 ** (-125 if extreme in ("near the top", "infinite") else 120)
    quantizer = MXFP8Quantizer(E4M3)
    for swapped in (False, True):
        if swapped and kind != "fprop":
            # The operands of the other GEMMs are not of one kind: theirs is the other's test.
            continue
        a, b = (quantizer(y), quantizer(x)) if swapped else (quantizer(x), quantizer(y))
        exact = expected(a, b, kind)
        info = torch.finfo(torch.float32)
        assert exact.isfinite().all()
        usual = exact.abs() < info.max
        good = usual.all(1) & (exact.norm(dim=1) > 2.0**-100)
        checked |= bool(good.any())
        for backend in ("cpu", "reference"):
            with use_backend(backend):
                wide = gemm(a, b, kind, out_dtype=torch.float32)
                narrow = gemm(a, b, kind, out_dtype=torch.bfloat16)
            assert torch.equal(wide.isinf(), ~usual), (backend, swapped)
            for got, bound in ((wide, 1e-6), (narrow, 2.0**-7)):
                assert bool((error_of_rows(got[good], exact[good]) < bound).all()), (backend, got.dtype, swapped)
    return checked


def test_opposite_extremes_in_one_row() -> None:
    """Products of the largest with the smallest values are one; the decoded float32 values alone would lose both."""
    a, b = torch.zeros(32, 64), torch.zeros(32, 64)
    a[0, 0], a[0, 32] = 3.3e38, 2.0**-140
    b[0, 0], b[0, 32] = 2.0**-128, 2.0**125
    quantizer = MXFP8Quantizer(E4M3)
    qa, qb = quantizer(a), quantizer(b)
    exact = expected(qa, qb, "fprop")
    assert 0.5 < exact[0, 0] < 2
    got = gemm(qa, qb, "fprop", out_dtype=torch.float32)
    assert relative_error(got, exact) < 1e-6


def test_zeros_and_padding_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of zeros have the smallest scale there is; nothing in them is beyond any range."""
    calls: list[int] = []
    original = mx_ops.mx_decode_exact
    monkeypatch.setattr(mx_ops, "mx_decode_exact", lambda *args: calls.append(1) or original(*args))
    x, y = torch.randn(96, 64), torch.randn(80, 64)
    x[:40] = 0
    y[:, 32:] = -0.0
    quantizer = MXFP8Quantizer(E4M3)
    gemm(quantizer(x), quantizer(y), "fprop")
    assert not calls
    gemm(quantizer(x * 2.0**-130), quantizer(y), "fprop")
    assert calls


def test_nan_stays_in_its_lines() -> None:
    x, y = torch.randn(96, 64), torch.randn(80, 64)
    x[7, 5] = float("nan")
    x[9] *= 2.0**-135
    got = gemm(MXFP8Quantizer(E4M3)(x), MXFP8Quantizer(E4M3)(y), "fprop", out_dtype=torch.float32)
    assert got[7].isnan().all()
    assert not got[torch.arange(96) != 7].isnan().any()


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
