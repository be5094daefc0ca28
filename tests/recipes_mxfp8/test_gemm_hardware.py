"""Products on hardware that multiplies blocks: torch's function is replaced by one that does what
is documented."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ottava
from ottava.gemm import gemm
from ottava.gemm import scaled as blocks
from ottava.kernels.backends import changed
from ottava_mxfp8 import MXFP8Quantizer
from tests.recipes_mxfp8.products import (
    E4M3,
    E5M2,
    SHAPES,
    expected,
    operands,
    relative_error,
    values,
)


def unswizzled(flat: torch.Tensor, outer: int, blocks: int) -> torch.Tensor:
    """Scales [outer, blocks] from the library's layout, by the documented offset of each."""
    across = -(-blocks // 4)
    r, c = torch.arange(outer)[:, None], torch.arange(blocks)
    tile = r // 128 * across + c // 4
    return flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


class BlockHardware:
    """Stands in for torch.nn.functional.scaled_mm, and insists on what it insists on."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        a: Any,
        b: Any,
        scale_a: Any,
        recipe_a: Any,
        scale_b: Any,
        recipe_b: Any,
        **options: Any,
    ) -> Any:
        functional = torch.nn.functional
        assert recipe_a == recipe_b == functional.ScalingType.BlockWise1x32
        assert options["swizzle_a"] == options["swizzle_b"] == functional.SwizzleType.SWIZZLE_32_4_4
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] == b.shape[0]
        assert a.shape[1] % 32 == a.shape[0] % 16 == b.shape[1] % 16 == 0
        dense = []
        for data, scales in ((a, scale_a), (b.t(), scale_b)):
            assert scales.dtype == torch.float8_e8m0fnu
            assert scales.is_contiguous()
            outer, blocks = data.shape[0], data.shape[1] // 32
            assert scales.numel() == -(-outer // 128) * 128 * (-(-blocks // 4) * 4)
            plain = unswizzled(scales.view(torch.uint8), outer, blocks)
            dense.append(values(data.view(torch.uint8), plain, data.dtype, False))
        self.calls.append({"scales": (scale_a, scale_b)} | options)
        return (dense[0] @ dense[1].t()).to(options["output_dtype"])


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> BlockHardware:
    made = BlockHardware()
    monkeypatch.setattr(blocks, "capability", lambda operand: 100)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", made)
    # What was planned without the hardware is outdated.
    changed()
    return made


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("sizes", [(96, 80, 64), (129, 31, 193), (1, 1, 1), (33, 260, 40)], ids=str)
def test_block_hardware_gets_padded_lines_and_swizzled_scales(
    hardware: BlockHardware, kind: str, sizes: tuple[int, int, int]
) -> None:
    m, n, k = sizes
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]
    generator = torch.Generator().manual_seed(1)
    # Every block has a scale of its own, so that none can stand in for another.
    spread = [torch.exp(2 * torch.randn(shape, generator=generator)) for shape in shapes]
    a, b = (MXFP8Quantizer(E4M3)(s * torch.randn(s.shape, generator=generator)) for s in spread)
    exact = expected(a, b, kind)
    bias = torch.randn(exact.shape[1], generator=generator)
    for dtype, offset in itertools.product((torch.float32, torch.bfloat16), (None, bias)):
        got = gemm(a, b, kind, out_dtype=dtype, bias=offset, use_split_accumulator=kind != "fprop")
        wanted = (exact if offset is None else exact.float() + offset).to(dtype)
        assert got.dtype == dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert all(call["use_fast_accum"] == (kind == "fprop") for call in hardware.calls)


def test_two_e5m2_operands_are_decoded(hardware: BlockHardware) -> None:
    a, b = operands("fprop", E5M2)
    assert (
        relative_error(gemm(a, b, "fprop", out_dtype=torch.float32), expected(a, b, "fprop")) < 1e-6
    )
    assert not hardware.calls
    gemm(a, operands("fprop")[1], "fprop")
    assert len(hardware.calls) == 1


def test_what_the_hardware_wants_is_made_once(hardware: BlockHardware) -> None:
    weight = MXFP8Quantizer(E4M3)(torch.randn(64, 96))
    x = [MXFP8Quantizer(E4M3)(torch.randn(32, 96)) for _ in range(3)]
    for operand in x[:2]:
        gemm(operand, weight, "fprop")
    first, second = (call["scales"][1] for call in hardware.calls)
    assert first is second or first.data_ptr() == second.data_ptr()
    # A write makes it anew: through the tensor, through a view of it, and below both.
    writes = [
        lambda: weight.copy_(torch.randn(64, 96)),
        lambda: weight[32:].copy_(torch.randn(32, 96)),
        lambda: weight._rowwise_scale_inv.add_(1),
        lambda: weight._rowwise_data.zero_(),
    ]
    for write in writes:
        write()
        got = gemm(x[2], weight, "fprop", out_dtype=torch.float32)
        torch.testing.assert_close(
            got, expected(x[2], weight, "fprop").float(), rtol=1e-6, atol=1e-6
        )


def test_a_layer_on_block_hardware(hardware: BlockHardware) -> None:
    torch.manual_seed(0)
    layer = ottava.nn.Linear(72, 40, recipe="mxfp8")
    x = torch.randn(5, 7, 72, requires_grad=True)
    layer(x).square().sum().backward()
    assert len(hardware.calls) == 3
    grads, x.grad = (x.grad, layer.weight.grad), None
    layer.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "capability", lambda operand: 90)
        layer(x).square().sum().backward()
    for mine, theirs in zip(grads, (x.grad, layer.weight.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_no_hardware_is_asked_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", None)
    assert gemm(*operands("fprop"), "fprop").shape == (96, 80)
