"""Products on FP8 hardware for the tests: what stands in for it, operands, and the comparison with
float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ottava.gemm import scaled as gemm_scaled
from ottava.tensors import Float8TensorStorage, QuantizedTensorStorage, columnwise_layout
from tests.choosing import scaled_products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ["fprop", "dgrad", "wgrad"]
# What each kind takes of its operands of a layer: shapes of (M, N, K), and whether they are taken
# by columns.
SHAPES: dict[str, Any] = {
    "fprop": lambda m, n, k: ((m, k), (n, k)),
    "dgrad": lambda m, n, k: ((m, n), (n, k)),
    "wgrad": lambda m, n, k: ((m, n), (m, k)),
}
PRODUCTS: dict[str, Any] = {
    "fprop": lambda a, b: a @ b.t(),
    "dgrad": lambda a, b: a @ b,
    "wgrad": lambda a, b: a.t() @ b,
}
SIZES = [
    (64, 48, 32),
    (1, 1, 1),
    (3, 5, 7),
    (17, 33, 65),
    (1, 16, 32),
    (33, 16, 48),
    (0, 4, 3),
    (4, 0, 3),
    (4, 3, 0),
]
# Half a unit in the last place.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Strict:
    """torch._scaled_mm with what a GPU's asks for: sizes, addresses, layouts, and the dtype of a
    bias."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        a: Any,
        b: Any,
        scale_a: Any,
        scale_b: Any,
        bias: Any,
        scale_result: Any,
        out_dtype: Any,
        fast: Any,
    ) -> torch.Tensor:
        assert a.shape[1] == b.shape[0]
        assert min(*a.shape, *b.shape) > 0
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert not {a.dtype, b.dtype} - {E4M3, E5M2}
        assert not a.dtype == b.dtype == E5M2
        rows = [self.is_row_major(matrix) for matrix in (a, b.t())]
        any_layout = 100 <= self.capability < 120
        for matrix, row_major in zip((a, b.t()), rows, strict=True):
            assert matrix.data_ptr() % 16 == 0
            assert row_major or (any_layout and self.is_row_major(matrix.t()))
            assert max(matrix.stride()) % 16 == 0
        assert scale_a.dtype == scale_b.dtype == torch.float32
        if scale_a.numel() == scale_b.numel() == 1:
            scales = scale_a.reshape(()), scale_b.reshape(())
        else:
            assert self.capability >= 90
            assert all(rows)
            assert scale_a.shape == (a.shape[0], 1)
            assert scale_b.shape == (1, b.shape[1])
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            assert out_dtype == torch.bfloat16
            assert b.dtype == E4M3
            scales = scale_a, scale_b
        assert scale_result is None
        result = a.float().double() @ b.float().double() * scales[0].double() * scales[1].double()
        if bias is not None:
            assert bias.dtype == out_dtype != torch.float32
            assert bias.shape == (b.shape[1],)
            assert bias.is_contiguous()
            assert bias.data_ptr() % 16 == 0
            result = result + bias.double()
        self.calls.append(
            {
                "a": a,
                "b": b,
                "scales": (scale_a, scale_b),
                "bias": bias,
                "dtype": out_dtype,
                "fast": fast,
            }
        )
        return result.to(out_dtype)

    @staticmethod
    def is_row_major(matrix: torch.Tensor) -> bool:
        return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


@pytest.fixture(params=[89, 90, 100, 120], ids=lambda found: f"sm{found}")
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strict]:
    """Each kind of hardware, with the layout that its tensors have."""
    made = Strict(request.param)
    monkeypatch.setattr(gemm_scaled, "capability", lambda operand: made.capability)
    monkeypatch.setattr(gemm_scaled, "scaled_mm", made)
    layout: Any = "transpose" if made.capability < 100 else "shared"
    with scaled_products(), columnwise_layout(layout):
        yield made


class Recorded:
    """torch's own function on the CPU, and how often it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = gemm_scaled.scaled_mm

        def call(*args: Any) -> torch.Tensor:
            self.count += 1
            try:
                return original(*args)
            except RuntimeError as error:
                # Where oneDNN is held to fewer instructions than the processor has, torch still
                # asks it for this.
                if "could not create a primitive descriptor" not in str(error):
                    raise
                pytest.skip(f"torch multiplies no FP8 here: {error}")

        monkeypatch.setattr(gemm_scaled, "scaled_mm", call)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def coded(
    shape: tuple[int, ...], fp8_dtype: torch.dtype, scale: float, seed: int
) -> Float8TensorStorage:
    """Codes drawn from all finite ones."""
    generator = torch.Generator().manual_seed(seed)
    top = 0x7E if fp8_dtype == E4M3 else 0x7B
    data = torch.randint(0, top + 1, shape, dtype=torch.uint8, generator=generator)
    data |= torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator) << 7
    made = Float8TensorStorage(
        data=data, fp8_scale_inv=torch.tensor(scale), fp8_dtype=fp8_dtype, dtype=torch.bfloat16
    )
    # As the quantizers do, where the columnwise usage is a transpose.
    made.rebuild_derived()
    return made


def matrix(x: Any) -> torch.Tensor:
    values = x.dequantize(torch.float64) if isinstance(x, QuantizedTensorStorage) else x.double()
    if isinstance(x, Float8TensorStorage):
        data, _ = x.ordered(columnwise=False) or x.ordered(columnwise=True)
        # The scale's product with a code need not be a float32 value.
        values = data.contiguous().view(x._fp8_dtype).double() * x._scale_inv.double()
    return (
        values.reshape(-1, values.shape[-1])
        if values.numel()
        else values.reshape(values.shape[0], values.shape[-1])
    )


def check(
    got: torch.Tensor,
    a: Any,
    b: Any,
    kind: str,
    dtype: torch.dtype,
    bias: Any = None,
    extra: Any = None,
) -> None:
    """Sums in float32 of exact products, and one rounding."""
    left, right = matrix(a), matrix(b)
    exact, size = PRODUCTS[kind](left, right), PRODUCTS[kind](left.abs(), right.abs())
    for term in (bias, extra):
        if term is not None:
            exact, size = exact + term.double(), size + term.double().abs()
    inner = left.shape[0 if kind == "wgrad" else 1]
    bound = (inner + 4) * 2.0**-24 * size + ROUNDING[dtype] * 1.01 * exact.abs()
    assert got.dtype == dtype
    assert got.shape == exact.shape
    assert got.is_contiguous()
    assert ((got.double() - exact).abs() <= bound + torch.finfo(dtype).tiny).all()
