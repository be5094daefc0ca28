"""The CUDA kernels on MX blocks, at any addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from mx_arrays import mx, scale_shapes
from placing import at, junk, one_nan, same_bytes, sample, surroundings_kept
from sequential_grid import grid_orders, serving_cpu

from ottava import Layout
from ottava.kernels import table, use_backend

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A warp quantizes 32 x 64 and a block of threads 32 x 512, or decodes 32 x 256 with eight columns
# in each lane. 512 and 1000 columns have a multiple of 16 blocks; those of 513 lie at no multiple
# of anything.
SHAPES = [(32, 512), (33, 1000), (31, 72), (40, 513), (1, 8), (97, 31), (64, 1)]

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_format = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
any_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def grid() -> Iterator[ModuleType]:
    with serving_cpu() as backend:
        yield backend


@pytest.fixture(params=grid_orders())
def any_order(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, grid: Any
) -> ModuleType:
    """For what threads do together."""
    monkeypatch.setenv("OTTAVA_GRID_ORDER", request.param)
    return grid


def by_reference(operation: Callable[..., Any], *arguments: Any) -> Any:
    with use_backend("reference"):
        return operation(*arguments)


# Quantization


def check_quantized(
    grid: Any, x: Tensor, layout: Layout, directions: tuple[bool, bool], offsets: tuple[int, ...]
) -> None:
    """``offsets`` of the source, of the data and of the scales."""
    expected = by_reference(table.grid_quantize, x, layout.text, *directions)
    shapes = [s for scales in scale_shapes(x.shape) for s in (tuple(x.shape), scales)]
    outs = [junk(s, torch.uint8, offsets[1 + i % 2]) for i, s in enumerate(shapes)]
    row, column = directions
    wanted = [out if directions[n // 2] else None for n, out in enumerate(outs)]
    grid.grid_quantize(at(x, offsets[0]), layout.text, wanted)
    for out, result, wanted in zip(outs, expected, (row, row, column, column), strict=True):
        assert torch.equal(out, result) if wanted else bool((out == 0x5A).all()), (
            directions,
            layout,
            offsets,
        )
        assert surroundings_kept(out)


@any_dtype
@any_shape
def test_quantize_at_any_address(grid: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = sample(shape, dtype)
    for offsets in [(0, 0, 0), (1, 0, 0), (0, 1, 1), (0, 8, 8), (8, 3, 16)]:
        check_quantized(grid, x, mx(E4M3), (True, True), offsets)


@pytest.mark.parametrize(
    ("fp8", "dtype"),
    [(E4M3, torch.float32), (E5M2, torch.bfloat16), (E4M3, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(65, 640), (33, 77)], ids=str)
def test_quantize_directions_and_rules(
    any_order: ModuleType, shape: tuple[int, int], fp8: torch.dtype, dtype: torch.dtype
) -> None:
    x = sample(shape, dtype, 1)
    ways = itertools.product(
        [(True, True), (True, False), (False, True)], (False, True), ("up", "floor")
    )
    for directions, square, rounding in ways:
        check_quantized(any_order, x, mx(fp8, square, rounding), directions, (0, 0, 0))


def test_blocks_that_one_element_decides(grid: Any) -> None:
    """Wherever in a block the largest element is: each lane's part of the exchange counts."""
    for i in range(32):
        x = torch.zeros(32, 64, dtype=torch.bfloat16)
        x[torch.arange(32), (torch.arange(32) * 5 + i) % 32] = 2.0 ** torch.arange(32).to(
            torch.bfloat16
        )
        x[:, 32:] = x[:, :32].t()
        for square in (False, True):
            check_quantized(grid, x, mx(E5M2, square), (True, True), (0, 0, 0))


@any_format
def test_scales_at_any_address(grid: Any, fp8: torch.dtype) -> None:
    amax = sample((7, 331), torch.float32, 2).abs()
    for offset, rounding in itertools.product((0, 1, 4), ("up", "floor")):
        out, text = junk(tuple(amax.shape), torch.uint8, offset), mx(fp8, rounding=rounding).text
        grid.grid_scales(at(amax, offset), text, torch.float32, (None, out))
        assert torch.equal(out, by_reference(table.grid_scales, amax, text, torch.float32)[1])
        assert surroundings_kept(out)


# Decoding


def blocks(shape: tuple[int, int], columnwise: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """All data, with all scales."""
    random = np.random.default_rng([seed, *shape])
    scales = random.integers(0, 256, scale_shapes(shape)[int(columnwise)], dtype=np.uint8)
    return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8)), torch.from_numpy(
        scales
    )


@any_dtype
@any_shape
@pytest.mark.parametrize("columnwise", [False, True])
def test_decode_at_any_address(
    grid: Any, shape: tuple[int, int], dtype: torch.dtype, columnwise: bool
) -> None:
    data, scales = blocks(shape, columnwise)
    for fp8, offsets in itertools.product(
        (E4M3, E5M2), [(0, 0, 0), (1, 0, 0), (8, 1, 0), (0, 8, 1)]
    ):
        expected = by_reference(table.grid_decode, data, scales, mx(fp8).text, columnwise, dtype)
        expected = one_nan(expected, data)
        out = junk(shape, dtype, offsets[2])
        grid.grid_decode(
            at(data, offsets[0]), at(scales, offsets[1]), mx(fp8).text, columnwise, out
        )
        assert same_bytes(out, expected), (fp8, offsets)
        assert surroundings_kept(out)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)], ids=str)
def test_nothing_to_do(grid: Any, shape: tuple[int, int]) -> None:
    data, scales = (torch.empty(s, dtype=torch.uint8) for s in (shape, scale_shapes(shape)[0]))
    grid.grid_decode(data, scales, mx(E4M3).text, False, torch.empty(shape))
