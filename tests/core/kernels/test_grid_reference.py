"""Kernels on grids of scales against a scalar oracle, byte for byte: every kind of grid, on every
backend."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grid_oracle
import numpy as np
import pytest
import torch
from comparing import assert_same

from ottava import Layout, kernels
from ottava.kernels import table

Tensor = torch.Tensor
E4M3, E5M2, E8M0, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = {
    "per tensor": Layout(E4M3, (None, None), columnwise="same"),
    "per tensor, transposed": Layout(
        E5M2, (None, None), rounding="floor", epsilon=1e-3, columnwise="transposed"
    ),
    "1 x 128": Layout(E4M3, (1, 128), columnwise="transposed", finite_as="input"),
    "1 x 128, powers of two": Layout(
        E4M3, (1, 128), rounding="floor", columnwise="transposed", finite_as="input"
    ),
    "128 x 128": Layout(E5M2, (128, 128), columnwise="transposed", epsilon=2.0),
    "128 x 128, powers of two": Layout(
        E4M3, (128, 128), rounding="floor", columnwise="transposed", finite_as="input"
    ),
    "1 x all": Layout(E4M3, (1, None), epsilon=1e-3),
    "all x 1": Layout(E5M2, (None, 1)),
    "MX": Layout(E4M3, (1, 32), E8M0, "up"),
    "MX, squares": Layout(E4M3, (1, 32), E8M0, "up", shared=(32, 32)),
    "MX, squares, floor": Layout(E5M2, (1, 32), E8M0, "floor", shared=(32, 32)),
    "MX, transposed": Layout(E4M3, (1, 32), E8M0, "up", columnwise="transposed"),
    "INT8, 8 x 64, powers of two": Layout(INT8, (8, 64), rounding="floor"),
    "INT8, E8M0": Layout(INT8, (1, 64), E8M0, "up"),
    "INT8, floor": Layout(INT8, (16, 16), E8M0, "floor", columnwise="same"),
    "3 x 5 in squares": Layout(E4M3, (3, 5), shared=(15, 15), rounding="floor"),
}
SHAPES = [
    (),
    (0,),
    (1,),
    (5,),
    (0, 5),
    (3, 0),
    (2, 0, 7),
    (1, 1),
    (7, 1),
    (1, 300),
    (33, 70),
    (3, 5, 41),
    (131, 130),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())

TINY, HUGE = 2.0**-149, 3.4028e38
SPECIAL = [
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    TINY,
    -TINY,
    1e-40,
    2.0**-126,
    6e-8,
    HUGE,
    -HUGE,
]
KINDS = ["ordinary", "special", "tiny", "ties"]


def sample(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int = 0) -> Tensor:
    """Values of magnitudes that change every few rows and columns, some rows all zeros or all
    NaN."""
    random = np.random.default_rng([seed, math.prod(shape), KINDS.index(kind)])
    rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
    x = random.standard_normal((rows, columns))
    if kind == "ties":  # halves, of elements whose scale is a power of two
        x = random.integers(-64, 65, (rows, columns)) / 2.0 + 448.0 * (
            random.random((rows, columns)) < 0.05
        )
    low, high = {
        "ordinary": (-12, 12),
        "special": (-100, 100),
        "tiny": (-148, -125),
        "ties": (0, 1),
    }[kind]
    x = np.ldexp(
        x,
        random.integers(low, high, (-(-rows // 4), -(-columns // 16)))
        .repeat(4, 0)
        .repeat(16, 1)[:rows, :columns],
    )
    if kind in ("special", "tiny"):
        odd = random.random((rows, columns)) < 0.05 * (random.random((rows, 1)) < 0.5)
        x[odd] = random.choice(
            SPECIAL[: None if kind == "special" else 10][4 * (kind == "tiny") :], int(odd.sum())
        )
        x[3::11] = math.nan
        x[7::13] = -0.0
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.astype(np.float32)).to(dtype).reshape(shape)


def wide(x: Tensor) -> Any:
    return x.to(torch.float32).numpy()


def check(x: Tensor, layout: Layout, expected: Any, note: Any) -> None:
    """Both directions, and each alone."""
    none = np.zeros(0, np.uint8)
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        got = kernels.grid_quantize(x, layout, rowwise=rowwise, columnwise=columnwise)
        assert all(t.is_contiguous() for t in got), note
        wanted = [
            *(expected[:2] if rowwise else (none, none)),
            *(expected[2:] if columnwise else (none, none)),
        ]
        assert_same(got, wanted, note=(note, rowwise, columnwise))


@each_layout
def test_quantize(on_every_path: Callable[..., None], layout: Layout) -> None:
    shapes = [*itertools.product(SHAPES[:-1], KINDS), (SHAPES[-1], "special")]
    cases = [(shape, kind, DTYPES[i % 3]) for i, (shape, kind) in enumerate(shapes)]
    cases += itertools.product([(33, 70)], ["special"], DTYPES)
    made = [(sample(shape, dtype, kind), (shape, kind, dtype)) for shape, kind, dtype in cases]
    expected = [grid_oracle.quantize(wide(x), layout, x.dtype) for x, _ in made]

    def run() -> None:
        for (x, note), result in zip(made, expected, strict=True):
            check(x, layout, result, note)

    on_every_path(run)


@each_layout
def test_what_is_quantized_is_what_the_layout_says(layout: Layout) -> None:
    """Shapes and dtypes without a kernel."""
    for shape in SHAPES:
        made = grid_oracle.quantize(np.zeros(shape, np.float32), layout, torch.float32)
        for columnwise, (data, stored) in ((False, made[:2]), (True, made[2:])):
            assert layout.data_shape(shape, columnwise) == data.shape
            assert layout.scale_shape(shape, columnwise) == stored.shape
            assert str(layout.stored_scale) == f"torch.{stored.dtype}"


def strided(dtype: torch.dtype) -> Iterator[Tensor]:
    x = sample((67, 75), dtype, "special", 1)
    yield from (
        x.t(),
        x.flip(0),
        x[:, ::2],
        x[::3],
        x[1:66, 3:70],
        x[:, 5:6],
        x[0],
        x[:, 3],
        x[3, 4],
    )
    yield from (x[:1].expand(40, 75), x[:, :1].expand(67, 40))
    cube = sample((5, 17, 42), dtype, "ordinary", 1)
    yield from (cube.permute(2, 0, 1), cube.transpose(0, 1), cube[1:, :, 1::3], cube[:, :0])
    yield torch.as_strided(sample((1321,), dtype, "ordinary"), (30, 40), (7, 3), 1)  # overlapping


@each_layout
def test_quantize_any_strides(on_every_path: Callable[..., None], layout: Layout) -> None:
    made = [alike[i % 3] for i, alike in enumerate(zip(*map(strided, DTYPES), strict=True))]
    expected = [grid_oracle.quantize(wide(x.contiguous()), layout, x.dtype) for x in made]

    def run() -> None:
        for x, result in zip(made, expected, strict=True):
            check(x, layout, result, (x.shape, x.stride(), x.dtype))

    on_every_path(run)


# Scales


def amaxes() -> Tensor:
    """Every exponent with extreme mantissas, and neighbours of what gives a power of two or
    overflows."""
    exponents = np.arange(256, dtype=np.int64)[:, None] << 23
    patterns = [
        (exponents | np.array([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF])).ravel()
    ]
    for limit in (448.0, 57344.0, 127.0):
        edges = np.array(
            [limit * 2.0**-128, limit * 2.0**-127, limit * 2.0**-126, limit / 65504, limit],
            np.float32,
        )
        patterns.append(
            (edges.view(np.uint32).astype(np.int64)[:, None] + np.arange(-2, 3)).ravel()
        )
    return torch.from_numpy(np.concatenate(patterns).astype(np.uint32).view(np.float32))


@each_layout
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales(on_every_path: Callable[..., None], layout: Layout, dtype: torch.dtype) -> None:
    seen = amaxes()
    expected = [grid_oracle.scales(value, layout, dtype) for value in seen.tolist()]
    scale = np.array([one for one, _ in expected], np.float32)
    stored = np.array([one for _, one in expected], grid_oracle.stored_dtype(layout))

    def run() -> None:
        for shape in ((len(seen),), (len(seen), 1), (1, 1, len(seen))):
            made = kernels.grid_scales(seen.view(shape), layout, dtype)
            wanted = None if layout.scale == E8M0 else scale.reshape(shape)
            assert_same(made, (wanted, stored.reshape(shape)), seen.view(shape), (shape, dtype))
        assert kernels.grid_scales(seen[:0], layout, dtype)[1].shape == (0,)

    on_every_path(run)


def test_scales_worked_out_by_hand(code_path: str) -> None:
    rows, tiny = Layout(E4M3, (1, None)), 2.0**-149
    largest = torch.finfo(torch.float32).max
    cases = [
        (rows, 448.0, torch.float32, 1.0),
        (rows, 3.0, torch.float32, float(np.float32(448) / np.float32(3))),
        (rows, 0.0, torch.float32, 1.0),
        (rows, math.inf, torch.float32, 1.0),
        (rows, math.nan, torch.float32, 1.0),
        (rows, tiny, torch.float16, largest),
        (Layout(E4M3, (1, None), finite_as="input"), tiny, torch.float32, largest),
        (Layout(E4M3, (1, None), finite_as="input"), tiny, torch.float16, 65504.0),
        (Layout(E4M3, (1, None), finite_as="input"), tiny, torch.bfloat16, 2.0**128 - 2.0**120),
        (
            Layout(E4M3, (1, None), rounding="floor", finite_as="input"),
            tiny,
            torch.float16,
            2.0**15,
        ),
        (
            Layout(E4M3, (1, None), rounding="floor", finite_as="input"),
            tiny,
            torch.bfloat16,
            2.0**127,
        ),
        (Layout(E4M3, (1, None), rounding="floor"), 449.0, torch.float32, 0.5),
        (Layout(E4M3, (1, None), epsilon=7.0), 6.5, torch.float32, 64.0),
        (Layout(E4M3, (1, None), epsilon=7.0), 0.0, torch.float32, 64.0),
        (Layout(E4M3, (1, None), epsilon=7.0), math.inf, torch.float32, 1.0),
        (Layout(E5M2, (1, None)), 7.0, torch.float32, 8192.0),
        (Layout(INT8, (1, None)), 127.0, torch.float32, 1.0),
        (Layout(INT8, (1, None), rounding="floor"), 128.0, torch.float32, 0.5),
    ]
    for layout, amax, dtype, scale in cases:
        assert grid_oracle.scales(amax, layout, dtype)[0] == scale
        made, inverse = kernels.grid_scales(torch.tensor(amax), layout, dtype)
        assert made is not None
        assert (made.item(), inverse.item()) == (scale, float(np.float32(1) / np.float32(scale))), (
            layout,
            amax,
        )


def test_integers_by_hand(code_path: str) -> None:
    """To nearest even, between -127 and 127, NaN to -128."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, math.nan, -0.0, -127.0]])
    data, scales, _, _ = kernels.grid_quantize(x, Layout(INT8, (1, None)), columnwise=False)
    assert data.view(torch.int8).tolist() == [[127, 0, 2, 2, 0, -2, 126, -126, -128, 0, -127]]
    assert scales.tolist() == [[1.0]]
    x = torch.tensor([[math.inf, -math.inf, 200.0, -200.0, 3.0]])  # of a scale of 1
    data, scales, _, _ = kernels.grid_quantize(x, Layout(INT8, (1, None)), columnwise=False)
    assert data.view(torch.int8).tolist() == [[127, -127, 127, -127, 3]]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_epsilon_that_float32_does_not_hold(backend: str) -> None:
    """Infinite as a float32: whatever was seen counts as infinite, which gives 1."""
    with kernels.use_backend(backend):
        scale, inverse = kernels.scale_from_amax(torch.tensor([0.0, 3.0, math.inf]), E4M3, 1e39)
    assert scale.tolist() == inverse.tolist() == [1.0] * 3


def test_blocks_larger_than_the_tensor(code_path: str) -> None:
    """They cost what a block of its size costs."""
    x = sample((5, 7), torch.bfloat16, "special")
    far = 2**40
    whole = kernels.grid_quantize(x, Layout(E4M3, (None, None)))
    assert_same(kernels.grid_quantize(x, Layout(E4M3, (far, far))), whole)
    rows = kernels.grid_quantize(x, Layout(E4M3, (1, None)))
    assert_same(kernels.grid_quantize(x, Layout(E4M3, (1, far))), rows)
    for columnwise in (False, True):
        data, scales = rows[2 * columnwise :][:2]
        values = kernels.grid_decode(
            data, scales, Layout(E4M3, (1, None)), torch.float32, columnwise=columnwise
        )
        again = kernels.grid_decode(
            data, scales, Layout(E4M3, (1, far)), torch.float32, columnwise=columnwise
        )
        assert_same(again, values)


# Decoding


def some_scales(shape: tuple[int, ...], layout: Layout, random: Any) -> Any:
    if layout.scale == E8M0:
        return random.integers(0, 256, shape, dtype=np.uint8)
    values = np.ldexp(random.standard_normal(shape), random.integers(-140, 120, shape)).astype(
        np.float32
    )
    odd = random.random(shape) < 0.1
    values[odd] = random.choice(np.array(SPECIAL, np.float32), int(odd.sum()))
    return values


def as_torch(values: Any, dtype: torch.dtype) -> Tensor:
    """An array of ml_dtypes is none that torch knows."""
    bits = np.ascontiguousarray(values).reshape(values.shape).view(f"int{8 * values.itemsize}")
    return torch.from_numpy(bits).view(dtype)


@each_layout
def test_decode(on_every_path: Callable[..., None], layout: Layout) -> None:
    random, cases = np.random.default_rng(1), []
    for shape, columnwise in itertools.product(SHAPES, (False, True)):
        size = layout.data_shape(shape, columnwise)
        data = np.asarray(random.integers(0, 256, size, dtype=np.uint8))
        stored = some_scales(layout.scale_shape(shape, columnwise), layout, random)
        for dtype in [*DTYPES, torch.float64]:
            expected = as_torch(grid_oracle.decode(data, stored, layout, columnwise, dtype), dtype)
            cases.append(
                (torch.from_numpy(data), torch.from_numpy(stored), columnwise, dtype, expected)
            )

    def run() -> None:
        for data, stored, columnwise, dtype, expected in cases:
            note = (data.shape, columnwise, dtype)
            got = kernels.grid_decode(data, stored, layout, dtype, columnwise=columnwise)
            assert got.is_contiguous(), note
            assert_same(got, expected, data, note)
            if data.dim() != 2:
                continue
            # Another order in memory.
            turned = data.t().contiguous().t(), stored.t().contiguous().t()
            assert_same(
                kernels.grid_decode(*turned, layout, dtype, columnwise=columnwise),
                expected,
                data,
                note,
            )
            out = torch.full_like(expected, 7.0)
            table.grid_decode.into([out], data, stored, layout.text, columnwise, dtype)
            assert_same(out, expected, data, note)

    on_every_path(run)


# Shards


class Cut(NamedTuple):
    """A matrix in pieces, as kernels are given them, and as the oracle sees it."""

    places: tuple[list[Tensor], list[torch.dtype], list[tuple[int, int]], list[int], list[Layout]]
    matrix: Any
    pieces: list[Any]

    def join(self, outs: list[Tensor]) -> Any:
        return torch.cat(outs).numpy().reshape(self.matrix.shape)


def cut(layout: Layout, dtype: torch.dtype, shape: tuple[int, int], ends: list[int]) -> Cut:
    """A float32 matrix, whose elements count as those of ``dtype``; what is not in a piece counts
    as zero."""
    weight = sample(shape, torch.float32, "special", 5).view(-1)
    starts = [0, *ends]
    ranges = [slice(a, b) for a, b in zip(starts, [*ends, weight.numel()], strict=True)]
    with np.errstate(over="ignore"):
        rounded = weight.numpy().astype(grid_oracle.NUMPY[dtype]).astype(np.float32)
    pieces = []
    for place in ranges:
        held = np.zeros_like(rounded)
        held[place] = rounded[place]
        pieces.append(held.reshape(shape))
    count = len(ranges)
    places = (
        [weight[place] for place in ranges],
        [dtype] * count,
        [shape] * count,
        starts,
        [layout] * count,
    )
    return Cut(places, rounded.reshape(shape), pieces)


def directions(layout: Layout) -> tuple[bool, ...]:
    """Those that have amaxes."""
    return (False,) if grid_oracle.same_for_both(layout) else (False, True)


CUTS: list[tuple[tuple[int, int], list[int]]] = [
    ((33, 70), [1, 75, 76, 1000, 1000, 2300]),
    ((131, 130), [130 * 64, 130 * 128 + 3]),
    ((1, 5), [2]),
    ((0, 5), []),
    ((3, 0), [0]),
]
each_cut = pytest.mark.parametrize(("shape", "ends"), CUTS, ids=str)


@each_layout
@each_cut
def test_amaxes_of_shards(
    on_every_path: Callable[..., None], layout: Layout, shape: tuple[int, int], ends: list[int]
) -> None:
    sides = directions(layout)
    for dtype in DTYPES:
        made = cut(layout, dtype, shape, ends)
        seen = [
            grid_oracle.amaxes(piece, layout, side).ravel()
            for piece in made.pieces
            for side in sides
        ]
        places, wanted = made.places, np.concatenate(seen)
        on_every_path(lambda p=places, w=wanted: assert_same(kernels.grid_multi_amax(*p), w))
        sizes = [len(one) for one in seen[: len(sides)]] + [0] * (2 - len(sides))
        assert list(kernels.grid_amax_sizes(*shape, layout)) == sizes


@each_layout
@each_cut
def test_data_of_shards(
    on_every_path: Callable[..., None], layout: Layout, shape: tuple[int, int], ends: list[int]
) -> None:
    """With scales of any kind."""
    random = np.random.default_rng(2)
    for dtype, columnwise in itertools.product(DTYPES, (False, True)):
        made, grid = (
            cut(layout, dtype, shape, ends),
            grid_oracle.grid(shape[:: 1 - 2 * columnwise], layout.block),
        )
        scales = some_scales(grid[:: 1 - 2 * columnwise], layout, random)
        expected = grid_oracle.cast(made.matrix, scales, layout, columnwise)
        arguments = made, torch.from_numpy(scales), expected, columnwise
        on_every_path(functools.partial(check_data, *arguments))


def check_data(made: Cut, scales: Tensor, expected: Any, columnwise: bool) -> None:
    """Of all pieces, and of every other one alone: what is not asked for is left as it is."""
    xs = made.places[0]
    for every in (1, 2):
        outs = [torch.full((x.numel(),), 0xA5, dtype=torch.uint8) for x in xs]
        pairs = [(scales, out) if i % every == 0 else None for i, out in enumerate(outs)]
        nothing = [None] * len(xs)
        kernels.grid_multi_cast(
            *made.places, *((nothing, pairs) if columnwise else (pairs, nothing))
        )
        wanted = [
            torch.from_numpy(expected.ravel().copy())[s : s + x.numel()]
            for x, s in zip(xs, made.places[3], strict=True)
        ]
        assert_same(
            outs, [w if i % every == 0 else torch.full_like(w, 0xA5) for i, w in enumerate(wanted)]
        )


@each_layout
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_have_the_bytes_of_the_whole(
    code_path: str, layout: Layout, dtype: torch.dtype
) -> None:
    """Amaxes, their maximum over the shards, scales, data: as the oracle quantizes the whole
    matrix."""
    for shape, ends in CUTS[:3]:
        made, sides = cut(layout, dtype, shape, ends), directions(layout)
        count, sizes = len(made.pieces), kernels.grid_amax_sizes(*shape, layout)
        largest = kernels.grid_multi_amax(*made.places).view(count, -1).amax(0).split(sizes)
        expected = grid_oracle.quantize(made.matrix, layout, dtype)
        for columnwise in (False, True):
            grid = grid_oracle.amaxes(made.matrix, layout, columnwise).shape
            scale, stored = kernels.grid_scales(
                largest[columnwise and len(sides) == 2].view(grid), layout, dtype
            )
            each = [
                torch.from_numpy(
                    grid_oracle.for_blocks(values.numpy(), layout, shape, columnwise).copy()
                )
                for values in (stored if scale is None else scale, stored)
            ]
            outs = [torch.empty(x.numel(), dtype=torch.uint8) for x in made.places[0]]
            pairs, nothing = [(each[0], out) for out in outs], [None] * count
            kernels.grid_multi_cast(
                *made.places, *((nothing, pairs) if columnwise else (pairs, nothing))
            )
            found = made.join(outs), each[1].numpy()
            if columnwise and layout.columnwise == "transposed":
                found = found[0].T, found[1].T
            assert_same(found, expected[2 * columnwise :][:2], note=(shape, columnwise))


def test_calls_of_several_layouts(code_path: str) -> None:
    """Of each matrix its own, MX blocks among others."""
    every = list(LAYOUTS.values())
    xs = [sample((40 + i,), torch.float32, "special", i) for i in range(len(every))]
    shapes, starts = [(9, 7)] * len(xs), [i % 5 for i in range(len(xs))]
    places = xs, [DTYPES[i % 3] for i in range(len(xs))], shapes, starts, every
    alone = [
        kernels.grid_multi_amax(*[[argument[i]] for argument in places]) for i in range(len(xs))
    ]
    assert_same(kernels.grid_multi_amax(*places), torch.cat(alone))
    random = np.random.default_rng(3)
    found = [
        [torch.from_numpy(some_scales(own.grid((9, 7), bool(side)), own, random)) for own in every]
        for side in (0, 1)
    ]

    def cast(chosen: list[int]) -> list[Tensor]:
        outs = [[torch.empty_like(xs[i], dtype=torch.uint8) for i in chosen] for _ in found]
        pairs = [
            [(side[i], out) for i, out in zip(chosen, own, strict=True)]
            for side, own in zip(found, outs, strict=True)
        ]
        kernels.grid_multi_cast(*[[argument[i] for i in chosen] for argument in places], *pairs)
        return [outs[side][at] for at in range(len(chosen)) for side in (0, 1)]

    assert_same(cast(list(range(len(xs)))), [out for i in range(len(xs)) for out in cast([i])])
