"""The CUDA kernels on grids with float32 scales, as loops: the reference's bytes in any order, at
any address."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from placing import at, junk, one_nan, same_bytes, surroundings_kept
from sequential_grid import grid_orders, serving_cpu

from ottava import Layout
from ottava.kernels import reference, table, use_backend

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e-45,
    -1e-40,
    6e-8,
    65504.0,
    -3.4028e38,
]
LINE, SQUARE, WHOLE = (1, 128), (128, 128), (1, None)
#: Every block with every way to hold columns, and every rule for scales.
LAYOUTS = [
    Layout(E4M3, LINE, rounding="floor", columnwise="transposed", finite_as="input"),
    Layout(E5M2, LINE, epsilon=1e-3),
    Layout(E4M3, SQUARE, rounding="floor", columnwise="transposed", finite_as="input"),
    Layout(E5M2, SQUARE, columnwise="own"),
    Layout(E4M3, SQUARE, columnwise="own", shared=SQUARE),
    Layout(E4M3, WHOLE),
    Layout(E5M2, WHOLE, rounding="floor", epsilon=0.5, columnwise="transposed"),
]
OTHERS = [
    Layout(torch.int8, LINE),
    Layout(E4M3, (1, 64)),
    Layout(E4M3, LINE, shared=SQUARE),
    Layout(E4M3, LINE, torch.float8_e8m0fnu, "up"),
    Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up", columnwise="transposed"),
]
# A block of threads has 128 rows and columns, a thread eight of each. Columns that are no multiple
# of 8, and rows that are none of 16, are written byte by byte.
SHAPES = [(128, 128), (256, 264), (144, 136), (131, 77), (1, 300), (260, 1), (7, 9)]
BOTH = (True, True)

any_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.text)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def grid() -> Iterator[Any]:
    with serving_cpu() as backend:
        yield backend


@pytest.fixture(params=grid_orders())
def any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, grid: Any) -> Any:
    monkeypatch.setenv("OTTAVA_GRID_ORDER", request.param)
    return grid


def sample(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rectangles of very different magnitudes, a few special values in some of them."""
    generator = torch.Generator().manual_seed(seed + shape[0] * 1000 + shape[1])
    down, across = (-(-size // 40) for size in shape)
    low, high = (-20, 8) if dtype is torch.float16 else (-130, 110)
    exponent = torch.randint(low, high, (down, across), generator=generator).double()
    odd = torch.rand(down, across, generator=generator) < 0.2
    exponent, odd = (
        t.repeat_interleave(40, 0).repeat_interleave(40, 1)[: shape[0], : shape[1]]
        for t in (exponent, odd)
    )
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.exp2(exponent)
    odd &= torch.rand(shape, generator=generator) < 0.02
    x[odd] = torch.tensor(SPECIAL, dtype=torch.float64)[
        torch.randint(len(SPECIAL), (int(odd.sum()),), generator=generator)
    ]
    x[: shape[0] // 4, : shape[1] // 3] = 0.0
    return x.to(dtype)


def check(
    grid: Any,
    x: Tensor,
    layout: Layout,
    directions: tuple[bool, bool],
    offsets: tuple[int, int, int],
) -> None:
    """``offsets`` of the source, of the data and of the scales."""
    with use_backend("reference"):
        expected = table.grid_quantize(x, layout.text, *directions)
    outs = [
        junk(tuple(result.shape), result.dtype, offsets[1 + i % 2]) if directions[i // 2] else None
        for i, result in enumerate(expected)
    ]
    grid.grid_quantize(at(x, offsets[0]), layout.text, outs)
    for i, (out, result) in enumerate(zip(outs, expected, strict=True)):
        if out is not None:
            assert same_bytes(out, result), (i, layout, directions, offsets)
            assert surroundings_kept(out)


@any_dtype
@any_layout
def test_bytes_are_the_references(grid: Any, layout: Layout, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SHAPES):
        offsets = [(0, 0, 0), (1, 0, 0), (0, 1, 1), (0, 8, 0), (8, 3, 2)]
        check(grid, sample(shape, dtype), layout, BOTH, offsets[0])
        check(grid, sample(shape, dtype, 1), layout, BOTH, offsets[1 + i % 4])


@any_layout
def test_in_any_order_and_one_direction(any_order: Any, layout: Layout) -> None:
    x = sample((260, 200), torch.bfloat16)
    for directions in (BOTH, (True, False), (False, True)):
        check(any_order, x, layout, directions, (0, 0, 0))


@any_layout
def test_the_kernels_are_used(grid: Any, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample((130, 136), torch.float32)
    data, scales, *_ = outs = table.grid_quantize.outputs(x, layout.text, *BOTH)
    for name in ("grid_quantize", "grid_decode"):
        monkeypatch.delattr(reference, name)
    grid.grid_quantize(x, layout.text, outs)
    grid.grid_decode(data, scales, layout.text, False, torch.empty_like(x))


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.text)
def test_other_layouts_are_the_references(grid: Any, layout: Layout) -> None:
    x = sample((130, 136), torch.bfloat16)
    check(grid, x, layout, BOTH, (0, 0, 0))
    with use_backend("reference"):
        data, scales, *_ = table.grid_quantize(x, layout.text, *BOTH)
        expected = table.grid_decode(data, scales, layout.text, False, torch.float32)
    out = torch.empty(x.shape)
    grid.grid_decode(data, scales, layout.text, False, out)
    assert same_bytes(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.text)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_nothing_to_quantize(grid: Any, layout: Layout, shape: tuple[int, int]) -> None:
    check(grid, torch.empty(shape), layout, BOTH, (0, 0, 0))


def test_an_element_anywhere_decides(grid: Any) -> None:
    """Each thread's part in what is known of a row and a column counts, and no other row's or
    column's."""
    x = torch.zeros(128, 128)
    rows, columns = torch.arange(128), (torch.arange(128) * 37 + 5) % 128
    x[rows, columns] = torch.exp2(torch.arange(128).float() / 2 - 30)
    for layout in (LAYOUTS[1], LAYOUTS[3], LAYOUTS[5]):
        check(grid, x, layout, BOTH, (0, 0, 0))
        check(grid, x.flip(0).bfloat16(), layout, BOTH, (0, 0, 0))


@any_dtype
@any_layout
def test_decode(grid: Any, layout: Layout, dtype: torch.dtype) -> None:
    """Of any data and scales, NaN and negative ones among them."""
    generator = torch.Generator().manual_seed(3)
    for shape, columnwise in itertools.product(SHAPES, (False, True)):
        stored = layout.data_shape(shape, columnwise)
        data = torch.randint(0, 256, stored, generator=generator, dtype=torch.uint8)
        sizes = layout.scale_shape(shape, columnwise)
        scales = (
            torch.randint(-(2**31), 2**31, sizes, generator=generator).int().view(torch.float32)
        )
        scales = torch.where(
            torch.rand(sizes, generator=generator) < 0.5, scales, scales.new_tensor(0.37)
        )
        with use_backend("reference"):
            expected = one_nan(
                table.grid_decode(data, scales, layout.text, columnwise, dtype), data
            )
        for offsets in [(0, 0, 0), (1, 1, 1)]:
            out = junk(stored, dtype, offsets[2])
            grid.grid_decode(
                at(data, offsets[0]), at(scales, offsets[1]), layout.text, columnwise, out
            )
            assert same_bytes(out, expected), (layout, shape, columnwise)
            assert surroundings_kept(out)
