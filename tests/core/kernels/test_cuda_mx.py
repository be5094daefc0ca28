"""The CUDA kernels on MX blocks and after products: any addresses, flags, the last step, exact lines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sequential_grid import grid_orders, serving_cpu

from ottava.formats import mx_scale_shapes
from ottava.kernels import reference_mx

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
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
def any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, grid: ModuleType) -> ModuleType:
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


def at(x: Tensor, offset: int) -> Tensor:
    """The same values, ``offset`` elements beyond a boundary of 64 bytes, in a buffer of bytes 0xA5."""
    size = x.element_size()
    room = torch.full((x.numel() * size + 256,), 0xA5, dtype=torch.uint8)
    first = -room.data_ptr() % 64 + offset * size
    part = room[first : first + x.numel() * size].view(x.dtype).view(x.shape)
    part.copy_(x)
    return part


def surroundings_kept(part: Tensor) -> bool:
    room = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
    first = part.storage_offset() * part.element_size()
    rest = torch.cat([room[:first], room[first + part.numel() * part.element_size() :]])
    return bool((rest == 0xA5).all())


def junk(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    return at(torch.full((math.prod(shape) * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype).view(shape), offset)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    bits = BITS.get(a.dtype, a.dtype)
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


# Quantization


def check_quantized(
    grid: ModuleType, x: Tensor, fp8: torch.dtype, directions: tuple[bool, bool], options: Any, offsets: tuple[int, ...]
) -> None:
    """``offsets`` of the source, of the codes and of the scales."""
    expected = reference_mx.mx_quantize(x, fp8, *directions, *options)
    shapes = [s for scales in mx_scale_shapes(x.shape) for s in (tuple(x.shape), scales)]
    outs = [junk(s, torch.uint8, offsets[1 + i % 2]) for i, s in enumerate(shapes)]
    row, column = directions
    grid.mx_quantize_out(
        at(x, offsets[0]), fp8, (outs[0], outs[1]) if row else None, (outs[2], outs[3]) if column else None, *options
    )
    for out, result, wanted in zip(outs, expected, (row, row, column, column), strict=True):
        assert torch.equal(out, result) if wanted else bool((out == 0x5A).all()), (directions, options, offsets)
        assert surroundings_kept(out)


@any_dtype
@any_shape
def test_quantize_at_any_address(grid: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = sample(shape, dtype)
    for offsets in [(0, 0, 0), (1, 0, 0), (0, 1, 1), (0, 8, 8), (8, 3, 16)]:
        check_quantized(grid, x, E4M3, (True, True), (False, False), offsets)


@any_dtype
@any_format
@pytest.mark.parametrize("shape", [(65, 640), (33, 77)], ids=str)
def test_quantize_directions_and_rules(
    any_order: ModuleType, shape: tuple[int, int], fp8: torch.dtype, dtype: torch.dtype
) -> None:
    x = sample(shape, dtype, 1)
    for directions, *options in itertools.product([(True, True), (True, False), (False, True)], *[(False, True)] * 2):
        check_quantized(any_order, x, fp8, directions, options, (0, 0, 0))


def test_blocks_that_one_element_decides(grid: ModuleType) -> None:
    """Wherever in a block the largest element is: each lane's part of the exchange counts."""
    for i in range(32):
        x = torch.zeros(32, 64, dtype=torch.bfloat16)
        x[torch.arange(32), (torch.arange(32) * 5 + i) % 32] = 2.0 ** torch.arange(32).to(torch.bfloat16)
        x[:, 32:] = x[:, :32].t()
        for square in (False, True):
            check_quantized(grid, x, E5M2, (True, True), (square, False), (0, 0, 0))


@any_format
def test_scales_at_any_address(grid: ModuleType, fp8: torch.dtype) -> None:
    amax = sample((7, 331), torch.float32, 2).abs()
    for offset, floor in itertools.product((0, 1, 4), (False, True)):
        got = grid.mx_scale_from_amax(at(amax, offset), fp8, floor)
        assert torch.equal(got, reference_mx.mx_scale_from_amax(amax, fp8, floor))


# Decoding


def blocks(shape: tuple[int, int], columnwise: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """All codes, with all scales."""
    random = np.random.default_rng([seed, *shape])
    scales = random.integers(0, 256, mx_scale_shapes(shape)[int(columnwise)], dtype=np.uint8)
    return torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8)), torch.from_numpy(scales)


def flag_of(codes: Tensor, scales: Tensor, fp8: torch.dtype, columnwise: bool) -> int:
    """By the words of the interface."""
    exact = reference_mx.mx_decode_exact(codes, scales, fp8, columnwise).abs()
    finite = exact.isfinite() & (exact > 0)
    beyond = finite & ((exact < 2.0**-126) | (exact > float(np.finfo(np.float32).max)))
    far = ((scales >= 1) & (scales <= 63)) | (scales >= 191)
    return int(beyond.any()) | 2 * int(far.any())


def flagged(
    grid: ModuleType, codes: Tensor, scales: Tensor, fp8: torch.dtype, out: Tensor, columnwise: bool, before: int = 0
) -> int:
    flags = torch.tensor([77, before, 77], dtype=torch.int32)
    grid.mx_decode_flagged(codes, scales, fp8, out, columnwise, flags[1])
    assert flags[0] == flags[2] == 77
    return int(flags[1])


@any_dtype
@any_shape
@pytest.mark.parametrize("columnwise", [False, True])
def test_decode_at_any_address(grid: ModuleType, shape: tuple[int, int], dtype: torch.dtype, columnwise: bool) -> None:
    codes, scales = blocks(shape, columnwise)
    for fp8, offsets in itertools.product((E4M3, E5M2), [(0, 0, 0), (1, 0, 0), (8, 1, 0), (0, 8, 1)]):
        expected = reference_mx.mx_decode(codes, scales, fp8, dtype, columnwise)
        # NaN has one pattern and the sign of its code.
        negative = torch.where(codes >= 128, -1.0, 1.0).to(dtype)
        expected = torch.where(
            expected.isnan(), torch.copysign(torch.full_like(expected, math.nan), negative), expected
        )
        out = junk(shape, dtype, offsets[2])
        grid.mx_decode_out(at(codes, offsets[0]), at(scales, offsets[1]), fp8, out, columnwise)
        assert same_bytes(out, expected), (fp8, offsets)
        assert surroundings_kept(out)
        found = flagged(grid, at(codes, offsets[0]), at(scales, offsets[1]), fp8, out, columnwise)
        assert same_bytes(out, expected), (fp8, offsets)
        assert found == flag_of(codes, scales, fp8, columnwise)


# Scale, code of E4M3 (1 is 2^-9, 0x7e is 448, 0x7f is NaN), bits of the flag.
FLAGS = [
    (127, 0x7E, 0),
    (64, 0x01, 0),
    (190, 0xFE, 0),
    (63, 0x7E, 2),
    (191, 0x01, 2),
    (0, 0x00, 0),  # a block of zeros
    (0, 0x80, 0),
    (0, 0x38, 1),  # 2^-127
    (0, 0x40, 0),  # 2^-126
    (9, 0x01, 3),  # 2^-127
    (10, 0x01, 2),  # 2^-126
    (246, 0x7E, 2),  # 448 * 2^119 is less than 2^128
    (247, 0x7E, 3),
    (247, 0x7F, 2),
    (255, 0x38, 2),  # NaN
    (255, 0x00, 2),
]


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("place", [(0, 0), (34, 299), (31, 256), (32, 7)], ids=str)
def test_flags(any_order: ModuleType, place: tuple[int, int], columnwise: bool) -> None:
    """One block that is unlike the others, with one element in it that is."""
    shape = (35, 300)
    block = (place[0] // 32, place[1]) if columnwise else (place[0], place[1] // 32)
    for scale, code, bits in FLAGS:
        codes = torch.zeros(shape, dtype=torch.uint8)
        scales = torch.full(mx_scale_shapes(shape)[int(columnwise)], 127, dtype=torch.uint8)
        codes[place], scales[block] = code, scale
        assert bits == flag_of(codes, scales, E4M3, columnwise), (scale, code)
        out = torch.empty(shape, dtype=torch.bfloat16)
        for before in (0, 3 ^ bits):
            assert flagged(any_order, codes, scales, E4M3, out, columnwise, before) == bits | before, (scale, code)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)], ids=str)
def test_nothing_to_do(grid: ModuleType, shape: tuple[int, int]) -> None:
    codes, scales = (torch.empty(s, dtype=torch.uint8) for s in (shape, mx_scale_shapes(shape)[0]))
    assert flagged(grid, codes, scales, E4M3, torch.empty(shape), False) == 0
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
def test_epilogue32(grid: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    acc = sample(shape, torch.float32, 3)
    scale = torch.tensor([0.37]), torch.tensor(3.0e-4)
    biases = [None, *(sample((1, shape[1]), d, 4).view(-1) for d in DTYPES)]
    for i, (a, b, bias) in enumerate(itertools.product((scale[0], None), (scale[1], None), biases)):
        out = junk(shape, dtype, (0, 1, 8)[i % 3])
        grid.epilogue32(at(acc, (0, 0, 1, 4)[i % 4]), a, b, None if bias is None else at(bias, i % 2), out)
        assert same_bytes(out, rounded(finished(acc, a, b, bias), dtype)), i
        assert surroundings_kept(out)


@any_shape
def test_epilogue_in_place(grid: ModuleType, shape: tuple[int, int]) -> None:
    acc = sample(shape, torch.bfloat16, 5)
    scale = torch.tensor(0.37), torch.tensor([1.5])
    biases = [None, *(sample((1, shape[1]), d, 6).view(-1) for d in DTYPES)]
    for i, (a, b, bias) in enumerate(itertools.product((scale[0], None), (scale[1], None), biases)):
        out = at(acc, i % 2)
        grid.epilogue(out, a, b, bias)
        assert same_bytes(out, rounded(finished(acc, a, b, bias), torch.bfloat16)), i
        assert surroundings_kept(out)


def test_the_last_step_rounds_once(grid: ModuleType) -> None:
    """The product is a float32 before the bias is added, and their sum is rounded from there."""
    acc = torch.tensor([[1 + 2.0**-8, 3.0, 1 + 2.0**-23]])
    bias = torch.tensor([2.0**-20, -1.0, -1.0])
    out = torch.empty(1, 3, dtype=torch.bfloat16)
    grid.epilogue32(acc, torch.tensor(1.0), None, bias, out)
    assert out.tolist() == [[1 + 2.0**-7, 2.0, 2.0**-23]]
    exact = torch.empty(1, 3)
    grid.epilogue32(acc, torch.tensor(1 + 2.0**-23), None, bias, exact)
    assert exact[0, 2] == 2.0**-22  # a fused multiply-add would keep 2^-46


# Exact lines

Case = tuple[tuple[Any, ...], tuple[Any, ...], bool, bool]


def operand(rows: int, cols: int, kind: str, seed: int) -> tuple[Any, ...]:
    """With a few values beyond float32's range where it is made of blocks."""
    if kind in ("float32", "bfloat16", "float16"):
        return sample((rows, cols), torch.float16, seed).nan_to_num(0, 1, 1).to(getattr(torch, kind)), None, None, False
    columnwise = kind == "columns"
    random = np.random.default_rng([seed, rows, cols])
    codes = torch.from_numpy(random.integers(0, 256, (rows, cols), dtype=np.uint8))
    codes[codes & 0x7F == 0x7F] = 0x30  # some of each line are numbers
    scales = torch.from_numpy(random.integers(120, 134, mx_scale_shapes((rows, cols))[int(columnwise)], dtype=np.uint8))
    scales[random.random(scales.shape) < 0.1] = 0
    scales[random.random(scales.shape) < 0.02] = 255
    return codes, scales, E5M2 if columnwise else E4M3, columnwise


def exact(case: tuple[Any, ...], transposed: bool) -> np.ndarray:
    values, scales, fp8, columnwise = case
    matrix = values.double() if scales is None else reference_mx.mx_decode_exact(values, scales, fp8, columnwise)
    return (matrix.t() if transposed else matrix).numpy()


def beyond_float32(matrix: np.ndarray, axis: int) -> np.ndarray:
    magnitude = np.abs(matrix)
    small, large = magnitude < 2.0**-126, magnitude > float(np.finfo(np.float32).max)
    return np.isfinite(magnitude) & (magnitude > 0) & (small | large)


def check_lines(
    grid: ModuleType, case: Case, dtype: torch.dtype, scales: tuple[Any, Any], bias: Tensor | None, flags: list[int]
) -> None:
    a, b, transpose_a, transpose_b = case
    left, right = exact(a, transpose_a), exact(b, transpose_b)
    result = torch.full((left.shape[0], right.shape[1]), 12345.0, dtype=dtype)
    before = result.clone()
    grid.mx_exact_lines(result, *case, *scales, bias, torch.tensor(flags, dtype=torch.int32))
    with np.errstate(all="ignore"):
        expected, size = left @ right, np.abs(np.nan_to_num(left)) @ np.abs(np.nan_to_num(right))
        for scale in scales:
            expected, size = (v * (1.0 if scale is None else float(scale)) for v in (expected, size))
        expected = expected + (0 if bias is None else bias.double().numpy())
    if any(s is not None for s in scales):
        touched = np.full(expected.shape, any(flags))
    else:
        rows = beyond_float32(left, 1).any(1) & bool(flags[0] & 1)
        columns = beyond_float32(right, 0).any(0) & bool(flags[1] & 1)
        touched = rows[:, None] | columns[None, :]
    wanted = torch.from_numpy(expected).float().to(dtype).double()
    step = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    close = (result.double() - wanted).abs() <= step * wanted.abs() + torch.from_numpy(size) * 2.0**-40
    close |= (result.double() == wanted) | (result.isnan() & wanted.isnan())
    mask = torch.from_numpy(touched)
    assert bool(close[mask].all()), (flags, result[mask & ~close], wanted[mask & ~close])
    assert torch.equal(result[~mask], before[~mask])


KINDS = [("rows", "rows"), ("rows", "columns"), ("columns", "bfloat16"), ("float32", "rows")]
# Every pair of kinds and transposes once, every kind and every transpose in every order.
LINES = [
    (kinds, transposes, grid_orders()[(i + j) % 3])
    for i, kinds in enumerate(KINDS)
    for j, transposes in enumerate(itertools.product((False, True), repeat=2))
]


@pytest.mark.parametrize(("kinds", "transposes", "order"), LINES, ids=str)
def test_exact_lines(
    grid: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[str, str],
    transposes: tuple[bool, bool],
    order: str,
) -> None:
    monkeypatch.setenv("OTTAVA_GRID_ORDER", order)
    m, k, n = 37, 70, 41
    a = operand(*((k, m) if transposes[0] else (m, k)), kinds[0], 1)
    b = operand(*((n, k) if transposes[1] else (k, n)), kinds[1], 2)
    scale = torch.tensor([0.25])
    for flags, with_scale in itertools.product([[0, 0], [1, 0], [0, 3], [3, 1], [2, 0], [0, 2]], (False, True)):
        scales = (None, None) if not with_scale else (scale, None) if flags[0] else (None, scale)
        check_lines(grid, (a, b, *transposes), torch.float32, scales, None, flags)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1), torch.float32),
        ((3, 300, 2), torch.float32),  # a sum in several parts
        ((3, 40, 300), torch.bfloat16),  # more columns than a block has threads
        ((530, 33, 5), torch.float16),  # more lines than there are blocks
    ],
    ids=str,
)
def test_exact_lines_of_other_sizes(grid: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    case = operand(m, k, "rows", 3), operand(k, n, "columns", 4), False, False
    case[0][0][0, 0], case[0][1][0, 0] = 0x01, 0
    biases = [sample((1, n), torch.float16, 5).nan_to_num(0, 1, 1).view(-1).to(d) for d in DTYPES]
    for i, bias in enumerate(biases):
        check_lines(grid, case, dtype, (None, None), bias, [1, i % 2])
    check_lines(grid, case, dtype, (torch.tensor(3.0), torch.tensor(2.0**-20)), biases[1], [2, 0])


def test_exact_lines_beyond_float32_in_between(grid: ModuleType) -> None:
    """Elements and partial sums that float32 does not hold, with a result that it does."""
    codes = torch.full((1, 64), 0x38, dtype=torch.uint8)  # ones
    codes[0, 32:] = 0xB8
    tall = (codes, torch.full((1, 2), 254, dtype=torch.uint8), E4M3, False)
    other = (codes.abs().clone(), torch.tensor([[240, 240]], dtype=torch.uint8), E4M3, False)
    other[0][0, 32:] = 0x38
    other[0][0, 0] = 0x40
    result = torch.zeros(1, 1)
    flags = torch.tensor([3, 2], dtype=torch.int32)
    grid.mx_exact_lines(result, tall, other, False, True, torch.tensor(2.0**-126), torch.tensor(2.0**-114), None, flags)
    assert result.item() == 1.0  # (2 + 31 - 32) * 2^127 * 2^113 * 2^-126 * 2^-114


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)], ids=str)
def test_exact_lines_of_nothing(grid: ModuleType, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    case = operand(m, k, "rows", 6), operand(k, n, "columns", 7), False, False
    flags, around = torch.tensor([3, 3], dtype=torch.int32), torch.full((16,), 7.0)
    result = around[8 : 8 + m * n].view(m, n)
    grid.mx_exact_lines(result, *case, None, None, None, flags)
    assert flags.tolist() == [3, 3]
    assert around.tolist() == [7.0] * 16
