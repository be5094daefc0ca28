"""The CUDA kernels on many tensors: full tables, any addresses, edges of chunks and panels, against
the CPU backend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from mx_arrays import mx
from sequential_grid import serving_cpu
from whole_tensors import multi_amax, multi_cast

from ottava import kernels
from ottava.distributed import quantize_master_weights
from ottava.kernels.backends import use_backend

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [
    0.0,
    -0.0,
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    1e-45,
    -1e-40,
    6e-8,
    65520.0,
    -3.4028e38,
]
# Elements that a block of the casts and of the amaxes takes.
CHUNKS = (16384, 32768)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def grid() -> Iterator[None]:
    with serving_cpu():
        yield


def sample(count: int, seed: int) -> Tensor:
    random = np.random.default_rng([seed, count])
    x = np.ldexp(random.standard_normal(count), random.integers(-20, 8)).astype(np.float32)
    where = random.random(count) < 0.05
    x[where] = random.choice(np.array(SPECIAL, np.float32), int(where.sum()))
    return torch.from_numpy(x)


def at_offset(x: Tensor, elements: int) -> Tensor:
    """The same values at an address that is so many elements beyond a boundary of 64 bytes."""
    room = torch.empty(x.numel() + 64 + elements, dtype=x.dtype)
    first = -room.data_ptr() % 64 // x.element_size() + elements
    room[first : first + x.numel()] = x
    return room[first : first + x.numel()]


def bytes_at(count: int, offset: int) -> tuple[Tensor, Tensor]:
    """A buffer of junk, and the part of it that begins so many bytes beyond a boundary of 64."""
    room = torch.full((count + 192,), 0xA5, dtype=torch.uint8)
    first = -room.data_ptr() % 64 + offset
    return room, room[first : first + count]


def untouched(room: Tensor, part: Tensor) -> bool:
    first = part.data_ptr() - room.data_ptr() if part.numel() else 0
    rest = torch.cat([room[:first], room[first + part.numel() :]])
    return bool((rest == 0xA5).all())


def on_cpu(function: Any, *arguments: Any) -> Any:
    with use_backend("cpu"):
        return function(*arguments)


def check_cast(
    xs: list[Tensor], dtypes: list[torch.dtype], formats: list[torch.dtype], offsets: list[int]
) -> None:
    amaxes = multi_amax(xs, dtypes)
    assert torch.equal(amaxes, on_cpu(multi_amax, xs, dtypes))
    scales = torch.linspace(0.25, 300.0, len(xs))
    places = [bytes_at(x.numel(), offset) for x, offset in zip(xs, offsets, strict=True)]
    multi_cast(xs, dtypes, scales, formats, [out for _, out in places])
    expected = [torch.empty(x.numel(), dtype=torch.uint8) for x in xs]
    on_cpu(multi_cast, xs, dtypes, scales, formats, expected)
    for (room, out), wanted in zip(places, expected, strict=True):
        assert torch.equal(out, wanted)
        assert untouched(room, out)


def test_more_tensors_than_a_table_holds(grid: None) -> None:
    """Each has its own amax and its own scale, whichever launch it is in."""
    tensors = range(1000)
    xs = [sample(i % 7 * (i % 3), i) for i in tensors]
    check_cast(xs, [DTYPES[i % 3] for i in tensors], [E4M3] * 1000, [i % 64 for i in tensors])


@any_dtype
def test_every_address(grid: None, dtype: torch.dtype) -> None:
    """Sources at each element of a wide load, results at each byte of a wide store; a wide round,
    and a rest."""
    count = 8192 + 777
    places = [(source, result) for source in range(16 // dtype.itemsize) for result in (0, 1, 4, 7)]
    places += [(0, result) for result in range(8)]
    x = sample(count, 1).to(dtype)
    xs = [at_offset(x, source) for source, _ in places]
    check_cast(
        xs,
        [torch.bfloat16] * len(xs),
        [E4M3, E5M2] * (len(xs) // 2),
        [result for _, result in places],
    )


@any_dtype
def test_around_a_chunk(grid: None, dtype: torch.dtype) -> None:
    counts = [chunk + step for chunk in (8192, *CHUNKS) for step in (-1, 0, 1)] + [
        0,
        1,
        2 * CHUNKS[1] + 5,
    ]
    xs = [sample(count, count).to(dtype) for count in counts]
    for x in xs[:9]:
        x[-1] = 60000.0  # the largest is the last
    check_cast(xs, [dtype] * len(xs), [E5M2] * len(xs), [0] * len(xs))


@any_dtype
@pytest.mark.parametrize("nominal", DTYPES, ids=str)
def test_every_pair_of_dtypes(grid: None, dtype: torch.dtype, nominal: torch.dtype) -> None:
    x = sample(9001, 7).to(dtype)
    check_cast([x, at_offset(x, 1)] * 2, [nominal] * 4, [E4M3, E4M3, E5M2, E5M2], [0, 0, 3, 8])


# MX blocks


Shard = tuple[tuple[int, int], int, int]  # rows and columns, first and last but one element


def check_shards(
    shards: list[Shard], dtypes: list[torch.dtype], formats: list[torch.dtype], offset: int = 1
) -> None:
    xs = [at_offset(sample(b - a, a).to(dtypes[i]), i % 4) for i, (_, a, b) in enumerate(shards)]
    shapes, starts = [shape for shape, _, _ in shards], [start for _, start, _ in shards]
    nominal = [DTYPES[i % 3] for i in range(len(xs))]
    layouts = [mx(fp8, i % 3 == 1) for i, fp8 in enumerate(formats)]
    arguments = (xs, nominal, shapes, starts, layouts)
    assert torch.equal(
        kernels.grid_multi_amax(*arguments), on_cpu(kernels.grid_multi_amax, *arguments)
    )
    random = torch.Generator().manual_seed(len(xs))
    scales = [
        [
            torch.randint(0, 256, s, dtype=torch.uint8, generator=random)
            for s in ((r, -(-c // 32)), (-(-r // 32), c))
        ]
        for r, c in shapes
    ]

    def cast(function: Any) -> list[tuple[Tensor, Tensor]]:
        places = [bytes_at(x.numel(), offset + i % 2) for x in xs for i in range(2)]
        pairs: list[list[Any]] = [
            [
                None if i % 5 == 3 + k else (scales[i][k], places[2 * i + k][1])
                for i in range(len(xs))
            ]
            for k in range(2)
        ]
        function(kernels.grid_multi_cast, *arguments, *pairs)
        return places

    for (room, out), (_, wanted) in zip(cast(lambda f, *a: f(*a)), cast(on_cpu), strict=True):
        assert torch.equal(out, wanted)
        assert untouched(room, out)


@any_dtype
def test_around_a_panel(grid: None, dtype: torch.dtype) -> None:
    """Shards that begin and end in every part of panels of 32 rows by 128 columns."""
    shards = [
        ((rows, cols), start, rows * cols - stop)
        for rows, cols in (
            (32, 128),
            (64, 256),
            (33, 129),
            (31, 127),
            (70, 300),
            (1, 500),
            (500, 1),
        )
        for start, stop in ((0, 0), (1, 0), (0, 1), (127, 130), (200, 201))
    ]
    shards += [
        ((64, 256), start, stop)
        for start, stop in ((5, 5), (5, 6), (130, 250), (250, 260), (8192, 16384))
    ]
    check_shards(shards, [dtype] * len(shards), [(E4M3, E5M2)[i % 2] for i in range(len(shards))])


def test_more_matrices_than_a_table_holds(grid: None) -> None:
    shards = [((i % 4 + 1, i % 5 + 1), i % 2, (i % 4 + 1) * (i % 5 + 1)) for i in range(500)]
    check_shards(shards, [DTYPES[i % 2] for i in range(500)], [E4M3] * 500)


# The state of delayed scaling


def state(
    counts: list[int], length: int, seed: int
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    random = np.random.default_rng([seed, length])
    scales = [torch.from_numpy(random.uniform(0.1, 9, n).astype(np.float32)) for n in counts]
    histories = []
    for n in counts:
        history = random.uniform(0, 50, (length, n)).astype(np.float32)
        odd = random.random((length, n)) < 0.2
        history[odd] = random.choice(np.array([*SPECIAL, -1.0, 3e-39], np.float32), int(odd.sum()))
        histories.append(torch.from_numpy(history))
    return scales, histories, random.choice([448.0, 57344.0, 28672.0], sum(counts)).tolist()


BOTH = list(itertools.product((False, True), repeat=2))
UPDATES = [
    ([1] * 590 + [0, 3], 4, [(True, False)]),  # more tensors than a table holds
    ([5, 2100, 1, 9], 2, [(True, True)]),  # more slots of one tensor
    ([0, 3, 0, 1], 1, BOTH),
    ([2, 1], 1023, BOTH),
    ([3, 2], 1024, BOTH),
    ([1, 2], 1026, BOTH),
    ([2], 2500, BOTH),
]


@pytest.mark.parametrize(
    ("counts", "length", "given", "most_recent"),
    [(counts, length, *how) for counts, length, ways in UPDATES for how in ways],
    ids=lambda v: str(v)[:20],
)
def test_the_update_of_all_slots(
    grid: None, counts: list[int], length: int, given: bool, most_recent: bool
) -> None:
    scales, histories, maxima = state(counts, length, 1)
    last = None
    if given:
        last = torch.cat([history[-1] for history in state(counts, 1, 2)[1]])
    mine = ([s.clone() for s in scales], [h.clone() for h in histories])
    for _ in range(2):
        on_cpu(
            lambda: kernels.update_scales(
                scales, histories, maxima, most_recent=most_recent, last=last
            )
        )
        kernels.update_scales(*mine, maxima, most_recent=most_recent, last=last)
    for found, expected in zip([*mine[0], *mine[1]], [*scales, *histories], strict=True):
        assert found.numpy().tobytes() == expected.numpy().tobytes()


def test_nothing_without_tensors(grid: None) -> None:
    kernels.update_scales([], [], [])
    assert multi_amax([torch.empty(0)] * 3, DTYPES).tolist() == [0.0] * 3
    multi_cast(
        [torch.empty(0)], [DTYPES[0]], torch.ones(1), [E4M3], [torch.empty(0, dtype=torch.uint8)]
    )
    assert (
        kernels.grid_multi_amax([torch.empty(0)], [DTYPES[0]], [(2, 3)], [4], [mx(E4M3)]).tolist()
        == [0.0] * 5
    )
    kernels.grid_multi_cast([torch.ones(4)], [DTYPES[0]], [(2, 3)], [1], [mx(E4M3)], [None], [None])


@any_dtype
def test_master_weights(grid: None, quantizer: Any, dtype: torch.dtype) -> None:
    """Two ranks' shards of weights, one after the other, leave the bytes of the CPU backend."""
    masters = [torch.randn(40, 50), torch.randn(7, 9) * 100, torch.randn(1, 3)]

    def written() -> list[Tensor]:
        weights = [quantizer.quantize(torch.ones(m.shape, dtype=dtype)) for m in masters]
        shards = [m.view(-1)[m.numel() // 3 :] for m in masters]
        quantize_master_weights(weights, shards, [m.numel() // 3 for m in masters])
        return [t for w in weights for t in (w._data, w._scale_inv)]

    for found, expected in zip(written(), on_cpu(written), strict=True):
        assert torch.equal(found, expected)
