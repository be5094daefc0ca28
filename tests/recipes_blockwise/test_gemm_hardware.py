"""Products on hardware that multiplies blocks of 128: torch's function is replaced by one that does
what is documented.

It insists on shapes, strides and sizes, and computes in float64 from what it is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ottava
from ottava.gemm import gemm
from ottava.gemm import scaled as blocks
from ottava.kernels.backends import changed
from ottava_blockwise import Float8BlockQuantizer, Float8BlockScaling
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, close, decoded, wide
from tests.recipes_blockwise.kinds import DIMS

KINDS = torch.nn.functional.ScalingType
SHAPES: dict[str, Any] = {
    "fprop": lambda m, n, k: ((m, k), (n, k)),
    "dgrad": lambda m, n, k: ((m, n), (n, k)),
    "wgrad": lambda m, n, k: ((m, n), (m, k)),
}
COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
SIZES = [(256, 128, 640), (70, 33, 300), (1, 1, 1), (129, 257, 128), (5, 700, 513)]


class Hopper:
    """Stands in for torch.nn.functional.scaled_mm on compute capability 9.0."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, a: Any, b: Any, scale_a: Any, kind_a: Any, scale_b: Any, kind_b: Any, **options: Any
    ) -> Any:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        assert a.shape[1] == b.shape[0] > 0
        assert a.shape[1] % 128 == 0
        assert {a.dtype, b.dtype} in ({E4M3}, {E4M3, E5M2})
        assert (kind_a, kind_b) != (KINDS.BlockWise128x128, KINDS.BlockWise128x128)
        assert options.pop("swizzle_a") is options.pop("swizzle_b") is None
        assert not options.pop("use_fast_accum")
        assert options["output_dtype"] in (torch.bfloat16, torch.float32)
        operands = ((a, scale_a, kind_a), (b.t(), scale_b, kind_b))
        left, right = (self.values(*operand) for operand in operands)
        self.calls.append(
            {"kinds": (kind_a, kind_b), "scales": (scale_a, scale_b), "given": (a, b)} | options
        )
        return (left @ right.t()).to(options["output_dtype"])

    @staticmethod
    def values(rows: torch.Tensor, scales: torch.Tensor, kind: Any) -> torch.Tensor:
        outer, inner = rows.shape
        length, span = inner // 128, torch.arange(inner) // 128
        assert scales.dtype == torch.float32
        if kind == KINDS.BlockWise1x128:
            assert outer % 4 == 0
            assert scales.shape == (outer, length)
            assert scales.stride() == (1, outer)
            return rows.double() * scales.double()[:, span]
        assert kind == KINDS.BlockWise128x128
        rounded = -(-length // 4) * 4
        assert outer % 128 == 0
        assert scales.shape == (rounded, outer // 128)
        assert scales.stride() == (1, rounded)
        return rows.double() * scales.double().t()[torch.arange(outer) // 128][:, span]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    made = Hopper()
    monkeypatch.setattr(blocks, "capability", lambda operand: 90)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", made)
    # What was planned without the hardware is outdated.
    changed()
    return made


def product(
    kind: str, sizes: Any, dims: Any, formats: Any = (E4M3, E4M3), pow_2: bool = False
) -> tuple[Any, ...]:
    """Two quantized operands and the exact product of what they decode to, ``[M, K] · [N, K]ᵀ``."""
    made, values = [], []
    given = zip(SHAPES[kind](*sizes), dims, formats, COLUMNWISE[kind], strict=True)
    for seed, (shape, dim, fp8, columnwise) in enumerate(given):
        quantizer = Float8BlockQuantizer(fp8, block_scaling_dim=dim, force_pow_2_scales=pow_2)
        made.append(quantizer(wide(*shape, seed=seed, sigma=1.5)))
        matrix = decoded(made[-1], DIMS[dim], columnwise=columnwise, transposed=True)
        values.append(matrix.t() if columnwise else matrix)
    return *made, *values


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dims", [(1, 1), (1, 2), (2, 1)])
def test_the_library_is_given_what_it_documents(
    hopper: Hopper, kind: Any, dims: tuple[int, int]
) -> None:
    for (number, sizes), pow_2 in itertools.product(enumerate(SIZES), (True, False)):
        formats = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)][number % 3]
        a, b, left, right = product(kind, sizes, dims, formats, pow_2)
        hopper.calls.clear()
        for dtype, bias in itertools.product(
            (torch.float32, torch.bfloat16), (None, torch.randn(len(right)))
        ):
            got = gemm(
                a, b, kind, out_dtype=dtype, bias=bias, use_split_accumulator=kind != "fprop"
            )
            assert got.dtype == dtype
            assert got.is_contiguous()
            close(got, left, right.t(), bias)
        wanted = tuple({1: KINDS.BlockWise1x128, 2: KINDS.BlockWise128x128}[dim] for dim in dims)
        assert [call["kinds"] for call in hopper.calls] == [wanted] * 4


def test_a_narrow_result_is_rounded_from_float32(hopper: Hopper) -> None:
    a, b, left, right = product("fprop", (70, 33, 300), (1, 2))
    for q in (a, b):
        q._rowwise_scale_inv.mul_(2.0**-6)
    close(gemm(a, b, "fprop", out_dtype=torch.float16), left * 2.0**-6, right.t() * 2.0**-6)
    assert hopper.calls[0]["output_dtype"] == torch.float32


@pytest.mark.parametrize("kind", SHAPES)
def test_what_the_library_has_no_product_for_is_decoded(hopper: Hopper, kind: Any) -> None:
    for dims, formats in (((2, 2), (E4M3, E4M3)), ((1, 2), (E5M2, E5M2))):
        a, b, left, right = product(kind, (70, 33, 300), dims, formats)
        close(gemm(a, b, kind, out_dtype=torch.float32), left, right.t())
    a, b, left, right = product(kind, (70, 33, 300), (1, 2))
    mixed = torch.randn(SHAPES[kind](70, 33, 300)[1])
    gemm(a, mixed, kind)
    quantizer = Float8BlockQuantizer(E4M3, block_scaling_dim=1)
    for sizes in ((0, 4, 3), (4, 0, 3), (4, 3, 0)):
        a, b = (torch.ones(shape) for shape in SHAPES[kind](*sizes))
        assert torch.equal(gemm(quantizer(a), quantizer(b), kind), gemm(a, b, kind))
    assert not hopper.calls


@pytest.mark.parametrize("capability", [0, 89, 100, 120])
def test_other_hardware_decodes(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    monkeypatch.setattr(blocks, "capability", lambda operand: capability)
    a, b, left, right = product("fprop", (70, 33, 300), (1, 2))
    close(gemm(a, b, "fprop", out_dtype=torch.float32), left, right.t())
    assert not hopper.calls


def test_results_are_written_and_added(hopper: Hopper) -> None:
    a, b, left, right = product("wgrad", (70, 33, 300), (1, 1))
    out = torch.ones(33, 300)
    assert gemm(a, b, "wgrad", out=out, accumulate=True) is out
    close(out, left, right.t(), torch.ones(300))
    assert len(hopper.calls) == 1
    with pytest.raises(ottava.errors.ShapeError, match="out"):
        gemm(a, b, "wgrad", out=torch.ones(3, 3))
    with pytest.raises(ottava.errors.ShapeError, match="reduced dimensions"):
        gemm(a, product("wgrad", (71, 33, 300), (1, 1))[1], "wgrad")
    assert len(hopper.calls) == 1


def test_what_is_made_of_a_weight_is_made_once(hopper: Hopper) -> None:
    a, weight, *_ = product("fprop", (64, 140, 300), (1, 2))
    for _ in range(2):
        gemm(a, weight, "fprop")
    first, second = ((call["given"][1], call["scales"][1]) for call in hopper.calls)
    assert [x.data_ptr() for x in first] == [x.data_ptr() for x in second]
    assert a.gemm_cache().entries == {}
    for write in (
        lambda: weight.copy_(wide(140, 300, seed=9, sigma=1.5)),
        lambda: weight._rowwise_scale_inv.mul_(2),
        lambda: weight._rowwise_data.zero_(),
    ):
        write()
        left, right = (
            decoded(q, DIMS[dim], columnwise=False, transposed=True)
            for q, dim in ((a, 1), (weight, 2))
        )
        close(gemm(a, weight, "fprop", out_dtype=torch.float32), left, right.t())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer(hopper: Hopper, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Its three products are the library's, and what decoded operands give up to rounding;
    compiled, the same bytes."""
    layer = ottava.nn.Linear(300, 140, recipe=Float8BlockScaling())
    x, dy = wide(2, 35, 300, sigma=1.0).requires_grad_(), wide(2, 35, 140, seed=1, sigma=1.0)
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer

    def step(run: Any) -> list[torch.Tensor]:
        x.grad = None
        layer.zero_grad()
        y = run(x)
        y.backward(dy)
        return [y.detach(), x.grad, layer.weight.grad]  # type: ignore[list-item]

    made = step(run)
    assert len(hopper.calls) == 3
    if compiled:
        assert_same(made, step(layer))
        return
    monkeypatch.setattr(blocks, "capability", lambda operand: 0)
    for mine, theirs in zip(made, step(layer), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_operations_are_counted(hopper: Hopper) -> None:
    """Those of the product, not of its padding."""
    a, b, *_ = product("dgrad", (70, 33, 300), (1, 2))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        gemm(a, b, "dgrad")
    assert counter.get_total_flops() == 2 * 70 * 33 * 300
    assert len(hopper.calls) == 1
