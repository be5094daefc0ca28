"""Views of MXFP8 tensors that nobody chose: slices, views of views, strides, dimensions out of
range."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strided import VIEWS as PLACES
from strided import check_places

from ottava import prepare_for_saving, restore_from_saved
from ottava.errors import UsageError
from ottava.tensors import DequantizedView
from ottava_mxfp8 import MXFP8Tensor
from tests.recipes_mxfp8.blocks import (
    KINDS,
    VIEW_KINDS,
    check_bytes,
    check_same,
    decoded,
    quantizer,
    values_of,
    wide,
)

few = settings(deadline=None, max_examples=60, derandomize=True, database=None)

sizes = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 70, 96])
kinds = st.sampled_from(VIEW_KINDS)
edges = st.one_of(st.sampled_from([None, 0, 32, 64, 96, -32, -1, 200]), st.integers(-100, 100))


@few
@given(shape=st.lists(sizes, min_size=1, max_size=3), data=st.data(), kind=kinds)
def test_any_slice(shape: list[int], data: st.DataObject, kind: str) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    part = slice(data.draw(edges), data.draw(edges), data.draw(st.sampled_from([None, 1, 1, 2])))
    index = (slice(None),) * dim + (part,)
    x, make = wide(shape), quantizer(kind)
    whole = make(x)
    view = whole[index]
    check_same(values_of(view), whole.dequantize()[index])
    start, stop, step = part.indices(shape[dim])
    stop = max(start, stop)
    if isinstance(view, MXFP8Tensor):
        assert step == 1
        check_bytes(view, make(x[index]))
        view.copy_(3 * x[index])
        x[index] *= 3
        check_bytes(whole, make(x))
        return
    # Blocks along rows allow any rows, those along columns any columns.
    last = dim == len(shape) - 1
    free = (
        step == 1 and kind == ("columnwise" if last else "rowwise") and math.prod(shape[:dim]) == 1
    )
    each = 1 if last else math.prod(shape[dim + 1 : -1])
    aligned = start * each % 32 == 0 and (stop * each % 32 == 0 or stop == shape[dim])
    assert not free or (not last and kind != "rowwise")
    assert not (aligned and step == 1 and (last or math.prod(shape[:dim]) == 1))


STEPS: dict[str, Callable[[torch.Tensor, Callable[[int, int], int]], torch.Tensor]] = {
    "rows": lambda t, draw: t[32 * draw(0, 2) :] if t.dim() else t,
    "some rows": lambda t, draw: t[: draw(0, 70)] if t.dim() else t,
    "columns": lambda t, draw: t[..., 32 * draw(0, 2) :] if t.dim() else t,
    "some columns": lambda t, draw: t[..., draw(0, 40) :] if t.dim() else t,
    "select": lambda t, draw: t[draw(0, t.shape[0] - 1)] if t.dim() and t.shape[0] else t,
    "t": lambda t, draw: t.t() if t.dim() == 2 else t,
    "permute": lambda t, draw: t.movedim(0, -1) if t.dim() else t,
    "unsqueeze": lambda t, draw: t.unsqueeze(draw(0, t.dim())),
    "squeeze": lambda t, draw: t.squeeze(),
    "flat": lambda t, draw: t.view(-1),
    "flat leading": lambda t, draw: t.view(math.prod(t.shape[:-1]), t.shape[-1]) if t.dim() else t,
    "lines of 32": lambda t, draw: t.view(-1, 32) if t.numel() else t,
    "lines of 64": lambda t, draw: t.view(-1, 64) if t.numel() else t,
    "halves": lambda t, draw: t.view(2, -1, t.shape[-1]) if t.dim() and t.numel() else t,
    "chunk": lambda t, draw: t.chunk(3)[0] if t.dim() else t,
    "split": lambda t, draw: t.split(32, -1)[-1] if t.dim() else t,
    "unbind": lambda t, draw: t.unbind(0)[-1] if t.dim() and t.shape[0] else t,
    "own strides": lambda t, draw: t.as_strided(t.shape, t.stride(), t.storage_offset()),
    "detach": lambda t, draw: t.detach(),
}


@settings(few, max_examples=150)
@given(
    shape=st.lists(st.sampled_from([1, 2, 32, 33, 64, 96]), min_size=0, max_size=3),
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 1000)), max_size=6),
    kind=kinds,
)
def test_any_views_of_views(shape: list[int], steps: list[tuple[str, int]], kind: str) -> None:
    x, make = wide(shape), quantizer(kind)
    whole = make(x)
    view, plain, original = whole, whole.dequantize(), x
    for name, seed in steps:

        def draw(low: int, high: int, seed: int = seed) -> int:
            return low + seed % (high - low + 1)

        try:
            plain = STEPS[name](plain, draw)
        except RuntimeError:
            # Not a view of these strides; quantized, it is none either.
            with pytest.raises(RuntimeError):
                STEPS[name](view, draw)
            continue
        before = plain
        original, view = STEPS[name](original, draw), STEPS[name](view, draw)
        check_same(values_of(view), before)
        if not isinstance(view, MXFP8Tensor):
            return
        assert view.stride() == plain.stride()
    check_bytes(view, make.with_usage(**view.get_usages())(original))
    new = wide(view.shape, seed=3)
    view.copy_(new)
    original.copy_(new)
    check_bytes(whole, make(x))


def test_one_step_back_keeps_which_values_are_shown() -> None:
    whole = quantizer()(wide((64, 96)))
    rows, columns = decoded(whole, False), decoded(whole, True)
    assert not torch.equal(rows, columns)
    transposed = whole.t()
    check_same(transposed.dequantize(torch.float64), rows.t())
    check_same(decoded(transposed, False), columns.t())
    for made in (
        transposed.clone(),
        transposed.contiguous(),
        copy.deepcopy(transposed),
        copy.copy(transposed),
        transposed.detach(),
        transposed.to(torch.bfloat16),
        transposed.to_dtype(torch.float16),
        restore_from_saved(*prepare_for_saving(transposed))[0],
        pickle.loads(pickle.dumps(transposed)),
        transposed[32:].t(),
    ):
        expected = rows.t() if made.shape == transposed.shape else rows[:, 32:]
        check_same(made.dequantize(torch.float64), expected)
    assert transposed.contiguous().is_contiguous()


def test_as_strided_goes_by_the_tensors_own_strides() -> None:
    whole = quantizer()(wide((64, 96)))
    values = whole.dequantize()
    for op in (lambda t: t, lambda t: t.t(), lambda t: t[:, 32:], lambda t: t.t()[:, 32:]):
        view, plain = op(whole), op(values)
        same = view.as_strided(view.shape, view.stride(), view.storage_offset())
        assert isinstance(same, MXFP8Tensor)
        check_same(same.dequantize(), plain)
        same.copy_(view)
        check_same(whole.dequantize(), values)
        stride = view.stride()
        asked = (3, 2), stride, view.storage_offset() + 2 * stride[0] + 5 * stride[1]
        if view.shape != (64, 64):
            part = view.as_strided(*asked)
            assert type(part) is DequantizedView
            check_same(part, plain[2:5, 5:7])
            continue
        # Between its elements lie others of the whole.
        with pytest.raises(UsageError, match=r"as_strided of a view.*view.dequantize\(\)"):
            view.as_strided(*asked)


@pytest.mark.parametrize("kind", KINDS)
def test_views_lie_where_plain_ones_do(kind: str) -> None:
    cut = set() if kind == "rowwise" else {"rows", "one row"}
    check_places(quantizer(kind)(wide((96, 64))), set(PLACES) - cut)


def test_dimensions_out_of_range() -> None:
    whole, scalar = quantizer()(wide((64, 96))), quantizer()(wide(()))
    for call in (
        lambda: whole.narrow(2, 0, 32),
        lambda: whole.select(2, 0),
        lambda: whole.split(32, 2),
        lambda: whole.unbind(-3),
        lambda: whole.transpose(0, 2),
        lambda: whole[64],
        lambda: whole.select(0, -65),
        lambda: torch.ops.aten.slice.Tensor(whole, 5, 0, 32),
        lambda: torch.ops.aten.slice.Tensor(scalar, 0, 0, 1),
        lambda: torch.ops.aten.select.int(scalar, 0, 0),
        lambda: scalar.unbind(),
        lambda: scalar[0],
    ):
        with pytest.raises(IndexError):
            call()
