"""Layouts: what is refused, their text, what follows from them, and how they travel."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ottava
from ottava import Layout
from ottava.errors import DTypeError, OptionError
from ottava.layout import as_matrix_shape

E4M3, E5M2, E8M0, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8
ROUNDINGS = {torch.float32: ["nearest", "floor"], E8M0: ["up", "floor"]}
MX = Layout(E4M3, (1, 32), E8M0, "up")


# What is refused, and the words of the error: what it was, and what was expected.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *[
        ({"element": wrong}, DTypeError, "float8_e4m3fn.*float8_e5m2.*int8")
        for wrong in (torch.float16, E8M0, torch.uint8)
    ],
    *[
        ({"element": wrong}, DTypeError, "format of elements")
        for wrong in (None, "float8_e4m3fn", 0, [])
    ],
    *[
        ({"scale": wrong}, DTypeError, "scale.*float32.*e8m0fnu")
        for wrong in (torch.float16, torch.uint8, None, [], "")
    ],
    *[
        ({"block": wrong}, OptionError, "block.*rows, columns")
        for wrong in (
            None,
            32,
            [1, 32],
            (32,),
            (1, 2, 3),
            (0, 32),
            (1, -1),
            (1, 1.0),
            (True, 32),
            ("1", 32),
            (),
        )
    ],
    *[
        ({"shared": wrong}, OptionError, "shared.*rows, columns")
        for wrong in (32, [32, 32], (32,), (0, 0), (32.0, 32.0), (True, True), ())
    ],
    *[
        ({"shared": wrong}, OptionError, "share a scale.*squares")
        for wrong in ((32, 64), (16, 16), (48, 48), (1, 32), (None, None), (32, None), (None, 32))
    ],
    ({"block": (1, None), "shared": (32, 32)}, OptionError, "share a scale.*squares"),
    ({"block": (3, 32), "shared": (32, 32)}, OptionError, "share a scale.*squares"),
    *[
        ({"rounding": wrong}, OptionError, "rounding.*nearest, floor")
        for wrong in ("up", "UP", "", None, 0, ["floor"])
    ],
    *[
        ({"scale": E8M0, "rounding": wrong}, OptionError, "rounding.*up, floor")
        for wrong in ("nearest", "down", True)
    ],
    *[
        ({"columnwise": wrong}, OptionError, "columnwise.*own, transposed, same")
        for wrong in ("", "rows", None, 1)
    ],
    *[
        ({"finite_as": wrong}, OptionError, "finite_as.*float32, input")
        for wrong in ("", "float16", None, torch.float32)
    ],
    *[
        ({"epsilon": wrong}, OptionError, "epsilon.*>= 0")
        for wrong in (
            -1.0,
            -1,
            math.nan,
            math.inf,
            1e39,
            10**400,
            True,
            "0",
            None,
            torch.tensor(0.0),
        )
    ],
    *[
        ({"block": wrong, "columnwise": "same"}, OptionError, "same.*squares")
        for wrong in ((1, 32), (1, None), (None, 2))
    ],
    ({"block": (1, 32), "columnwise": "same", "shared": (32, 32)}, OptionError, "same.*squares"),
    *[
        (
            {"scale": E8M0, "rounding": rounding, **wrong},
            OptionError,
            "E8M0.*epsilon.*finite_as.*scale=torch.float32",
        )
        for rounding in ("up", "floor")
        for wrong in (
            {"epsilon": 1e-30},
            {"finite_as": "input"},
            {"epsilon": 1, "finite_as": "input"},
        )
    ],
]


@pytest.mark.parametrize(
    ("fields", "error", "words"), REFUSED, ids=lambda v: str(v)[:40] if isinstance(v, dict) else ""
)
def test_what_is_refused(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    right: dict[str, Any] = {"element": E4M3, "block": (1, 32)}
    Layout(**right)
    with pytest.raises(error, match=words):
        Layout(**right | fields)


TEXT = "float8_e4m3fn/1x32/float8_e8m0fnu/up/0.0/own/None/float32"


def test_the_text() -> None:
    assert MX.text == TEXT
    assert Layout.of(TEXT) == MX
    assert (
        Layout(INT8, (None, 8), epsilon=1, shared=None).text
        == "int8/allx8/float32/nearest/1.0/own/None/float32"
    )
    square = Layout(E5M2, (1, 32), E8M0, "floor", shared=(32, 32))
    assert square.text == "float8_e5m2/1x32/float8_e8m0fnu/floor/0.0/own/32x32/float32"
    blockwise = Layout(
        E4M3, (128, 128), rounding="floor", columnwise="transposed", finite_as="input"
    )
    assert blockwise.text == "float8_e4m3fn/128x128/float32/floor/0.0/transposed/None/input"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "mx",
        "/" * 7,
        TEXT + "/",
        TEXT.removesuffix("/float32"),
        TEXT.replace("float8_e4m3fn", "float16"),
        TEXT.replace("float8_e4m3fn", "nn"),
        TEXT.replace("float8_e8m0fnu", "__all__"),
        TEXT.replace("float8_e4m3fn", "__all__"),
        TEXT.replace("1x32", "32"),
        TEXT.replace("1x32", "1x"),
        TEXT.replace("1x32", "0x32"),
        TEXT.replace("1x32", "None"),
        TEXT.replace("1x32", "1x" + "9" * 5000),
        TEXT.replace("up", "nearest"),
        TEXT.replace("0.0", "nan"),
        TEXT.replace("0.0", "-1"),
        TEXT.replace("0.0", "little"),
        TEXT.replace("None", "16x16"),
        TEXT.replace("None", "allxall"),
        TEXT.replace("own", "same"),
        None,
        3,
        b"x",
        [TEXT],
        MX,
    ],
    ids=lambda wrong: str(wrong)[:60],
)
def test_what_is_no_text_of_a_layout(wrong: Any) -> None:
    with pytest.raises((OptionError, DTypeError)):
        Layout.of(wrong)


def test_an_error_quotes_little_of_a_long_text() -> None:
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


@given(layouts())
def test_text_and_back(made: Layout) -> None:
    for again in (
        Layout.of(made.text),
        known_anew(made.text),
        dataclasses.replace(made),
        copy.deepcopy(made),
    ):
        assert again == made
        assert again.text == made.text
        assert hash(again) == hash(made)


@given(layouts(), layouts())
def test_texts_are_equal_where_layouts_are(one: Layout, other: Layout) -> None:
    assert (one == other) == (one.text == other.text)
    if one == other:
        assert hash(one) == hash(other)


def test_equality() -> None:
    same = Layout(E4M3, (1, 32), E8M0, "up", epsilon=0)
    assert same == MX
    assert same.text == MX.text
    assert len({same, MX, Layout(E4M3, (1, 32), E8M0, "up", -0.0)}) == 1
    assert same.epsilon == 0.0
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
    assert len({MX, *others}) == 1 + len(others)
    assert len({layout.text for layout in (MX, *others)}) == 1 + len(others)
    assert MX.text != MX
    with pytest.raises(dataclasses.FrozenInstanceError):
        MX.epsilon = 1.0  # type: ignore[misc]


@given(layouts())
def test_pickles_and_files(made: Layout) -> None:
    assert pickle.loads(pickle.dumps(made)) == made
    file = io.BytesIO()
    torch.save({"layout": made}, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)["layout"]
    assert again == made
    assert again.text == made.text


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"nearest", b"neither"), (b"float8_e4m3fn\n", b"bfloat16\n"), (b"own", b"wow")],
    ids=["rounding", "element", "columnwise"],
)
def test_a_pickle_of_none_is_refused(old: bytes, new: bytes) -> None:
    """It goes through the checks of the constructor."""
    written = pickle.dumps(Layout(E4M3, (1, 7)), protocol=2)
    assert old in written
    with pytest.raises((OptionError, DTypeError)):
        pickle.loads(written.replace(old, new))


# What follows from the fields

SHAPES = {
    # layout, shape of the tensor: data and scales of rows, data and scales of columns
    ("MX", ()): ((), (1, 1), (), (1, 1)),
    ("MX", (5,)): ((5,), (1, 1), (5,), (1, 5)),
    ("MX", (0, 5)): ((0, 5), (0, 1), (0, 5), (0, 5)),
    ("MX", (3, 0)): ((3, 0), (3, 0), (3, 0), (1, 0)),
    ("MX", (33, 65)): ((33, 65), (33, 3), (33, 65), (2, 65)),
    ("MX", (2, 3, 41)): ((2, 3, 41), (6, 2), (2, 3, 41), (1, 41)),
    ("squares", (33, 65)): ((33, 65), (33, 3), (33, 65), (2, 65)),
    ("tensor", ()): ((), (1, 1), (), (1, 1)),
    ("tensor", (0, 5)): ((0, 5), (1, 1), (0, 5), (1, 1)),
    ("tensor", (2, 3, 41)): ((2, 3, 41), (1, 1), (2, 3, 41), (1, 1)),
    ("rows", (7, 9)): ((7, 9), (7, 1), (7, 9), (1, 9)),
    ("rows", (3, 0)): ((3, 0), (3, 1), (3, 0), (1, 0)),
    ("rows", (0, 5)): ((0, 5), (0, 1), (0, 5), (1, 5)),
    ("columns", (7, 9)): ((7, 9), (1, 9), (7, 9), (7, 1)),
    ("1 x 128", (130, 300)): ((130, 300), (130, 3), (300, 130), (300, 2)),
    ("1 x 128", (2, 65, 300)): ((2, 65, 300), (130, 3), (300, 2, 65), (300, 2)),
    ("1 x 128", ()): ((), (1, 1), (), (1, 1)),
    ("1 x 128", (5,)): ((5,), (1, 1), (5,), (5, 1)),
    ("1 x 128", (0, 5)): ((0, 5), (0, 1), (5, 0), (5, 0)),
    ("1 x 128", (2, 3, 0)): ((2, 3, 0), (6, 0), (0, 2, 3), (0, 1)),
    ("128 x 128", (130, 300)): ((130, 300), (2, 3), (300, 130), (3, 2)),
    ("8 x 64", (20, 100)): ((20, 100), (3, 2), (20, 100), (1, 13)),
}
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


@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_shapes_of_data_and_scales(name: str, shape: tuple[int, ...]) -> None:
    layout = NAMED[name]
    found = [
        f(shape, columnwise)
        for columnwise in (False, True)
        for f in (layout.data_shape, layout.scale_shape)
    ]
    assert tuple(found) == SHAPES[name, shape]
    for columnwise, (data, scales) in enumerate((found[:2], found[2:])):
        # What is stored is a grid over a matrix of its own.
        matrix, block = (
            layout.stored_matrix(data, bool(columnwise)),
            layout.stored_block(bool(columnwise)),
        )
        assert scales == tuple(
            1 if b is None else -(-size // b) for size, b in zip(matrix, block, strict=True)
        )
        assert math.prod(matrix) == math.prod(shape)


def test_what_follows() -> None:
    squares = {name for name, layout in NAMED.items() if layout.square}
    assert squares == {"squares", "tensor", "128 x 128"}
    assert {name for name, layout in NAMED.items() if layout.transposed} == {"1 x 128", "128 x 128"}
    assert {name for name, layout in NAMED.items() if layout.stored_scale == torch.uint8} == {
        "MX",
        "squares",
    }
    assert {layout.stored_scale for layout in NAMED.values()} == {torch.uint8, torch.float32}
    shared, wide = NAMED["squares"], NAMED["8 x 64"]
    assert [shared.block_of(columnwise) for columnwise in (False, True)] == [(1, 32), (32, 1)]
    assert [shared.block_of(columnwise, shared=True) for columnwise in (False, True)] == [
        (32, 32)
    ] * 2
    assert [wide.block_of(columnwise, shared=True) for columnwise in (False, True)] == [
        (8, 64),
        (64, 8),
    ]
    assert shared.grid((33, 65), True) == (2, 65)
    assert shared.grid((33, 65), True, shared=True) == (2, 3)
    assert [as_matrix_shape(shape) for shape in ((), (5,), (2, 3, 4), (2, 0, 4))] == [
        (1, 1),
        (1, 5),
        (6, 4),
        (0, 4),
    ]


def test_it_is_public_and_its_fields_are_seen() -> None:
    assert ottava.Layout is Layout
    assert "Layout" in dir(ottava)
    assert "(1, 32)" in repr(MX)
    assert "text" not in repr(MX)
