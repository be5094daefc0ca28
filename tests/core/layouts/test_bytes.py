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


def check_values(q: Any, layout: Layout, usages: str) -> None:
    """Element times scale, rounded once to the dtype: those of the rows, if there are any."""
    columnwise = usages == "columnwise" and not layout.one_buffer
    data, scales, _ = q.direction(columnwise=columnwise)
    for dtype in (torch.float64, *DTYPES, None):
        wanted = dtype or q.dtype
        values = arrays.decode(data, scales, layout, columnwise=columnwise, dtype=wanted)
        if columnwise and layout.transposed and values.dim():
            values = values.movedim(0, -1)
        assert_same(q.dequantize(dtype), values)
    # Beyond FP8 values torch's own conversion rounds from float32.
    fp8 = q.dequantize(E5M2).view(torch.uint8)
    assert_same(fp8, q.dequantize(torch.float32).to(E5M2).view(torch.uint8))


@pytest.mark.parametrize("name", PLAIN)
def test_data_scales_and_values_are_those_of_the_oracle(name: str) -> None:
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
                if dtype == torch.bfloat16:
                    check_values(q, layout, usages)
