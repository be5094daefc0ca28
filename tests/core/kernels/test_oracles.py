"""The scalar oracle and its array twin agree with each other, with ml_dtypes and with torch."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import Layout
from tests import arrays, numbers, oracle, samples
from tests.comparing import assert_same

E8M0 = torch.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
#: The elements that the twin quantizes: one in a byte.
UNPACKED = [element.name for element in oracle.ELEMENTS.values() if element.bits > 4]
ROUNDINGS: list[tuple[torch.dtype | str, str]] = [
    (torch.float32, "nearest"),
    (torch.float32, "floor"),
    (E8M0, "up"),
    (E8M0, "floor"),
    (E8M0, "even"),
    (E8M0, "nearest"),
    (E4M3, "nearest"),
    ("UE5M3", "nearest"),
]
NUMBERS = [*samples.SPECIAL, 0.3, -7.0, 3.0, 449.0, 2.0**-10, 6e4, 1e30, 1e-30]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout, with blocks of a few elements."""
    scale, rounding = draw(st.sampled_from(ROUNDINGS))
    block = draw(st.tuples(*[st.sampled_from([None, 1, 2, 3, 8])] * 2))
    shared = None
    if None not in block and draw(st.booleans()):
        side = math.lcm(*block) * draw(st.integers(1, 2))
        shared = (side, side)
    ways = ["own", "transposed"] + ["same"] * (block[0] == block[1])
    options: dict[str, Any] = {}
    if scale is torch.float32:
        options["epsilon"] = draw(st.sampled_from([0.0, 1e-3, 2.0]))
        options["finite_as"] = draw(st.sampled_from(["float32", "input"]))
    element = draw(st.sampled_from(UNPACKED))
    columnwise = draw(st.sampled_from(ways))
    return Layout(element, block, scale, rounding, columnwise=columnwise, shared=shared, **options)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Ragged ones of numbers of all kinds."""
    rows, columns = draw(st.integers(1, 11)), draw(st.integers(1, 11))
    dtype = draw(st.sampled_from(samples.DTYPES))
    number = st.sampled_from(NUMBERS) | st.floats(width=32)
    values = draw(st.lists(number, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values).view(rows, columns).to(dtype)


@given(layouts(), matrices())
@settings(max_examples=40)
def test_quantize(layout: Layout, x: torch.Tensor) -> None:
    """The oracle and its twin give the same bytes, of which the layout says the shapes."""
    rows = oracle.quantize(x.tolist(), layout, x.dtype)[:4]
    expected = arrays.quantize(x, layout)
    dtypes = [torch.uint8, layout.stored_scale] * 2
    for got, dtype, tensor in zip(rows, dtypes, expected, strict=True):
        assert_same(tensor, torch.tensor(got, dtype=dtype), note=layout.text)
    for columnwise in (False, True):
        data, scale_inv = expected[2 * columnwise :][:2]
        assert data.shape == layout.data_shape(x.shape, columnwise)
        assert scale_inv.shape == layout.scale_shape(x.shape, columnwise)


@pytest.mark.parametrize("name", oracle.ELEMENTS)
def test_codes(name: str) -> None:
    """Every code has the value of ml_dtypes, and every value its code."""
    element = oracle.ELEMENTS[name]
    data = np.arange(1 << element.bits, dtype=np.uint8)
    values = [oracle.decode(code, name) for code in data.tolist()]
    if name in ML_DTYPES:
        expected = data.view(ML_DTYPES[name]).astype(np.float64)
    else:
        unused = 8 - element.bits
        expected = ((data << unused).view(np.int8) >> unused) * element.positive[1]
    if element.nan == 1 << element.bits - 1:
        expected[element.nan] = np.nan
    assert_same(torch.tensor(values, dtype=torch.float64), expected, data)
    for code, value in enumerate(values):
        if math.isfinite(value) and -value <= element.negative[-1]:
            assert oracle.encode(value, name) == code
            assert abs(value) <= max(element.max, element.negative[-1])
            assert math.frexp(min(abs(value), element.max))[1] - 1 <= element.exponent


@pytest.mark.parametrize("name", oracle.ELEMENTS)
def test_encode(name: str) -> None:
    """Numbers halfway between two codes and their neighbours; both oracles, and ml_dtypes."""
    codes = oracle.ELEMENTS[name].values
    finite = np.unique(np.array([value for value in codes if math.isfinite(value)], np.float32))
    edges = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    with np.errstate(all="ignore"):
        x = np.concatenate([edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)])
        x = np.concatenate([x, np.float32(NUMBERS), np.float32([-448, 464, 480, 61440, 1e38])])
    x = np.append(x, samples.patterns(torch.bfloat16).float()).astype(np.float32)
    got = torch.tensor([oracle.encode(value, name) for value in x.tolist()], dtype=torch.uint8)
    element = oracle.ELEMENTS[name]
    assert_same(arrays.encode(x, element.name), got, x)
    inside = np.abs(x) <= oracle.MAX[name]
    if name in ML_DTYPES:
        assert_same(got.numpy()[inside], x[inside].astype(ML_DTYPES[name]).view(np.uint8), x)
    signs = np.where(np.signbit(x), -1.0, 1.0)
    beyond = np.abs(x) > element.negative[-1]
    ends = {1.0: element.max, -1.0: -element.negative[-1]}
    largest = [oracle.encode(ends[sign], name) for sign in signs[beyond]]
    assert got.numpy()[beyond].tolist() == largest


#: Known answers of Random123 for Philox4x32 with ten rounds: counter, key, words.
PHILOX = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def test_random_words() -> None:
    for counter, key, words in PHILOX:
        counters, keys = ([int(word, 16) for word in text.split()] for text in (counter, key))
        block, stream, seed = (low | high << 32 for low, high in (counters[:2], counters[2:], keys))
        got = numbers.philox(seed, block, stream)
        assert " ".join(f"{word:08x}" for word in got) == words


#: An element, a rule, an amax, and the byte of the scale.
CODES = [
    ("e4m3", "up", 448.0, 127),
    ("e4m3", "up", 449.0, 128),
    ("e4m3", "up", 0.0, 0),
    ("e4m3", "up", math.inf, 254),
    ("e4m3", "up", math.nan, 255),
    ("e4m3", "floor", 448.0, 127),
    ("e4m3", "floor", 255.0, 126),
    ("e2m1", "even", 6.999, 127),
    ("e2m1", "even", 7.0, 128),
    ("e2m1", "nearest", 8.0, 127),
    ("e2m1", "nearest", 9.0, 128),
]


def test_powers_of_two_by_hand() -> None:
    for element, rule, amax, code in CODES:
        layout = Layout(oracle.ELEMENTS[element].name, (1, 32), E8M0, rule, columnwise="transposed")
        _, stored = oracle.scale(amax, layout, torch.float32)
        assert stored == code, (element, rule, amax)
