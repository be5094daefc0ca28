"""Data and scales of every layout are those of the oracle, and values are element times scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottava import GridTensor, GridTensorStorage, Layout
from ottava.tensors.packed import needs_packing
from tests import arrays, samples
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import DTYPES, E5M2, LAYOUTS, USAGES, quantizer

#: Layouts whose elements have a byte each, and one level of scales: the oracle knows these alone.
PLAIN = [name for name, layout in LAYOUTS.items() if not needs_packing(layout)]
SHAPES = [
    (),
    (1,),
    (70,),
    (0,),
    (0, 7),
    (7, 0),
    (1, 1),
    (33, 70),
    (130, 140),
    (2, 31, 65),
    (2, 0, 3),
]


def check_bytes(q: Any, x: torch.Tensor, layout: Layout, usages: str) -> None:
    """The directions that were asked for, and no others, have the bytes of the oracle."""
    expected = arrays.quantize(x, layout)
    directions = expected[:2], expected[2:]
    for columnwise, is_requested in enumerate(USAGES[usages]):
        if layout.one_buffer:
            # One buffer serves both usages.
            assert_same(q.direction(columnwise=bool(columnwise))[:2], directions[0])
        elif is_requested:
            assert_same(q.direction(columnwise=bool(columnwise))[:2], directions[columnwise])
        else:
            assert q.direction(columnwise=bool(columnwise)) is None


@pytest.mark.parametrize("name", PLAIN)
def test_data_and_scales_are_those_of_the_oracle(name: str) -> None:
    layout = LAYOUTS[name]
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            usages = list(USAGES)[number % 3]
            with told(shape, dtype, usages):
                x = samples.wide(*shape, seed=number, dtype=dtype, sigma=2.0)
                make = quantizer(name, usages, internal=dtype == torch.float16)
                q = make(x)
                assert type(q) is (GridTensorStorage if make.internal else GridTensor)
                assert (tuple(q.size()), q.dtype) == (shape, dtype)
                check_bytes(q, x, layout, usages)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("usages", USAGES)
def test_values_are_element_times_scale(name: str, usages: str) -> None:
    """Rounded once to the dtype; those of the rows where both directions are held."""
    layout, columnwise = LAYOUTS[name], usages == "columnwise" and not LAYOUTS[name].one_buffer
    for shape in ((), (7, 0), (33, 70), (2, 31, 65)):
        q = quantizer(name, usages)(samples.wide(*shape, dtype=torch.bfloat16))
        data, scales, _ = q.direction(columnwise=columnwise)
        for dtype in (torch.float64, *DTYPES, None):
            wanted = dtype or torch.bfloat16
            values = arrays.decode(data, scales, layout, columnwise=columnwise, dtype=wanted)
            if columnwise and layout.transposed and shape:
                values = values.movedim(0, -1)
            assert_same(q.dequantize(dtype), values)
        # Beyond FP8 values torch's own conversion rounds from float32.
        fp8 = q.dequantize(E5M2).view(torch.uint8)
        assert_same(fp8, q.dequantize(torch.float32).to(E5M2).view(torch.uint8))


@pytest.mark.parametrize("name", PLAIN)
def test_squares_hold_the_same_values_in_both_directions(name: str) -> None:
    layout, x = LAYOUTS[name], samples.wide(140, 300)
    q = quantizer(name)(x)
    data, scales, _ = q.ordered(columnwise=False)
    columns, column_scales, _ = q.ordered(columnwise=True)
    values, column_values = (
        arrays.decode(part, own.contiguous(), plain, columnwise=side, dtype=torch.float64)
        for part, own, side in (
            (data, scales, False),
            (columns, column_scales, not layout.one_buffer),
        )
        for plain in [Layout(layout.element, layout.block, layout.scale, layout.rounding)]
    )
    assert torch.equal(values, column_values) is layout.square
