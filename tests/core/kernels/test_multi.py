"""Kernels on many shards in one call: bytes of the whole weight's quantization, wherever the weight
was cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import mx_oracle
import numpy as np
import oracle
import pytest
import torch
from comparing import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mx_arrays import mx
from whole_tensors import multi_amax, multi_cast

from ottava import kernels
from tests.core.conftest import FP8_DTYPES

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMPY = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
HUGE = [3.4028e38, -3.3961e38, 65519.0, 65520.0, -1e30]  # some are infinite when they are rounded
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-40, 6e-8, 2.9e-8, 1.00390625, *HUGE]

any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
searching = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def sample(count: int, seed: int = 0, special: float = 0.03) -> Tensor:
    """float32 values of many magnitudes; neighbouring stretches of 48 differ much, some hold
    special values."""
    random = np.random.default_rng([seed, count])
    exponents = np.repeat(random.integers(-30, 12, -(-count // 48)), 48)[:count]
    x = np.ldexp(random.standard_normal(count), exponents).astype(np.float32)
    odd = (
        random.random(count) < special * np.repeat(random.random(-(-count // 48)) < 0.3, 48)[:count]
    )
    x[odd] = random.choice(np.array(SPECIAL, np.float32), int(odd.sum()))
    return torch.from_numpy(x)


def rounded(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """What the elements count as, by ml_dtypes."""
    with np.errstate(over="ignore"):
        return x.detach().numpy().astype(NUMPY[dtype]).astype(np.float32)


def shard_ranges(count: int, cuts: list[int]) -> list[slice]:
    ends = sorted(cut % (count + 1) for cut in cuts)
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, count], strict=True)]


class Places:
    """Results one after the other in one buffer, with gaps, at any address; what lies between them
    has to stay."""

    def __init__(self, counts: list[int], first: int = 1, gap: int = 3) -> None:
        self.starts = np.cumsum([first, *(count + gap for count in counts)]).tolist()
        self.buffer = torch.full((self.starts[-1] + 64,), 0xA5, dtype=torch.uint8)
        self.outs = [
            self.buffer[start : start + n] for start, n in zip(self.starts, counts, strict=False)
        ]

    def untouched(self) -> bool:
        mask = torch.ones_like(self.buffer, dtype=torch.bool)
        for start, out in zip(self.starts, self.outs, strict=False):
            mask[start : start + out.numel()] = False
        return bool((self.buffer[mask] == 0xA5).all())


# One scale for a tensor


@searching
@given(data=st.data())
def test_shards_have_the_bytes_of_the_whole(code_path: str, data: Any) -> None:
    fmt, dtype = data.draw(st.sampled_from(list(FP8_DTYPES))), data.draw(st.sampled_from(DTYPES))
    fp8 = FP8_DTYPES[fmt]
    count = data.draw(st.sampled_from([0, 1, 15, 64, 65, 4095, 4097, 9000]), "count")
    weight = sample(
        count,
        data.draw(st.integers(0, 9), "seed"),
        data.draw(st.sampled_from([0.0, 0.3]), "special"),
    )
    ranges = shard_ranges(count, data.draw(st.lists(st.integers(0, 9000), max_size=6), "cuts"))
    xs = [weight[place] for place in ranges]
    seen = multi_amax(xs, [dtype] * len(xs))
    expected = [np.nanmax(np.abs(rounded(x, dtype)), initial=0.0) for x in xs]
    assert seen.tolist() == expected
    scale, _ = kernels.scale_from_amax(seen.max(), fp8)
    codes, _, whole_scale, _, amax = kernels.quantize(weight.to(dtype), fp8)
    assert (seen.max(), scale) == (amax, whole_scale)
    places = Places([x.numel() for x in xs])
    multi_cast(xs, [dtype] * len(xs), scale.expand(len(xs)), [fp8] * len(xs), places.outs)
    assert torch.equal(torch.cat(places.outs), codes)
    assert places.untouched()
    if count < 100:
        assert codes.tolist() == [
            oracle.encode(oracle.float32(v * scale.item()), fmt) for v in rounded(weight, dtype)
        ]


def test_elements_are_rounded_before_the_cast(code_path: str, fmt: str) -> None:
    """Just beyond a tie of the format, which is a value of each dtype: once rounded, they are the
    tie."""
    ties = (
        torch.tensor(
            [oracle.decode(code, fmt) + oracle.decode(code + 1, fmt) for code in range(0x30, 0x50)]
        )
        / 2
    )
    x = torch.cat([ties * sign * (1 + step * 2.0**-20) for sign in (1, -1) for step in (-1, 0, 1)])
    outs = [torch.empty(x.numel(), dtype=torch.uint8) for _ in DTYPES]
    multi_cast([x] * 3, DTYPES, torch.ones(3), [FP8_DTYPES[fmt]] * 3, outs)
    for dtype, out in zip(DTYPES, outs, strict=True):
        assert out.tolist() == [oracle.encode(float(v), fmt) for v in rounded(x, dtype)]
    assert torch.equal(outs[1], outs[2])
    assert not torch.equal(outs[0], outs[1])


def mixed(seed: int) -> tuple[list[Tensor], list[torch.dtype], list[torch.dtype]]:
    """Every source and nominal dtype in both formats, of many sizes, some strided, some with
    gradients."""
    xs, dtypes, formats = [], [], []
    for i, count in enumerate(
        [0, 1, 7, 100, 5000, 33, 40000, 64, 2, 16, 4096, 12288, 0, 70001, 3, 8, 90, 17]
    ):
        x = sample(count, seed + i).to(DTYPES[i % 3])
        if i % 4 == 1:
            x = torch.stack([x, -x], 1)[:, 0]
        if i % 5 == 2:
            x = x.reshape(-1, 1).expand(-1, 3).t()
        xs.append(x.requires_grad_(i % 7 == 0))
        dtypes.append(DTYPES[i // 3 % 3])
        formats.append((E4M3, E5M2)[i // 2 % 2])
    return xs, dtypes, formats


@contextmanager
def running_on(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_threads(code_path: str, run: Callable[[], None]) -> None:
    """With several numbers of threads where kernels have threads, which the reference's and the
    loops' do not."""
    for count in (1, 2, 5) if code_path not in ("reference", "grid") else (2,):
        with running_on(count):
            run()


def test_a_mixed_list(code_path: str) -> None:
    on_threads(code_path, check_mixed_list)


def check_mixed_list() -> None:
    xs, dtypes, formats = mixed(3)
    amaxes = multi_amax(xs, dtypes)
    assert not amaxes.requires_grad
    wanted = [x.detach().to(dtype) for x, dtype in zip(xs, dtypes, strict=True)]
    assert amaxes.tolist() == [kernels.amax(x).item() for x in wanted]
    scales = torch.tensor(
        [0.0, math.nan, math.inf, -2.0, 1e-30, *np.linspace(0.1, 900, len(xs) - 5).tolist()]
    )
    places = Places([x.numel() for x in xs], 5, 1)
    multi_cast(xs, dtypes, scales, formats, places.outs)
    for x, scale, fp8, out in zip(wanted, scales, formats, places.outs, strict=True):
        assert torch.equal(out, kernels.cast(x, scale, fp8).flatten())
    assert places.untouched()


def test_results_larger_than_the_caches(on_every_isa: Callable[..., None]) -> None:
    """Streaming stores, at the beginning of a line and not."""
    xs, formats = [sample(count, count) for count in (3_000_064, 1_200_000, 5)], [E4M3, E5M2, E4M3]
    scales = torch.tensor([3.0, 0.5, 1.0])

    def run() -> None:
        for first in (0, 1):
            places = Places([x.numel() for x in xs], first, 0)
            multi_cast(xs, DTYPES, scales, formats, places.outs)
            for x, dtype, scale, fp8, out in zip(
                xs, DTYPES, scales, formats, places.outs, strict=True
            ):
                assert_same(out, kernels.cast(x.to(dtype), scale, fp8), x, first)
            assert places.untouched()

    on_every_isa(run)


# MX blocks


def spread(squares: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """The scales of rows and columns from those of squares."""
    return (
        squares.repeat_interleave(32, 0)[:rows].contiguous(),
        squares.repeat_interleave(32, 1)[:, :cols].contiguous(),
    )


def scales_of(
    amaxes: Tensor, rows: int, cols: int, square: bool, fp8: torch.dtype, how: str
) -> tuple[Tensor, Tensor]:
    across, down = -(-cols // 32), -(-rows // 32)
    _, codes = kernels.grid_scales(amaxes, mx(fp8, rounding=how))
    if square:
        return spread(codes.view(down, across), rows, cols)
    first, second = codes.split(kernels.grid_amax_sizes(rows, cols, mx(fp8)))
    return first.view(rows, across), second.view(down, cols)


def check_shards(
    weight: Tensor,
    dtype: torch.dtype,
    fp8: torch.dtype,
    ranges: list[slice],
    square: bool,
    how: str = "up",
) -> None:
    """The whole way: amaxes of the shards, their maximum, scales, codes of the shards."""
    (rows, cols), count = weight.shape, len(ranges)
    xs = [weight.view(-1)[place] for place in ranges]
    starts = [place.start for place in ranges]
    places = xs, [dtype] * count, [(rows, cols)] * count, starts, [mx(fp8, square, how)] * count
    found = kernels.grid_multi_amax(*places)
    sizes = kernels.grid_amax_sizes(rows, cols, mx(fp8, square, how))
    assert found.shape == (count * sum(sizes),)
    by_row, by_column = scales_of(
        found.view(count, sum(sizes)).amax(0), rows, cols, square, fp8, how
    )
    expected = kernels.grid_quantize(weight.to(dtype), mx(fp8, square, how))
    assert torch.equal(by_row, expected[1])
    assert torch.equal(by_column, expected[3])
    results = Places([x.numel() for x in xs for _ in range(2)])
    rowwise = [(by_row, out) for out in results.outs[::2]]
    columnwise = [(by_column, out) for out in results.outs[1::2]]
    kernels.grid_multi_cast(*places, rowwise, columnwise)
    assert torch.equal(torch.cat(results.outs[::2]), expected[0].flatten())
    assert torch.equal(torch.cat(results.outs[1::2]), expected[2].flatten())
    assert results.untouched()


SIZES = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 70, 97])


@searching
@given(data=st.data())
def test_shards_have_the_blocks_of_the_whole(code_path: str, data: Any) -> None:
    fmt, dtype = data.draw(st.sampled_from(list(FP8_DTYPES))), data.draw(st.sampled_from(DTYPES))
    rows, cols = (
        data.draw(SIZES, "rows"),
        data.draw(SIZES | st.sampled_from([130, 1023, 1024, 1025, 2100]), "cols"),
    )
    weight = sample(
        rows * cols, data.draw(st.integers(0, 9), "seed"), data.draw(st.sampled_from([0.0, 0.2]))
    )
    cuts = data.draw(st.lists(st.integers(0, rows * cols), max_size=5), "cuts")
    cuts += data.draw(st.sampled_from([[], [7, 8], [5, 5]]), "a single element, an empty shard")
    how = data.draw(st.sampled_from(["up", "floor"]), "rounding")
    square = data.draw(st.booleans(), "two_dimensional")
    check_shards(
        weight.view(rows, cols),
        dtype,
        FP8_DTYPES[fmt],
        shard_ranges(rows * cols, cuts),
        square,
        how,
    )


@any_dtype
@pytest.mark.parametrize(
    ("rows", "cols", "start", "stop", "fmt"),
    [
        (40, 70, 75, 2700, "e4m3"),
        (3, 5, 4, 11, "e4m3"),
        (3, 5, 4, 11, "e5m2"),
        (65, 33, 0, 2145, "e5m2"),
    ],
)
def test_amaxes_and_codes_by_scalars(
    on_every_path: Callable[..., None],
    dtype: torch.dtype,
    rows: int,
    cols: int,
    start: int,
    stop: int,
    fmt: str,
) -> None:
    """Against the scalar oracle: what is not in the shard counts as zero, and is not cast."""
    weight = sample(rows * cols, 5)
    held = np.zeros(rows * cols, np.float32)
    held[start:stop] = rounded(weight[start:stop], dtype)
    x = held.reshape(rows, cols).tolist()
    across, down = mx_oracle.block_ranges(cols), mx_oracle.block_ranges(rows)
    by_row = [mx_oracle.block_amax([x[i][j] for j in wide]) for i in range(rows) for wide in across]
    by_column = [
        mx_oracle.block_amax([x[i][j] for i in high]) for high in down for j in range(cols)
    ]
    squares = [
        mx_oracle.block_amax([x[i][j] for i in high for j in wide])
        for high in down
        for wide in across
    ]
    shard, place = weight[start:stop], ((rows, cols), start)
    random = torch.Generator().manual_seed(1)
    row_scales = torch.randint(0, 256, (rows, len(across)), dtype=torch.uint8, generator=random)
    column_scales = torch.randint(0, 256, (len(down), cols), dtype=torch.uint8, generator=random)
    expected: list[list[int]] = [[], []]
    for k in range(start, stop):
        i, j = k // cols, k % cols
        for codes, scale in zip(
            expected, (row_scales[i, j // 32], column_scales[i // 32, j]), strict=True
        ):
            codes.append(
                0x7F if scale == 255 else mx_oracle.element(float(held[k]), int(scale), fmt)
            )

    def run() -> None:
        both = [mx(FP8_DTYPES[fmt], square) for square in (False, True)]
        found = kernels.grid_multi_amax([shard] * 2, [dtype] * 2, [place[0]] * 2, [start] * 2, both)
        assert found.tolist() == by_row + by_column + squares
        outs = [torch.empty(stop - start, dtype=torch.uint8) for _ in range(2)]
        pairs = [[(row_scales, outs[0])], [(column_scales, outs[1])]]
        kernels.grid_multi_cast([shard], [dtype], [(rows, cols)], [start], both[:1], *pairs)
        for out, codes in zip(outs, expected, strict=True):
            assert_same(out, codes, shard)

    on_every_path(run)


@any_dtype
def test_every_rounding(code_path: str, dtype: torch.dtype) -> None:
    """Neighbours of every value of the dtype, of every midpoint and of random values; a row is its
    columns' amaxes."""
    mantissa = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[dtype]
    exact = (
        np.arange(0, 65536, dtype=np.uint32) << 16
        if mantissa != 13
        else np.arange(65536, dtype=np.uint16)
    )
    exact = exact.view(np.float32) if mantissa != 13 else exact.view(np.float16).astype(np.float32)
    bits = exact.view(np.uint32).astype(np.int64)
    half = 1 << mantissa >> 1
    bits = np.concatenate(
        [bits + step for step in (-half - 1, -half, -half + 1, -1, 0, 1, half - 1, half, half + 1)]
    )
    bits = np.concatenate([bits, np.random.default_rng(0).integers(0, 2**32, 100_003)])
    # The arithmetic is the CPU's in the loop over a grid, and a column of its own for each element
    # takes long there.
    bits = bits[:: 29 if code_path == "grid" else 1]
    x = torch.from_numpy((bits & 0xFFFFFFFF).astype(np.uint32).view(np.float32))
    n = x.numel()
    found = kernels.grid_multi_amax([x], [dtype], [(1, n)], [0], [mx(E4M3)])
    _, amaxes = found.split(kernels.grid_amax_sizes(1, n, mx(E4M3)))
    with np.errstate(invalid="ignore"):
        expected = np.abs(rounded(x, dtype))
    assert np.array_equal(amaxes.numpy(), np.where(np.isnan(expected), np.float32(0), expected))


def test_mixed_matrices(code_path: str) -> None:
    """Many matrices in one call; some directions are left out, sources are strided and of every
    dtype."""
    on_threads(code_path, check_mixed_matrices)


def check_mixed_matrices() -> None:
    xs, dtypes, formats = mixed(20)
    shapes, starts, squares, scales, counts = [], [], [], [], [x.numel() for x in xs]
    for i, count in enumerate(counts):
        cols = [1, 5, 32, 100, 1500][i % 5]
        shapes.append((count // cols + 2 + i % 3, cols))
        starts.append(i % (math.prod(shapes[-1]) - count + 1))
        squares.append(i % 4 == 3)
        (rows, cols), random = shapes[-1], torch.Generator().manual_seed(i)
        scale_shapes = (rows, -(-cols // 32)), (-(-rows // 32), cols)
        scales.append(
            [torch.randint(90, 150, s, dtype=torch.uint8, generator=random) for s in scale_shapes]
        )
    layouts = [mx(fp8, square) for fp8, square in zip(formats, squares, strict=True)]
    found = kernels.grid_multi_amax(xs, dtypes, shapes, starts, layouts)
    assert not found.requires_grad
    parts = found.split(
        [sum(kernels.grid_amax_sizes(*s, own)) for s, own in zip(shapes, layouts, strict=True)]
    )
    places = [Places(counts, 1), Places(counts, 7)]
    pairs = [
        [None if i % 3 == skip else (scales[i][k], out) for i, out in enumerate(places[k].outs)]
        for k, skip in enumerate((1, 2))
    ]
    kernels.grid_multi_cast(xs, dtypes, shapes, starts, layouts, *pairs)
    for i, x in enumerate(xs):
        one = ([x.detach()], [dtypes[i]], [shapes[i]], [starts[i]])
        whole = np.zeros(math.prod(shapes[i]), np.float32)
        values = x.detach().to(dtypes[i]).float().flatten()
        whole[starts[i] : starts[i] + counts[i]] = values.numpy()
        pad = np.zeros((-(-shapes[i][0] // 32) * 32, -(-shapes[i][1] // 32) * 32), np.float32)
        pad[: shapes[i][0], : shapes[i][1]] = np.nan_to_num(
            np.abs(whole), nan=0.0, posinf=np.inf
        ).reshape(shapes[i])
        high, wide = pad.shape[0] // 32, pad.shape[1] // 32
        rows = pad.reshape(-1, wide, 32).max(2)[: shapes[i][0]].ravel()
        columns = pad.reshape(high, 32, -1).max(1)[:, : shapes[i][1]].ravel()
        blocks = pad.reshape(high, 32, wide, 32).max((1, 3)).ravel()
        assert np.array_equal(
            parts[i].numpy(), blocks if squares[i] else np.concatenate([rows, columns])
        ), i
        for k, pair in enumerate((pairs[0][i], pairs[1][i])):
            if pair is None:
                assert (places[k].outs[i] == 0xA5).all()
                continue
            again = (pair[0], torch.empty(counts[i], dtype=torch.uint8))
            kernels.grid_multi_cast(
                *one, [layouts[i]], *([[again], [None]] if k == 0 else [[None], [again]])
            )
            assert torch.equal(again[1], pair[1]), i
            position = torch.arange(starts[i], starts[i] + counts[i])
            row, col = position // shapes[i][1], position % shapes[i][1]
            factor = pair[0][row, col // 32] if k == 0 else pair[0][row // 32, col]
            exact = (values.double() * torch.exp2(127.0 - factor.double())).float()
            assert torch.equal(pair[1], kernels.cast(exact, torch.tensor(1.0), formats[i])), i
    assert places[0].untouched()
    assert places[1].untouched()


def test_large_matrices(on_every_isa: Callable[..., None]) -> None:
    """Streaming stores, chunks of one matrix on several threads; only a part of a matrix is at
    hand."""
    rows, cols = 1100, 2112
    weight = sample(rows * cols, 9).view(rows, cols)
    q = kernels.grid_quantize(weight.bfloat16(), mx(E4M3))

    def run() -> None:
        for first, threads in ((0, 1), (1, 2), (0, 5)):
            start, stop = (first * 77, rows * cols - first * 5000)
            places = Places([stop - start] * 2, first, 0 if first == 0 else 3)
            x = weight.view(-1)[start:stop]
            pairs = [[(q[1], places.outs[0])], [(q[3], places.outs[1])]]
            with running_on(threads):
                kernels.grid_multi_cast(
                    [x], [torch.bfloat16], [(rows, cols)], [start], [mx(E4M3)], *pairs
                )
            assert_same(
                places.outs,
                [q[0].view(-1)[start:stop], q[2].view(-1)[start:stop]],
                x,
                (first, threads),
            )
            assert places.untouched()

    on_every_isa(run)


def test_empty_lists(code_path: str) -> None:
    assert kernels.grid_multi_amax([], [], [], [], []).shape == (0,)
    kernels.grid_multi_cast([], [], [], [], [], [], [])
