"""Products on hardware that multiplies blocks: torch's function is replaced by one that does what
is documented.

It insists on shapes, strides and sizes, and computes in float64 from what it is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ottava import GridQuantizer
from ottava.errors import UsageError
from ottava.gemm import LayerProduct, gemm, scaled
from ottava.kernels.backends import changed
from ottava.layout import Rotation
from ottava.nn import Linear
from tests.cases import told
from tests.comparing import assert_same
from tests.core.gemm.operands import PRODUCTS, SHAPES, check, values
from tests.core.layouts.layouts import E4M3, E5M2, E8M0, LAYOUTS, OneQuantizer
from tests.samples import wide

functional = torch.nn.functional
TYPES = functional.ScalingType
#: The row of the table -> how the library calls its blocks.
TYPE_OF = {
    "mxfp8": TYPES.BlockWise1x32,
    "1x128": TYPES.BlockWise1x128,
    "128x128": TYPES.BlockWise128x128,
}
#: Pairs that hardware of this compute capability multiplies.
PAIRS = [
    (100, "mxfp8", "mxfp8"),
    (90, "1x128", "1x128"),
    (90, "1x128", "128x128"),
    (90, "128x128", "1x128"),
]
SIZES = [(96, 80, 64), (129, 31, 193), (1, 1, 1), (33, 260, 40)]


class Hardware:
    """Stands in for ``torch.nn.functional.scaled_mm``."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, a: Any, b: Any, scale_a: Any, type_a: Any, scale_b: Any, type_b: Any, **options: Any
    ) -> torch.Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        assert a.shape[1] == b.shape[0] > 0
        assert (a.dtype, b.dtype) in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
        assert options["output_dtype"] in (torch.bfloat16, torch.float32)
        values = self._mx if self.capability >= 100 else self._hopper
        sides = (a, scale_a, type_a), (b.t(), scale_b, type_b)
        left, right = (
            values(*side, swizzle=options[f"swizzle_{n}"])
            for n, side in zip("ab", sides, strict=True)
        )
        self.calls.append({"types": (type_a, type_b), "given": (b, scale_b)} | options)
        return (left @ right.t()).to(options["output_dtype"])

    def _mx(self, rows: Any, scales: Any, kind: Any, swizzle: Any) -> torch.Tensor:
        outer, reduced = rows.shape
        count, across = reduced // 32, -(-(reduced // 32) // 4)
        assert kind == TYPES.BlockWise1x32
        assert swizzle == functional.SwizzleType.SWIZZLE_32_4_4
        assert outer % 16 == reduced % 32 == 0
        assert scales.dtype == E8M0
        assert scales.is_contiguous()
        assert scales.numel() == -(-outer // 128) * 128 * across * 4
        # The documented offset of the scale of each row and block.
        r, c = torch.arange(outer)[:, None], torch.arange(count)
        offsets = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        return rows.double() * scales.double().flatten()[offsets].repeat_interleave(32, 1)

    def _hopper(self, rows: Any, scales: Any, kind: Any, swizzle: Any) -> torch.Tensor:
        outer, reduced = rows.shape
        count, block = reduced // 128, torch.arange(reduced) // 128
        assert swizzle is None
        assert reduced % 128 == 0
        assert scales.dtype == torch.float32
        if kind == TYPES.BlockWise1x128:
            assert outer % 4 == 0
            assert (scales.shape, scales.stride()) == ((outer, count), (1, outer))
            return rows.double() * scales.double()[:, block]
        assert kind == TYPES.BlockWise128x128
        rounded = -(-count // 4) * 4
        assert outer % 128 == 0
        assert (scales.shape, scales.stride()) == ((rounded, outer // 128), (1, rounded))
        return rows.double() * scales.double().t()[torch.arange(outer) // 128][:, block]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Hardware]:
    """Makes products those of hardware of a compute capability."""

    def use(capability: int) -> Hardware:
        hardware = Hardware(capability)
        monkeypatch.setattr(scaled, "capability", lambda operand: capability)
        monkeypatch.setattr(functional, "scaled_mm", hardware)
        # What was planned without the hardware is outdated.
        changed()
        return hardware

    return use


def operands(kind: str, sizes: Any, names: Any, elements: Any = (E4M3, E4M3)) -> list[Any]:
    made = []
    for seed, (shape, name, element) in enumerate(
        zip(SHAPES[kind](*sizes), names, elements, strict=True)
    ):
        layout = replace(LAYOUTS[name], element=element)
        made.append(GridQuantizer(layout)(wide(*shape, seed=seed, sigma=1.5)))
    return made


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("capability", "one", "two"), PAIRS)
def test_the_library_gets_what_it_documents(
    on: Callable[[int], Hardware], capability: int, one: str, two: str, kind: Any
) -> None:
    hardware = on(capability)
    for number, sizes in enumerate(SIZES):
        elements = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)][number % 3]
        a, b = operands(kind, sizes, (one, two), elements)
        columns = PRODUCTS[kind](values(a), values(b)).shape[1]
        hardware.calls.clear()
        options = itertools.product(
            (torch.float32, torch.bfloat16, torch.float16), (None, torch.randn(columns))
        )
        for dtype, bias in options:
            with told(sizes, dtype, bias is not None):
                got = gemm(
                    a, b, kind, out_dtype=dtype, bias=bias, use_split_accumulator=kind != "fprop"
                )
                assert got.dtype == dtype
                check(got, a, b, kind, bias=bias, roundings=2)
        assert [call["types"] for call in hardware.calls] == [(TYPE_OF[one], TYPE_OF[two])] * 6
        # A result that the library does not give is rounded from float32.
        assert all(call["output_dtype"] != torch.float16 for call in hardware.calls)
        # Blocks of 128 are always accumulated exactly.
        fast = kind == "fprop" and capability >= 100
        assert all(call["use_fast_accum"] is fast for call in hardware.calls)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_what_the_library_has_no_product_for_is_decoded(
    on: Callable[[int], Hardware], kind: Any
) -> None:
    for capability, names, elements in (
        (100, ("mxfp8", "mxfp8"), (E5M2, E5M2)),
        (90, ("1x128", "128x128"), (E5M2, E5M2)),
        (90, ("128x128", "128x128"), (E4M3, E4M3)),
        (90, ("mxfp8", "mxfp8"), (E4M3, E4M3)),
        (100, ("1x128", "128x128"), (E4M3, E4M3)),
        (100, ("mxfp8", "1x128"), (E4M3, E4M3)),
        (89, ("1x128", "1x128"), (E4M3, E4M3)),
        (0, ("mxfp8", "mxfp8"), (E4M3, E4M3)),
    ):
        with told(capability, names, elements):
            hardware = on(capability)
            a, b = operands(kind, (70, 33, 130), names, elements)
            check(gemm(a, b, kind, out_dtype=torch.float32), a, b, kind)
            plain = wide(*SHAPES[kind](70, 33, 130)[1], seed=5)
            check(gemm(a, plain, kind, out_dtype=torch.float32), a, plain, kind)
            for sizes in ((0, 4, 3), (4, 0, 3), (4, 3, 0)):
                a, b = operands(kind, sizes, names, elements)
                check(gemm(a, b, kind, out_dtype=torch.float32), a, b, kind)
            assert not hardware.calls


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("capability", "one", "two"), PAIRS[::2])
def test_what_is_made_of_a_weight_is_made_once(
    on: Callable[[int], Hardware], capability: int, one: str, two: str, inference: bool
) -> None:
    """A write makes it anew: through the tensor, through a view of it, and below both."""
    hardware = on(capability)
    with torch.inference_mode(inference):
        x, weight = operands("fprop", (64, 256, 160), (one, two))
        for _ in range(2):
            gemm(x, weight, "fprop")
        first, second = ([t.data_ptr() for t in call["given"]] for call in hardware.calls)
        assert first == second
        # An activation is met once.
        assert x.gemm_cache().entries == {}
        writes: list[Callable[[], Any]] = [
            lambda: weight.copy_(wide(256, 160, seed=9)),
            lambda: weight[128:].copy_(wide(128, 160, seed=8)),
            lambda: weight.t().mul_(2.0),
            lambda: weight.detach().view(2, 128, 160)[0].zero_(),
            # Inference tensors count no writes below Ottava.
            lambda: weight._rowwise_scale_inv.copy_(weight._rowwise_scale_inv.flip(0)),
            lambda: weight._rowwise_data.zero_(),
        ]
        for write in writes[:4] if inference else writes:
            write()
            check(gemm(x, weight, "fprop", out_dtype=torch.float32), x, weight, "fprop")


@pytest.mark.xdist_group("compiler")
def test_a_layer(on: Callable[[int], Hardware]) -> None:
    """Its three products are the library's; compiled, the same bytes."""
    layer = Linear(72, 40, recipe=OneQuantizer(row="mxfp8"))
    x, dy = wide(5, 7, 72, sigma=1.0).requires_grad_(), wide(5, 7, 40, seed=1, sigma=1.0)

    def step(run: Any) -> list[torch.Tensor]:
        x.grad = None
        layer.zero_grad()
        y = run(x)
        y.backward(dy)
        return [y.detach(), x.grad, layer.weight.grad]

    hardware = on(100)
    found = step(layer)
    assert len(hardware.calls) == 3
    torch._dynamo.reset()
    assert_same(step(torch.compile(layer, fullgraph=True, backend="aot_eager")), found)
    on(0)
    for mine, theirs in zip(found, step(layer), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_operations_are_those_of_the_product_and_not_of_its_padding(
    on: Callable[[int], Hardware],
) -> None:
    hardware = on(90)
    a, b = operands("wgrad", (70, 33, 300), ("1x128", "1x128"))
    out = torch.ones(33, 300)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        assert gemm(a, b, "wgrad", out=out, accumulate=True) is out
    assert counter.get_total_flops() == 2 * 70 * 33 * 300
    check(out, a, b, "wgrad", start=torch.ones(33, 300))
    assert len(hardware.calls) == 1


def test_a_planned_product_refuses_one_rotated_operand(on: Callable[[int], Hardware]) -> None:
    """A layer's product is decided once, for hardware that does not know of rotations."""
    on(100)
    x, w = wide(32, 64), wide(48, 64)
    plain = LAYOUTS["mxfp8"]
    rotated = replace(plain, rotation=Rotation(32, 5, "rowwise"))
    product = LayerProduct("fprop", torch.float32)
    with pytest.raises(UsageError, match=r"fprop of an operand that is rotated .* not rotated"):
        product(GridQuantizer(rotated)(x), GridQuantizer(plain)(w))
    exact = x @ w.t()
    error = product(GridQuantizer(rotated)(x), GridQuantizer(rotated)(w)) - exact
    assert error.norm() < 0.1 * exact.norm()


def test_no_hardware_is_asked_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_mm", None)
    assert gemm(*operands("fprop", (96, 80, 64), ("mxfp8", "mxfp8"))).shape == (96, 80)
