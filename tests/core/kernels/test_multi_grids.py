"""Many shards of matrices on any grid in one call: the compiled kernels give the reference's
bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ottava import Layout, kernels
from ottava.kernels import cpu, reference, use_backend
from tests.core.kernels.test_multi import Places, running_on, sample

Tensor = torch.Tensor
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [
    Layout(E4M3, (None, None)),
    Layout(E5M2, (1, None)),
    Layout(E4M3, (1, 128), rounding="floor", columnwise="transposed"),
    Layout(E4M3, (128, 128), columnwise="transposed"),
    Layout(torch.int8, (8, 64), rounding="floor"),
    Layout(torch.int8, (None, 1)),
    Layout(E4M3, (3, 5)),
    Layout(E5M2, (1, 1)),
    Layout(E4M3, (2, 4), shared=(100, 100)),
    Layout(E4M3, (1, 32), E8M0, "up", columnwise="transposed"),
    Layout(torch.int8, (40, 16), E8M0, "floor"),
]
Shards = dict[str, list[Any]]


def shards_of(shape: tuple[int, int], cuts: list[int], layout: Layout, number: int = 0) -> Shards:
    """A matrix cut into shards, whose dtypes and nominal dtypes differ."""
    count = math.prod(shape)
    weight, ends = sample(count, number, 0.2), sorted(cut % (count + 1) for cut in cuts)
    ranges = list(itertools.pairwise([0, *ends, count]))
    return {
        "xs": [weight[a:b].to(DTYPES[(number + i) % 3]) for i, (a, b) in enumerate(ranges)],
        "dtypes": [DTYPES[(number + i // 3) % 3] for i in range(len(ranges))],
        "shapes": [shape] * len(ranges),
        "starts": [a for a, _ in ranges],
        "layouts": [layout] * len(ranges),
    }


def scales_for(shards: Shards, side: bool, seed: int) -> list[Tensor]:
    """Any bits: NaN, infinities and negative numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape, layout in zip(shards["shapes"], shards["layouts"], strict=True):
        grid = layout.grid(shape, side)
        if layout.stored_scale is torch.uint8:
            found.append(torch.randint(0, 256, grid, generator=generator, dtype=torch.uint8))
            continue
        usual = torch.rand(grid, generator=generator) * 100
        odd = torch.randint(-(2**31), 2**31, grid, generator=generator).int().view(torch.float32)
        found.append(
            torch.where(torch.rand(grid, generator=generator) < 0.1 * (seed % 2), odd, usual)
        )
    return found


def check(shards: Shards, seed: int = 0, threads: int = 2) -> None:
    scales = [scales_for(shards, side, seed) for side in (False, True)]
    counts = [x.numel() for x in shards["xs"]]
    results = []
    for backend in ("reference", "cpu"):
        places = [Places(counts, 1), Places(counts, 7)]
        pairs = [
            [
                None if i % 5 == 3 + k else pair
                for i, pair in enumerate(zip(scales[k], places[k].outs, strict=True))
            ]
            for k in range(2)
        ]
        with use_backend(backend), running_on(threads):
            amaxes = kernels.grid_multi_amax(*shards.values())
            kernels.grid_multi_cast(*shards.values(), *pairs)
        assert all(place.untouched() for place in places)
        results.append([amaxes, *(place.buffer for place in places)])
    assert_same(results[1], results[0], shards["xs"][0] if len(counts) == 1 else None)


SIZES = st.sampled_from([1, 2, 31, 32, 40, 65, 128, 129, 300])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_bytes_are_the_references(data: Any) -> None:
    shape = (
        data.draw(SIZES, "rows"),
        data.draw(SIZES | st.sampled_from([1023, 1024, 1025, 2100]), "columns"),
    )
    cuts = data.draw(st.lists(st.integers(0, math.prod(shape)), max_size=5), "cuts")
    layout, number = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(0, 8))
    check(
        shards_of(shape, cuts, layout, number),
        number,
        data.draw(st.sampled_from([1, 2, 5]), "threads"),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.text)
def test_on_every_instruction_set(on_every_isa: Callable[..., None], layout: Layout) -> None:
    cases = [((34, 1100), [5, 1099, 1100, 30000]), ((7, 33), [40, 41, 41]), ((200, 64), [6400])]
    on_every_isa(
        lambda: [
            check(shards_of(shape, cuts, layout, i), i) for i, (shape, cuts) in enumerate(cases)
        ]
    )


def test_matrices_on_different_grids_in_one_call() -> None:
    every: Shards = {}
    for i, layout in enumerate(LAYOUTS):
        for name, values in shards_of((37 + i, 90 + 40 * i), [i * 50, 900], layout, i).items():
            every.setdefault(name, []).extend(values)
    for threads in (1, 2, 5):
        check(every, 1, threads)


def test_no_elements() -> None:
    for layout in LAYOUTS:
        for shape in ((0, 5), (3, 0), (3, 5)):
            shards = shards_of(shape, [], layout)
            check({**shards, "xs": [x[:0] for x in shards["xs"]]})


def test_the_compiled_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grid_multi_amax", "grid_multi_cast"):
        monkeypatch.delattr(reference, name)
    shards = shards_of((40, 130), [77], LAYOUTS[2])
    with use_backend("cpu"):
        kernels.grid_multi_amax(*shards.values())
    assert all(cpu.BACKEND.serves(layout, shards=True) for layout in LAYOUTS)
