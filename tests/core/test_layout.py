"""Layouts: what is refused, their text, what follows from them, and how they travel."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import Layout
from ottava.errors import DTypeError, OptionError
from ottava.layout import Rotation, as_matrix_shape
from tests.copying import by_file, by_pickle
from tests.core.layouts.layouts import LAYOUTS as COMMON
from tests.core.layouts.layouts import LEVELS as COMMON_LEVELS

E4M3, E5M2, E8M0, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8
MX = Layout(E4M3, (1, 32), E8M0, "up")
ROTATION = Rotation(16, 0xD7E8)
#: Fields that others need.
PACKED = {"element": "E2M1", "columnwise": "transposed"}
LEVELS = {"scale": E4M3, "second_level": "row"}
CANDIDATES = {"candidates": (1.0, 1.5)}
TURNED = {"columnwise": "transposed"}
TEXT = "float8_e4m3fn/1x32/float8_e8m0fnu/up/0.0/own/None/float32"

POWERS = {"scale": E8M0, "rounding": "up"}
ONLY_FLOATS = "e8m0fnu.*epsilon.*finite_as.*scale=torch.float32"
NO_SIZES = [Rotation(size, 0) for size in (0, 8, 24, 256, 16.0, True)]  # type: ignore[arg-type]
NO_SIGNS = [Rotation(16, signs) for signs in (-1, 1 << 16, 1.0, False)]  # type: ignore[arg-type]
NVFP4 = replace(COMMON["nvfp4"], stochastic=True)
BOUND = Layout(
    "MXINT8",
    (16, 16),
    "UE5M3",
    second_level="tensor",
    bound=256,
    candidates=(1, 1.5),
    error="MSE",
)

# Other fields, wrong values of one field, and the words of the error.
REFUSED: list[tuple[dict[str, Any], str, list[Any], str]] = [
    ({}, "element", [torch.float16, E8M0, torch.uint8], "e4m3fn.*e5m2.*int8"),
    ({}, "element", [None, "float8_e4m3fn", 0, []], "format of elements"),
    ({}, "element", ["e2m1", "E5M3", "UE5M3", "E8M0", ""], "E2M1.*MXINT8S"),
    ({}, "scale", [torch.float16, None, [], "", "E4M3"], "float32.*e8m0fnu.*e4m3fn.*UE5M3"),
    ({}, "block", [None, 32, [1, 32], (32,), (1, 2, 3)], "block.*rows, columns"),
    ({}, "block", [(0, 32), (1, -1), (1, 1.0), (True, 32), ("1", 32)], "block.*rows, columns"),
    ({}, "shared", [32, [32, 32], (0, 0), (32.0, 32.0), (True, True)], "shared.*rows, columns"),
    ({}, "shared", [(32, 64), (16, 16), (48, 48), (1, 32), (32, None)], "share a scale.*squares"),
    ({"block": (1, None)}, "shared", [(32, 32)], "share a scale.*squares"),
    ({"block": (3, 32)}, "shared", [(32, 32)], "share a scale.*squares"),
    ({}, "rounding", ["up", "UP", "", None, 0, ["floor"]], "rounding.*nearest, floor"),
    ({"scale": E8M0}, "rounding", ["down", True], "rounding.*up, floor, even, nearest"),
    ({"scale": E4M3}, "rounding", ["up", "floor"], "rounding.*nearest"),
    ({}, "columnwise", ["", "rows", None, 1], "columnwise.*own, transposed, same"),
    ({}, "finite_as", ["", "float16", None, torch.float32], "finite_as.*float32, input"),
    ({}, "epsilon", [-1.0, -1, math.nan, math.inf, 1e39, 10**400], "epsilon.*>= 0"),
    ({}, "epsilon", [True, "0", None, torch.tensor(0.0)], "epsilon.*>= 0"),
    ({"columnwise": "same"}, "block", [(1, 32), (1, None), (None, 2)], "same.*squares"),
    ({"columnwise": "same"}, "shared", [(32, 32)], "same.*squares"),
    (POWERS, "epsilon", [1e-30, 1], ONLY_FLOATS),
    (POWERS, "finite_as", ["input"], ONLY_FLOATS),
    (PACKED, "columnwise", ["own"], "E2M1.*columnwise='transposed'.*sums over"),
    (PACKED, "block", [(1, 15), (16, 1), (4, 5)], "E2M1.*even number of columns"),
    ({"element": "INT4"}, "columnwise", ["own"], "INT4.*columnwise='transposed'"),
    ({}, "second_level", ["rows", "", None, True], "second_level.*none, tensor, row"),
    ({}, "second_level", ["tensor", "row"], "over scales in float32.*'UE5M3'"),
    (POWERS, "second_level", ["row"], "e8m0fnu.*'UE5M3'"),
    (LEVELS, "block", [(2, 32), (None, 32), (32, 32)], "'row'.*blocks of one row"),
    (LEVELS, "shared", [(32, 32)], "'row'.*shared=None"),
    ({"scale": E4M3}, "bound", [256.0, 0, ""], "bound is .* without a second level"),
    (LEVELS, "bound", [0, -1.0, 448.5, math.nan, True, "256"], "bound is .*at most 448.0"),
    (LEVELS | {"scale": "UE5M3"}, "bound", [114689], "bound is .*at most 114688.0"),
    (LEVELS, "candidates", [(1.0,), [1, 1.5], 1, None], "candidates is .*two or more"),
    (LEVELS, "candidates", [(1, 0), (1, -1.5), (1, math.nan)], "candidates is .*two or more"),
    (LEVELS, "candidates", [(1, 1e39), (1, True), ("1", 2)], "candidates is .*two or more"),
    (LEVELS, "error", ["MSE"], "'MSE' without candidates"),
    (LEVELS | CANDIDATES, "error", ["mae", "", None], "error.*MAE, MSE"),
    (LEVELS | CANDIDATES, "stochastic", [True], "stochastic=True.*nearest"),
    (LEVELS | CANDIDATES, "rotation", [ROTATION], "a rotation.*a layout and"),
    ({}, "stochastic", [1, 0, None, "True"], "stochastic.*True or False"),
    (TURNED, "rotation", [16, (16, 0, "both"), True, ""], "rotation is .*Rotation"),
    (TURNED, "rotation", NO_SIZES, "a rotation of .*16, 32, 64 or 128"),
    (TURNED, "rotation", NO_SIGNS, "signs .*an integer of 16 bits"),
    (TURNED, "rotation", [Rotation(16, 0, "rows")], "directions.*columnwise, both"),
    ({}, "rotation", [ROTATION], "rotated columns.*columnwise='transposed'"),
    (TURNED | {"rotation": ROTATION}, "block", [(16, 16), (None, None)], "same values.*no squares"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{REFUSED[n][1]}-{n}")
def test_what_is_refused(number: int) -> None:
    others, field, values, match = REFUSED[number]
    right: dict[str, Any] = {"element": E4M3, "block": (1, 32)}
    error = DTypeError if field in ("element", "scale") else OptionError
    Layout(**right)
    for wrong in values:
        with pytest.raises(error, match=match):
            Layout(**right | others | {field: wrong})


TEXTS = {
    TEXT: MX,
    "int8/allx8/float32/nearest/1.0/own/None/float32": Layout(INT8, (None, 8), epsilon=1),
    "E2M1/1x16/float8_e4m3fn/nearest/0.0/transposed/None/float32/second_level=tensor"
    "/stochastic=True/rotation=16:0xd7e8:columnwise": replace(NVFP4, rotation=ROTATION),
    "E2M1/1x16/float8_e4m3fn/nearest/0.0/transposed/None/float32/second_level=tensor"
    "/stochastic=True/rotation=128:0x1:both": replace(NVFP4, rotation=Rotation(128, 1, "both")),
    "MXINT8/16x16/UE5M3/nearest/0.0/own/None/float32/second_level=tensor"
    "/bound=256.0/candidates=1.0x1.5/error=MSE": BOUND,
}


def test_the_text() -> None:
    for text, layout in TEXTS.items():
        assert layout.text == text
        assert Layout.of(text) == known_anew(text) == layout
    assert "(1, 32)" in repr(MX)
    assert "text" not in repr(MX)


#: What follows a text, and what replaces a part of it: the result is no text.
MORE = "second_level=tensor bound=1.0 candidates=1.0 candidates=1.0xx2.0 error=MSE stochastic=true"
MORE += " stochastic=1 rotation=16 rotation=16:x:both rotation=16:0x1:both:1 text=mx element=INT4"
MORE += " second_level second_level=none=none ="
OTHERS = {
    "float8_e4m3fn": ["float16", "nn", "__all__"],
    "float8_e8m0fnu": ["__all__"],
    "1x32": ["32", "1x", "0x32", "None", "1x" + "9" * 5000],
    "up": ["down"],
    "0.0": ["nan", "-1", "little"],
    "None": ["16x16", "allxall"],
    "own": ["same"],
}
NO_TEXTS = ["", "mx", "/" * 7, TEXT + "/", TEXT.removesuffix("/float32"), None, 3, b"x", [TEXT], MX]
NO_TEXTS += [f"{TEXT}/{words}" for words in MORE.split()]
NO_TEXTS += [TEXT.replace(old, new) for old, news in OTHERS.items() for new in news]


def test_what_is_no_text_of_a_layout() -> None:
    for wrong in NO_TEXTS:
        with pytest.raises((OptionError, DTypeError)):
            Layout.of(wrong)
    with pytest.raises(OptionError) as caught:
        Layout.of("x" * 100_000)
    assert len(str(caught.value)) < 300


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout of the common tables with other numbers."""
    made = draw(st.sampled_from([*COMMON.values(), *COMMON_LEVELS.values()]))
    fields: dict[str, Any] = {}
    if made.scale is torch.float32:
        largest = torch.finfo(torch.float32).max
        fields["epsilon"] = draw(st.floats(0, largest) | st.integers(0, 10**9) | st.just(-0.0))
    if made.second_level != "none":
        fields["bound"] = draw(st.none() | st.integers(1, 448) | st.floats(1e-3, 448.0))
    if made.candidates:
        factors = st.integers(1, 9) | st.floats(2.0**-100, 2.0**100)
        fields["candidates"] = tuple(draw(st.lists(factors, min_size=2, max_size=4)))
    if made.rotation is not None:
        signs = draw(st.integers(0, 2**made.rotation.size - 1))
        fields["rotation"] = made.rotation._replace(signs=signs)
    return replace(made, **fields)


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
        replace(made),
        copy.deepcopy(made),
        by_pickle(made),
        by_file(made),
    ):
        assert again == made
        assert again.text == made.text
        assert hash(again) == hash(made)
    assert (made == other) == (made.text == other.text)


def test_a_layout_is_frozen_and_zeros_of_both_signs_are_one_epsilon() -> None:
    """``test_contract.py`` has a change of each field, which makes another layout."""
    same = Layout(E4M3, (1, 32), E8M0, "up", epsilon=-0.0)
    assert same == MX
    assert same.text == MX.text != MX
    assert isinstance(same.epsilon, float)
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
    "packed": Layout("E2M1", (1, 16), E4M3, columnwise="transposed", second_level="row"),
    "rotated": Layout(E4M3, (1, 16), E4M3, columnwise="transposed", rotation=ROTATION),
    "rotated rows": Layout(
        "E2M1", (1, 32), E8M0, "up", columnwise="transposed", rotation=Rotation(64, 1, "rowwise")
    ),
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
    ("packed", (2, 9, 35), (2, 9, 18), (18, 3), (35, 9), (35, 2)),
    ("packed", (), (1,), (1, 1), (1, 1), (1, 1)),
    ("packed", (0, 5), (0, 3), (0, 1), (5, 0), (5, 0)),
    ("rotated", (2, 9, 35), (2, 9, 35), (18, 3), (35, 32), (35, 2)),
    ("rotated rows", (3, 65), (3, 64), (3, 4), (65, 2), (65, 1)),
    ("rotated rows", (), (32,), (1, 2), (1, 1), (1, 1)),
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
        if layout.is_plain(columnwise):
            assert math.prod(matrix) == math.prod(shape)


def test_what_follows() -> None:
    assert {n for n, a in NAMED.items() if a.square} == {"squares", "tensor", "128 x 128"}
    turned = {"1 x 128", "128 x 128", "packed", "rotated", "rotated rows"}
    assert {n for n, a in NAMED.items() if a.transposed} == turned
    assert {n for n, a in NAMED.items() if a.elements_per_byte == 2} == {"packed", "rotated rows"}
    amaxes = [NAMED["packed"].amax_shape((2, 9, 35), side) for side in (False, True)]
    assert amaxes == [(18,), (35,)]
    assert Layout(E4M3, (4, 4), E4M3, second_level="tensor").amax_shape((2, 9), True) == ()
    assert MX.amax_shape((2, 9), False) is None
    assert {n for n, a in NAMED.items() if a.one_buffer} == {"tensor"}
    codes = {n for n, a in NAMED.items() if a.stored_scale is torch.uint8}
    assert codes == {"MX", "squares", "packed", "rotated", "rotated rows"}
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
