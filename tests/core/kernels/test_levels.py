"""Kernels for small elements, two levels of scales, rotation and choices, against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ottava import Layout
from ottava.formats import ELEMENT_NAMES
from ottava.kernels import reference, table
from ottava.kernels.levels import decodes_levels, quantizes_levels
from ottava.layout import Rotation
from tests import oracle, samples
from tests.comparing import assert_same
from tests.core.conftest import on_each
from tests.core.placing import check, running_on

Tensor = torch.Tensor
Results = tuple[Tensor | None, ...]
Runs = Callable[[Callable[[], object]], None]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SIGNS = 0xA7E8


def nvfp4(block: tuple[int, int] = (1, 16), second_level: str = "tensor", **options: Any) -> Layout:
    return Layout(
        "E2M1", block, E4M3, columnwise="transposed", second_level=second_level, **options
    )


def mxfp4(rule: str = "floor", **options: Any) -> Layout:
    return Layout("E2M1", (1, 32), E8M0, rule, columnwise="transposed", **options)


LAYOUTS: dict[str, Layout] = {
    "nvfp4": nvfp4(),
    "nvfp4-stochastic": nvfp4(stochastic=True),
    "nvfp4-rotated": nvfp4(rotation=Rotation(16, SIGNS)),
    "nvfp4-rotated-stochastic": nvfp4(rotation=Rotation(16, SIGNS), stochastic=True),
    "nvfp4-16x16": nvfp4((16, 16)),
    "nvfp4-24x16": nvfp4((24, 16)),
    "nvfp4-4over6": nvfp4(candidates=(1.0, 1.5), bound=256.0),
    "nvfp4-4over6-MSE": nvfp4(candidates=(1.0, 1.5), error="MSE"),
    "nvfp4-16x16-stochastic": nvfp4((16, 16), stochastic=True),
    "nvfp4-16x16-4over6": nvfp4((16, 16), candidates=(1.0, 1.5), bound=256.0),
    "nvfp4-squares-MSE": nvfp4(shared=(16, 16), candidates=(1.0, 1.5, 0.7), error="MSE"),
    "nvfp4-128x128-candidates": nvfp4((128, 128), candidates=(1.0, 1.5)),
    "nvfp4-rows": nvfp4(second_level="row"),
    "nvfp4-rows-rotated": nvfp4(
        second_level="row", rotation=Rotation(128, 0x123456789 << 90 | 0x12345, "both")
    ),
    # An amax has every bit of the factor of a rotation.
    "nvfp4-rows-rotated-32": nvfp4(second_level="row", rotation=Rotation(32, 0x12345678, "both")),
    "ue5m3": Layout("E2M1", (1, 16), "UE5M3", columnwise="transposed"),
    "ue5m3-tensor": Layout(
        "E2M1", (1, 16), "UE5M3", columnwise="transposed", second_level="tensor"
    ),
    "mxfp4-up": mxfp4("up"),
    "mxfp4-floor": mxfp4("floor"),
    "mxfp4-even": mxfp4("even"),
    "mxfp4-nearest": mxfp4("nearest"),
    "mxfp4-rotated": mxfp4(stochastic=True, rotation=Rotation(32, 0x12345678, "both")),
    "mxfp4-groups-in-blocks": mxfp4(rotation=Rotation(16, SIGNS, "rowwise")),
    "mxfp4-blocks-in-groups": mxfp4(rotation=Rotation(64, 0x123412341235678, "both")),
    "mxfp4-candidates": mxfp4(candidates=(1.0, 2.0, 0.5)),
    "mxfp4-squares": mxfp4(shared=(32, 32)),
    "mxfp4-squares-candidates": mxfp4("even", shared=(32, 32), candidates=(1.0, 0.5)),
    "mxfp4-squares-64-stochastic": mxfp4(shared=(64, 64), stochastic=True),
    "mxfp6-E2M3": Layout("E2M3", (1, 32), E8M0, "floor"),
    "mxfp6-E3M2": Layout("E3M2", (1, 32), E8M0, "even", columnwise="transposed"),
    "mxfp6-E3M2-stochastic": Layout("E3M2", (1, 32), E8M0, "nearest", stochastic=True),
    "mxint8": Layout("MXINT8", (1, 32), E8M0, "floor"),
    "mxint8-stochastic": Layout("MXINT8", (1, 32), E8M0, "even", stochastic=True),
    "mxint8-symmetric": Layout("MXINT8S", (1, 32), E8M0, "nearest", columnwise="transposed"),
    "int4": Layout("INT4", (1, 128), columnwise="transposed"),
    "int4-stochastic": Layout(
        "INT4",
        (1, 32),
        columnwise="transposed",
        stochastic=True,
        epsilon=1e-3,
        rounding="floor",
        finite_as="input",
    ),
    "int4-2x32": Layout("INT4", (2, 32), columnwise="transposed"),
    "int8-32x32-candidates": Layout(
        torch.int8, (32, 32), candidates=(1.0, 1.25), rounding="floor", finite_as="input"
    ),
    "e4m3-even": Layout(E4M3, (1, 32), E8M0, "even"),
    "e5m2-stochastic": Layout(torch.float8_e5m2, (1, 32), E8M0, "up", stochastic=True),
    "e4m3-two-levels": Layout(E4M3, (1, 64), E4M3, columnwise="own", second_level="tensor"),
    "e3m2-8x16-candidates": Layout(
        "E3M2", (8, 16), E4M3, second_level="tensor", candidates=(1.0, 1.5, 0.25)
    ),
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)
SHAPES = [(), (0,), (5,), (0, 5), (3, 0), (7, 1), (2, 3, 48), (16, 16), (17, 33), (33, 70)]
SHAPES += [(64, 128), (129, 257), (150, 31)]
ASKED = [(True, True), (True, True), (True, False), (False, True)]
#: Rows of a larger matrix, which random numbers depend on.
FIRST_ROWS = [0, 1, 6, 2**40 + 3]


def seed_of(layout: Layout, number: int = 0) -> Tensor | None:
    return torch.tensor(0x1234567890ABCDE - (number << 57)) if layout.stochastic else None


def quantized(
    x: Tensor, layout: Layout, seed: Tensor | None, *asked: bool, first_row: int = 0
) -> Results:
    """The results of the reference; None for amaxes that a layout does not have."""
    results = table.grid_quantize_levels.outputs(x, seed, first_row, layout.text, *asked)
    reference.grid_quantize_levels(x, seed, first_row, layout.text, results)
    return results


def decoded(
    data: Tensor, scales: Tensor | None, amax: Tensor | None, layout: Layout, *how: Any
) -> Tensor:
    out = table.grid_decode.outputs(data, scales, layout.text, *how)
    reference.grid_decode_levels(data, scales, amax, layout.text, how[0], out)
    return out


@cache
def matrices(turn: int) -> list[Tensor]:
    """Ordinary values in every shape, and unusual ones; layouts take turns with dtypes."""
    dtypes = itertools.islice(itertools.cycle(samples.DTYPES), turn, None)
    found = [samples.tiles(*shape, dtype=next(dtypes)) for shape in SHAPES]
    special = [x for dtype in samples.DTYPES for _, x in samples.special(dtype)]
    return found + special[turn::4]


def check_quantization(name: str, runs: Runs, every: int = 1) -> None:
    """Every kind of value in every kind of shape; both directions, or one of them."""
    layout, turn = LAYOUTS[name], list(LAYOUTS).index(name)
    asked, first_rows = itertools.cycle(ASKED), itertools.cycle(FIRST_ROWS)
    assert quantizes_levels(layout)
    cases = []
    for number, x in enumerate(matrices(turn % 3)):
        seed, first_row, sides = seed_of(layout, number), next(first_rows), next(asked)
        if (number + turn) % every == 0:
            arguments = (x, seed, first_row, layout.text, *sides)
            cases.append((arguments, quantized(x, layout, seed, *sides, first_row=first_row)))

    def run() -> None:
        for arguments, expected in cases:
            x = arguments[0]
            with running_on(1 + x.numel() % 2):
                check(table.grid_quantize_levels, arguments, expected, (name, x.shape, x.dtype))

    runs(run)


def check_decoding(name: str, runs: Runs, every: int = 1) -> None:
    """Any codes and any scales, with and without what multiplies them."""
    layout, dtypes = LAYOUTS[name], itertools.cycle([*samples.DTYPES, torch.float64])
    generator, turn = torch.Generator().manual_seed(0), list(LAYOUTS).index(name)
    cases = []
    for number, (shape, columnwise) in enumerate(itertools.product(SHAPES[4:], (False, True))):
        dtype = next(dtypes)
        if (number + turn) % every:
            continue
        data, scales = (
            torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
            for size in (
                layout.data_shape(shape, columnwise),
                layout.scale_shape(shape, columnwise),
            )
        )
        if layout.element in ("E2M3", "E3M2"):
            data &= 0x3F
        if layout.stored_scale is torch.float32:
            scales = samples.wide(*scales.shape)
        amax_shape = layout.amax_shape(shape, columnwise)
        amax = None if amax_shape is None else samples.wide(*amax_shape).abs()
        how = (columnwise, dtype)
        for parts in ((scales, amax), (scales, None), (None, None)):
            if parts[1] is None and amax is not None and shape != SHAPES[-2]:
                continue
            cases.append((data, parts, how, decoded(data, *parts, layout, *how)))
    assert decodes_levels(layout) or layout.format.torch_dtype.is_floating_point

    def run() -> None:
        for data, (scales, amax), how, expected in cases:
            note = (name, data.shape, how)
            if amax is None:
                check(table.grid_decode, (data, scales, layout.text, *how), (expected,), note)
                continue
            arguments = (data, scales, amax, layout.text, *how)
            check(table.grid_decode_levels, arguments, (expected,), note)

    runs(run)


@each_layout
def test_quantize(on_every_isa: Runs, name: str) -> None:
    check_quantization(name, on_every_isa)


@each_layout
def test_decode(on_every_isa: Runs, name: str) -> None:
    check_decoding(name, on_every_isa)


@pytest.mark.grid
@each_layout
def test_cuda_kernels(name: str) -> None:
    """Layouts take turns with the cases, because each thread of a GPU is a loop on the CPU."""
    check_quantization(name, on_each(["grid"]), every=3)
    check_decoding(name, on_each(["grid"]), every=5)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("element", ELEMENT_NAMES)
def test_every_bfloat16_as_an_element(on_every_isa: Runs, element: str, stochastic: bool) -> None:
    """The first of each block sets the scale to 1, unless others are larger than the format's."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.nn.functional.pad(values.float().view(-1, 16), [16, 0])
    x[:, 0] = ELEMENT_NAMES[element].max
    layout = Layout(element, (1, 32), columnwise="transposed", stochastic=stochastic)
    seed = seed_of(layout)
    expected = quantized(x, layout, seed, True, False)

    def run() -> None:
        arguments = (x, seed, 0, layout.text, True, False)
        check(table.grid_quantize_levels, arguments, expected, (element, stochastic))

    on_every_isa(run)


@pytest.mark.parametrize(
    "name",
    [
        *("mxfp4-up", "mxfp4-floor", "mxfp4-even", "mxfp4-nearest", "mxint8", "ue5m3"),
        *("nvfp4-4over6", "nvfp4-rows", "int4-stochastic"),
    ],
)
def test_every_bfloat16_as_an_amax(on_every_isa: Runs, name: str) -> None:
    layout = LAYOUTS[name]
    width = layout.block[1]
    assert width is not None
    patterns = torch.arange(0, 1 << 16, 3, dtype=torch.int32).to(torch.int16)
    x = torch.zeros(len(patterns), width, dtype=torch.bfloat16)
    x[:, 3] = patterns.view(torch.bfloat16)
    x[:, 5] = x[:, 3] * 0.3
    # A second level of rows has the amaxes themselves.
    seed = seed_of(layout)
    expected = quantized(x, layout, seed, True, False)

    def run() -> None:
        arguments = (x, seed, 0, layout.text, True, False)
        check(table.grid_quantize_levels, arguments, expected, name)

    on_every_isa(run)


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        "nvfp4-rotated-stochastic",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("nvfp4-16x16", "nvfp4-4over6", "nvfp4-rows-rotated", "mxfp6-E2M3")
        ),
    ],
)
def test_threads_and_sizes_beyond_the_caches(on_every_isa: Runs, name: str) -> None:
    layout = LAYOUTS[name]
    x = samples.tiles(643, 2052, dtype=torch.bfloat16)
    seed = seed_of(layout)
    expected = quantized(x, layout, seed, True, True)
    rowwise = [*expected[:2], expected[2]]
    values = decoded(*rowwise, layout, False, torch.bfloat16)  # type: ignore[arg-type]

    def run() -> None:
        for threads in (1, 3):
            with running_on(threads):
                arguments = (x, seed, 0, layout.text, True, True)
                check(table.grid_quantize_levels, arguments, expected, (name, threads))
                if rowwise[2] is None:
                    found = table.grid_decode(*rowwise[:2], layout.text, False, torch.bfloat16)
                else:
                    found = table.grid_decode_levels(*rowwise, layout.text, False, torch.bfloat16)
                assert_same(found, values, note=threads)

    on_every_isa(run)


def tied(rows: int, columns: int, seed: int) -> Tensor:
    """A block whose scales 1 and 1/2 have equal errors for E2M1, but for the rounding of sums.

    A largest element near 6 becomes 6 with the scale 1, and 3 with 1/2. A smaller one, from 1/8 to
    1/4, becomes 0 or 1/4, so that many of them make up for it.
    """
    count = rows * columns - 1
    generator = torch.Generator().manual_seed(seed)
    largest = 5.5 + torch.rand(1, generator=generator) / 2
    total = (count / 8 + float(largest) - 4.5) * (1 + 2**-24)
    values = torch.rand(count, generator=generator, dtype=torch.float64) / count
    values = (values + (total - values.sum()) / count).to(torch.float32)
    # The last one makes up for the rounding of the others.
    values[-1] = total - values[:-1].double().sum()
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return torch.cat([largest, values * signs]).view(rows, columns)


def check_order(runs: Runs, block: tuple[int, int], shared: tuple[int, int] | None) -> None:
    """Candidates whose errors differ by the rounding of sums alone."""
    layout = Layout(
        "E2M1",
        block,
        E8M0,
        "floor",
        columnwise="transposed",
        shared=shared,
        candidates=(1.0, 0.5),
    )
    area = shared or block
    bands = [[tied(*area, seed=4 * i + j) for j in range(4)] for i in range(8)]
    x = torch.cat([torch.cat(band, 1) for band in bands])
    expected = quantized(x, layout, None, True, True)
    scales = expected[1]
    assert scales is not None
    assert set(scales.unique().tolist()) == {126, 127}
    assert scales.tolist() == oracle.quantize(x.tolist(), layout, x.dtype).rowwise_scale_inv

    def run() -> None:
        arguments = (x, None, 0, layout.text, True, True)
        check(table.grid_quantize_levels, arguments, expected, layout.text)

    runs(run)


each_area = pytest.mark.parametrize(
    ("block", "shared"),
    [((1, 32), None), ((8, 16), None), ((16, 16), None), ((1, 32), (32, 32))],
    ids=str,
)


@each_area
def test_errors_are_summed_in_order(
    on_every_isa: Runs, block: tuple[int, int], shared: tuple[int, int] | None
) -> None:
    check_order(on_every_isa, block, shared)


@pytest.mark.grid
@each_area
def test_cuda_kernels_sum_errors_in_order(
    block: tuple[int, int], shared: tuple[int, int] | None
) -> None:
    check_order(on_each(["grid"]), block, shared)


def test_any_strides(on_every_isa: Runs) -> None:
    layout = LAYOUTS["nvfp4-rotated"]
    x = samples.tiles(67, 75, dtype=torch.bfloat16)
    expected = quantized(x, layout, None, True, True)

    def run() -> None:
        for note, view in samples.strided(x):
            got = table.grid_quantize_levels(view, None, 0, layout.text, True, True)
            assert_same(got, expected, note=note)

    on_every_isa(run)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("E2M3", (1, None), E8M0, "floor"),
        Layout("E2M1", (1, 6), columnwise="transposed"),
        nvfp4(bound=0.5),
        nvfp4((2, 16), rotation=Rotation(16, SIGNS)),
        nvfp4((24, 16), candidates=(1.0, 1.5)),
        nvfp4(shared=(48, 48), candidates=(1.0, 1.5)),
        nvfp4(candidates=tuple(1.0 + i for i in range(9))),
    ],
    ids=[
        *("rows", "1x6", "small-bound", "2x16-rotated"),
        *("24x16-candidates", "48x48-candidates", "nine-candidates"),
    ],
)
def test_the_reference_serves_the_rest(on_every_isa: Runs, layout: Layout) -> None:
    """Blocks that end elsewhere than strips, and what would leave the range of float32."""
    assert not quantizes_levels(layout)
    x = samples.tiles(35, 50, dtype=torch.bfloat16)
    expected = quantized(x, layout, None, True, True)

    def run() -> None:
        arguments = (x, None, 0, layout.text, True, True)
        check(table.grid_quantize_levels, arguments, expected, layout.text)

    on_every_isa(run)
