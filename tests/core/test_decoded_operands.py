"""Products of operands that are decoded first, on a CPU in memory that each thread keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ottava import Layout, kernels
from ottava.gemm import Operand
from ottava.gemm import decoded as products
from ottava.gemm.decoded import decoded_mm
from ottava.kernels import scaled_mm
from ottava.kernels.products import cpu_products

E4M3, F32 = torch.float8_e4m3fn, torch.float32
WHOLE = Layout(E4M3, (None, None), columnwise="same").text


def decoded_products(seed: int, size: int = 24) -> list[torch.Tensor]:
    """Products of operands of several sizes, and what float64 makes of the same values."""
    torch.manual_seed(seed)
    found = []
    for rows, columns in ((size, size + 3), (1, 5), (2 * size, 7)):
        x, w = torch.randn(rows, size), torch.randn(columns, size)
        a, b = (kernels.cast(values, torch.tensor(4.0), E4M3) for values in (x, w))
        scale = torch.tensor(0.25)
        operands = Operand(a, scale, WHOLE), Operand(b, scale, WHOLE)
        made = decoded_mm(*operands, None, F32, F32)
        exact = (a.view(E4M3).double() / 4) @ (b.view(E4M3).double() / 4).t()
        torch.testing.assert_close(made, exact.float(), rtol=1e-5, atol=1e-5)
        found.append(made)
    return found


def test_results_outlive_the_memory_that_operands_take_turns_in() -> None:
    first = decoded_products(1)
    kept = [made.clone() for made in first]
    with torch.inference_mode():
        decoded_products(2, 300)
    decoded_products(3)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_threads_decode_into_memory_of_their_own() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(repeated_product, range(4)))
    assert all(torch.equal(made, repeated_product(seed)) for seed, made in enumerate(found))


def repeated_product(seed: int) -> torch.Tensor:
    """The product of the values of a seed, the same each of many times."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 64, generator=generator)
    data, scale = kernels.cast(x, torch.tensor(4.0), E4M3), torch.tensor(0.25)
    operand = Operand(data, scale, WHOLE)
    first = decoded_mm(operand, operand, None, F32, F32)
    for _ in range(200):
        assert torch.equal(decoded_mm(operand, operand, None, F32, F32), first)
    return first


def test_large_operands_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products._Scratch, "LARGEST", 10_000)
    monkeypatch.setattr(products, "_scratch", products._Scratch())
    decoded_products(1, 64)
    assert 0 < max(buffer.numel() for buffer in products._scratch.buffers) <= 10_000


def test_scales_beyond_float32_follow_ieee() -> None:
    """Their product is infinite, or 0: so is the result, and NaN where IEEE has one."""
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0], [float("nan"), 0.0], [-2.0, 0.0]]).bfloat16()
    one = torch.tensor([[1.0, 0.0]]).bfloat16().t()
    for scale, expected in ((2.0**100, ["inf", "nan", "nan", "-inf"]), (2.0**-100, [0.0, 0.0, "nan", 0.0])):
        for dtype in (torch.bfloat16, torch.float32):
            with cpu_products(dtype):
                made = scaled_mm(a, one, torch.tensor(scale), torch.tensor(scale), None, torch.bfloat16)
            wanted = torch.tensor([[float(value)] for value in expected]).bfloat16()
            torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("block", "count"), [((None, None), 3), ((1, None), 3), ((1, 128), 3), ((8, 32), 10)], ids=str)
def test_partial_sums_are_those_of_blocks(
    block: tuple[int | None, int | None], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has one scale along the summed dimension asks for no more of them."""
    torch.manual_seed(0)
    operands, exact = [], []
    for rows, sides in ((5, (1, 128)), (7, block)):
        layout = Layout(E4M3, sides)
        data, scales, _, _ = kernels.grid_quantize(torch.randn(rows, 300), layout, columnwise=False)
        operands.append(Operand(data, scales.reshape(()) if sides == (None, None) else scales, layout.text))
        high, wide = (side or size for side, size in zip(sides, (rows, 300), strict=True))
        spread = scales.double()[torch.arange(rows) // high][:, torch.arange(300) // wide]
        exact.append(data.view(E4M3).double() * spread)
    calls: list[torch.Size] = []
    mm = products.mm
    monkeypatch.setattr(products, "mm", lambda a, b: calls.append(a.shape) or mm(a, b))
    made = decoded_mm(*operands, None, F32, F32)
    torch.testing.assert_close(made, (exact[0] @ exact[1].t()).float(), rtol=1e-5, atol=1e-4)
    assert len(calls) == count
