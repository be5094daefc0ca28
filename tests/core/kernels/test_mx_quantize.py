"""MX blocks: codes and scales of both directions, byte for byte, for special values, any shape,
stride and size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from comparing import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mx_arrays import (
    ALL_OPTIONS,
    DTYPES,
    FP8,
    PAIRS,
    ROUNDINGS,
    Four,
    Options,
    array_expected,
    by_arrays,
    by_scalars,
    check_decoded,
    check_four,
    mx,
    random_blocks,
    sample,
    scale_shapes,
)

from ottava import kernels

INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
searching = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def quantized(x: torch.Tensor, options: Options) -> Four:
    _, fmt, scale_rounding, two_dimensional = options
    return kernels.grid_quantize(x, mx(FP8[fmt], two_dimensional, scale_rounding))


def check_shape(shape: tuple[int, ...], options: Options) -> None:
    x = sample(shape, options[0])
    check_four(quantized(x, options), array_expected(shape, options), (shape, options), x)


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
        for neighbour in (
            np.nextafter(edge, np.float32(0)),
            edge,
            np.nextafter(edge, np.float32(inf)),
        ):
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


@pytest.mark.parametrize("layout", ["rows", "columns", "squares"])
def test_special_blocks(code_path: str, layout: str) -> None:
    for dtype, fmt, scale_rounding in itertools.product(DTYPES, FP8, ROUNDINGS):
        x, options = special_case(dtype, layout), (dtype, fmt, scale_rounding, layout == "squares")
        check_four(
            quantized(x, options), special_expected(dtype, layout, fmt, scale_rounding), options, x
        )


def test_special_blocks_by_hand(code_path: str) -> None:
    """A few blocks whose bytes follow from the rules without an oracle."""
    x = torch.tensor(
        [[math.nan] * 32, [math.inf, 1.0, -math.inf] + [0.0] * 29, [-0.0] * 32, [480.0, -1.0] * 16]
    )
    codes, scales, _, _ = kernels.grid_quantize(x, mx(FP8["e4m3"]), columnwise=False)
    assert scales.flatten().tolist() == [0, 254, 0, 128]
    assert codes[0].tolist() == [0x7F] * 32
    assert codes[1].tolist() == [0x7E, 0, 0xFE] + [0] * 29
    assert codes[2].tolist() == [0x80] * 32
    assert codes[3].tolist() == [0x77, 0xB0] * 16  # 240 and -1/2
    codes, scales, _, _ = kernels.grid_quantize(
        x, mx(FP8["e4m3"], rounding="floor"), columnwise=False
    )
    assert scales.flatten().tolist() == [0, 254, 0, 127]
    assert codes[3].tolist() == [0x7E, 0xB8] * 16  # saturated


def bit_patterns(dtype: str, mantissas: list[int] | None) -> torch.Tensor:
    """Every sign and exponent with these mantissas, or with all."""
    patterns = torch.arange(65536, dtype=torch.int32)
    if mantissas is not None:
        patterns = patterns[
            torch.isin(patterns & (0x7F if dtype == "bfloat16" else 0x3FF), torch.tensor(mantissas))
        ]
    return patterns.to(torch.uint16).view(DTYPES[dtype])


@cache
def each_a_block(
    dtype: str, fmt: str, scale_rounding: str, shape: tuple[int, int], every: bool
) -> Four:
    return by_arrays(some_patterns(dtype, every).view(shape), fmt, scale_rounding)


@cache
def some_patterns(dtype: str, every: bool) -> torch.Tensor:
    edges = [0, 1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 126, 127]
    # The finer mantissas of float16 near the ties of elements with two and three bits of mantissa.
    fine = sorted({(i * 64 + step) % 1024 for i in range(16) for step in (-1, 0, 1)})
    return bit_patterns(dtype, None if every else edges if dtype == "bfloat16" else fine)


def check_each_as_a_block(dtype: str, every: bool) -> None:
    """A matrix of one column has one element in each of its rows' blocks; a matrix of one row, of
    its columns'."""
    x = some_patterns(dtype, every)
    for fmt, scale_rounding, shape in itertools.product(
        FP8, ROUNDINGS, ((x.numel(), 1), (1, x.numel()))
    ):
        got = quantized(x.view(shape), (dtype, fmt, scale_rounding, False))
        expected = each_a_block(dtype, fmt, scale_rounding, shape, every)
        check_four(got, expected, (dtype, fmt, scale_rounding, shape), x.view(shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_patterns_as_a_block(code_path: str, dtype: str) -> None:
    check_each_as_a_block(dtype, False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_as_a_block(code_path: str, dtype: str) -> None:
    check_each_as_a_block(dtype, True)


def test_every_size_up_to_97(on_every_path: Callable[..., None]) -> None:
    """Each pair of sizes with other options."""

    def run() -> None:
        for number, shape in enumerate(PAIRS):
            check_shape(shape, ALL_OPTIONS[number * 7 % len(ALL_OPTIONS)])

    on_every_path(run)


@pytest.mark.slow
def test_every_size_up_to_97_by_scalars(on_every_path: Callable[..., None]) -> None:
    def check(x: torch.Tensor, shape: Any, options: Any, expected: Any) -> None:
        check_four(quantized(x, options), expected, (shape, options), x)

    for number, shape in enumerate(PAIRS):
        options = ALL_OPTIONS[(number * 7 + 11) % len(ALL_OPTIONS)]
        x = sample(shape, options[0])
        expected = by_scalars(x, *options[1:])
        on_every_path(partial(check, x, shape, options, expected))


def test_every_option(code_path: str) -> None:
    shapes = [(1, 1), (31, 33), (32, 32), (33, 31), (64, 16), (65, 97), (2, 3, 41), (128, 160)]
    for shape, options in itertools.product(shapes, ALL_OPTIONS):
        check_shape(shape, options)


@searching
@given(data=st.data())
def test_any_values_in_any_shape(on_every_path: Callable[..., None], data: st.DataObject) -> None:
    shape = data.draw(
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40).filter(small)
    )
    values = data.draw(
        arrays.arrays(np.float32, shape, elements=st.floats(width=32), fill=st.floats(width=32))
    )
    options = data.draw(st.sampled_from(ALL_OPTIONS))
    x = torch.from_numpy(np.array(values)).to(DTYPES[options[0]])
    expected = by_scalars(x, *options[1:])
    on_every_path(lambda: check_four(quantized(x, options), expected, (shape, options), x))


def small(shape: tuple[int, ...]) -> bool:
    """The oracle takes microseconds for an element."""
    return math.prod(shape) <= 3000


@searching
@given(
    rows=st.integers(1, 97),
    columns=st.integers(1, 97),
    seed=st.integers(0, 2**31),
    options=st.sampled_from(ALL_OPTIONS),
)
def test_any_shape(
    on_every_path: Callable[..., None], rows: int, columns: int, seed: int, options: Options
) -> None:
    x = sample((rows, columns), options[0], seed)
    expected = by_arrays(x, *options[1:])
    on_every_path(lambda: check_four(quantized(x, options), expected, options, x))


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
    assert {shape: scale_shapes(shape) for shape in expected} == expected


def test_any_number_of_dimensions(code_path: str) -> None:
    shapes = [
        (),
        (0,),
        (1,),
        (5,),
        (77,),
        (0, 5),
        (3, 0),
        (0, 0),
        (5, 0, 7),
        (1, 100),
        (100, 1),
        (2, 3, 41),
    ]
    for shape, options in itertools.product([*shapes, (2, 2, 17, 33)], ALL_OPTIONS[::3]):
        check_shape(shape, options)


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


def test_any_strides(code_path: str) -> None:
    for dtype in DTYPES:
        for number, x in enumerate(strided(dtype)):
            options = (dtype, list(FP8)[number // 2 % 2], ROUNDINGS[number % 2], number % 3 == 0)
            before = x.clone()
            check_four(
                quantized(x, options),
                by_arrays(before, *options[1:]),
                (number, x.shape, x.stride()),
                before,
            )
            assert torch.equal(x.view(INTEGER[x.dtype]), before.view(INTEGER[x.dtype]))


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_one_direction_gives_the_bytes_of_both(code_path: str, two_dimensional: bool) -> None:
    absent = torch.empty(0, dtype=torch.uint8)
    shapes = [(), (0, 5), (3, 0), (33, 70), (3, 11, 97), (37, 1100)]
    for shape, dtype, fmt in itertools.product(shapes, DTYPES, FP8):
        x, layout = sample(shape, dtype), mx(FP8[fmt], two_dimensional)
        both = array_expected(shape, (dtype, fmt, "up", two_dimensional))
        rows = kernels.grid_quantize(x, layout, columnwise=False)
        check_four(rows, (*both[:2], absent, absent), (shape, dtype, fmt), x)
        columns = kernels.grid_quantize(x, layout, rowwise=False)
        check_four(columns, (absent, absent, *both[2:]), (shape, dtype, fmt), x)


def test_squares_serve_both_directions(code_path: str) -> None:
    shapes = [(1, 1), (32, 64), (45, 97), (33, 1030)]
    for shape, fmt, scale_rounding in itertools.product(shapes, FP8, ROUNDINGS):
        x, options = sample(shape, "bfloat16"), ("bfloat16", fmt, scale_rounding, True)
        codes, scales, column_codes, column_scales = quantized(x, options)
        assert_same(column_codes, codes, x)
        expanded = scales.repeat_interleave(32, 1)[:, : shape[1]]
        assert_same(column_scales.repeat_interleave(32, 0)[: shape[0]], expanded, x)
        turned = quantized(x.t(), options)
        assert_same(
            (turned[0], turned[1], turned[3]),
            (codes.t(), column_scales.t(), scales.t()),
            note=shape,
        )


def test_directions_of_a_transpose_are_exchanged(code_path: str, fmt: str) -> None:
    x = sample((75, 1100), "float32")
    rows, row_scales, columns, column_scales = kernels.grid_quantize(x, mx(FP8[fmt]))
    turned = kernels.grid_quantize(x.t(), mx(FP8[fmt]))
    check_four(turned, [t.t().contiguous() for t in (columns, column_scales, rows, row_scales)])


# Sizes past one panel of columns, and past what is written around the caches, which only the
# compiled CPU kernels do.

PANELS: list[tuple[tuple[int, int], Options]] = [
    ((5, 1023), ("float32", "e4m3", "up", False)),
    ((33, 1024), ("bfloat16", "e5m2", "floor", False)),
    ((97, 1025), ("float16", "e4m3", "up", True)),
    ((40, 2050), ("float32", "e5m2", "up", False)),
    ((3, 4129), ("bfloat16", "e4m3", "up", True)),
]
STREAMED: list[tuple[tuple[int, int], Options]] = [
    ((1, 70_001), ("bfloat16", "e4m3", "up", False)),
    ((70_001, 1), ("float32", "e4m3", "up", False)),
    ((64, 65536), ("bfloat16", "e5m2", "floor", True)),
    ((65, 65537), ("float16", "e4m3", "floor", False)),
    ((2100, 2050), ("float32", "e5m2", "up", True)),
]


def test_several_panels(code_path: str) -> None:
    for shape, options in PANELS:
        check_shape(shape, options)


@pytest.mark.parametrize(("shape", "options"), STREAMED, ids=str)
def test_large_matrices(
    on_every_isa: Callable[..., None], shape: tuple[int, int], options: Options
) -> None:
    on_every_isa(lambda: check_shape(shape, options))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), STREAMED, ids=str)
def test_large_matrices_on_every_path(
    on_every_path: Callable[..., None], shape: Any, options: Options
) -> None:
    on_every_path(lambda: check_shape(shape, options))


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
def test_threads_do_not_change_bytes(
    on_every_isa: Callable[..., None], two_dimensional: bool
) -> None:
    codes, scales = random_blocks((513, 1100), False)

    def run() -> None:
        for shape in [(513, 517), (3, 70_000), (9000, 5)]:
            x, options = sample(shape, "bfloat16"), ("bfloat16", "e4m3", "up", two_dimensional)
            for result in with_threads(lambda: quantized(x, options)):  # noqa: B023
                check_four(result, array_expected(shape, options), shape, x)
        for result in with_threads(
            lambda: kernels.grid_decode(codes, scales, mx(FP8["e4m3"]), torch.bfloat16)
        ):
            check_decoded(result, codes, scales, "e4m3", "bfloat16", False)

    on_every_isa(run)
