"""Products on devices that multiply no FP8 but give the sums of bfloat16 products in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scaled_gemm import E4M3, KINDS, PRODUCTS, SHAPES, check, coded, matrix

from ottava.gemm import gemm
from ottava.gemm import scratch as memory
from ottava.kernels import products
from ottava.kernels.backends import backend_module


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device whose bfloat16 products give float32 sums, and whose backend has an epilogue for
    them."""
    calls: list[Any] = []

    def epilogue32(
        sums: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any, out: torch.Tensor
    ) -> None:
        assert sums.dtype == torch.float32
        assert sums.is_contiguous()
        assert out.is_contiguous()
        assert sums.shape == out.shape
        calls.append("epilogue32")
        values = sums
        if scale_a is not None and scale_b is not None:
            values = values * (scale_a * scale_b)
        out.copy_(values if bias is None else values + bias.float())

    def mm(a: torch.Tensor, b: torch.Tensor, *out_dtype: torch.dtype) -> torch.Tensor:
        calls.append((a.dtype, *out_dtype))
        return (a.double() @ b.double()).to(out_dtype[0] if out_dtype else a.dtype)

    def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append((a.dtype, "bias"))
        return (a.double() @ b.double() + bias.double()).to(a.dtype)

    cpu = backend_module("cpu")
    backend = SimpleNamespace(grid_decode=cpu.grid_decode, epilogue32=epilogue32)
    monkeypatch.setattr(products, "returns_float32", lambda device: True)
    # Without the plans of a CPU's products.
    monkeypatch.setattr(memory, "scratch", memory.Scratch())
    monkeypatch.setattr(products, "_bfloat16_is_fast", True)
    monkeypatch.setattr(products, "backend_module", lambda kind: backend)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_products_round_once(wide: list[Any], kind: Any) -> None:
    a, b = (coded(shape, E4M3, 0.3e-3, i) for i, shape in enumerate(SHAPES[kind](17, 33, 9)))
    columns = PRODUCTS[kind](matrix(a), matrix(b)).shape[1]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bias in (None, torch.randn(columns)):
            wide.clear()
            check(gemm(a, b, kind, out_dtype=dtype, bias=bias), a, b, kind, dtype, bias)
            assert wide == [(torch.bfloat16, torch.float32), "epilogue32"]


def test_a_product_without_scales_goes_straight_to_its_dtype(wide: list[Any]) -> None:
    a, b = torch.randn(5, 6).bfloat16(), torch.randn(7, 6).bfloat16()
    gemm(a, b, "fprop")
    gemm(a, b, "fprop", out_dtype=torch.float32)
    gemm(a.float(), b.float(), "fprop", out_dtype=torch.float32)
    assert wide == [(torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float32,)]


def test_the_library_adds_a_bias_that_it_can(wide: list[Any]) -> None:
    """One of the result's own dtype, where there is no scale to apply before."""
    a, b, bias = torch.randn(5, 6).bfloat16(), torch.randn(7, 6).bfloat16(), torch.randn(7)
    exact = a.double() @ b.double().t()
    for dtype, given in (
        (torch.bfloat16, bias.bfloat16()),
        (torch.bfloat16, bias),
        (torch.float32, bias),
    ):
        result = gemm(a, b, "fprop", out_dtype=dtype, bias=given)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact + given.double(), rtol=2**-8, atol=1e-6)
    sums = [(torch.bfloat16, torch.float32), "epilogue32"]
    assert wide == [(torch.bfloat16, "bias"), *sums, *sums]
