"""MX blocks against the scalar oracle, byte for byte; large matrices against the same rules written for arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import mx_oracle
import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError
from ottava.formats import mx_scale_shapes

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ROUNDINGS = ["up", "floor"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# Every size from 1 to 97 once as a number of rows and once as a number of columns: 37 is coprime to 97.
PAIRS = [(rows, rows * 37 % 97 + 1) for rows in range(1, 98)]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-45, 2.0**-149 * 0x400000, -3.4e38, 448.0, -57344.0]

rounding = pytest.mark.parametrize("scale_rounding", ROUNDINGS)
wide_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
decoded_dtype = pytest.mark.parametrize("dtype", [*DTYPES, "float64"])


def float32_of(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns.astype(np.uint32).view(np.float32))


@cache
def sample(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Tiles of very different magnitudes with values of many; some tiles hold zeros, NaN, infinities and the like."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    random = np.random.default_rng([seed, rows, columns])
    low, high = (-20, 10) if dtype == "float16" else (-140, 115)

    def tiles(values: np.ndarray) -> np.ndarray:
        return np.repeat(np.repeat(values, 32, 0), 32, 1)[:rows, :columns]

    grid = (-(-rows // 32), -(-columns // 32))
    exponents = tiles(random.integers(low, high, grid)) + random.normal(0, 4, (rows, columns)).round()
    x = np.clip(np.ldexp(random.standard_normal((rows, columns)), exponents.astype(int)), -3e38, 3e38)
    specials = random.random((rows, columns)) < tiles(random.choice([0, 0, 0.003, 0.1], grid))
    x[specials] = random.choice(SPECIAL, int(specials.sum()))
    x[tiles(random.random(grid) < 0.02)] = 0.0
    return torch.from_numpy(x.astype(np.float32)).to(DTYPES[dtype]).reshape(shape)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def by_scalars(x: torch.Tensor, fmt: str, scale_rounding: str, two_dimensional: bool = False) -> Four:
    """What the scalar oracle says, in the shapes of the kernels."""
    columns = x.shape[-1] if x.dim() else 1
    found = mx_oracle.quantize(as_matrix(x).to(torch.float32).tolist(), columns, fmt, scale_rounding, two_dimensional)
    shapes = [x.shape, mx_scale_shapes(x.shape)[0], x.shape, mx_scale_shapes(x.shape)[1]]
    a, b, c, d = (torch.tensor(f, dtype=torch.uint8).reshape(s) for f, s in zip(found, shapes, strict=True))
    return a, b, c, d


def array_scales(amax: np.ndarray, fmt: str, scale_rounding: str) -> np.ndarray:
    """The rules on bits of float32, as they are stated."""
    amax = amax.astype(np.float32)
    if scale_rounding == "up":
        with np.errstate(under="ignore", invalid="ignore"):  # signalling NaN
            amax = amax * np.float32(1.0 / oracle.MAX[fmt])
        bits = amax.view(np.uint32)
        exponent, mantissa = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
        codes = exponent + ((mantissa != 0) & ~((exponent == 0) & (mantissa <= 0x400000)))
        codes = np.minimum(codes, 0xFE)
    else:
        bits = amax.view(np.uint32)
        codes = np.clip((bits >> 23).astype(np.int64) - mx_oracle.LARGEST_EXPONENT[fmt], 0, 0xFE)
    codes = np.where(np.isinf(amax), 0xFE, codes)
    return np.where(np.isnan(amax), 0xFF, codes).astype(np.uint8)


def array_codes(x: np.ndarray, scales: np.ndarray, fmt: str) -> np.ndarray:
    """A product with a power of two is exact in float64; saturation and NaN are added to ml_dtypes' cast."""
    numbers = np.where(np.isnan(x), np.float32(0), x).astype(np.float64)
    product = (numbers * np.exp2(127.0 - scales)).clip(-oracle.MAX[fmt], oracle.MAX[fmt])
    codes = product.astype(np.float32).astype(ML_DTYPES[fmt]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def by_arrays(x: torch.Tensor, fmt: str, scale_rounding: str, two_dimensional: bool = False) -> Four:
    """The rules for whole matrices; for sizes that the scalar oracle is too slow for."""
    values = as_matrix(x).to(torch.float32).numpy()
    rows, columns = values.shape
    across, down = -(-columns // 32), -(-rows // 32)
    magnitudes = np.zeros((down * 32, across * 32), np.float32)
    magnitudes[:rows, :columns] = np.where(np.isnan(values), 0, np.abs(values))
    if two_dimensional:
        squares = array_scales(magnitudes.reshape(down, 32, across, 32).max((1, 3)), fmt, scale_rounding)
        row_scales, column_scales = squares.repeat(32, 0)[:rows], squares.repeat(32, 1)[:, :columns]
    else:
        row_scales = array_scales(magnitudes.reshape(down * 32, across, 32).max(2), fmt, scale_rounding)[:rows]
        column_scales = array_scales(magnitudes.reshape(down, 32, across * 32).max(1), fmt, scale_rounding)[:, :columns]
    row_codes = array_codes(values, row_scales.repeat(32, 1)[:, :columns], fmt)
    column_codes = array_codes(values, column_scales.repeat(32, 0)[:rows], fmt)
    a, c = (torch.from_numpy(codes).reshape(x.shape) for codes in (row_codes, column_codes))
    b, d = (torch.from_numpy(scales.copy()) for scales in (row_scales, column_scales))
    return a, b, c, d


def check_equal(got: Any, expected: Any, note: Any = "") -> None:
    names = ("rowwise codes", "rowwise scales", "columnwise codes", "columnwise scales")
    for name, mine, theirs in zip(names, got, expected, strict=True):
        assert mine.dtype == torch.uint8, (name, note)
        assert mine.shape == theirs.shape, (name, note)
        assert mine.is_contiguous(), (name, note)
        assert torch.equal(mine, theirs), (name, note, (mine != theirs).nonzero()[:3].tolist())


# Scales


@cache
def every_bfloat16_scale(fmt: str, scale_rounding: str) -> list[int]:
    amaxes = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().tolist()
    return [mx_oracle.scale_code(abs(amax), fmt, scale_rounding) for amax in amaxes]


@rounding
def test_scales_of_every_bfloat16(code_path: str, fmt: str, scale_rounding: str) -> None:
    """An amax has no sign; one that has is taken for its magnitude, NaN of either sign included."""
    amax = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    got = kernels.mx_scale_from_amax(amax, FP8[fmt], scale_rounding)
    assert got.dtype == torch.uint8
    assert got.tolist() == every_bfloat16_scale(fmt, scale_rounding)


@cache
def hard_amaxes() -> torch.Tensor:
    """Every exponent with extreme mantissas; neighbours of each power of two, plain and times a maximum; random."""
    exponents = np.arange(256, dtype=np.int64)[:, None] << 23
    mantissas = [0, 1, 2, 3, 0x1FFFFF, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFE, 0x7FFFFF]
    patterns = [(exponents | np.array(mantissas)).ravel()]
    for fraction in (1.0, 1.75, 2 / 1.75):  # a maximum is 1.75 times a power of two
        scaled = np.ldexp(np.float64(fraction), np.arange(-150, 128)).astype(np.float32).view(np.uint32)
        patterns.append((scaled.astype(np.int64)[:, None] + np.arange(-9, 10)).ravel().clip(0, 0x7F800000))
    random = np.random.default_rng(0)
    patterns.append(random.integers(0, 0x7F800001, 20_000))
    patterns.append(random.integers(0, 24 << 23, 10_000))  # whose products are subnormal, or nearly
    return float32_of(np.concatenate(patterns))


@cache
def hard_scales(fmt: str, scale_rounding: str) -> list[int]:
    return [mx_oracle.scale_code(amax, fmt, scale_rounding) for amax in hard_amaxes().tolist()]


@rounding
def test_scales_of_hard_float32(code_path: str, fmt: str, scale_rounding: str) -> None:
    got = kernels.mx_scale_from_amax(hard_amaxes(), FP8[fmt], scale_rounding)
    expected = torch.tensor(hard_scales(fmt, scale_rounding), dtype=torch.uint8)
    wrong = (got != expected).nonzero().flatten()[:3]
    assert torch.equal(got, expected), [(hard_amaxes()[i].item().hex(), got[i], expected[i]) for i in wrong]


def test_scales_that_the_rules_name(code_path: str) -> None:
    """Each line was worked out by hand."""
    cases = [
        ("e4m3", "up", 0.0, 0),
        ("e4m3", "up", math.inf, 254),
        ("e4m3", "up", math.nan, 255),
        ("e4m3", "up", 448 * 2.0**-127, 0),  # the product is 2^-127, the smallest scale
        ("e4m3", "up", 449 * 2.0**-127, 1),
        ("e4m3", "up", 448 * 2.0**-126, 1),
        ("e4m3", "up", 1e-45, 0),  # the product underflows
        ("e4m3", "up", oracle.FLOAT32_MAX, 247),  # 2^128 / 448 is between 2^119 and 2^120
        ("e4m3", "up", 1.0, 119),  # 1 / 448 is between 2^-9 and 2^-8
        ("e5m2", "up", 1.0, 112),
        ("e5m2", "up", 57344.0 * 1.01, 128),
        ("e4m3", "floor", 0.0, 0),
        ("e4m3", "floor", math.inf, 254),
        ("e4m3", "floor", math.nan, 255),
        ("e4m3", "floor", 1.0, 119),
        ("e4m3", "floor", 511.0, 127),
        ("e4m3", "floor", 2.0**-119, 0),
        ("e4m3", "floor", 2.0**-118, 1),
        ("e4m3", "floor", 1e-45, 0),
        ("e5m2", "floor", 1.0, 112),
        ("e5m2", "floor", oracle.FLOAT32_MAX, 239),
    ]
    for fmt, scale_rounding, amax, code in cases:
        assert mx_oracle.scale_code(oracle.float32(amax), fmt, scale_rounding) == code
        got = kernels.mx_scale_from_amax(torch.tensor(amax), FP8[fmt], scale_rounding)
        assert got.item() == code, (fmt, scale_rounding, amax)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 7), (2, 3, 4)])
def test_scales_keep_the_shape(code_path: str, fmt: str, shape: tuple[int, ...]) -> None:
    amax = sample(shape, "float32").abs()
    for tensor in [amax] + ([amax.transpose(0, -1), amax[..., ::2]] if amax.dim() else []):
        for scale_rounding in ROUNDINGS:
            got = kernels.mx_scale_from_amax(tensor, FP8[fmt], scale_rounding)
            expected = [mx_oracle.scale_code(v, fmt, scale_rounding) for v in tensor.flatten().tolist()]
            assert got.shape == tensor.shape
            assert got.is_contiguous()
            assert got.flatten().tolist() == expected


# Blocks


@rounding
def test_both_oracles_agree(fmt: str, scale_rounding: str) -> None:
    expected = torch.tensor(hard_scales(fmt, scale_rounding), dtype=torch.uint8)
    assert torch.equal(torch.from_numpy(array_scales(hard_amaxes().numpy(), fmt, scale_rounding)), expected)
    for shape, dtype, two_dimensional in itertools.product([(70, 97), (33, 1), (0, 5)], DTYPES, (False, True)):
        x = sample(shape, dtype, 3)
        check_equal(
            by_arrays(x, fmt, scale_rounding, two_dimensional), by_scalars(x, fmt, scale_rounding, two_dimensional)
        )


def special_blocks() -> torch.Tensor:
    """Rows of 32 values, one kind of block each."""
    tiny, huge, inf, nan = 2.0**-149, oracle.FLOAT32_MAX, math.inf, math.nan
    ramp = [(-1.0) ** i * (i + 1) for i in range(32)]
    blocks = [
        [0.0] * 32,
        [-0.0] * 32,
        [0.0, -0.0] * 16,
        [nan] * 32,
        [-nan, nan] * 16,
        [nan] * 31 + [0.0],
        [nan, -0.0] * 16,
        [nan, *ramp[1:]],
        [*ramp[:31], nan],
        [inf] * 32,
        [-inf] * 32,
        [inf, *ramp[1:]],
        [*ramp[:31], -inf],
        [inf, -inf, nan, -nan, 0.0, -0.0, tiny, -tiny] * 4,
        [inf, *[huge, -huge, 2.0**100] * 10, 1.0],
        [tiny] * 32,
        [-tiny, 0.0] * 16,
        [tiny * i for i in range(32)],
        [tiny * 2.0 ** (i % 24) for i in range(32)],
        [2.0**-126, *[tiny * (1 << (i % 23)) for i in range(31)]],
        [448 * 2.0**-127 * (i + 1) / 32 for i in range(32)],
        [57344 * 2.0**-127 * (i + 1) / 32 for i in range(32)],
        [huge] * 32,
        [-huge, *ramp[1:]],
        [huge * (i + 1) / 32 for i in range(32)],
        [huge, tiny] * 16,
        [2.0 ** (i * 8 - 126) for i in range(31)] + [0.0],
        ramp,
        [v * 448 / 32 for v in ramp],
        [v * 57344 / 32 for v in ramp],
        [v * 2.0**-14 for v in ramp],
        [511.0, *[v * 480 / 32 for v in ramp[1:]]],  # beyond E4M3's maximum with the floor's scale
        [65535.0, *[v * 61440 / 32 for v in ramp[1:]]],  # and E5M2's
        [448.0, 464.0, 465.0, 479.0, 480.0, 495.0, 496.0, 511.0] * 4,
        [57344.0, 61439.0, 61440.0, 61441.0] * 8,
        # Ties and near-ties of elements under a scale of 1.
        [448.0, *[17.0 + 2 * i for i in range(31)]],
        [448.0, *[2.0**-10 * (2 * i + 1) for i in range(31)]],
        [57344.0, *[2.0**-17 * (2 * i + 1) for i in range(31)]],
        [57344.0, *[9.0 + 2 * i for i in range(31)]],
    ]
    for fraction, exponent in itertools.product((1.0, 1.75), (-110, -20, 0, 7, 100)):
        edge = np.float32(math.ldexp(fraction, exponent))
        for neighbour in (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(inf))):
            blocks.append([float(neighbour)] + [float(neighbour) * i / 32 for i in range(31)])
    return torch.tensor(blocks, dtype=torch.float32)


@cache
def special_case(dtype: str, layout: str) -> torch.Tensor:
    x = special_blocks()
    if layout == "squares":  # one special row of each square, so that each decides its scale
        spread = torch.zeros(len(x), 32, 32)
        spread[torch.arange(len(x)), torch.arange(len(x)) % 32] = x
        x = spread.reshape(-1, 32)
    if layout == "columns":
        x = x.t().contiguous()
    return x.to(DTYPES[dtype])


@cache
def special_expected(dtype: str, layout: str, fmt: str, scale_rounding: str) -> Four:
    if layout == "squares":
        return by_arrays(special_case(dtype, layout), fmt, scale_rounding, True)
    return by_scalars(special_case(dtype, layout), fmt, scale_rounding)


@rounding
@wide_dtype
@pytest.mark.parametrize("layout", ["rows", "columns", "squares"])
def test_special_blocks(code_path: str, fmt: str, dtype: str, layout: str, scale_rounding: str) -> None:
    x = special_case(dtype, layout)
    got = kernels.mx_quantize(x, FP8[fmt], two_dimensional=layout == "squares", scale_rounding=scale_rounding)
    check_equal(got, special_expected(dtype, layout, fmt, scale_rounding))


def test_special_blocks_by_hand(code_path: str) -> None:
    """A few blocks whose bytes follow from the rules without an oracle."""
    x = torch.tensor([[math.nan] * 32, [math.inf, 1.0, -math.inf] + [0.0] * 29, [-0.0] * 32, [480.0, -1.0] * 16])
    codes, scales, _, _ = kernels.mx_quantize(x, FP8["e4m3"], columnwise=False)
    assert scales.flatten().tolist() == [0, 254, 0, 128]
    assert codes[0].tolist() == [0x7F] * 32
    assert codes[1].tolist() == [0x7E, 0, 0xFE] + [0] * 29
    assert codes[2].tolist() == [0x80] * 32
    assert codes[3].tolist() == [0x77, 0xB0] * 16  # 240 and -1/2
    codes, scales, _, _ = kernels.mx_quantize(x, FP8["e4m3"], columnwise=False, scale_rounding="floor")
    assert scales.flatten().tolist() == [0, 254, 0, 127]
    assert codes[3].tolist() == [0x7E, 0xB8] * 16  # saturated


@rounding
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_as_a_block(code_path: str, fmt: str, dtype: str, scale_rounding: str) -> None:
    """A matrix of one column has one element in each of its rows' blocks; a matrix of one row, of its columns'."""
    # The arithmetic is the CPU's in the loop over a grid, and a block of its own for each element takes long there.
    x = torch.arange(0, 65536, 5 if code_path == "grid" else 1, dtype=torch.int32).to(torch.uint16).view(DTYPES[dtype])
    for shape in ((x.numel(), 1), (1, x.numel())):
        got = kernels.mx_quantize(x.view(shape), FP8[fmt], scale_rounding=scale_rounding)
        check_equal(got, by_arrays(x.view(shape), fmt, scale_rounding))


Options = tuple[str, str, str, bool]
ALL_OPTIONS: list[Options] = list(itertools.product(DTYPES, FP8, ROUNDINGS, (False, True)))


@cache
def ragged_expected(shape: tuple[int, int], options: Options) -> Four:
    dtype, fmt, scale_rounding, two_dimensional = options
    return by_scalars(sample(shape, dtype), fmt, scale_rounding, two_dimensional)


@pytest.mark.parametrize("turn", range(2))
def test_every_size_up_to_97(code_path: str, turn: int) -> None:
    """Each pair of sizes with other options in each turn."""
    for number, shape in enumerate(PAIRS):
        options = ALL_OPTIONS[(number * 7 + turn * 11) % len(ALL_OPTIONS)]
        dtype, fmt, scale_rounding, two_dimensional = options
        got = kernels.mx_quantize(
            sample(shape, dtype), FP8[fmt], two_dimensional=two_dimensional, scale_rounding=scale_rounding
        )
        check_equal(got, ragged_expected(shape, options), (shape, options))


@cache
def array_expected(shape: tuple[int, ...], options: Options) -> Four:
    dtype, fmt, scale_rounding, two_dimensional = options
    return by_arrays(sample(shape, dtype), fmt, scale_rounding, two_dimensional)


@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (32, 32), (33, 31), (64, 16), (65, 97), (2, 3, 41), (128, 160)])
def test_every_option(code_path: str, shape: tuple[int, ...]) -> None:
    for options in ALL_OPTIONS:
        dtype, fmt, scale_rounding, two_dimensional = options
        got = kernels.mx_quantize(
            sample(shape, dtype), FP8[fmt], two_dimensional=two_dimensional, scale_rounding=scale_rounding
        )
        check_equal(got, array_expected(shape, options), options)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_in_any_shape(code_path: str, data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40))
    values = data.draw(arrays.arrays(np.float32, shape, elements=st.floats(width=32), fill=st.floats(width=32)))
    dtype, fmt, scale_rounding, two_dimensional = data.draw(st.sampled_from(ALL_OPTIONS))
    x = torch.from_numpy(np.array(values)).to(DTYPES[dtype])
    got = kernels.mx_quantize(x, FP8[fmt], two_dimensional=two_dimensional, scale_rounding=scale_rounding)
    check_equal(got, by_scalars(x, fmt, scale_rounding, two_dimensional))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 97),
    columns=st.integers(1, 97),
    seed=st.integers(0, 2**31),
    options=st.sampled_from(ALL_OPTIONS),
)
def test_any_shape(code_path: str, rows: int, columns: int, seed: int, options: Options) -> None:
    dtype, fmt, scale_rounding, two_dimensional = options
    x = sample((rows, columns), dtype, seed)
    got = kernels.mx_quantize(x, FP8[fmt], two_dimensional=two_dimensional, scale_rounding=scale_rounding)
    check_equal(got, by_arrays(x, fmt, scale_rounding, two_dimensional))


def test_shapes_of_scales() -> None:
    expected = {
        (): ((1, 1), (1, 1)),
        (0,): ((1, 0), (1, 0)),
        (5,): ((1, 1), (1, 5)),
        (33,): ((1, 2), (1, 33)),
        (0, 5): ((0, 1), (0, 5)),
        (3, 0): ((3, 0), (1, 0)),
        (32, 32): ((32, 1), (1, 32)),
        (33, 65): ((33, 3), (2, 65)),
        (2, 3, 41): ((6, 2), (1, 41)),
        (5, 0, 7): ((0, 1), (0, 7)),
        (2, 2, 17, 64): ((68, 2), (3, 64)),
    }
    assert {shape: mx_scale_shapes(shape) for shape in expected} == expected


@wide_dtype
@pytest.mark.parametrize("two_dimensional", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(), (0,), (1,), (5,), (77,), (0, 5), (3, 0), (0, 0), (5, 0, 7), (1, 100), (100, 1), (2, 3, 41), (2, 2, 17, 33)],
)
def test_any_number_of_dimensions(
    code_path: str, fmt: str, shape: tuple[int, ...], dtype: str, two_dimensional: bool
) -> None:
    x = sample(shape, dtype)
    got = kernels.mx_quantize(x, FP8[fmt], two_dimensional=two_dimensional)
    check_equal(got, array_expected(shape, (dtype, fmt, "up", two_dimensional)))


def strided(dtype: str) -> Iterator[torch.Tensor]:
    x = sample((67, 75), dtype)
    yield x.t()
    yield x.flip(0)
    yield x[:, ::2]
    yield x[::3]
    yield x[1:66, 3:70]
    yield x[:, 5:6]
    yield x[5:6]
    yield x[0]
    yield x[:, 3]
    yield x[3, 4]
    yield x[:1].expand(40, 75)
    yield x[:, :1].expand(67, 40)
    cube = sample((5, 37, 42), dtype)
    yield cube.permute(2, 0, 1)
    yield cube.transpose(0, 1)
    yield cube[1:, :, 1::3]
    yield cube[:, :0]
    flat = sample((40 * 33 + 1,), dtype)
    yield flat[1:].view(40, 33)  # contiguous, one element off
    yield torch.as_strided(flat, (30, 40), (7, 3))  # overlapping


@wide_dtype
def test_any_strides(code_path: str, fmt: str, dtype: str) -> None:
    for number, x in enumerate(strided(dtype)):
        options = ROUNDINGS[number % 2], number % 3 == 0
        before = x.clone()
        got = kernels.mx_quantize(x, FP8[fmt], two_dimensional=options[1], scale_rounding=options[0])
        check_equal(got, by_arrays(before, fmt, *options), (number, x.shape, x.stride()))
        assert torch.equal(x.view(INTEGER[x.dtype]), before.view(INTEGER[x.dtype]))


@wide_dtype
@pytest.mark.parametrize("two_dimensional", [False, True])
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (33, 70), (3, 11, 97), (70, 1100)])
def test_one_direction_gives_the_bytes_of_both(
    code_path: str, fmt: str, dtype: str, shape: tuple[int, ...], two_dimensional: bool
) -> None:
    x = sample(shape, dtype)
    expected = array_expected(shape, (dtype, fmt, "up", two_dimensional))
    both = kernels.mx_quantize(x, FP8[fmt], two_dimensional=two_dimensional)
    check_equal(both, expected)
    absent = torch.empty(0, dtype=torch.uint8)
    rows = kernels.mx_quantize(x, FP8[fmt], columnwise=False, two_dimensional=two_dimensional)
    check_equal(rows, (*both[:2], absent, absent))
    columns = kernels.mx_quantize(x, FP8[fmt], rowwise=False, two_dimensional=two_dimensional)
    check_equal(columns, (absent, absent, *both[2:]))


@rounding
@pytest.mark.parametrize("shape", [(1, 1), (32, 64), (45, 97), (33, 1030)])
def test_squares_serve_both_directions(code_path: str, fmt: str, shape: tuple[int, int], scale_rounding: str) -> None:
    x = sample(shape, "bfloat16")
    codes, scales, column_codes, column_scales = kernels.mx_quantize(
        x, FP8[fmt], two_dimensional=True, scale_rounding=scale_rounding
    )
    assert torch.equal(codes, column_codes)
    expanded = scales.repeat_interleave(32, 1)[:, : shape[1]]
    assert torch.equal(expanded, column_scales.repeat_interleave(32, 0)[: shape[0]])
    turned = kernels.mx_quantize(x.t(), FP8[fmt], two_dimensional=True, scale_rounding=scale_rounding)
    assert torch.equal(turned[0], codes.t())
    assert torch.equal(turned[1], column_scales.t())
    assert torch.equal(turned[3], scales.t())


def test_directions_of_a_transpose_are_exchanged(code_path: str, fmt: str) -> None:
    x = sample((75, 1100), "float32")
    rows, row_scales, columns, column_scales = kernels.mx_quantize(x, FP8[fmt])
    turned = kernels.mx_quantize(x.t(), FP8[fmt])
    check_equal(turned, [t.t().contiguous() for t in (columns, column_scales, rows, row_scales)])


# Sizes past one panel of columns, and past what is written around the caches.


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 1023), ("float32", "e4m3", "up", False)),
        ((33, 1024), ("bfloat16", "e5m2", "floor", False)),
        ((97, 1025), ("float16", "e4m3", "up", True)),
        ((40, 2050), ("float32", "e5m2", "up", False)),
        ((3, 4129), ("bfloat16", "e4m3", "up", True)),
        ((1, 70_001), ("bfloat16", "e4m3", "up", False)),
        ((70_001, 1), ("float32", "e4m3", "up", False)),
        ((64, 65536), ("bfloat16", "e4m3", "up", False)),
        ((64, 65536), ("bfloat16", "e5m2", "floor", True)),
        ((65, 65537), ("float16", "e4m3", "floor", False)),
        ((2100, 2050), ("float32", "e5m2", "up", True)),
    ],
    ids=str,
)
def test_large_matrices(code_path: str, shape: tuple[int, int], options: Options) -> None:
    dtype, fmt, scale_rounding, two_dimensional = options
    x = sample(shape, dtype)
    got = kernels.mx_quantize(x, FP8[fmt], two_dimensional=two_dimensional, scale_rounding=scale_rounding)
    check_equal(got, array_expected(shape, options))


def with_threads(run: Callable[[], Any]) -> list[Any]:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return results


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_threads_do_not_change_bytes(code_path: str, two_dimensional: bool) -> None:
    for shape in [(513, 517), (3, 70_000), (9000, 5)]:
        x = sample(shape, "bfloat16")
        for result in with_threads(lambda: kernels.mx_quantize(x, FP8["e4m3"], two_dimensional=two_dimensional)):  # noqa: B023
            check_equal(result, array_expected(shape, ("bfloat16", "e4m3", "up", two_dimensional)))
    codes, scales = random_blocks((513, 1100), False)
    decoded = with_threads(lambda: kernels.mx_decode(codes, scales, FP8["e4m3"], torch.bfloat16))
    for result in decoded:
        check_decoded(result, codes, scales, "e4m3", "bfloat16", False)


# Decoding


@cache
def decoded_patterns(fmt: str, dtype: str) -> np.ndarray:
    """The bits of every result, [scale, code], as signed integers; -1 for NaN."""
    table = [mx_oracle.decode(code, scale, fmt) for scale in range(256) for code in range(256)]
    patterns = [2**64 - 1 if math.isnan(value) else mx_oracle.wide_pattern(value, dtype) for value in table]
    size = torch.finfo(getattr(torch, dtype)).bits
    return np.array(patterns, np.uint64).astype(f"uint{size}").view(f"int{size}").reshape(256, 256)


def check_decoded(
    got: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fmt: str, dtype: str, columnwise: bool
) -> None:
    matrix = as_matrix(codes).numpy()
    rows, columns = matrix.shape
    each = scales.numpy().repeat(32, 0)[:rows] if columnwise else scales.numpy().repeat(32, 1)[:, :columns]
    assert got.dtype == getattr(torch, dtype)
    assert got.shape == codes.shape
    assert got.is_contiguous()
    patterns = as_matrix(got).view(getattr(torch, f"int{8 * got.element_size()}")).numpy().copy()
    patterns[as_matrix(got).isnan().numpy()] = -1
    expected = decoded_patterns(fmt, dtype)[each, matrix]
    np.testing.assert_array_equal(patterns, expected)


def random_blocks(shape: tuple[int, ...], columnwise: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of every kind with scales of every kind, those around 1 more often."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, mx_scale_shapes(shape)[int(columnwise)], dtype=torch.uint8, generator=generator)
    ordinary = torch.randint(0, 2, scales.shape, generator=generator).bool()
    return codes, torch.where(ordinary, scales % 32 + 111, scales)


@decoded_dtype
@pytest.mark.parametrize("columnwise", [False, True])
def test_every_code_with_every_scale(code_path: str, fmt: str, dtype: str, columnwise: bool) -> None:
    if columnwise:
        codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 256).contiguous()
        scales = torch.arange(256, dtype=torch.uint8).expand(8, 256).contiguous()
    else:
        codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
        scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    got = kernels.mx_decode(codes, scales, FP8[fmt], getattr(torch, dtype), columnwise=columnwise)
    check_decoded(got, codes, scales, fmt, dtype, columnwise)


@decoded_dtype
def test_decoding_equals_float64_arithmetic(code_path: str, fmt: str, dtype: str) -> None:
    """Element and power of two are exact in float64, so is their product; a cast of numpy or ml_dtypes rounds it.

    ml_dtypes rounds to bfloat16 by way of float32, in which all products but those that overflow are exact.
    """
    codes = torch.arange(256, dtype=torch.uint8).expand(255, 256).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 8).contiguous()
    values = np.arange(256, dtype=np.uint8).view(ML_DTYPES[fmt]).astype(np.float64)
    with np.errstate(over="ignore"):
        product = values[None] * np.exp2(np.arange(255) - 127.0)[:, None]
        expected = product.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float64)
    got = kernels.mx_decode(codes, scales, FP8[fmt], getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(expected)], np.signbit(expected)[~np.isnan(expected)])


@decoded_dtype
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(), (0,), (1,), (5,), (0, 5), (3, 0), (5, 0, 7), (31, 33), (33, 31), (65, 97), (2, 3, 41), (40, 2050), (1, 5001)],
)
def test_decoding_any_shape(code_path: str, fmt: str, dtype: str, shape: tuple[int, ...], columnwise: bool) -> None:
    codes, scales = random_blocks(shape, columnwise)
    got = kernels.mx_decode(codes, scales, FP8[fmt], getattr(torch, dtype), columnwise=columnwise)
    check_decoded(got, codes, scales, fmt, dtype, columnwise)


@pytest.mark.parametrize("turn", range(2))
def test_decoding_every_size_up_to_97(code_path: str, turn: int) -> None:
    choices = list(itertools.product(DTYPES, FP8, (False, True)))
    for number, shape in enumerate(PAIRS):
        dtype, fmt, columnwise = choices[(number + 5 * turn) % len(choices)]
        codes, scales = random_blocks(shape, columnwise, number)
        got = kernels.mx_decode(codes, scales, FP8[fmt], DTYPES[dtype], columnwise=columnwise)
        check_decoded(got, codes, scales, fmt, dtype, columnwise)


@pytest.mark.parametrize(
    ("shape", "dtype", "fmt", "columnwise"),
    [
        ((64, 65536), "bfloat16", "e4m3", False),
        ((64, 65536), "bfloat16", "e5m2", True),
        ((1025, 2111), "float32", "e4m3", True),
        ((1025, 2111), "float16", "e5m2", False),
    ],
)
def test_decoding_large_matrices(
    code_path: str, shape: tuple[int, int], dtype: str, fmt: str, columnwise: bool
) -> None:
    codes, scales = random_blocks(shape, columnwise)
    got = kernels.mx_decode(codes, scales, FP8[fmt], DTYPES[dtype], columnwise=columnwise)
    check_decoded(got, codes, scales, fmt, dtype, columnwise)


@pytest.mark.parametrize("columnwise", [False, True])
def test_decoding_any_strides(code_path: str, fmt: str, columnwise: bool) -> None:
    codes, scales = random_blocks((67, 75), columnwise)
    turned = random_blocks((75, 67), not columnwise, 1)
    spaced = [torch.stack([t, t + 1], -1)[..., 0] for t in (codes, scales)]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (codes, scales)]
    constant = torch.tensor(130, dtype=torch.uint8).expand(mx_scale_shapes((67, 75))[int(columnwise)])
    cases = [(turned[0].t(), turned[1].t()), spaced, shifted, (codes[:1].expand(67, 75), constant)]
    for data, blocks in cases:
        got = kernels.mx_decode(data, blocks, FP8[fmt], torch.bfloat16, columnwise=columnwise)
        check_decoded(got, data, blocks, fmt, "bfloat16", columnwise)


@pytest.mark.parametrize("columnwise", [False, True])
def test_what_blocks_hold_survives_a_second_quantization(code_path: str, fmt: str, columnwise: bool) -> None:
    """Decoded blocks are quantized to the same values again: the element of the amax cannot grow."""
    x = sample((70, 97), "float32").nan_to_num(1.0, 1.0, 1.0).clamp(-(2.0**100), 2.0**100)
    first = kernels.mx_quantize(x, FP8[fmt])[2 * columnwise :][:2]
    values = kernels.mx_decode(*first, FP8[fmt], torch.float32, columnwise=columnwise)
    second = kernels.mx_quantize(values, FP8[fmt])[2 * columnwise :][:2]
    again = kernels.mx_decode(*second, FP8[fmt], torch.float32, columnwise=columnwise)
    assert torch.equal(values, again)


# Another implementation


def gfloat_cases() -> Iterator[np.ndarray]:
    """Finite blocks: of one magnitude, of many, with zeros, of powers of two, close below them."""
    random = np.random.default_rng(5)
    for number in range(60):
        x = random.standard_normal(32) * np.exp(random.normal(0, (0.0, 2.0, 12.0)[number % 3]))
        if number % 2:
            x = x * random.lognormal(0, 4, 32)
        if number % 5 == 0:
            x[random.random(32) < 0.4] = 0.0
        if number % 7 == 0:
            x = np.exp2(np.round(np.log2(np.abs(x) + 1e-3)))
        x = x.astype(np.float32)
        yield np.nextafter(x, np.float32(0)) if number % 11 == 0 else x
    yield np.zeros(32, np.float32)
    yield np.linspace(400, 511, 32, dtype=np.float32)
    yield np.linspace(50000, 65535, 32, dtype=np.float32)


def test_the_floor_rule_equals_gfloat(code_path: str, fmt: str) -> None:
    """Decoded values, block by block.

    gfloat's ``compute_scale_amax`` is the floor rule; both its formats saturate in ``quantize_block``, as ours do, so
    amaxes between the largest element and the next power of two are compared too. Not compared: NaN, infinities, and
    scales at the ends of the range, for which gfloat has other rules. It computes in float64, which is given to it.
    """
    info = getattr(gfloat.formats, f"format_info_mxfp8_{fmt}")
    blocks = np.stack(list(gfloat_cases()))
    codes, scales, _, _ = kernels.mx_quantize(
        torch.from_numpy(blocks), FP8[fmt], columnwise=False, scale_rounding="floor"
    )
    got = kernels.mx_decode(codes, scales, FP8[fmt], torch.float32).numpy()
    saturated = 0
    for block, mine in zip(blocks, got, strict=True):
        theirs = gfloat.quantize_block(info, block.astype(np.float64), gfloat.compute_scale_amax)
        np.testing.assert_array_equal(mine.astype(np.float64), theirs)
        np.testing.assert_array_equal(np.signbit(mine), np.signbit(theirs))
        saturated += bool(np.abs(theirs).max() < np.abs(block).max() * 15 / 16)
    assert saturated > 0  # some blocks are beyond the largest element


def test_elements_under_the_up_rule_equal_gfloat(code_path: str, fmt: str) -> None:
    """gfloat does not have this rule for scales; its elements are compared under our scales."""
    info = getattr(gfloat.formats, f"format_info_mxfp8_{fmt}")
    blocks = np.stack(list(gfloat_cases()))
    codes, scales, _, _ = kernels.mx_quantize(torch.from_numpy(blocks), FP8[fmt], columnwise=False)
    got = kernels.mx_decode(codes, scales, FP8[fmt], torch.float32).numpy()
    for block, mine, scale in zip(blocks, got, scales.flatten().tolist(), strict=True):
        theirs = gfloat.quantize_block(info, block.astype(np.float64), lambda *_: 2.0 ** (scale - 127))  # noqa: B023
        np.testing.assert_array_equal(mine.astype(np.float64), theirs)


# Results in given buffers


def buffers(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Four buffers inside of larger ones, at odd addresses."""
    rows, columns = mx_scale_shapes(shape)
    return [inside(s, torch.uint8) for s in (shape, rows, shape, columns)]


def inside(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.full((math.prod(shape) + 131,), 85, dtype=dtype)
    return whole[65 : 65 + math.prod(shape)].view(shape)


def check_surroundings(view: torch.Tensor) -> None:
    whole = view.new_empty(0).set_(view.untyped_storage())
    assert bool((whole[:65] == 85).all())
    assert bool((whole[65 + view.numel() :] == 85).all())


@wide_dtype
@pytest.mark.parametrize("two_dimensional", [False, True])
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (33, 70), (2, 31, 97), (65, 2050), (1, 70_001)])
def test_quantize_out(code_path: str, fmt: str, dtype: str, shape: tuple[int, ...], two_dimensional: bool) -> None:
    x = sample(shape, dtype)
    expected = array_expected(shape, (dtype, fmt, "floor", two_dimensional))
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        out = buffers(shape)
        result = kernels.mx_quantize_out(
            x,
            FP8[fmt],
            (out[0], out[1]) if rowwise else None,
            (out[2], out[3]) if columnwise else None,
            two_dimensional=two_dimensional,
            scale_rounding="floor",
        )
        assert result is None
        untouched = [torch.full_like(t, 85) for t in out]
        check_equal(out, [*(expected if rowwise else untouched)[:2], *(expected if columnwise else untouched)[2:]])
        for view in out:
            check_surroundings(view)


def test_quantize_out_at_the_size_of_streaming_stores(code_path: str) -> None:
    shape, options = (64, 65536), ("bfloat16", "e4m3", "up", False)
    out = buffers(shape)
    kernels.mx_quantize_out(sample(shape, "bfloat16"), FP8["e4m3"], (out[0], out[1]), (out[2], out[3]))
    check_equal(out, array_expected(shape, options))
    for view in out:
        check_surroundings(view)


def test_quantize_out_of_strided_input(code_path: str, fmt: str) -> None:
    x = sample((75, 70), "bfloat16").t()
    out = buffers((70, 75))
    kernels.mx_quantize_out(x, FP8[fmt], (out[0], out[1]), (out[2], out[3]))
    check_equal(out, by_arrays(x, fmt, "up"))


@wide_dtype
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (33, 70), (2, 31, 97), (65, 2050)])
def test_decode_out(code_path: str, fmt: str, dtype: str, shape: tuple[int, ...], columnwise: bool) -> None:
    codes, scales = random_blocks(shape, columnwise)
    out = inside(shape, DTYPES[dtype])
    kernels.mx_decode_out(codes, scales, FP8[fmt], out, columnwise=columnwise)
    check_decoded(out, codes, scales, fmt, dtype, columnwise)
    check_surroundings(out)


def test_decode_out_at_the_size_of_streaming_stores(code_path: str, fmt: str) -> None:
    codes, scales = random_blocks((33, 65537), False)
    out = inside((33, 65537), torch.bfloat16)
    kernels.mx_decode_out(codes, scales, FP8[fmt], out)
    check_decoded(out, codes, scales, fmt, "bfloat16", False)
    check_surroundings(out)


WRONG: list[tuple[Callable[[torch.Tensor], Any], type[OttavaError]]] = [
    (lambda t: torch.full((t.shape[0] + 1, t.shape[1]), 85, dtype=t.dtype), ShapeError),
    (lambda t: torch.full((t.shape[0], t.shape[1] + 1), 85, dtype=t.dtype), ShapeError),
    (lambda t: torch.full((t.numel(),), 85, dtype=t.dtype), ShapeError),
    (lambda t: torch.full((1, *t.shape), 85, dtype=t.dtype), ShapeError),
    (lambda t: torch.full((*t.shape, 2), 85, dtype=t.dtype)[..., 0], ShapeError),  # not contiguous
    (lambda t: torch.full(t.shape, 85, dtype=torch.int8), DTypeError),
    (lambda t: torch.full(t.shape, 85, dtype=torch.float32), DTypeError),
    (lambda t: torch.full(t.shape, 85.0).to(torch.float8_e4m3fn), DTypeError),
    (lambda t: t.numpy(), DTypeError),
    (lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), DeviceError),
]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_quantize_out_refuses_what_does_not_fit(code_path: str, place: int, number: int) -> None:
    """Nothing is written, to whichever buffer."""
    spoil, error = WRONG[number]
    out: list[Any] = [torch.full_like(t, 85) for t in buffers((33, 70))]
    out[place] = spoil(out[place])
    before = [t.clone() if isinstance(t, torch.Tensor) else t.copy() for t in out]
    with pytest.raises(error, match=r"codes|scales"):
        kernels.mx_quantize_out(torch.ones(33, 70), FP8["e4m3"], (out[0], out[1]), (out[2], out[3]))
    for now, then in zip(out, before, strict=True):
        if isinstance(now, torch.Tensor) and now.device.type == "cpu":
            assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
        elif not isinstance(now, torch.Tensor):
            np.testing.assert_array_equal(now, then)


def test_quantize_out_refuses_wrong_requests(code_path: str) -> None:
    x, out = torch.ones(33, 70), buffers((33, 70))
    rows, columns = (out[0], out[1]), (out[2], out[3])
    with pytest.raises(OptionError):
        kernels.mx_quantize_out(x, FP8["e4m3"], None, None)
    with pytest.raises(OptionError):
        kernels.mx_quantize_out(x, FP8["e4m3"], rows, columns, scale_rounding="down")
    with pytest.raises(DTypeError):
        kernels.mx_quantize_out(x, torch.float8_e8m0fnu, rows, columns)
    with pytest.raises(DTypeError):
        kernels.mx_quantize_out(x.double(), FP8["e4m3"], rows, columns)
    with pytest.raises(ShapeError):
        kernels.mx_quantize_out(x.t(), FP8["e4m3"], rows, columns)
    assert all(bool((t == 85).all()) for t in out)


def test_decode_out_refuses_what_does_not_fit(code_path: str) -> None:
    codes, scales = random_blocks((33, 70), False)
    out = torch.full((33, 70), 85.0)
    refused: list[tuple[type[OttavaError], Callable[[], Any]]] = [
        (ShapeError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out[:32])),
        (ShapeError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out.view(70, 33))),
        (ShapeError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out.view(70, 33).t())),
        (ShapeError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out, columnwise=True)),
        (ShapeError, lambda: kernels.mx_decode_out(codes, scales[:, :2], FP8["e4m3"], out)),
        (DTypeError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out.double())),
        (DTypeError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out.view(torch.int32))),
        (DTypeError, lambda: kernels.mx_decode_out(codes, scales, torch.float16, out)),
        (DTypeError, lambda: kernels.mx_decode_out(codes, scales.view(torch.float8_e8m0fnu), FP8["e4m3"], out)),
        (DTypeError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out.numpy())),
        (DeviceError, lambda: kernels.mx_decode_out(codes, scales, FP8["e4m3"], out.to("meta"))),
        (DeviceError, lambda: kernels.mx_decode_out(codes, scales.to("meta"), FP8["e4m3"], out)),
    ]
    for error, run in refused:
        with pytest.raises(error):
            run()
        assert bool((out == 85).all())


# Refusals


@pytest.mark.parametrize("value", ["down", "UP", "", "up ", None, 0, True, ["up"]])
def test_an_unknown_rounding_is_refused(code_path: str, value: Any) -> None:
    x = torch.ones(4, 4)
    with pytest.raises(OptionError, match="scale_rounding"):
        kernels.mx_quantize(x, FP8["e4m3"], scale_rounding=value)
    with pytest.raises(OptionError, match="scale_rounding"):
        kernels.mx_scale_from_amax(x, FP8["e4m3"], value)
    with pytest.raises(OptionError, match="scale_rounding"):
        kernels.check_scale_rounding(value)


@pytest.mark.parametrize("wrong", [torch.float16, torch.float8_e8m0fnu, torch.uint8, "e4m3", None])
def test_an_unknown_format_is_refused(code_path: str, wrong: Any) -> None:
    codes, scales = random_blocks((4, 4), False)
    for run in (
        lambda: kernels.mx_quantize(torch.ones(4, 4), wrong),
        lambda: kernels.mx_scale_from_amax(torch.ones(4), wrong),
        lambda: kernels.mx_decode(codes, scales, wrong, torch.float32),
    ):
        with pytest.raises(DTypeError):
            run()


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.int32), torch.eye(4).to_sparse(), [1.0], None],
    ids=["float64", "int32", "sparse", "list", "none"],
)
def test_what_cannot_be_quantized_is_refused(code_path: str, wrong: Any) -> None:
    with pytest.raises(DTypeError):
        kernels.mx_quantize(wrong, FP8["e4m3"])


def test_other_refusals(code_path: str) -> None:
    codes, scales = random_blocks((33, 70), False)
    with pytest.raises(OptionError, match="neither"):
        kernels.mx_quantize(torch.ones(4, 4), FP8["e4m3"], rowwise=False, columnwise=False)
    for amax in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float64), 1.0):
        with pytest.raises(DTypeError):
            kernels.mx_scale_from_amax(amax, FP8["e4m3"])
    for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(DTypeError):
            kernels.mx_decode(codes, scales, FP8["e4m3"], dtype)
    for data, blocks in ((codes.view(FP8["e4m3"]), scales), (codes, scales.view(torch.int8)), (codes.int(), scales)):
        with pytest.raises(DTypeError):
            kernels.mx_decode(data, blocks, FP8["e4m3"], torch.float32)
    for blocks in (scales[:-1], scales[:, :-1], scales.t(), scales.flatten(), scales[None]):
        with pytest.raises(ShapeError):
            kernels.mx_decode(codes, blocks, FP8["e4m3"], torch.float32)
    with pytest.raises(ShapeError):
        kernels.mx_decode(codes, scales, FP8["e4m3"], torch.float32, columnwise=True)
    with pytest.raises(DeviceError):
        kernels.mx_decode(codes, scales.to("meta"), FP8["e4m3"], torch.float32)


# Compiled graphs


@pytest.mark.parametrize("two_dimensional", [False, True])
@pytest.mark.parametrize("shape", [(), (33, 70), (2, 31, 97), (0, 5), (3, 0)])
def test_compiled_equals_eager(fmt: str, shape: tuple[int, ...], two_dimensional: bool) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for scale_rounding in ROUNDINGS:
            a, b, c, d = kernels.mx_quantize(
                x, FP8[fmt], two_dimensional=two_dimensional, scale_rounding=scale_rounding
            )
            rows = kernels.mx_decode(a, b, FP8[fmt], x.dtype)
            columns = kernels.mx_decode(c, d, FP8[fmt], torch.float32, columnwise=True)
            only = kernels.mx_quantize(x, FP8[fmt], rowwise=False, scale_rounding=scale_rounding)
            scale = kernels.mx_scale_from_amax(x.abs().float(), FP8[fmt], scale_rounding)
            found += [a, b, c, d, rows, columns, *only, scale]
        return tuple(found)

    x = sample(shape, "bfloat16").nan_to_num(1.0)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    for mine, theirs in zip(compiled, run(x), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)


def test_compiled_for_any_size() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        codes, scales, _, _ = kernels.mx_quantize(x, FP8["e4m3"], columnwise=False)
        return kernels.mx_decode(codes, scales, FP8["e4m3"], torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in [(33, 70), (5, 128), (97, 31)]:
        x = sample(shape, "bfloat16").nan_to_num(1.0)
        assert torch.equal(compiled(x), run(x))


@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (33, 70), (2, 3, 41)])
def test_operators_are_well_formed(fmt: str, shape: tuple[int, ...]) -> None:
    """Schemas, shapes under tracing and graphs with symbolic sizes, by torch's own checks."""
    x = sample(shape, "float32").nan_to_num(1.0)
    for rowwise, columnwise, two_dimensional, floor in [
        (True, True, False, False),
        (True, False, True, True),
        (False, True, False, True),
    ]:
        arguments = (x, FP8[fmt], rowwise, columnwise, two_dimensional, floor)
        torch.library.opcheck(torch.ops.ottava.mx_quantize.default, arguments)
    torch.library.opcheck(torch.ops.ottava.mx_scale_from_amax.default, (x.abs(), FP8[fmt], False))
    for columnwise, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        codes, scales = random_blocks(shape, columnwise)
        codes, scales = codes % 0x78, scales % 64 + 96  # no NaN: it differs from itself
        torch.library.opcheck(torch.ops.ottava.mx_decode.default, (codes, scales, FP8[fmt], dtype, columnwise))


def test_results_need_buffers_of_their_own() -> None:
    x = torch.randn(32, 32)
    codes, rows, columns = torch.zeros(32, 32, dtype=torch.uint8), *torch.zeros(2, 32, 1, dtype=torch.uint8)
    with pytest.raises(OptionError, match="one buffer"):
        kernels.mx_quantize_out(x, torch.float8_e4m3fn, (codes, rows), (codes, columns.view(1, 32)))
    with pytest.raises(ShapeError, match="no pair"):
        kernels.mx_quantize_out(x, torch.float8_e4m3fn, (codes,), None)  # type: ignore[arg-type]
    assert not codes.any()
