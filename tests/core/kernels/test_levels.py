"""Small elements, two levels of scales, rotation, candidates and random rounding.

Small matrices are compared with the scalar oracle, larger ones with the reference.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ottava import Layout, kernels
from ottava.kernels import reference, table
from ottava.kernels.compiled import is_native
from ottava.kernels.levels import quantizes_levels
from ottava.layout import Rotation
from tests import arrays, oracle, samples
from tests.cases import told
from tests.comparing import assert_same
from tests.core.conftest import ISAS, Runs, on_each
from tests.core.layouts.layouts import DTYPES, LEVELS, SIGNS, mx, nvfp4
from tests.core.layouts.layouts import LAYOUTS as COMMON
from tests.core.placing import check, running_on

Tensor = torch.Tensor
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
on_every_cpu_path = on_each(["reference", *ISAS])


#: Layouts that only kernels treat in another way than those of the common table: how blocks, groups
#: of a rotation and the strips of a kernel lie to each other.
LAYOUTS: dict[str, Layout] = {n: a for n, a in LEVELS.items() if quantizes_levels(a)} | {
    "24x16": nvfp4((24, 16)),
    "three-candidates-of-squares": nvfp4(shared=(16, 16), candidates=(1.0, 1.5, 0.7), error="MSE"),
    "128x128-candidates": nvfp4((128, 128), candidates=(1.0, 1.5)),
    "rows-rotated-128": nvfp4(
        second_level="row", rotation=Rotation(128, 0x123456789 << 90 | 0x12345, "both")
    ),
    "rotated-stochastic": mx(
        "E2M1", "floor", stochastic=True, rotation=Rotation(32, 0x12345678, "both")
    ),
    "groups-in-blocks": mx("E2M1", "floor", rotation=Rotation(16, SIGNS, "rowwise")),
    "blocks-in-groups": mx("E2M1", "floor", rotation=Rotation(64, 0x123412341235678, "both")),
    "three-powers": mx("E2M1", "floor", candidates=(1.0, 2.0, 0.5)),
    "squares-candidates": mx("E2M1", "even", shared=(32, 32), candidates=(1.0, 0.5)),
    "squares-64-stochastic": mx("E2M1", "floor", shared=(64, 64), stochastic=True),
    "int4-2x32": Layout("INT4", (2, 32), columnwise="transposed"),
    "int4-options": Layout(
        "INT4",
        (1, 32),
        columnwise="transposed",
        stochastic=True,
        epsilon=1e-3,
        rounding="floor",
        finite_as="input",
    ),
    "int8-32x32-candidates": Layout(
        torch.int8, (32, 32), candidates=(1.0, 1.25), rounding="floor", finite_as="input"
    ),
    "E2M3-own": Layout("E2M3", (1, 32), E8M0, "floor"),
    "E4M3-even": Layout(E4M3, (1, 32), E8M0, "even"),
    "E5M2-stochastic": Layout(torch.float8_e5m2, (1, 32), E8M0, "up", stochastic=True),
    "E4M3-levels-64": Layout(E4M3, (1, 64), E4M3, second_level="tensor"),
    "E3M2-8x16-candidates": Layout(
        "E3M2", (8, 16), E4M3, second_level="tensor", candidates=(1.0, 1.5, 0.25)
    ),
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)
SEEDS = [0, 7, -1, 2**63 - 1, -(2**63)]
#: Rows of a larger matrix, which random numbers depend on.
FIRST_ROWS = [0, 1, 6, 2**33 + 5]


def seed_of(layout: Layout, number: int = 0) -> Tensor | None:
    return torch.tensor(SEEDS[number % len(SEEDS)]) if layout.stochastic else None


# -- against the scalar oracle --


def expected(x: Tensor, layout: Layout, seed: Tensor | None, first_row: int) -> list[Tensor]:
    """What :func:`kernels.grid_quantize_levels` gives, in its order and shapes."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1).tolist()
    # A contract's seed is a word without a sign.
    word = None if seed is None else int(seed) % 2**64
    q = oracle.quantize(rows, layout, x.dtype, word, first_row)
    results = []
    for columnwise, data, scales, amaxes in (
        (False, q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax),
        (True, q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax),
    ):
        amax = torch.empty(0, dtype=torch.uint8)
        amax_shape = layout.amax_shape(x.shape, columnwise)
        if amax_shape is not None:
            amax = torch.tensor(amaxes, dtype=torch.float32).reshape(amax_shape)
        results += [
            torch.tensor(data, dtype=torch.uint8).reshape(layout.data_shape(x.shape, columnwise)),
            torch.tensor(scales, dtype=layout.stored_scale),
            amax,
        ]
    return results


def check_bytes(x: Tensor, layout: Layout, number: int = 0) -> None:
    """Every path gives the bytes of the oracle: of both directions, and of each by itself."""
    seed, first_row = seed_of(layout, number), FIRST_ROWS[number % len(FIRST_ROWS)]
    words: dict[str, Any] = {"seed": seed, "first_row": first_row}
    wanted = expected(x, layout, seed, first_row)

    def run() -> None:
        assert_same(kernels.grid_quantize_levels(x, layout, **words), wanted)
        rowwise = kernels.grid_quantize_levels(x, layout, columnwise=False, **words)
        columnwise = kernels.grid_quantize_levels(x, layout, rowwise=False, **words)
        assert_same([*rowwise[:3], *columnwise[3:]], wanted)
        assert not any(part.numel() for part in (*rowwise[3:], *columnwise[:3]))
        if layout.second_level == "none" and seed is None:
            assert_same(kernels.grid_quantize(x, layout), [*wanted[:2], *wanted[3:5]])

    on_every_cpu_path(run)


def special(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Matrices of 5 × 35 with unusual values: blocks of 16 are ragged in both directions."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = samples.wide(5, 35, dtype=dtype, sigma=1.0)
    for name, values in {
        "NaN and zeros": [math.nan, 0.0, -0.0, -math.nan],
        "infinity": [math.inf, 1.0, -math.inf, 0.0],
        "largest": [largest, -largest, 1.0, tiny],
    }.items():
        planted = x.clone()
        planted[1, :16] = planted[:, 20] = 0
        for place, value in enumerate(values):
            planted[place, 3] = planted[4, place] = planted[place, 17 + place] = value
        yield name, planted
        yield f"all {name}", torch.tensor(values).repeat(44)[:175].view(5, 35).to(dtype)
    yield "nothing but NaN", torch.full((5, 35), math.nan, dtype=dtype)
    yield "subnormal", (x.float() * tiny / 16).to(dtype)
    yield "large", (x.float() / x.float().abs().max() * largest).to(dtype)
    yield "ties", (torch.arange(175.0).view(5, 35) / 16 - 6).to(dtype)


#: With the other rows of the common table that test_grids.py does not have, for the long run.
ALL = LEVELS | LAYOUTS | {n: a for n, a in COMMON.items() if not is_native(a)}
NUMBERS = [
    pytest.param(number, id=name, marks=() if name in LEVELS | LAYOUTS else pytest.mark.slow)
    for number, name in enumerate(ALL)
]


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", NUMBERS)
def test_bytes(number: int, every: int) -> None:
    """In the short run layouts take turns with dtypes and special values, and two blocks in each
    direction are enough."""
    layout = list(ALL.values())[number]
    sides = [*layout.block, *(layout.shared or ()), layout.rotation.size if layout.rotation else 1]
    is_small = every == 2 and all(side is None or side <= 32 for side in sides)
    shapes = [(33, 38), (2, 9, 35)] if is_small else [(33, 70), (2, 31, 65)]
    dtypes = DTYPES if every == 1 else DTYPES[number % 3 :][:1]
    for dtype in dtypes:
        for place, shape in enumerate([(), (1,), (17, 47), shapes[number % 2]]):
            with told(shape, dtype):
                x = samples.wide(*shape, seed=place, dtype=dtype, sigma=2.0)
                check_bytes(x, layout, number + place)
        for what, x in list(special(dtype))[number % every :: every]:
            with told(what, dtype):
                check_bytes(x, layout)


@pytest.mark.parametrize("name", LEVELS)
def test_bytes_of_nothing(name: str) -> None:
    """Data of the shape that the layout gives; scales and amaxes are those of an amax of 0."""
    layout = LEVELS[name]
    stored = oracle.scale(0.0, layout, torch.float32, factor=(layout.candidates or (1.0,))[0])[1]
    for shape in [(0,), (0, 7), (7, 0), (2, 0, 3)]:
        with told(shape):
            x = torch.empty(shape)
            parts = kernels.grid_quantize_levels(x, layout, seed=seed_of(layout))
            for columnwise in (False, True):
                data, scales, amaxes = parts[3 * columnwise :][:3]
                assert data.shape == layout.data_shape(shape, columnwise)
                assert scales.shape == layout.scale_shape(shape, columnwise)
                assert amaxes.shape == (layout.amax_shape(shape, columnwise) or amaxes.shape)
                assert bool((scales == stored).all())
                assert not data.any()
                assert not amaxes.any()


@pytest.mark.parametrize("name", ["nvfp4", "E2M1-UE5M3-levels", "4over6"])
def test_scales_at_ties(name: str) -> None:
    """Amaxes whose scales are halfway between two codes, and their neighbours: every rounding of
    the order of operations shows."""
    layout = dataclasses.replace(LEVELS[name], block=(1, 16))
    codes = np.array(oracle.SCALES[layout.scale].positive[-130:])
    middles = (codes[1:] + codes[:-1]) / 2
    for largest in (5.3, 7.7, 1000.1):
        bound = layout.bound or codes[-1]
        amaxes = np.float32(middles * largest / bound)
        near = [(amaxes.view(np.int32) + step).view(np.float32) for step in range(-3, 4)]
        x = torch.from_numpy(np.concatenate([*near, np.float32([largest])]))
        check_bytes(torch.stack([x.clamp(max=largest), x / 3], 1), layout)


@pytest.mark.parametrize("rule", oracle.E8M0_RULES)
def test_powers_of_two_change_at_the_right_amax(rule: str) -> None:
    """Amaxes where a rule may go over to the next power of two, and their neighbours."""
    half_units = [2 - 2.0**-bits for bits in range(2, 9)]
    points = np.array([1, math.sqrt(2), *half_units])
    powers = 2.0 ** np.array([-149, -128, -127, -126, -125, -3, 0, 7, 120])
    steps = np.arange(-3, 4)[:, None]
    for element in ("E2M1", "E2M3", "E3M2", "INT4", "MXINT8"):
        layout = Layout(element, (1, 16), E8M0, rule, columnwise="transposed")
        maximum = oracle.ELEMENTS[oracle.NAMES[element]].max
        amaxes = np.float32(np.outer(np.append(points, points * maximum), powers).ravel())
        near = (amaxes.view(np.int32) + steps).clip(0).view(np.float32)
        with told(element):
            check_bytes(torch.from_numpy(near.reshape(-1, 1)), layout)


def packed(codes: np.ndarray[Any, Any], element: oracle.Element) -> Tensor:
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4 if element.bits == 4 else codes)


@pytest.mark.parametrize("name", oracle.ELEMENTS)
def test_every_bfloat16_value_and_every_code(name: str) -> None:
    """With scales of 1, which an infinity in each block gives."""
    element = oracle.ELEMENTS[name]
    layout = Layout(element.name, (1, 32), columnwise="transposed")
    x = samples.patterns(torch.bfloat16).float().view(-1, 16)
    x = torch.nn.functional.pad(x, [16, 0], value=math.inf)
    random = dataclasses.replace(layout, stochastic=True)
    of_random = quantized(x, random, torch.tensor(3), True, False)
    every = torch.arange(256 if element.bits == 4 else len(element.values)).to(torch.uint8)
    codes = oracle.unpack(every.tolist()) if element.bits == 4 else every.tolist()
    values = torch.tensor([element.values[code] for code in codes]).double()

    def run() -> None:
        data, scales, *_ = kernels.grid_quantize_levels(x, layout, columnwise=False)
        assert_same(scales, torch.ones(len(x), 1))
        assert_same(data, packed(arrays.encode(x.numpy(), element.name), element), x)
        arguments = (x, torch.tensor(3), 0, random.text, True, False)
        check(table.grid_quantize_levels, arguments, of_random, name)
        ones = torch.ones(1, -(-len(values) // 32))
        assert_same(kernels.grid_decode(every[None], ones, layout, torch.float64)[0], values)

    on_every_cpu_path(run)


def any_parts(layout: Layout, shape: tuple[int, ...], columnwise: bool) -> list[Tensor | None]:
    """Any codes, scales and amaxes of one direction."""
    random = np.random.default_rng(len(shape))
    element = oracle.ELEMENTS[oracle.NAMES[layout.element]]
    count = 256 if element.bits == 4 else 1 << element.bits
    data = random.integers(0, count, layout.data_shape(shape, columnwise))
    scales = random.integers(0, 256, layout.scale_shape(shape, columnwise))
    if layout.stored_scale is torch.float32:
        scales = scales / 64
    amax_shape = layout.amax_shape(shape, columnwise)
    return [
        torch.from_numpy(np.array(data)).to(torch.uint8),
        torch.from_numpy(scales).to(layout.stored_scale),
        None if amax_shape is None else torch.tensor(random.lognormal(0, 9, amax_shape)).float(),
    ]


def decoded(parts: Any, layout: Layout, columnwise: bool, dtype: torch.dtype) -> Tensor:
    """The values of the oracle, which decodes rows along the summed dimension."""
    data, scales, amax = parts
    is_turned = columnwise and not layout.transposed
    lines = data.shape[:1] if columnwise and layout.transposed else data.shape[:-1]
    matrix = data.reshape(lines.numel(), data.numel() // max(lines.numel(), 1))
    rows, own = (part.t() if is_turned else part for part in (matrix, scales))
    amaxes = [] if amax is None else amax.reshape(-1).tolist()
    values = oracle.dequantize_rows(rows.tolist(), own.tolist(), layout, dtype, amaxes)
    wanted = torch.tensor(values, dtype=dtype)
    wanted = wanted.t() if is_turned else wanted
    columns = data.shape[-1:].numel() * layout.elements_per_byte
    return wanted.reshape((*data.shape[:-1], columns) if data.dim() else ()).contiguous()


def check_decoding(name: str, runs: Runs) -> None:
    layout, dtypes = ALL[name], itertools.cycle([*DTYPES, torch.float64])
    cases = []
    for shape, columnwise in itertools.product(
        [(), (5,), (7, 0), (2, 3, 48), (33, 70)], (False, True)
    ):
        parts, dtype = any_parts(layout, shape, columnwise), next(dtypes)
        cases.append((parts, columnwise, dtype, decoded(parts, layout, columnwise, dtype)))

    def run() -> None:
        for (data, scales, amax), columnwise, dtype, values in cases:
            how, note = (layout.text, columnwise, dtype), (name, data.shape, columnwise, dtype)
            if amax is None:
                check(table.grid_decode, (data, scales, *how), (values,), note)
            else:
                check(table.grid_decode_levels, (data, scales, amax, *how), (values,), note)

    runs(run)


@pytest.mark.parametrize("name", ALL)
def test_decode(name: str) -> None:
    """Any codes, scales and amaxes."""
    check_decoding(name, on_every_cpu_path)


# -- against the reference --

SHAPES = [(), (0,), (5,), (0, 5), (3, 0), (7, 1), (2, 3, 48), (16, 16), (17, 33), (33, 70)]
SHAPES += [(64, 128), (129, 257), (150, 31)]


def quantized(
    x: Tensor, layout: Layout, seed: Tensor | None, *asked: bool, first_row: int = 0
) -> tuple[Tensor | None, ...]:
    """The results of the reference; None for amaxes that a layout does not have."""
    results = table.grid_quantize_levels.outputs(x, seed, first_row, layout.text, *asked)
    reference.grid_quantize_levels(x, seed, first_row, layout.text, results)
    return results


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
    asked = itertools.cycle([(True, True), (True, True), (True, False), (False, True)])
    cases = []
    for number, x in enumerate(matrices(turn % 3)):
        seed, first_row, sides = seed_of(layout, number), FIRST_ROWS[number % 4], next(asked)
        if (number + turn) % every == 0:
            arguments = (x, seed, first_row, layout.text, *sides)
            cases.append((arguments, quantized(x, layout, seed, *sides, first_row=first_row)))

    def run() -> None:
        for arguments, wanted in cases:
            x = arguments[0]
            with running_on(1 + x.numel() % 2):
                check(table.grid_quantize_levels, arguments, wanted, (name, x.shape, x.dtype))

    runs(run)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@each_layout
def test_quantize(on_every_isa: Runs, name: str, every: int) -> None:
    """In the short run layouts take turns with the cases."""
    check_quantization(name, on_every_isa, every)


@pytest.mark.grid
@each_layout
def test_cuda_kernels(name: str) -> None:
    """Layouts take turns with the cases, because each thread of a GPU is a loop on the CPU."""
    check_quantization(name, on_each(["grid"]), every=3)
    check_decoding(name, on_each(["grid"]))


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


@pytest.mark.parametrize(
    "runs", [on_every_cpu_path, pytest.param(on_each(["grid"]), marks=pytest.mark.grid)]
)
@pytest.mark.parametrize(
    ("block", "shared"),
    [((1, 32), None), ((8, 16), None), ((16, 16), None), ((1, 32), (32, 32))],
    ids=str,
)
def test_errors_are_summed_in_order(
    runs: Runs, block: tuple[int, int], shared: tuple[int, int] | None
) -> None:
    """Candidates whose errors differ by the rounding of sums alone."""
    fields: dict[str, Any] = {"columnwise": "transposed", "candidates": (1.0, 0.5)}
    layout = Layout("E2M1", block, E8M0, "floor", shared=shared, **fields)
    area = shared or block
    bands = [[tied(*area, seed=4 * i + j) for j in range(4)] for i in range(8)]
    x = torch.cat([torch.cat(band, 1) for band in bands])
    wanted = expected(x, layout, None, 0)
    assert set(wanted[1].unique().tolist()) == {126, 127}
    runs(lambda: assert_same(kernels.grid_quantize_levels(x, layout), wanted))


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
    ids=lambda layout: layout.text,
)
def test_the_reference_serves_the_rest(layout: Layout) -> None:
    """Blocks that end elsewhere than strips, and what would leave the range of float32."""
    assert not quantizes_levels(layout)
    check_bytes(samples.tiles(35, 50, dtype=torch.bfloat16), layout)
