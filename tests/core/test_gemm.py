"""The GEMM: against float64 on dequantized operands, every kind, ragged and empty shapes,
accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.gemm import gemm
from ottava.kernels import use_backend
from ottava.tensors import Float8Tensor


def operands(quantizer: Any, kind: str, m: int, n: int, k: int) -> tuple[Any, Any, torch.Tensor]:
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]
    generator = torch.Generator().manual_seed(m + 10 * n + 100 * k)
    a, b = (quantizer(torch.randn(shape, generator=generator)) for shape in shapes)
    x, y = a.dequantize(torch.float64), b.dequantize(torch.float64)
    # float64 products of the data themselves, so that rounding scale_inv first plays no part.
    return (
        a,
        b,
        {"fprop": lambda: x @ y.t(), "dgrad": lambda: x @ y, "wgrad": lambda: x.t() @ y}[kind](),
    )


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 5, 7), (17, 33, 65), (0, 4, 3), (4, 0, 3), (4, 3, 0), (64, 48, 100)]
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_against_float64(
    quantizer: Any, kind: Any, shape: tuple[int, int, int], backend: str
) -> None:
    a, b, expected = operands(quantizer, kind, *shape)
    with use_backend(backend):
        exact = gemm(a, b, kind, out_dtype=torch.float32)
        rounded = gemm(a, b, kind, out_dtype=torch.bfloat16)
    torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-5)
    u = 2.0**-8
    bound = u if backend == "reference" else (1 + u) ** 2 - 1
    error = (rounded.double() - exact.double()).abs()
    assert (error <= bound * exact.double().abs() * (1 + 1e-3) + 1e-6).all()


def test_power_of_two_scales_round_once() -> None:
    data = torch.randint(
        0, 120, (64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )

    def make(scale_inv: float) -> Float8Tensor:
        return Float8Tensor(
            dtype=torch.bfloat16,
            data=data,
            fp8_dtype=torch.float8_e4m3fn,
            fp8_scale_inv=torch.tensor(scale_inv),
        )

    for sa, sb in ((1.0, 1.0), (0.25, 0.125)):
        fast = gemm(make(sa), make(sb), out_dtype=torch.bfloat16)
        with use_backend("reference"):
            once = gemm(make(sa), make(sb), out_dtype=torch.bfloat16)
        assert torch.equal(fast, once)


def test_bias_out_and_accumulate(quantizer: Any) -> None:
    a, b, expected = operands(quantizer, "fprop", 4, 5, 6)
    bias = torch.randn(5)
    biased = gemm(a, b, bias=bias, out_dtype=torch.float32)
    torch.testing.assert_close(biased.double(), expected + bias.double(), rtol=1e-5, atol=1e-5)
    out = torch.ones(4, 5)
    assert gemm(a, b, out=out, accumulate=True) is out
    torch.testing.assert_close(out.double(), expected + 1, rtol=1e-5, atol=1e-5)
    gemm(a, b, out=out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_high_precision_operands_mix_in(quantizer: Any) -> None:
    a, b, expected = operands(quantizer, "fprop", 4, 5, 6)
    mixed = gemm(a, b.dequantize(), out_dtype=torch.float32)
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_custom_quantizer_does_its_own_gemm(quantizer: Any) -> None:
    calls: list[str] = []

    class Custom(type(quantizer)):  # type: ignore[misc]
        custom = True

        def qgemm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(args[9])
            return super().qgemm(*args, **kwargs)

    own = Custom(torch.float8_e4m3fn)
    for kind in ("fprop", "dgrad", "wgrad"):
        a, b, expected = operands(own, kind, 4, 5, 6)
        got = gemm(a, b, kind, out_dtype=torch.float32)  # type: ignore[arg-type]
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert calls == ["fprop", "dgrad", "wgrad"]


def test_bad_operands_are_refused(quantizer: Any) -> None:
    a, b = quantizer(torch.ones(2, 3)), quantizer(torch.ones(4, 3))
    with pytest.raises(ShapeError, match="reduced dimensions"):
        gemm(a, quantizer(torch.ones(4, 5)))
    with pytest.raises(OptionError):
        gemm(a, b, "forward")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="out"):
        gemm(a, b, accumulate=True)
    with pytest.raises(DTypeError):
        gemm(a, b, out_dtype=torch.int8)
    with pytest.raises(ShapeError, match="bias"):
        gemm(a, b, bias=torch.ones(3))
    with pytest.raises(ShapeError, match="out"):
        gemm(a, b, out=torch.ones(3, 3))
    with pytest.raises(DeviceError):
        gemm(a, torch.ones(4, 3, device="meta"))


def test_no_gradient_flows_through_a_product() -> None:
    a, b, bias = (
        torch.randn(4, 6, requires_grad=True),
        torch.randn(5, 6),
        torch.randn(5, requires_grad=True),
    )
    for operand in (a, a.detach().requires_grad_()):
        result = gemm(operand, b, "fprop", out_dtype=torch.float32, bias=bias)
        assert not result.requires_grad
    torch.testing.assert_close(result, torch.nn.functional.linear(a, b, bias).detach())
