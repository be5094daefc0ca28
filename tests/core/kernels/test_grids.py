"""Kernels on grids of scales, on every path and for every layout, against the array twin."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch

from ottava import Layout, kernels
from ottava.kernels import for_layers, table
from ottava.kernels.compiled import is_native
from tests import arrays, oracle, samples
from tests.comparing import assert_same
from tests.core.layouts.layouts import LAYOUTS as COMMON
from tests.core.placing import check

Tensor = torch.Tensor
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
E8M0 = torch.float8_e8m0fnu
#: The rows of the common table for which compiled modules have kernels of grids (``test_levels.py``
#: has the others), and what only kernels treat in another way.
LAYOUTS: dict[str, Layout] = {
    "128x128-own": Layout(E5M2, (128, 128), epsilon=2.0, shared=(128, 128)),
    "1x128-shared": Layout(E4M3, (1, 128), shared=(128, 128), columnwise="transposed"),
    "mx-squares-floor": Layout(E5M2, (1, 32), E8M0, "floor", shared=(32, 32)),
    "mx-transposed": Layout(E4M3, (1, 32), E8M0, "up", columnwise="transposed"),
    "int8-e8m0-16x16": Layout(INT8, (16, 16), E8M0, "floor", columnwise="same"),
    "3x5-in-squares": Layout(E4M3, (3, 5), shared=(15, 15), rounding="floor"),
    "1x1": Layout(E5M2, (1, 1), E8M0, "floor"),
    "300x3": Layout(E4M3, (300, 3), columnwise="transposed", finite_as="input"),
    "beyond": Layout(E4M3, (2**40, 2**40)),
    "1xbeyond": Layout(E4M3, (1, 2**40)),
    **{name: layout for name, layout in COMMON.items() if is_native(layout)},
}
# One process of pytest tests a layout on all paths, and expects once.
each_layout = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in LAYOUTS]
)
SHAPES = [(), (0,), (5,), (0, 5), (3, 0), (2, 0, 7), (7, 1), (1, 300), (33, 70), (3, 5, 41)]
SHAPES += [(131, 130), (144, 136), (40, 513), (5, 1100)]
ASKED = [(True, True), (True, False), (False, True)]
AMAXES = samples.amaxes()


def share(items: list[Any], path: str) -> list[Any]:
    """Some of them for the CUDA kernels, whose loops are slow."""
    return items[::3] if path == "grid" else items


@cache
def quantized(name: str) -> list[tuple[Tensor, tuple[bool, bool], arrays.Bytes]]:
    # Layouts take turns with dtypes, and with values that are not ordinary.
    layout, turn, asked = LAYOUTS[name], list(LAYOUTS).index(name), itertools.cycle(ASKED)
    dtype = samples.DTYPES[turn % 3]
    matrices = [
        samples.tiles(*shape, dtype=samples.DTYPES[(turn + i) % 3])
        for i, shape in enumerate(SHAPES)
    ]
    matrices += [samples.tiles(131, 130, dtype=dtype, seed=1) for dtype in samples.DTYPES]
    matrices += [x for _, x in samples.special(dtype)][turn // 3 % 2 :: 2]
    matrices.append(samples.patterns(dtype)[turn // 3 % 4 :: 4].contiguous())
    # bfloat16 has infinite scales, and its largest value is not float32's.
    matrices.append(dict(samples.special(torch.bfloat16))["an infinite scale"])
    return [(x, next(asked), arrays.quantize(x, layout)) for x in matrices]


@each_layout
def test_quantize(code_path: str, name: str) -> None:
    """Every kind of value in every kind of shape; both directions, or one of them."""
    for x, (rowwise, columnwise), parts in share(quantized(name), code_path):
        expected = tuple(
            part if asked else None
            for part, asked in zip(parts, (rowwise,) * 2 + (columnwise,) * 2, strict=True)
        )
        arguments = (x, LAYOUTS[name].text, rowwise, columnwise)
        check(table.grid_quantize, arguments, expected, (name, tuple(x.shape), x.dtype))
        assert_same(for_layers.grid_quantize(*arguments), expected, note=x.shape)


@each_layout
def test_scales(code_path: str, name: str) -> None:
    layout = LAYOUTS[name]
    for dtype in samples.DTYPES:
        scale, stored = map(torch.from_numpy, arrays.scales(AMAXES.numpy(), layout, dtype))
        expected = (scale if layout.scale is torch.float32 else None, stored)
        arguments = (AMAXES, layout.text, dtype)
        check(table.grid_scales, arguments, expected, (name, dtype))
    for shape in ((), (0,), (3, 0), (2, 3)):
        assert kernels.grid_scales(torch.ones(shape), layout)[1].shape == shape
    # An amax has no sign: one that has counts as its magnitude.
    if layout.scale is E8M0:
        assert_same(kernels.grid_scales(-AMAXES, layout)[1], stored, AMAXES)


def any_scales(shape: tuple[int, ...], layout: Layout) -> Tensor:
    if layout.stored_scale is torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    scales = samples.wide(*shape, seed=3, sigma=20.0)
    unusual = torch.tensor(samples.SPECIAL)[torch.randint(len(samples.SPECIAL), shape)]
    return torch.where(torch.rand(shape) < 0.1, unusual, scales)


@cache
def decoded(name: str) -> list[tuple[Tensor, Tensor, bool, torch.dtype, Tensor]]:
    torch.manual_seed(0)
    layout, dtypes = LAYOUTS[name], itertools.cycle([*samples.DTYPES, torch.float64])
    cases = []
    # Every code with every scale, and other shapes.
    for shape, columnwise in itertools.product([*SHAPES, (256, 256)], (False, True)):
        data = torch.randint(0, 256, layout.data_shape(shape, columnwise), dtype=torch.uint8)
        scales = any_scales(layout.scale_shape(shape, columnwise), layout)
        if shape == (256, 256):
            data = torch.arange(256, dtype=torch.uint8).expand(256, 256)
            data = data.t().contiguous() if columnwise and not layout.transposed else data.clone()
            if layout.scale is E8M0 and layout.block[0] == 1:
                line = torch.arange(256, dtype=torch.uint8)
                over_rows = not columnwise or layout.transposed
                scales = line[:, None] if over_rows else line
                scales = scales.expand(layout.scale_shape(shape, columnwise)).contiguous()
        for dtype in [next(dtypes) for _ in range(2 if data.dim() == 2 else 1)]:
            values = arrays.decode(data, scales, layout, columnwise=columnwise, dtype=dtype)
            cases.append((data, scales, columnwise, dtype, values))
        next(dtypes)
    return cases


@each_layout
def test_decode(code_path: str, name: str) -> None:
    """Any codes and any scales: NaN, infinite and negative ones among them."""
    for data, scales, columnwise, dtype, values in share(decoded(name), code_path):
        arguments = (data, scales, LAYOUTS[name].text, columnwise, dtype)
        check(table.grid_decode, arguments, (values,), (name, tuple(data.shape), arguments[3:]))


def test_by_hand(code_path: str) -> None:
    """Blocks whose bytes follow from the rules without an oracle."""
    nan, inf = math.nan, math.inf
    x = torch.tensor([[nan] * 32, [inf, 1.0, -inf] + [0.0] * 29, [-0.0] * 32, [480.0, -1.0] * 16])
    data, scales, _, _ = kernels.grid_quantize(x, LAYOUTS["mxfp8"], columnwise=False)
    assert scales.flatten().tolist() == [0, 254, 0, 128]
    assert data[0].tolist() == [0x7F] * 32
    assert data[1].tolist() == [0x7E, 0, 0xFE] + [0] * 29
    assert data[2].tolist() == [0x80] * 32
    assert data[3].tolist() == [0x77, 0xB0] * 16  # 240 and -1/2
    rows = Layout(INT8, (1, None))
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, 126.5, nan, -0.0], [inf, -inf, 200, -200, 3, 0, 1]])
    data, scales, _, _ = kernels.grid_quantize(x, rows, columnwise=False)
    assert scales.tolist() == [[1.0], [1.0]]
    expected = [[127, 0, 2, 0, 126, -128, 0], [127, -127, 127, -127, 3, 0, 1]]
    assert data.view(torch.int8).tolist() == expected
    # Scales of nothing are those of an amax of 0.
    for shape in ((3, 0), (0, 4), (2, 3, 0)):
        torch.full((64,), 7.5)  # What would be there if nothing were written.
        for scales in kernels.grid_quantize(torch.empty(shape), rows)[1::2]:
            assert bool((scales == 1.0).all())


def finite_blocks() -> np.ndarray[Any, Any]:
    """Of many magnitudes, of powers of two and close below them, of zeros, and around maxima."""
    x = samples.wide(30, 32, seed=5).numpy()
    powers = np.exp2(np.round(np.log2(np.abs(x) + 1e-3)))
    maxima = [np.linspace(start, end, 32) for start, end in ((0, 0), (400, 511), (5e4, 65535))]
    return np.concatenate([x, powers, np.nextafter(powers, 0), np.float32(maxima)])


#: The names of gfloat by ours.
GFLOAT = {
    "e4m3": "mxfp8_e4m3",
    "e5m2": "mxfp8_e5m2",
    "e2m3": "mxfp6_e2m3",
    "e3m2": "mxfp6_e3m2",
    "e2m1": "mxfp4_e2m1",
    "mxint8": "mxint8",
}


@pytest.mark.parametrize("rounding", ["floor", "up"])
@pytest.mark.parametrize("fmt", GFLOAT)
def test_mx_blocks_are_those_of_gfloat(fmt: str, rounding: str) -> None:
    """Another implementation, which has the rule "floor"; with "up" it is given our scales.

    Not compared: NaN, infinities and scales at the ends of the range, for which its rules differ.
    """
    element = oracle.ELEMENTS[fmt].name
    layout = Layout(element, (1, 32), E8M0, rounding, columnwise="transposed")
    info = getattr(gfloat.formats, f"format_info_{GFLOAT[fmt]}")
    blocks = finite_blocks()
    data, scales, _, _ = kernels.grid_quantize(torch.from_numpy(blocks), layout, columnwise=False)
    values = kernels.grid_decode(data, scales, layout, torch.float64).numpy()
    for block, mine, code in zip(blocks.astype(np.float64), values, scales.tolist(), strict=True):
        compute = gfloat.compute_scale_amax
        if rounding == "up":
            compute = lambda *_, code=code[0]: 2.0 ** (code - 127)  # noqa: E731
        assert_same(mine, gfloat.quantize_block(info, block, compute), block)
