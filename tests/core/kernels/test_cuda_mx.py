"""The CUDA kernels on MX blocks and after products: any addresses, and the last step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from mx_arrays import mx, scale_shapes
from placing import at, junk, one_nan, same_bytes, surroundings_kept
from sequential_grid import grid_orders, serving_cpu

from ottava import Layout
from ottava.kernels import table, use_backend

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-40, 6e-8, 65520.0, -3.4028e38]
# A warp quantizes 32 x 64 and a block of threads 32 x 512, or decodes 32 x 256 with eight columns in each lane. 512 and
# 1000 columns have a multiple of 16 blocks; those of 513 lie at no multiple of anything.
SHAPES = [(32, 512), (33, 1000), (31, 72), (40, 513), (1, 8), (97, 31), (64, 1)]

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_format = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
any_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def grid() -> Iterator[ModuleType]:
    with serving_cpu() as backend:
        yield backend


@pytest.fixture(params=grid_orders())
def any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, grid: Any) -> ModuleType:
    """For what threads do together."""
    monkeypatch.setenv("OTTAVA_GRID_ORDER", request.param)
    return grid


def sample(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Stretches of very different magnitudes, some with special values."""
    random = np.random.default_rng([seed, *shape])
    low, high = (-20, 8) if dtype is torch.float16 else (-130, 110)
    exponents = random.integers(low, high, (shape[0], -(-shape[1] // 32))).repeat(32, 1)[:, : shape[1]]
    x = np.ldexp(random.standard_normal(shape), exponents).astype(np.float32)
    odd = random.random(shape) < 0.1 * (random.random((shape[0], 1)) < 0.4)
    x[odd] = random.choice(np.array(SPECIAL, np.float32), int(odd.sum()))
    return torch.from_numpy(x).to(dtype)


def by_reference(operation: table.Operation, *arguments: Any) -> Any:
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
        assert torch.equal(out, result) if wanted else bool((out == 0x5A).all()), (directions, layout, offsets)
        assert surroundings_kept(out)


@any_dtype
@any_shape
def test_quantize_at_any_address(grid: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = sample(shape, dtype)
    for offsets in [(0, 0, 0), (1, 0, 0), (0, 1, 1), (0, 8, 8), (8, 3, 16)]:
        check_quantized(grid, x, mx(E4M3), (True, True), offsets)


@any_dtype
@any_format
@pytest.mark.parametrize("shape", [(65, 640), (33, 77)], ids=str)
def test_quantize_directions_and_rules(
    any_order: ModuleType, shape: tuple[int, int], fp8: torch.dtype, dtype: torch.dtype
) -> None:
    x = sample(shape, dtype, 1)
    ways = itertools.product([(True, True), (True, False), (False, True)], (False, True), ("up", "floor"))
    for directions, square, rounding in ways:
        check_quantized(any_order, x, mx(fp8, square, rounding), directions, (0, 0, 0))


def test_blocks_that_one_element_decides(grid: Any) -> None:
    """Wherever in a block the largest element is: each lane's part of the exchange counts."""
    for i in range(32):
        x = torch.zeros(32, 64, dtype=torch.bfloat16)
        x[torch.arange(32), (torch.arange(32) * 5 + i) % 32] = 2.0 ** torch.arange(32).to(torch.bfloat16)
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
    return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8)), torch.from_numpy(scales)


@any_dtype
@any_shape
@pytest.mark.parametrize("columnwise", [False, True])
def test_decode_at_any_address(grid: Any, shape: tuple[int, int], dtype: torch.dtype, columnwise: bool) -> None:
    data, scales = blocks(shape, columnwise)
    for fp8, offsets in itertools.product((E4M3, E5M2), [(0, 0, 0), (1, 0, 0), (8, 1, 0), (0, 8, 1)]):
        expected = by_reference(table.grid_decode, data, scales, mx(fp8).text, columnwise, dtype)
        expected = one_nan(expected, data)
        out = junk(shape, dtype, offsets[2])
        grid.grid_decode(at(data, offsets[0]), at(scales, offsets[1]), mx(fp8).text, columnwise, out)
        assert same_bytes(out, expected), (fp8, offsets)
        assert surroundings_kept(out)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)], ids=str)
def test_nothing_to_do(grid: Any, shape: tuple[int, int]) -> None:
    data, scales = (torch.empty(s, dtype=torch.uint8) for s in (shape, scale_shapes(shape)[0]))
    grid.grid_decode(data, scales, mx(E4M3).text, False, torch.empty(shape))
    grid.epilogue32(torch.empty(shape), None, None, None, torch.empty(shape))


# The last step


def finished(acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> Tensor:
    """The float32 before the one rounding."""
    values, one = acc.float().numpy(), np.float32(1)
    a, b = (one if s is None else s.float().numpy().reshape(()) for s in (scale_a, scale_b))
    with np.errstate(all="ignore"):
        values = values * (a * b)
        if bias is not None:
            values = values + bias.float().numpy()
    assert values.dtype == np.float32
    return torch.from_numpy(values)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN as the one NaN."""
    narrow = values.to(dtype)
    return torch.where(narrow.isnan(), torch.full_like(narrow, math.nan), narrow)


@any_dtype
@any_shape
def test_epilogue32(grid: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    acc = sample(shape, torch.float32, 3)
    scale = torch.tensor([0.37]), torch.tensor(3.0e-4)
    biases = [None, *(sample((1, shape[1]), d, 4).view(-1) for d in DTYPES)]
    for i, (a, b, bias) in enumerate(itertools.product((scale[0], None), (scale[1], None), biases)):
        out = junk(shape, dtype, (0, 1, 8)[i % 3])
        grid.epilogue32(at(acc, (0, 0, 1, 4)[i % 4]), a, b, None if bias is None else at(bias, i % 2), out)
        assert same_bytes(out, rounded(finished(acc, a, b, bias), dtype)), i
        assert surroundings_kept(out)


def test_the_last_step_rounds_once(grid: Any) -> None:
    """The product is a float32 before the bias is added, and their sum is rounded from there."""
    acc = torch.tensor([[1 + 2.0**-8, 3.0, 1 + 2.0**-23]])
    bias = torch.tensor([2.0**-20, -1.0, -1.0])
    out = torch.empty(1, 3, dtype=torch.bfloat16)
    grid.epilogue32(acc, torch.tensor(1.0), None, bias, out)
    assert out.tolist() == [[1 + 2.0**-7, 2.0, 2.0**-23]]
    exact = torch.empty(1, 3)
    grid.epilogue32(acc, torch.tensor(1 + 2.0**-23), None, bias, exact)
    assert exact[0, 2] == 2.0**-22  # a fused multiply-add would keep 2^-46
