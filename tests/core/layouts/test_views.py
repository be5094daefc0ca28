"""Views: where they keep the class, whose bytes they show, and where writes to them arrive."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import GridQuantizer, Layout, QuantizedTensor
from ottava.errors import UsageError
from ottava.layout import Block
from ottava.tensors import DequantizedView
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    EACH,
    LAYOUTS,
    QUANTIZERS,
    ROTATED_ONCE,
    USAGES,
    assert_directions,
    boundary,
    inner,
)
from tests.samples import wide

Op = Callable[[torch.Tensor], Any]
#: Name -> shape of the tensor, and the view. Blocks of 32 and of less lie in these shapes.
VIEWS: dict[str, tuple[tuple[int, ...], Op]] = {
    "rows": ((96, 64), lambda t: t[32:64]),
    "rows to a ragged end": ((70, 40), lambda t: t[32:]),
    "rows before a ragged end": ((70, 40), lambda t: t[:69]),
    "rows off the boundary": ((96, 64), lambda t: t[5:37]),
    "rows that end off it": ((96, 64), lambda t: t[32:50]),
    "no rows": ((96, 64), lambda t: t[32:32]),
    "all rows": ((96, 64), lambda t: t[:]),
    "columns": ((96, 64), lambda t: t[:, 32:]),
    "columns to a ragged end": ((40, 70), lambda t: t[:, 64:]),
    "columns off the boundary": ((96, 64), lambda t: t[:, 3:40]),
    "rows and columns": ((96, 64), lambda t: t[32:64, 32:]),
    "row": ((96, 64), lambda t: t[5]),
    "column": ((96, 64), lambda t: t[:, 5]),
    "element": ((96, 64), lambda t: t[5, 7]),
    "matrix of a stack": ((3, 32, 40), lambda t: t[1]),
    "matrices of a stack": ((3, 32, 40), lambda t: t[1:]),
    "rows of a stack of one": ((1, 64, 40), lambda t: t[:, 32:]),
    "one row of each": ((2, 64, 40), lambda t: t[:, 3]),
    "matrices of one row each": ((2, 64, 40), lambda t: t[:, 3:4]),
    "columns of a stack": ((2, 31, 96), lambda t: t[:, :, 32:64]),
    "columns of a vector": ((96,), lambda t: t[32:64]),
    "part of a vector": ((96,), lambda t: t[3:5]),
    "split rows by view": ((96, 64), lambda t: t.view(2, 48, 64)),
    "join rows": ((3, 31, 40), lambda t: t.view(93, 40)),
    "flatten leading": ((3, 2, 5, 40), lambda t: t.flatten(0, 1)),
    "unflatten": ((6, 40), lambda t: t.unflatten(0, (2, 3))),
    "narrower lines": ((96, 64), lambda t: t.view(192, 32)),
    "wider lines": ((96, 64), lambda t: t.view(48, 128)),
    "one line": ((96, 64), lambda t: t.view(-1)),
    "lines of another length": ((96, 64), lambda t: t.view(128, 48)),
    "ragged lines": ((32, 40), lambda t: t.view(40, 32)),
    "unsqueeze": ((33, 40), lambda t: t.unsqueeze(0)),
    "unsqueeze a scalar": ((), lambda t: t.unsqueeze(0)),
    "squeeze some": ((1, 33, 1, 40), lambda t: t.squeeze((0, 2))),
    "expand to more dimensions": ((33, 40), lambda t: t.expand(1, 33, 40)),
    "t": ((33, 70), lambda t: t.t()),
    "permute": ((33, 70), lambda t: t.permute(1, 0)),
    "permute to the same": ((2, 33, 40), lambda t: t.permute(0, 1, 2)),
    "t twice": ((33, 70), lambda t: t.t().t()),
    "rows of t": ((33, 70), lambda t: t.t()[32:64]),
    "rows of t off the boundary": ((33, 70), lambda t: t.t()[3:40]),
    "columns of t": ((70, 70), lambda t: t.t()[:, 64:]),
    "unsqueezed t": ((33, 70), lambda t: t.t().unsqueeze(0)),
    "detach": ((33, 40), lambda t: t.detach()),
    "split": ((70, 40), lambda t: t.split(32)[2]),
    "split off the boundary": ((96, 40), lambda t: t.split([10, 86])[1]),
    "split columns": ((40, 96), lambda t: t.split(64, dim=1)[1]),
    "chunk": ((96, 40), lambda t: t.chunk(3)[1]),
    "unbind": ((3, 32, 40), lambda t: t.unbind()[2]),
}
#: Views that may give the values although blocks would allow more.
ANY_CLASS: dict[str, tuple[tuple[int, ...], Op]] = {
    "every second row": ((96, 64), lambda t: t[::2]),
    "rows of a stack": ((2, 64, 40), lambda t: t[:, 32:]),
    "transpose a stack": ((2, 33, 40), lambda t: t.mT),
    "unbind columns": ((3, 40), lambda t: t.unbind(1)[4]),
    "expand to more": ((33, 40), lambda t: t.expand(2, 33, 40)),
    "as_strided": ((96, 40), lambda t: t.as_strided((96, 40), (40, 1))),
    "as_strided rows": ((96, 40), lambda t: t.as_strided((32, 40), (40, 1), 32 * 40)),
    "as_strided between rows": ((96, 40), lambda t: t.as_strided((32, 40), (40, 1), 5)),
    "as_strided overlapping": ((96, 40), lambda t: t.as_strided((96, 40), (1, 1))),
    "diagonal": ((33, 33), lambda t: t.diagonal()),
    "unfold": ((96, 40), lambda t: t.unfold(0, 32, 32)),
    "empty to another shape": ((0, 64), lambda t: t.view(5, 0)),
}
#: Views whose rows are the columns of the tensor.
TURNED = {
    "t",
    "permute",
    "rows of t",
    "rows of t off the boundary",
    "columns of t",
    "unsqueezed t",
}
#: Views of a transpose.
OF_A_TRANSPOSE = {*TURNED, "t twice"}
WRITES: list[Callable[[Any, torch.Tensor], Any]] = [
    lambda view, new: view.copy_(new),
    lambda view, new: view.quantize_(new),
    lambda view, new: view.copy_(view._quantizer.with_usage(**view.get_usages())(new)),
    lambda view, new: view._quantizer.quantize(new, out=view),
    lambda view, new: torch.add(torch.zeros_like(new), new, out=view),
]


def small(name: str) -> GridQuantizer:
    """The quantizer of a row of the table, with blocks of at most 32."""
    quantizer = QUANTIZERS[name]
    if name not in LAYOUTS:
        return quantizer
    rows, columns = (side and min(side, 32) for side in quantizer.layout.block)
    return GridQuantizer(replace(quantizer.layout, block=(rows, columns)))


def numbers(shape: tuple[int, ...], block: Block) -> torch.Tensor:
    """The number of each element's block."""
    rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
    high, wide_ = (side or max(size, 1) for side, size in zip(block, (rows, columns), strict=True))
    down, across = torch.arange(rows) // high, torch.arange(columns) // wide_
    return (down[:, None] * (columns + 1) + across).reshape(shape)


def fits(
    layout: Layout, shape: tuple[int, ...], op: Op, usages: dict[str, bool], *, turned: bool
) -> tuple[bool, bool]:
    """Whether a view consists of whole blocks, and whether it shares no amax of a second level.

    The elements of a view that share a scale, or an amax, have to be those that share one in the
    view's own grid. Rows of a turned view are columns.
    """
    has_blocks = has_amaxes = True
    for columnwise, is_held in ((False, usages["rowwise"]), (True, usages["columnwise"])):
        if not is_held:
            continue
        matched, complete = _fits(
            op,
            numbers(shape, layout.block_of(columnwise, shared=True)),
            layout.block_of(columnwise ^ turned, shared=True),
        )
        has_blocks = has_blocks and matched and complete
        matched, complete = _fits(
            op,
            numbers(shape, elements_together(layout, columnwise)),
            elements_together(layout, columnwise ^ turned),
        )
        has_blocks = has_blocks and matched and complete
        block = layout.block_of_amax(columnwise)
        own_block = layout.block_of_amax(columnwise ^ turned)
        if block is not None and own_block is not None:
            matched, complete = _fits(op, numbers(shape, block), own_block)
            has_blocks = has_blocks and matched
            has_amaxes = has_amaxes and complete
    return has_blocks, has_blocks and has_amaxes


def elements_together(layout: Layout, columnwise: bool) -> Block:
    """Rows and columns of the elements that share a byte, or are rotated together."""
    count = layout.whole_elements(columnwise)
    return (count, 1) if columnwise else (1, count)


def _fits(op: Op, whole: torch.Tensor, own_block: Block) -> tuple[bool, bool]:
    """Whether the elements of a view that share a block are those that share one of its own, and
    whether they are all elements of their blocks."""
    part = op(whole)
    own = numbers(tuple(part.shape), own_block)
    count = [len(t.unique()) for t in (part, own, part * 10**6 + own)]
    counts, part_counts = (torch.bincount(t.flatten()) for t in (whole, part))
    touched = part_counts.nonzero()
    return count[0] == count[1] == count[2], torch.equal(counts[touched], part_counts[touched])


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def as_laid_out(whole: QuantizedTensor) -> torch.Tensor:
    """The values, which lie in memory as the elements do."""
    return torch.empty_strided(whole.shape, whole.stride()).copy_(whole.dequantize())


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@EACH
def test_a_view_has_the_class_that_blocks_allow_and_writes_reach_the_whole(
    name: str, every: int
) -> None:
    """Rows of the table take turns with every third view."""
    first = list(QUANTIZERS).index(name) % every
    for number, (what, (shape, op)) in list(enumerate((VIEWS | ANY_CLASS).items()))[first::every]:
        # Each view with both directions, and with one of them in turn.
        for usages in ("both", ("rowwise", "columnwise")[number // every % 2]):
            with told(what, usages):
                make = small(name).with_usage(*USAGES[usages])
                check_view(name, make, shape, op, WRITES[number % len(WRITES)], what)


def check_view(
    name: str, make: GridQuantizer, shape: tuple[int, ...], op: Op, write: Any, what: str
) -> None:
    layout, x = make.layout, wide(*shape, sigma=1.0)
    whole = make(x)
    before = inner(whole)
    try:
        plain = op(as_laid_out(whole))
    except RuntimeError:
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            op(whole)
        return
    view = op(whole)
    assert_same(values_of(view), plain)
    assert_same(inner(whole), before)
    if not plain.numel():
        return
    is_quantized = isinstance(view, QuantizedTensor)
    assert type(view) is (type(whole) if is_quantized else DequantizedView)
    if what in ANY_CLASS:
        _check_zeros(whole, view, plain)
        return
    has_blocks, complete = fits(layout, shape, op, whole.get_usages(), turned=what in TURNED)
    if what in OF_A_TRANSPOSE and name in ROTATED_ONCE:
        has_blocks = complete = False
    has_one_scale = layout.block == (None, None)
    if has_one_scale:
        assert is_quantized
        complete = view.numel() == whole.numel()
    elif None not in layout.block:
        assert is_quantized is has_blocks
    new = wide(*view.shape, seed=7)
    if not is_quantized:
        with pytest.raises(UsageError, match="cannot share its data"):
            view.copy_(new)
        assert_same(inner(whole), before)
        return
    if not layout.transposed:
        assert (view.stride(), view.storage_offset()) == (plain.stride(), plain.storage_offset())
    if complete:
        # The blocks are those of its part of the original.
        assert_same(inner(view), inner(make.with_usage(**view.get_usages())(op(x))))
        write(view, new)
        op(x).copy_(new)
        assert_directions(whole, make(x))
        assert_same(values_of(op(whole)), view.dequantize())
    elif view.numel() < whole.numel():
        # A write with another scale would change the rest.
        said = r"rest of the tensor.*assign with tensor\[index\] = values"
        with pytest.raises(UsageError, match=said):
            write(view, 100 * new)
        assert_same(inner(whole), before)


def _check_zeros(whole: Any, view: torch.Tensor, plain: torch.Tensor) -> None:
    """Zeros that are written to a view reach the whole, or are refused."""
    before = whole.dequantize()
    try:
        view.zero_()
    except UsageError:
        assert_same(whole.dequantize(), before)
        return
    assert view.numel() == whole.numel()
    assert not whole.dequantize().any()


STEPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rows": lambda t, n: t[32 * (n % 3) :] if t.dim() else t,
    "some rows": lambda t, n: t[: n % 70] if t.dim() else t,
    "rows by step": lambda t, n: t[:: 1 + n % 2] if t.dim() else t,
    "columns": lambda t, n: t[..., 32 * (n % 3) :] if t.dim() else t,
    "some columns": lambda t, n: t[..., n % 40 :] if t.dim() else t,
    "select": lambda t, n: t[n % t.shape[0]] if t.dim() and t.shape[0] else t,
    "t": lambda t, n: t.t() if t.dim() == 2 else t,
    "permute": lambda t, n: t.movedim(0, -1) if t.dim() else t,
    "unsqueeze": lambda t, n: t.unsqueeze(n % (t.dim() + 1)),
    "squeeze": lambda t, n: t.squeeze(),
    "flat": lambda t, n: t.view(-1),
    "flat leading": lambda t, n: t.view(math.prod(t.shape[:-1]), t.shape[-1]) if t.dim() else t,
    "lines of 32": lambda t, n: t.view(-1, 32) if t.numel() else t,
    "lines of 64": lambda t, n: t.view(-1, 64) if t.numel() else t,
    "halves": lambda t, n: t.view(2, -1, t.shape[-1]) if t.dim() and t.numel() else t,
    "chunk": lambda t, n: t.chunk(3)[0] if t.dim() else t,
    "split": lambda t, n: t.split(32, -1)[-1] if t.dim() else t,
    "unbind": lambda t, n: t.unbind(0)[-1] if t.dim() and t.shape[0] else t,
    "own strides": lambda t, n: t.as_strided(t.shape, t.stride(), t.storage_offset()),
    "detach": lambda t, n: t.detach(),
    "reshape": lambda t, n: t.reshape(-1),
    "contiguous": lambda t, n: t.contiguous(),
}


@pytest.mark.every_layout
@settings(max_examples=60, derandomize=True, database=None)
@given(
    name=st.sampled_from(sorted(QUANTIZERS)),
    usages=st.sampled_from(sorted(USAGES)),
    shape=st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 64, 96]), max_size=3),
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 1000)), max_size=6),
)
def test_views_of_views(
    name: str, usages: str, shape: list[int], steps: list[tuple[str, int]]
) -> None:
    make, x = small(name).with_usage(*USAGES[usages]), wide(*shape)
    whole = make(x)
    values = as_laid_out(whole)
    view, plain = whole, values
    for step, number in steps:
        try:
            plain = STEPS[step](plain, number)
        except RuntimeError:
            # Columns that are held transposed lie in an order of their own.
            if not make.layout.transposed:
                with pytest.raises(RuntimeError):
                    STEPS[step](view, number)
            return
        view = STEPS[step](view, number)
        assert_same(values_of(view), plain)
        if not isinstance(view, QuantizedTensor):
            return
        if not make.layout.transposed:
            assert view.stride() == plain.stride()
            assert view.storage_offset() == plain.storage_offset()
    before = whole.dequantize()
    try:
        view.copy_(3 * plain.clone())
    except UsageError:
        assert_same(whole.dequantize(), before)
        return
    plain.copy_(view.dequantize())
    assert_same(whole.dequantize(), values.contiguous())


@pytest.mark.parametrize(
    "name", [n for n, layout in LAYOUTS.items() if layout.square and layout.transposed]
)
def test_views_of_squares_follow_the_rows(name: str) -> None:
    """A view keeps no columns that were made of rows which other code writes to."""
    make, step = small(name), boundary(name)
    for op in (lambda t: t.t(), lambda t: t[step:], lambda t: t[:, step:]):
        whole = make(wide(2 * step, 2 * step))
        view = op(whole)
        rows: torch.Tensor = getattr(whole, whole.data_names[0])
        rows.zero_()
        assert not view.dequantize().any()
        for columnwise in (False, True):
            assert not view.for_usage(columnwise).data.any()


def test_dimensions_out_of_range_are_refused_as_torch_does() -> None:
    whole, scalar = QUANTIZERS["mxfp8"](wide(64, 96)), QUANTIZERS["mxfp8"](wide())
    for call in (
        lambda: whole.narrow(2, 0, 32),
        lambda: whole.split(32, 2),
        lambda: whole.unbind(-3),
        lambda: whole.transpose(0, 2),
        lambda: whole[64],
        lambda: whole.select(0, -65),
        lambda: scalar.unbind(),
        lambda: scalar[0],
    ):
        with pytest.raises(IndexError):
            call()
