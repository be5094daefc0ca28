"""Data, scales and amaxes of layouts with two levels, candidates, rotations and random rounding are
those of the scalar oracle, and decoding gives its values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ottava import Layout, kernels
from tests import arrays, oracle, samples
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import DTYPES, LEVELS

SMALL = [(), (1,), (1, 1), (17, 47)]
LARGE = [(33, 70), (2, 31, 65)]
EMPTY = [(0,), (0, 7), (7, 0), (2, 0, 3)]
SEEDS = [0, 7, -1, 2**63 - 1, -(2**63)]
FIRST_ROWS = [0, 1, 2**33 + 5]


def expected(
    x: torch.Tensor, layout: Layout, seed: torch.Tensor | None, first_row: int
) -> list[torch.Tensor]:
    """What :func:`kernels.grid_quantize_levels` gives, in its order and shapes."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1).tolist()
    q = oracle.quantize(rows, layout, x.dtype, None if seed is None else int(seed), first_row)
    results = []
    for columnwise, data, scales, amaxes in (
        (False, q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax),
        (True, q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax),
    ):
        results += [
            torch.tensor(data, dtype=torch.uint8).reshape(layout.data_shape(x.shape, columnwise)),
            torch.tensor(scales, dtype=layout.stored_scale),
            of_level(amaxes, layout, x.shape, columnwise),
        ]
    return results


def of_level(
    amaxes: list[float], layout: Layout, shape: tuple[int, ...], columnwise: bool
) -> torch.Tensor:
    """The amaxes of the second level as a tensor; nothing without one."""
    amax_shape = layout.amax_shape(shape, columnwise)
    if amax_shape is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.tensor(amaxes, dtype=torch.float32).reshape(amax_shape)


def check(x: torch.Tensor, layout: Layout, number: int = 0) -> None:
    """The reference and the default backend give the bytes of the oracle, in each direction."""
    seed = torch.tensor(SEEDS[number % len(SEEDS)]) if layout.stochastic else None
    words: dict[str, Any] = {"seed": seed, "first_row": FIRST_ROWS[number % len(FIRST_ROWS)]}
    wanted = expected(x, layout, **words)
    with kernels.use_backend("reference"):
        assert_same(kernels.grid_quantize_levels(x, layout, **words), wanted, note="reference")
    rowwise = kernels.grid_quantize_levels(x, layout, columnwise=False, **words)
    columnwise = kernels.grid_quantize_levels(x, layout, rowwise=False, **words)
    assert_same([*rowwise[:3], *columnwise[3:]], wanted, note="by default")
    assert not any(part.numel() for part in (*rowwise[3:], *columnwise[:3]))
    if layout.second_level == "none" and seed is None:
        assert_same(kernels.grid_quantize(x, layout), [*wanted[:2], *wanted[3:5]])


@pytest.mark.parametrize("number", range(len(LEVELS)), ids=list(LEVELS))
def test_bytes(number: int) -> None:
    name = list(LEVELS)[number]
    for place, shape in enumerate([*SMALL, *LARGE[number % 3 :][:1]]):
        dtype = DTYPES[(number + place) % 3]
        with told(shape, dtype):
            x = samples.wide(*shape, seed=place, dtype=dtype, sigma=2.0)
            check(x, LEVELS[name], number + place)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_bytes_of_every_shape_and_dtype(name: str) -> None:
    for dtype in DTYPES:
        for place, shape in enumerate([*SMALL, *LARGE]):
            with told(shape, dtype):
                check(samples.wide(*shape, seed=place + 10, dtype=dtype), LEVELS[name], place)
        for what, x in special(dtype):
            with told(what, dtype):
                check(x, LEVELS[name])
    check(samples.tiles(96, 130), LEVELS[name])


@pytest.mark.parametrize("name", LEVELS)
def test_bytes_of_nothing(name: str) -> None:
    """Data of the shape that the layout gives; scales and amaxes are those of an amax of 0."""
    layout = LEVELS[name]
    seed = torch.tensor(1) if layout.stochastic else None
    stored = oracle.scale(0.0, layout, torch.float32, factor=(layout.candidates or (1.0,))[0])[1]
    for shape in EMPTY:
        with told(shape):
            parts = kernels.grid_quantize_levels(torch.empty(shape), layout, seed=seed)
            for columnwise in (False, True):
                data, scales, amaxes = parts[3 * columnwise :][:3]
                assert data.shape == layout.data_shape(shape, columnwise)
                assert not data.any()
                assert scales.shape == layout.scale_shape(shape, columnwise)
                assert bool((scales == stored).all())
                assert amaxes.shape == (layout.amax_shape(shape, columnwise) or amaxes.shape)
                assert not amaxes.any()


def special(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
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
    yield "nothing but minus zero", torch.full((5, 35), -0.0, dtype=dtype)
    yield "subnormal", (x.float() * tiny / 16).to(dtype)
    yield "large", (x.float() / x.float().abs().max() * largest).to(dtype)
    yield "ties", (torch.arange(175.0).view(5, 35) / 16 - 6).to(dtype)


@pytest.mark.parametrize("number", range(len(LEVELS)), ids=list(LEVELS))
def test_bytes_of_special_values(number: int) -> None:
    name, dtype = list(LEVELS)[number], DTYPES[number % 3]
    for what, x in list(special(dtype))[number % 2 :: 2]:
        with told(what, dtype):
            check(x, LEVELS[name])


@pytest.mark.parametrize("name", ["nvfp4", "E2M1-UE5M3-levels", "4over6"])
def test_scales_at_ties(name: str) -> None:
    """Amaxes whose scales are halfway between two codes, and their neighbours: every rounding of
    the order of operations shows."""
    layout = dataclasses.replace(LEVELS[name], block=(1, 2))
    number = oracle.SCALES[layout.scale].number
    assert number is not None
    codes = np.array(number.positive[-130:])
    middles = (codes[1:] + codes[:-1]) / 2
    for largest in (5.3, 7.7, 1000.1):
        bound = layout.bound or codes[-1]
        amaxes = np.float32(middles * largest / bound)
        near = [(amaxes.view(np.int32) + step).view(np.float32) for step in range(-3, 4)]
        x = torch.from_numpy(np.concatenate([*near, np.float32([largest])]))
        check(torch.stack([x.clamp(max=largest), x / 3], 1), layout)


@pytest.mark.parametrize("rule", ["up", "floor", "even", "nearest"])
def test_powers_of_two_change_at_the_right_amax(rule: str) -> None:
    """Amaxes where a rule may go over to the next power of two, and their neighbours."""
    half_units = [2 - 2.0**-bits for bits in range(2, 9)]
    points = np.array([1, math.sqrt(2), *half_units])
    powers = 2.0 ** np.array([-149, -128, -127, -126, -125, -3, 0, 7, 120])
    steps = np.arange(-3, 4)[:, None]
    for element in ("E2M1", "E2M3", "E3M2", "INT4", "MXINT8"):
        layout = Layout(element, (1, 16), torch.float8_e8m0fnu, rule, columnwise="transposed")
        maximum = oracle.ELEMENTS[oracle.NAMES[element]].max
        amaxes = np.float32(np.outer(np.append(points, points * maximum), powers).ravel())
        near = (amaxes.view(np.int32) + steps).clip(0).view(np.float32)
        with told(element):
            check(torch.from_numpy(near.reshape(-1, 1)), layout)


@pytest.mark.parametrize("name", oracle.ELEMENTS)
def test_every_bfloat16_value_and_every_code(name: str) -> None:
    """With a scale of 1, which infinity gives: elements are those of both oracles' table."""
    element = oracle.ELEMENTS[name]
    layout = Layout(element.name, (None, None), columnwise="transposed")
    x = samples.patterns(torch.bfloat16)
    data, scales, *_ = kernels.grid_quantize_levels(x, layout)
    assert scales.item() == 1.0
    codes = arrays.encode(x.float().numpy(), element.name)
    packed = codes[:, ::2] | codes[:, 1::2] << 4 if element.bits == 4 else codes
    assert_same(data, packed, x)
    every = torch.arange(256 if element.bits == 4 else len(element.values)).to(torch.uint8)
    values = kernels.grid_decode(every, scales, layout, torch.float64)
    each = oracle.unpack(every.tolist()) if element.bits == 4 else every.tolist()
    assert_same(values, torch.tensor([element.values[code] for code in each]).double())


@pytest.mark.parametrize("name", LEVELS)
def test_decode(name: str) -> None:
    """Any codes, scales and amaxes."""
    layout, random = LEVELS[name], np.random.default_rng(len(name))
    element = oracle.ELEMENTS[oracle.NAMES[layout.element]]
    count = 1 << max(element.bits, 8 if element.bits == 4 else 0)
    for shape in ((), (5,), (7, 0), (9, 37), (2, 3, 34)):
        for columnwise in (False, True):
            data = random.integers(0, count, layout.data_shape(shape, columnwise))
            scales = random.integers(0, 256, layout.scale_shape(shape, columnwise))
            if layout.stored_scale is torch.float32:
                scales = scales / 64
            amax_shape = layout.amax_shape(shape, columnwise)
            amaxes = random.lognormal(0, 9, amax_shape or ())
            parts = [
                torch.from_numpy(np.array(data)).to(torch.uint8),
                torch.from_numpy(scales).to(layout.stored_scale),
                torch.tensor(amaxes).float(),
            ]
            for dtype in (torch.float64, DTYPES[len(shape) % 3]):
                with told(shape, dtype, columnwise):
                    check_decoded(parts, layout, dtype, columnwise, amax_shape is not None)


def check_decoded(
    parts: list[torch.Tensor], layout: Layout, dtype: torch.dtype, columnwise: bool, levels: bool
) -> None:
    data, scales, amax = parts
    got = kernels.grid_decode(
        data, scales, layout, dtype, columnwise=columnwise, amax=amax if levels else None
    )
    # A matrix of rows along the summed dimension.
    matrix, turned = data.reshape(math.prod(data.shape[:-1]), -1 if data.numel() else 0), False
    if columnwise:
        if layout.columnwise == "transposed":
            matrix = data.reshape(*(data.shape[:1] or (1,)), -1) if data.numel() else matrix
        else:
            matrix, scales, turned = matrix.t(), scales.t(), True
    amaxes = amax.reshape(-1).tolist() if levels else []
    values = oracle.dequantize_rows(matrix.tolist(), scales.tolist(), layout, dtype, amaxes)
    wanted = torch.tensor(values, dtype=dtype)
    assert_same(got, (wanted.t() if turned else wanted).reshape(got.shape), note=layout.text)
    doubled = 2 if layout.element in ("E2M1", "INT4") else 1
    assert got.numel() == data.numel() * doubled
    assert got.shape[:-1] == data.shape[:-1] or not data.dim()
