"""Layouts: what is refused, their text, what follows from them, and how they travel."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import Layout
from ottava.errors import DTypeError, OptionError
from ottava.layout import as_matrix_shape
from tests.copying import by_file, by_pickle

E4M3, E5M2, E8M0, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8
ROUNDINGS: dict[Any, list[str]] = {
    torch.float32: ["nearest", "floor"],
    E8M0: ["up", "floor", "even", "nearest"],
    E4M3: ["nearest"],
    "UE5M3": ["nearest"],
}
MX = Layout(E4M3, (1, 32), E8M0, "up")
TEXT = "float8_e4m3fn/1x32/float8_e8m0fnu/up/0.0/own/None/float32"

# Other fields, wrong values of one field, the error, and its words.
REFUSED: list[tuple[dict[str, Any], str, list[Any], type[Exception], str]] = [
    ({}, "element", [torch.float16, E8M0, torch.uint8], DTypeError, "e4m3fn.*e5m2.*int8"),
    ({}, "element", [None, "float8_e4m3fn", 0, []], DTypeError, "format of elements"),
    (
        {},
        "scale",
        [torch.float16, torch.uint8, None, [], "", "E4M3"],
        DTypeError,
        "float32.*e8m0fnu.*e4m3fn.*UE5M3",
    ),
    (
        {},
        "block",
        [None, 32, [1, 32], (32,), (1, 2, 3), (0, 32), (1, -1), (1, 1.0), (True, 32), ("1", 32)],
        OptionError,
        "block.*rows, columns",
    ),
    (
        {},
        "shared",
        [32, [32, 32], (32,), (0, 0), (32.0, 32.0), (True, True), ()],
        OptionError,
        "shared.*rows, columns",
    ),
    (
        {},
        "shared",
        [(32, 64), (16, 16), (48, 48), (1, 32), (None, None), (32, None), (None, 32)],
        OptionError,
        "share a scale.*squares",
    ),
    ({"block": (1, None)}, "shared", [(32, 32)], OptionError, "share a scale.*squares"),
    ({"block": (3, 32)}, "shared", [(32, 32)], OptionError, "share a scale.*squares"),
    ({}, "rounding", ["up", "UP", "", None, 0, ["floor"]], OptionError, "rounding.*nearest, floor"),
    (
        {"scale": E8M0},
        "rounding",
        ["down", True],
        OptionError,
        "rounding.*up, floor, even, nearest",
    ),
    ({"scale": E4M3}, "rounding", ["up", "floor"], OptionError, "rounding.*nearest"),
    ({}, "columnwise", ["", "rows", None, 1], OptionError, "columnwise.*own, transposed, same"),
    (
        {},
        "finite_as",
        ["", "float16", None, torch.float32],
        OptionError,
        "finite_as.*float32, input",
    ),
    (
        {},
        "epsilon",
        [-1.0, -1, math.nan, math.inf, 1e39, 10**400, True, "0", None, torch.tensor(0.0)],
        OptionError,
        "epsilon.*>= 0",
    ),
    (
        {"columnwise": "same"},
        "block",
        [(1, 32), (1, None), (None, 2)],
        OptionError,
        "same.*squares",
    ),
    ({"columnwise": "same"}, "shared", [(32, 32)], OptionError, "same.*squares"),
    (
        {"scale": E8M0, "rounding": "up"},
        "epsilon",
        [1e-30, 1],
        OptionError,
        "e8m0fnu.*epsilon.*finite_as.*scale=torch.float32",
    ),
    (
        {"scale": E8M0, "rounding": "floor"},
        "finite_as",
        ["input"],
        OptionError,
        "e8m0fnu.*epsilon.*finite_as.*scale=torch.float32",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{REFUSED[n][1]}-{n}")
def test_what_is_refused(number: int) -> None:
    others, field, values, error, match = REFUSED[number]
    right: dict[str, Any] = {"element": E4M3, "block": (1, 32)}
    Layout(**right)
    for wrong in values:
        with pytest.raises(error, match=match):
            Layout(**right | others | {field: wrong})


def test_the_text() -> None:
    for text, layout in (
        (TEXT, MX),
        (
            "int8/allx8/float32/nearest/1.0/own/None/float32",
            Layout(INT8, (None, 8), epsilon=1, shared=None),
        ),
        (
            "float8_e5m2/1x32/float8_e8m0fnu/floor/0.0/own/32x32/float32",
            Layout(E5M2, (1, 32), E8M0, "floor", shared=(32, 32)),
        ),
        (
            "float8_e4m3fn/128x128/float32/floor/0.0/transposed/None/input",
            Layout(E4M3, (128, 128), rounding="floor", columnwise="transposed", finite_as="input"),
        ),
    ):
        assert layout.text == text
        assert Layout.of(text) == layout
    assert "(1, 32)" in repr(MX)
    assert "text" not in repr(MX)


NO_TEXTS = [
    *["", "mx", "/" * 7, TEXT + "/", TEXT.removesuffix("/float32"), None, 3, b"x", [TEXT], MX],
    *[
        TEXT.replace(old, new)
        for old, new in [
            ("float8_e4m3fn", "float16"),
            ("float8_e4m3fn", "nn"),
            ("float8_e4m3fn", "__all__"),
            ("float8_e8m0fnu", "__all__"),
            ("1x32", "32"),
            ("1x32", "1x"),
            ("1x32", "0x32"),
            ("1x32", "None"),
            ("1x32", "1x" + "9" * 5000),
            ("up", "down"),
            ("0.0", "nan"),
            ("0.0", "-1"),
            ("0.0", "little"),
            ("None", "16x16"),
            ("None", "allxall"),
            ("own", "same"),
        ]
    ],
]


def test_what_is_no_text_of_a_layout() -> None:
    for wrong in NO_TEXTS:
        with pytest.raises((OptionError, DTypeError)):
            Layout.of(wrong)
    with pytest.raises(OptionError) as caught:
        Layout.of("x" * 100_000)
    assert len(str(caught.value)) < 300


SIZES = st.none() | st.integers(1, 10**6)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    scale = draw(st.sampled_from(list(ROUNDINGS)))
    block, shared = (draw(SIZES), draw(SIZES)), None
    if None not in block and draw(st.booleans()):
        side = math.lcm(*block) * draw(st.integers(1, 4))
        shared = (side, side)
    columnwise = ["own", "transposed", *(["same"] if block[0] == block[1] else [])]
    epsilons = st.just(0) | st.floats(0, torch.finfo(torch.float32).max) | st.integers(0, 10**9)
    of_floats = scale is torch.float32
    return Layout(
        draw(st.sampled_from([E4M3, E5M2, INT8])),
        block,
        scale,
        draw(st.sampled_from(ROUNDINGS[scale])),
        draw(epsilons if of_floats else st.sampled_from([0, 0.0, -0.0])),
        draw(st.sampled_from(columnwise)),
        shared,
        draw(st.sampled_from(["float32", *(["input"] if of_floats else [])])),
    )


def known_anew(text: str) -> Layout:
    """The layout as a process reads it that has not made it: no layout has the text "+epsilon"."""
    words = text.split("/")
    words[4] = f"+{words[4]}"
    return Layout.of("/".join(words))


@settings(max_examples=40)
@given(layouts(), layouts())
def test_layouts_travel_by_their_fields(made: Layout, other: Layout) -> None:
    for again in (
        Layout.of(made.text),
        known_anew(made.text),
        dataclasses.replace(made),
        copy.deepcopy(made),
        by_pickle(made),
        by_file(made),
    ):
        assert again == made
        assert again.text == made.text
        assert hash(again) == hash(made)
    assert (made == other) == (made.text == other.text)


def test_equality() -> None:
    same = Layout(E4M3, (1, 32), E8M0, "up", epsilon=-0.0)
    assert same == MX
    assert same.text == MX.text != MX
    assert isinstance(same.epsilon, float)
    others = [
        Layout(E5M2, (1, 32), E8M0, "up"),
        Layout(E4M3, (1, 64), E8M0, "up"),
        Layout(E4M3, (1, 32)),
        Layout(E4M3, (1, 32), E8M0, "floor"),
        Layout(E4M3, (1, 32), epsilon=1.0),
        Layout(E4M3, (1, 32), E8M0, "up", columnwise="transposed"),
        Layout(E4M3, (1, 32), E8M0, "up", shared=(32, 32)),
        Layout(E4M3, (1, 32), finite_as="input"),
    ]
    assert len({MX, same, *others}) == 1 + len(others)
    assert len({layout.text for layout in (MX, *others)}) == 1 + len(others)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MX.epsilon = 1.0  # type: ignore[misc]


def test_a_pickle_goes_through_the_checks_of_the_constructor() -> None:
    written = pickle.dumps(Layout(E4M3, (1, 7)), protocol=2)
    for old, new in (
        (b"nearest", b"neither"),
        (b"float8_e4m3fn\n", b"bfloat16\n"),
        (b"own", b"wow"),
    ):
        assert old in written
        with pytest.raises((OptionError, DTypeError)):
            pickle.loads(written.replace(old, new))


# -- what follows from the fields --

NAMED = {
    "MX": MX,
    "squares": Layout(E4M3, (1, 32), E8M0, "up", shared=(32, 32)),
    "tensor": Layout(E4M3, (None, None), columnwise="same"),
    "rows": Layout(E4M3, (1, None)),
    "columns": Layout(E4M3, (None, 1)),
    "1 x 128": Layout(E4M3, (1, 128), columnwise="transposed"),
    "128 x 128": Layout(E4M3, (128, 128), columnwise="transposed"),
    "8 x 64": Layout(INT8, (8, 64)),
}


# A layout, the shape of the tensor: data and scales of rows, data and scales of columns.
SHAPES = [
    ("MX", (5,), (5,), (1, 1), (5,), (1, 5)),
    ("MX", (3, 0), (3, 0), (3, 0), (3, 0), (1, 0)),
    ("MX", (2, 3, 41), (2, 3, 41), (6, 2), (2, 3, 41), (1, 41)),
    ("tensor", (0, 5), (0, 5), (1, 1), (0, 5), (1, 1)),
    ("rows", (0, 5), (0, 5), (0, 1), (0, 5), (1, 5)),
    ("1 x 128", (), (), (1, 1), (), (1, 1)),
    ("1 x 128", (2, 65, 300), (2, 65, 300), (130, 3), (300, 2, 65), (300, 2)),
    ("1 x 128", (2, 3, 0), (2, 3, 0), (6, 0), (0, 2, 3), (0, 1)),
    ("8 x 64", (20, 100), (20, 100), (3, 2), (20, 100), (1, 13)),
]


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: f"{row[0]}-{row[1]}")
def test_shapes_of_data_and_scales(row: Any) -> None:
    name, shape, *expected = row
    layout = NAMED[name]
    for columnwise in (False, True):
        data = layout.data_shape(shape, columnwise)
        scales = layout.scale_shape(shape, columnwise)
        assert [data, scales] == expected[2 * columnwise :][:2]
        # What is stored is a grid over a matrix of its own.
        matrix, block = layout.stored_matrix(data, columnwise), layout.stored_block(columnwise)
        counts = [1 if b is None else -(-n // b) for n, b in zip(matrix, block, strict=True)]
        assert scales == tuple(counts)
        assert math.prod(matrix) == math.prod(shape)


def test_what_follows() -> None:
    assert {n for n, a in NAMED.items() if a.square} == {"squares", "tensor", "128 x 128"}
    assert {n for n, a in NAMED.items() if a.transposed} == {"1 x 128", "128 x 128"}
    assert {n for n, a in NAMED.items() if a.one_buffer} == {"tensor"}
    codes = {n for n, a in NAMED.items() if a.stored_scale is torch.uint8}
    assert codes == {"MX", "squares"}
    assert all(a.stored_scale is torch.float32 for n, a in NAMED.items() if n not in codes)
    shared, wide = NAMED["squares"], NAMED["8 x 64"]
    for layout, blocks, areas in (
        (shared, [(1, 32), (32, 1)], [(32, 32), (32, 32)]),
        (wide, [(8, 64), (64, 8)], [(8, 64), (64, 8)]),
    ):
        assert [layout.block_of(side) for side in (False, True)] == blocks
        assert [layout.block_of(side, shared=True) for side in (False, True)] == areas
    assert shared.grid((33, 65), True) == (2, 65)
    assert shared.grid((33, 65), True, shared=True) == (2, 3)
    shapes = [as_matrix_shape(shape) for shape in ((), (5,), (2, 3, 4), (2, 0, 4))]
    assert shapes == [(1, 1), (1, 5), (6, 4), (0, 4)]
