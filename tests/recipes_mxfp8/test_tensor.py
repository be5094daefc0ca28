"""``MXFP8Tensor`` and its storage: views on the boundaries of blocks, writes through them, copies, usages, refusals.

A view is held against two things: the same view of the dequantized values, and the quantization of the same view of
the original.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import prepare_for_saving, restore_from_saved
from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava.gemm_blocks import _lines, swizzle
from ottava.tensors.blocks import BlockOperand
from ottava_mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
KINDS = ("both", "rowwise", "columnwise", "square")
# Squares of which one direction is held can give the other: they are held to the boundaries of both.
VIEW_KINDS = (*KINDS, "square rows", "square columns")
SHAPES = [(), (1,), (5,), (70,), (0,), (0, 7), (7, 0), (1, 1), (33, 70), (2, 31, 65)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
few = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def wide(shape: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes so far apart that rows and columns of blocks keep different values."""
    random = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(10 * torch.randn(tuple(shape), generator=random)).clamp(1e-30, 1e30)
    return (torch.randn(tuple(shape), generator=random).sign() * magnitudes).to(dtype)


def quantizer(kind: str = "both", fp8_dtype: torch.dtype = E4M3, rounding: str = "up") -> MXFP8Quantizer:
    return MXFP8Quantizer(
        fp8_dtype,
        rowwise=kind not in ("columnwise", "square columns"),
        columnwise=kind not in ("rowwise", "square rows"),
        with_2d_quantization=kind.startswith("square"),
        scale_rounding=rounding,
    )


def inner(q: Any) -> list[torch.Tensor | None]:
    return [getattr(q, name) for name in INNER]


def check_bytes(q: Any, expected: Any) -> None:
    """Codes and scales are those of ``expected``, a quantized tensor or their list."""
    wanted = expected if isinstance(expected, list) else inner(expected)
    for name, mine, theirs in zip(INNER, inner(q), wanted, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            assert mine.shape == theirs.shape, name
            assert torch.equal(mine, theirs), name


def check_same(one: torch.Tensor, two: torch.Tensor) -> None:
    """Equal bit for bit, the sign of zero included."""
    assert not isinstance(one, MXFP8Tensor)
    assert not isinstance(two, MXFP8Tensor)
    assert (one.shape, one.dtype) == (two.shape, two.dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    assert torch.equal(one.contiguous().view(bits), two.contiguous().view(bits))


def values_of(result: torch.Tensor) -> torch.Tensor:
    return result.dequantize() if isinstance(result, MXFP8Tensor) else result


def decoded(q: Any, columnwise: bool) -> torch.Tensor:
    """The values of one direction in float64, by torch's own conversions."""
    codes, scales = (q._columnwise_data, q._columnwise_scale_inv) if columnwise else inner(q)[:2]
    columns = codes.shape[-1] if codes.dim() else 1
    matrix = codes.contiguous().view(q._fp8_dtype).double().reshape(math.prod(codes.shape[:-1]), columns)
    powers = torch.where(scales == 255, math.nan, torch.exp2(scales.double() - 127))
    side = 0 if columnwise else 1
    powers = powers.repeat_interleave(32, side).narrow(side, 0, matrix.shape[side])
    return (matrix * powers).reshape(codes.shape)


# Views. Letters say with which usages the class is kept: (r)owwise only, (c)olumnwise only, (b)oth, (s)quares.

Op = Callable[[torch.Tensor], Any]
LETTER = dict(zip(VIEW_KINDS, "brcsss", strict=True))
VIEWS: dict[str, tuple[tuple[int, ...], Op, str]] = {
    "rows": ((96, 128), lambda t: t[32:64], "rcbs"),
    "first rows": ((96, 128), lambda t: t[:32], "rcbs"),
    "last rows": ((96, 128), lambda t: t[-32:], "rcbs"),
    "rows to a ragged end": ((70, 40), lambda t: t[32:], "rcbs"),
    "rows of a ragged end": ((70, 40), lambda t: t[64:70], "rcbs"),
    "rows beyond the end": ((70, 40), lambda t: t[64:700], "rcbs"),
    "rows before a ragged end": ((70, 40), lambda t: t[:69], "r"),
    "rows off the boundary": ((96, 128), lambda t: t[5:37], "r"),
    "rows that end off it": ((96, 128), lambda t: t[32:50], "r"),
    "no rows": ((96, 128), lambda t: t[32:32], "rcbs"),
    "all rows": ((96, 128), lambda t: t[:], "rcbs"),
    "every second row": ((96, 128), lambda t: t[::2], ""),
    "columns": ((96, 128), lambda t: t[:, 32:96], "rcbs"),
    "columns to a ragged end": ((40, 70), lambda t: t[:, 64:], "rcbs"),
    "columns off the boundary": ((96, 128), lambda t: t[:, 3:40], "c"),
    "columns that end off it": ((96, 128), lambda t: t[:, 32:50], "c"),
    "every second column": ((96, 128), lambda t: t[:, ::2], ""),
    "rows and columns": ((96, 128), lambda t: t[32:64, 64:], "rcbs"),
    "narrow": ((96, 128), lambda t: t.narrow(1, 32, 32), "rcbs"),
    "row": ((96, 128), lambda t: t[5], "r"),
    "row in the last block": ((33, 40), lambda t: t[32], "rcbs"),
    "the only row": ((1, 40), lambda t: t[0], "rcbs"),
    "column": ((96, 128), lambda t: t[:, 5], ""),
    "element": ((96, 128), lambda t: t[5, 7], ""),
    "matrix of a stack": ((3, 32, 40), lambda t: t[1], "rcbs"),
    "last of a stack": ((3, 32, 40), lambda t: t[-1], "rcbs"),
    "matrix of a ragged stack": ((3, 31, 40), lambda t: t[1], "r"),
    "matrices of a stack": ((3, 32, 40), lambda t: t[1:], "rcbs"),
    "rows of a stack of one": ((1, 64, 40), lambda t: t[:, 32:], "rcbs"),
    "rows of a stack": ((2, 64, 40), lambda t: t[:, 32:], ""),
    "one row of each": ((2, 64, 40), lambda t: t[:, 3], "r"),
    "columns of a stack": ((2, 31, 96), lambda t: t[:, :, 32:64], "rcbs"),
    "columns of a vector": ((96,), lambda t: t[32:64], "rcbs"),
    "part of a vector": ((96,), lambda t: t[3:5], "c"),
    "element of a vector": ((96,), lambda t: t[3], ""),
    "split rows by view": ((96, 128), lambda t: t.view(2, 48, 128), "rcbs"),
    "join rows": ((3, 31, 40), lambda t: t.view(93, 40), "rcbs"),
    "flatten leading": ((3, 2, 5, 40), lambda t: t.flatten(0, 1), "rcbs"),
    "unflatten": ((6, 40), lambda t: t.unflatten(0, (2, 3)), "rcbs"),
    "view as itself": ((6, 40), lambda t: t.view(6, 40), "rcbs"),
    "narrower lines": ((96, 128), lambda t: t.view(384, 32), "r"),
    "wider lines": ((96, 128), lambda t: t.view(48, 256), "r"),
    "one line": ((96, 128), lambda t: t.view(-1), "r"),
    "ravel": ((96, 128), lambda t: t.ravel(), "r"),
    "reshape": ((96, 128), lambda t: t.reshape(96, 2, 64), "r"),
    "lines of another length": ((96, 128), lambda t: t.view(256, 48), ""),
    "ragged lines": ((32, 40), lambda t: t.view(40, 32), ""),
    "unsqueeze": ((33, 40), lambda t: t.unsqueeze(0), "rcbs"),
    "unsqueeze between": ((33, 40), lambda t: t.unsqueeze(1), "rcbs"),
    "unsqueeze last": ((33, 40), lambda t: t.unsqueeze(-1), ""),
    "unsqueeze by None": ((33, 40), lambda t: t[None], "rcbs"),
    "unsqueeze a scalar": ((), lambda t: t.unsqueeze(0), "rcbs"),
    "squeeze": ((1, 33, 1, 40), lambda t: t.squeeze(), "rcbs"),
    "squeeze one": ((1, 33, 40), lambda t: t.squeeze(0), "rcbs"),
    "squeeze some": ((1, 33, 1, 40), lambda t: t.squeeze((0, 2)), "rcbs"),
    "squeeze nothing": ((2, 33, 40), lambda t: t.squeeze(0), "rcbs"),
    "squeeze last": ((33, 1), lambda t: t.squeeze(1), ""),
    "expand to more dimensions": ((33, 40), lambda t: t.expand(1, 33, 40), "rcbs"),
    "expand to more": ((33, 40), lambda t: t.expand(2, 33, 40), ""),
    "t": ((33, 70), lambda t: t.t(), "rcbs"),
    "T": ((33, 70), lambda t: t.T, "rcbs"),
    "mT": ((33, 70), lambda t: t.mT, "rcbs"),
    "transpose": ((33, 70), lambda t: t.transpose(-1, -2), "rcbs"),
    "permute": ((33, 70), lambda t: t.permute(1, 0), "rcbs"),
    "movedim": ((33, 70), lambda t: t.movedim(0, 1), "rcbs"),
    "permute to the same": ((2, 33, 40), lambda t: t.permute(0, 1, 2), "rcbs"),
    "permute three": ((2, 33, 40), lambda t: t.permute(1, 0, 2), ""),
    "transpose a stack": ((2, 33, 40), lambda t: t.mT, ""),
    "t of a vector": ((40,), lambda t: t.t(), "rcbs"),
    "t twice": ((33, 70), lambda t: t.t().t(), "rcbs"),
    "rows of t": ((33, 70), lambda t: t.t()[32:64], "rcbs"),
    "rows of t off the boundary": ((33, 70), lambda t: t.t()[3:40], "c"),
    "columns of t": ((70, 70), lambda t: t.t()[:, 64:], "rcbs"),
    "unsqueezed t": ((33, 70), lambda t: t.t().unsqueeze(0), "rcbs"),
    "lines of rows": ((96, 128), lambda t: t[32:64].view(2, 16, 128), "rcbs"),
    "as_strided": ((96, 40), lambda t: t.as_strided((96, 40), (40, 1)), "rcbs"),
    "as_strided rows": ((96, 40), lambda t: t.as_strided((32, 40), (40, 1), 32 * 40), "rcbs"),
    "as_strided rows off the boundary": ((96, 40), lambda t: t.as_strided((32, 40), (40, 1), 3 * 40), "r"),
    "as_strided lines": ((96, 128), lambda t: t.as_strided((384, 32), (32, 1)), "r"),
    "as_strided stack": ((3, 32, 40), lambda t: t.as_strided((96, 40), (40, 1)), "rcbs"),
    "as_strided between rows": ((96, 40), lambda t: t.as_strided((32, 40), (40, 1), 5), ""),
    "as_strided elsewhere": ((96, 40), lambda t: t.as_strided((2, 3), (40, 1), 1), ""),
    "as_strided overlapping": ((96, 40), lambda t: t.as_strided((96, 40), (1, 1)), ""),
    "diagonal": ((33, 33), lambda t: t.diagonal(), ""),
    "unfold": ((96, 40), lambda t: t.unfold(0, 32, 32), ""),
    "ellipsis": ((33, 40), lambda t: t[...], "rcbs"),
    "detach": ((33, 40), lambda t: t.detach(), "rcbs"),
    "empty columns": ((33, 0), lambda t: t[:32], "rcbs"),
    "empty to another shape": ((0, 64), lambda t: t.view(5, 0), "rcbs"),
}


@pytest.mark.parametrize("kind", VIEW_KINDS)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_the_class_where_blocks_allow_and_the_values_anywhere(name: str, kind: str) -> None:
    shape, op, kept = VIEWS[name]
    x, make = wide(shape), quantizer(kind)
    whole = make(x)
    before = [None if t is None else t.clone() for t in inner(whole)]
    view, plain = op(whole), op(whole.dequantize())
    assert isinstance(view, MXFP8Tensor) is (LETTER[kind] in kept)
    check_same(values_of(view), plain)
    assert view.shape == plain.shape
    if isinstance(view, MXFP8Tensor):
        assert view.stride() == plain.stride()
        assert view.dtype == whole.dtype
        # Its blocks are those of its part of the original.
        check_bytes(view, make.with_usage(**view.get_usages())(op(x)))
        assert view._fp8_dtype == whole._fp8_dtype
    check_bytes(whole, before)


WRITES: dict[str, Callable[[MXFP8Tensor, torch.Tensor], Any]] = {
    "copy_": lambda view, new: view.copy_(new),
    "quantize_": lambda view, new: view.quantize_(new),
    "quantized": lambda view, new: view.copy_(view._quantizer.with_usage(**view.get_usages())(new)),
    "out": lambda view, new: view._quantizer.quantize(new, out=view),
    "add": lambda view, new: torch.add(torch.zeros_like(new), new, out=view),
}


@pytest.mark.parametrize("kind", VIEW_KINDS)
@pytest.mark.parametrize("name", [name for name, (_, _, kept) in VIEWS.items() if kept])
def test_a_write_to_a_view_reaches_the_whole_and_nothing_else(name: str, kind: str) -> None:
    """The whole is then what quantizing it anew gives, block for block."""
    shape, op, kept = VIEWS[name]
    if LETTER[kind] not in kept:
        return
    for number, (way, write) in enumerate(WRITES.items()):
        x, make = wide(shape), quantizer(kind)
        whole = make(x)
        view = op(whole)
        new = wide(view.shape, seed=7 + number)
        write(view, new)
        op(x).copy_(new)
        check_bytes(whole, make(x)), way
        check_same(op(whole).dequantize(), view.dequantize())


SPLITS: dict[str, tuple[tuple[int, ...], Op, str]] = {
    "split": ((96, 40), lambda t: t.split(32), "rcbs"),
    "split with a rest": ((70, 40), lambda t: t.split(32), "rcbs"),
    "split off the boundary": ((96, 40), lambda t: t.split(40), "r"),
    "split by sizes": ((96, 40), lambda t: t.split([32, 64]), "rcbs"),
    "split by sizes off the boundary": ((96, 40), lambda t: t.split([10, 86]), "r"),
    "split by sizes partly off the boundary": ((96, 40), lambda t: t.split([32, 10, 54]), "r"),
    "split columns": ((40, 96), lambda t: t.split(64, dim=1), "rcbs"),
    "split columns off the boundary": ((40, 96), lambda t: t.split(48, -1), "c"),
    "split a stack": ((3, 32, 40), lambda t: t.split(1), "rcbs"),
    "chunk": ((96, 40), lambda t: t.chunk(3), "rcbs"),
    "chunk off the boundary": ((96, 40), lambda t: t.chunk(2), "r"),
    "chunk columns": ((40, 128), lambda t: t.chunk(2, 1), "rcbs"),
    "one chunk": ((33, 40), lambda t: t.chunk(1), "rcbs"),
    "tensor_split": ((96, 40), lambda t: t.tensor_split([32, 64]), "rcbs"),
    "hsplit": ((40, 96), lambda t: t.hsplit(3), "rcbs"),
    "unbind": ((3, 32, 40), lambda t: t.unbind(), "rcbs"),
    "unbind rows": ((33, 40), lambda t: t.unbind(0), "r"),
    "unbind columns": ((3, 40), lambda t: t.unbind(1), ""),
    "iteration": ((3, 32, 40), lambda t: tuple(t), "rcbs"),
    "split t": ((40, 96), lambda t: t.t().split(32), "rcbs"),
    "unbind nothing": ((0, 40), lambda t: t.unbind(), "rcbs"),
}


@pytest.mark.parametrize("kind", VIEW_KINDS)
@pytest.mark.parametrize("name", SPLITS)
def test_splits(name: str, kind: str) -> None:
    shape, op, kept = SPLITS[name]
    x, make = wide(shape), quantizer(kind)
    whole = make(x)
    parts, originals, plain = op(whole), op(x), op(whole.dequantize())
    assert len(parts) == len(plain)
    for part, original, expected in zip(parts, originals, plain, strict=True):
        assert isinstance(part, MXFP8Tensor) is (LETTER[kind] in kept)
        check_same(values_of(part), expected)
        if isinstance(part, MXFP8Tensor):
            check_bytes(part, make.with_usage(**part.get_usages())(original))
    if parts and LETTER[kind] in kept:
        new = wide(parts[-1].shape, seed=9)
        parts[-1].copy_(new)
        originals[-1].copy_(new)
        check_bytes(whole, make(x))


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
    free = step == 1 and kind == ("columnwise" if last else "rowwise") and math.prod(shape[:dim]) == 1
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
        # Counted from its own first element.
        stride = view.stride()
        part = view.as_strided((3, 2), stride, 2 * stride[0] + 5 * stride[1])
        assert type(part) is torch.Tensor
        check_same(part, plain[2:5, 5:7])


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


# Values


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("columnwise", [False, True])
def test_all_codes_and_scales_are_decoded(fp8_dtype: torch.dtype, columnwise: bool) -> None:
    """Each code under each scale, in all dtypes; NaN scales too."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    parts = (codes.t().contiguous(), scales.t().contiguous()) if columnwise else (codes, scales)
    empty = (None, None)
    rows, columns = (empty, parts) if columnwise else (parts, empty)
    for cls in (MXFP8Tensor, MXFP8TensorStorage):
        q = cls(
            dtype=torch.bfloat16,
            rowwise_data=rows[0],
            rowwise_scale_inv=rows[1],
            columnwise_data=columns[0],
            columnwise_scale_inv=columns[1],
            fp8_dtype=fp8_dtype,
        )
        exact = decoded(q, columnwise)
        for dtype in (torch.float64, *DTYPES):
            got = q.dequantize(dtype)
            assert got.dtype == dtype
            torch.testing.assert_close(got, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert q.dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_values_are_those_of_the_rows_if_held(kind: str, dtype: torch.dtype) -> None:
    for number, shape in enumerate(SHAPES):
        x = wide(shape, seed=number).clamp(-1e4, 1e4).to(dtype)
        for internal in (False, True):
            make = quantizer(kind, E5M2)
            make.internal = internal
            q = make(x)
            exact = decoded(q, kind == "columnwise")
            check_same(q.dequantize(), exact.to(dtype))
            check_same(q.dequantize(torch.float64), exact)
            assert q.dequantize(torch.float32).dtype == torch.float32
            fp8 = q.dequantize(E5M2)
            assert torch.equal(fp8.view(torch.uint8), exact.float().to(E5M2).view(torch.uint8))


def test_conversions() -> None:
    q = quantizer()(wide((33, 70)))
    exact = decoded(q, False)
    for method, dtype in (("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        check_same(getattr(q, method)(), exact.to(dtype))
    check_same(q.double(), exact)
    check_same(q.to(torch.float64), exact)
    for dtype in DTYPES:
        for made in (q.to(dtype), q.to_dtype(dtype), q.to("cpu", dtype), q.type(dtype)):
            assert isinstance(made, MXFP8Tensor)
            assert made.dtype == dtype
            check_bytes(made, q)
            check_same(made.dequantize(), exact.to(dtype))
        shared = q.to_dtype(dtype)
        assert [t.data_ptr() for t in inner(shared)] == [t.data_ptr() for t in inner(q)]
    assert q.to(torch.float32) is q
    assert q.cpu() is q
    assert type(q.to(torch.int32)) is torch.Tensor
    moved = q.to("meta")
    assert isinstance(moved, MXFP8Tensor)
    assert moved.is_meta
    assert all(t.is_meta for t in inner(moved))


def test_to_dtype_is_differentiable() -> None:
    tensor = quantizer()(wide((33, 70))).requires_grad_()
    made = tensor.to_dtype(torch.bfloat16)
    assert isinstance(made, MXFP8Tensor)
    made.sum().backward()
    assert torch.equal(tensor.grad, torch.ones(33, 70))
    tensor.grad = None
    tensor.dequantize(torch.float64).sum().backward()
    assert torch.equal(tensor.grad, torch.ones(33, 70))


def test_gradients_through_views() -> None:
    """Also where a view is written to in place, and whether it is quantized or not."""
    weights = torch.randint(-3, 4, (96, 64)).float()
    for op in (lambda t: t[32:64], lambda t: t.t()[:32], lambda t: t[5:7], lambda t: t.view(2, 48, 64)[1]):
        leaf, plain = torch.randn(96, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
        for start, whole in ((leaf, quantizer()(leaf)), (plain, plain)):
            (op(whole) * op(weights)).sum().backward()
            assert start.grad is not None
        assert torch.equal(leaf.grad, plain.grad)
    for op in (lambda t: t[:32], lambda t: t[32:64], lambda t: t.t()[32:]):
        leaf, plain = torch.randn(96, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
        for whole in (quantizer()(leaf), plain.clone()):
            op(whole).mul_(2.0)
            (whole * weights).sum().backward()
        assert torch.equal(leaf.grad, plain.grad)


def test_other_ops_see_dequantized_values() -> None:
    q = quantizer()(wide((64, 64), dtype=torch.bfloat16))
    values = decoded(q, False).bfloat16()
    for op in (
        lambda t: t + 1,
        lambda t: t @ t.t(),
        lambda t: torch.cat([t, t]),
        lambda t: t.sum(),
        lambda t: t.index_select(0, torch.tensor([3, 1])),
        lambda t: t[torch.tensor([3, 1])],
        lambda t: t[t > 0],
        lambda t: torch.nn.functional.linear(t, t),
        lambda t: torch.where(t > 0, t, -t),
        lambda t: t.flip(0),
        lambda t: torch.zeros_like(t),
        lambda t: torch.ones_like(t),
        lambda t: t.view(torch.int16),
        lambda t: torch.stack([t, t]),
    ):
        got, expected = op(q), op(values)
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected)
    assert q[3, 4].item() == values[3, 4].item()
    assert torch.equal(torch.zeros(64, 64).bfloat16().copy_(q), values)


def test_flat_values_are_like_any_other_tensor() -> None:
    q = quantizer()(wide((33, 70)))
    values = q.dequantize()
    for flatten in (torch.Tensor.flatten, torch.Tensor.ravel, lambda t: t.view(-1), lambda t: t.reshape(-1)):
        flat = flatten(q)
        check_same(flat, values.flatten())
        check_same(flat[3:5] + 1, values.flatten()[3:5] + 1)
        check_same(copy.deepcopy(flat), values.flatten())
        check_same(pickle.loads(pickle.dumps(flat)), values.flatten())
        stream = io.BytesIO()
        torch.save(flat, stream)
        stream.seek(0)
        check_same(torch.load(stream, weights_only=True), values.flatten())
        check_same(torch.nn.Parameter(flat).detach(), values.flatten())
        torch._dynamo.reset()
        doubled = torch.compile(lambda t: t * 2, fullgraph=True, backend="aot_eager")(flat)
        check_same(doubled, values.flatten() * 2)


def test_in_place_ops_quantize_again() -> None:
    make, x = quantizer(), wide((40, 70))
    q = make(x)
    values = q.dequantize()
    same = q.mul_(3).add_(1)
    assert same is q
    step = make(values * 3).dequantize() + 1
    check_bytes(q, make(step))
    torch._foreach_mul_([q, q[:32]], 0.0)
    check_bytes(q, make(torch.zeros(40, 70) * step.sign()))
    assert torch.add(torch.ones(40, 70), 1.0, out=q) is q
    check_bytes(q, make(torch.full((40, 70), 2.0)))
    q.zero_()
    check_bytes(q, make(torch.zeros(40, 70)))
    q.fill_(3.0)[32:].fill_(5.0)
    assert torch.equal(q.dequantize()[31:33, 0], torch.tensor([3.0, 5.0]))
    for index in (3, [2, 9]):
        q[32:][:, 32:64] = x[32:, 32:64]
        expected = torch.full((40, 70), 3.0)
        expected[32:] = 5.0
        expected[32:, 32:64] = x[32:, 32:64]
        check_bytes(q, make(expected)), index


def test_a_view_across_blocks_is_a_copy() -> None:
    """As documented: what is written to one is not written to the whole."""
    x = wide((64, 64))
    q = quantizer()(x)
    for write in (
        lambda t: t[:, 3:5].zero_(),
        lambda t: t.view(-1).zero_(),
        lambda t: t[::2].zero_(),
        lambda t: t.fill_diagonal_(1.0),
    ):
        write(q)
        check_bytes(q, quantizer()(x))


def test_an_assignment_across_blocks_reaches_the_whole() -> None:
    for index in (5, (slice(None), 3), slice(None, None, 2), (4, 40)):
        q = quantizer()(wide((64, 64)))
        expected = q.dequantize()
        expected[index] = 0.0
        q[index] = 0.0
        check_bytes(q, quantizer()(expected))


def test_no_memory_is_given_away() -> None:
    """There is none that holds the values."""
    q = quantizer()(wide((4, 4)))
    for call in (lambda: torch.from_dlpack(q), lambda: q.__dlpack__(), lambda: q.numpy(), lambda: q.tolist()):
        with pytest.raises((OttavaError, RuntimeError)):
            call()


# New tensors and copies


@pytest.mark.parametrize("kind", KINDS)
def test_new_tensors(kind: str) -> None:
    make = quantizer(kind)
    q = make(wide((40, 70), dtype=torch.bfloat16))
    for whole in (q, q.t()):
        made = whole.new_zeros(33, 5)
        assert isinstance(made, MXFP8Tensor)
        assert torch.equal(made.dequantize(), torch.zeros(33, 5, dtype=torch.bfloat16))
        assert made.get_usages() == whole.get_usages()
        for made, shape in (
            (whole.new_empty((3, 2)), (3, 2)),
            (whole.new_empty(()), ()),
            (whole.new_empty((0, 4)), (0, 4)),
            (torch.empty_like(whole), whole.shape),
            (whole.new_empty_strided((3, 2), (2, 1)), (3, 2)),
        ):
            assert isinstance(made, MXFP8Tensor)
            assert (made.shape, made.dtype) == (shape, torch.bfloat16)
            assert made.get_usages() == whole.get_usages()
            new = wide(shape)
            made.copy_(new)
            check_bytes(made, make.with_usage(**whole.get_usages())(new))
            assert made._quantizer is not whole._quantizer
    assert torch.empty_like(q, dtype=torch.float32).dtype == torch.float32
    assert isinstance(torch.empty_like(q, dtype=torch.float32), MXFP8Tensor)
    assert q.new_zeros(2, device="meta").is_meta
    assert torch.empty_like(q, device="meta").is_meta
    for plain in (
        q.new_zeros(2, dtype=torch.int32),
        torch.empty_like(q, dtype=torch.float64),
        q.new_empty_strided((3, 2), (1, 3)),
        q.new_ones(2),
        q.new_full((2,), 3.0),
        # Moments of an optimizer.
        torch.zeros_like(q),
    ):
        assert type(plain) is torch.Tensor


@pytest.mark.parametrize("kind", KINDS)
def test_copies_share_nothing(kind: str) -> None:
    make = quantizer(kind)
    for op in (lambda t: t, lambda t: t[32:], lambda t: t.t()):
        whole = make(wide((70, 40)))
        q = op(whole)
        before = [None if t is None else t.clone() for t in inner(q)]
        values = q.dequantize()
        copies = [q.clone(), copy.deepcopy(q), q.clone(memory_format=torch.contiguous_format), q.to(torch.bfloat16)]
        copies.append(pickle.loads(pickle.dumps(q)))
        for made in copies:
            assert isinstance(made, MXFP8Tensor)
            assert made._quantizer == q._quantizer
            assert made._quantizer is not q._quantizer
        q.copy_(wide(q.shape, seed=1))
        for made in copies:
            check_bytes(made, before)
            check_same(made.dequantize(torch.float32), values if made.dtype == q.dtype else values.bfloat16().float())
            made.zero_()
        assert bool(q.dequantize().any())
    for internal in (True,):
        make.internal = internal
        storage = make(wide((70, 40)))
        made = copy.deepcopy(storage)
        assert type(made) is MXFP8TensorStorage
        storage.quantize_(torch.zeros(70, 40))
        check_bytes(made, make(wide((70, 40))))


def test_deepcopy_keeps_what_a_parameter_has() -> None:
    parameter = torch.nn.Parameter(quantizer()(wide((33, 40))))
    parameter.grad = torch.ones(33, 40)
    pair = copy.deepcopy([parameter, parameter])
    assert pair[0] is pair[1]
    assert isinstance(pair[0], torch.nn.Parameter)
    assert pair[0].requires_grad
    assert torch.equal(pair[0].grad, parameter.grad)
    assert pair[0].grad is not parameter.grad
    with pytest.raises(UsageError, match="leaf"):
        copy.deepcopy(quantizer()(torch.ones(2, requires_grad=True)))


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_copying_between_tensors(source: str, target: str) -> None:
    """Bytes where the source has all that the destination holds; else its values, quantized again."""
    src, dst = quantizer(source)(wide((70, 40))), quantizer(target)(wide((70, 40), seed=1))
    held = dst.get_usages()
    enough = all(src.get_usages()[usage] for usage, wanted in held.items() if wanted)
    adopted = enough and (target != "square" or source == "square")
    assert dst.copy_(src) is dst
    assert dst.get_usages() == held
    if adopted:
        check_bytes(dst, [theirs if mine is not None else None for mine, theirs in zip(inner(dst), inner(src))])
    else:
        check_bytes(dst, quantizer(target)(src.dequantize()))
    assert all(
        mine.data_ptr() != theirs.data_ptr()
        for mine, theirs in zip(inner(dst), inner(src), strict=True)
        if mine is not None and theirs is not None
    )


def test_copying_what_is_not_alike() -> None:
    make = quantizer()
    dst, other = make(wide((70, 40))), quantizer("both", E5M2)(wide((70, 40), seed=1))
    dst.copy_(other)
    check_bytes(dst, make(other.dequantize()))
    dst.copy_(torch.arange(40.0))
    check_bytes(dst, make(torch.arange(40.0).expand(70, 40)))
    dst.copy_(make(wide((40,))))
    check_bytes(dst, make(make(wide((40,))).dequantize().expand(70, 40)))
    dst.copy_(wide((70, 40), dtype=torch.bfloat16))
    check_bytes(dst, make(wide((70, 40), dtype=torch.bfloat16)))
    plain = torch.empty(70, 40, dtype=torch.float64)
    plain.copy_(other)
    check_same(plain, other.dequantize().double())
    half = make(wide((70, 40), seed=5, dtype=torch.bfloat16))
    dst.copy_(half)
    check_bytes(dst, half)
    assert dst.dtype == torch.float32
    with pytest.raises(ShapeError, match=r"\(3, 40\)"):
        dst.copy_(torch.ones(3, 40))
    with pytest.raises(DTypeError):
        dst.copy_(torch.ones(70, 40).int())
    with pytest.raises(DeviceError, match="meta"):
        dst.copy_(torch.ones(70, 40, device="meta"))
    check_bytes(dst, half)


def test_copy_from_storage() -> None:
    make = quantizer()
    bare = make.copy()
    bare.internal = True
    for dst in (make(torch.zeros(70, 40)), bare(torch.zeros(70, 40))):
        for src in (make(wide((70, 40))), bare(wide((70, 40), seed=1))):
            dst.copy_from_storage(src, noop_flag=torch.zeros(1))
            check_bytes(dst, src)
            dst.copy_from_storage(make(torch.ones(70, 40)), noop_flag=torch.ones(1))
            check_bytes(dst, src)
            dst.copy_from_storage(make(torch.ones(70, 40)))
            check_bytes(dst, make(torch.ones(70, 40)))
        rows = quantizer("rowwise")(wide((70, 40)))
        for error, wrong, message in (
            (UsageError, rows, "columnwise_data"),
            (ShapeError, make(torch.ones(40, 70)), r"\(40, 70\)"),
            (DTypeError, quantizer("both", E5M2)(torch.ones(70, 40)), "e5m2"),
            (DTypeError, torch.ones(70, 40), "Tensor"),
        ):
            with pytest.raises(error, match=message):
                dst.copy_from_storage(wrong)
        check_bytes(dst, make(torch.ones(70, 40)))
    # A destination that holds less takes what it holds.
    rows = quantizer("rowwise")(torch.zeros(70, 40))
    rows.copy_from_storage(make(wide((70, 40))))
    check_bytes(rows, quantizer("rowwise")(wide((70, 40))))


def test_data_adopts_or_quantizes() -> None:
    make = quantizer()
    q, other = make(wide((40, 70))), quantizer("square", E5M2)(wide((40, 70), seed=1))
    q.data = other
    assert [t.data_ptr() for t in inner(q)] == [t.data_ptr() for t in inner(other)]
    check_same(q.dequantize(), other.dequantize())
    assert q._fp8_dtype == E5M2
    assert q.rowwise_serves_columnwise
    for kind in KINDS:
        parameter = torch.nn.Parameter(quantizer(kind)(wide((40, 70))))
        alias = parameter.detach()
        new = wide((40, 70), seed=2, dtype=torch.bfloat16)
        parameter.data = new
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad
        check_bytes(parameter, quantizer(kind)(new))
        check_bytes(alias, quantizer(kind)(wide((40, 70))))
    transposed = make(wide((70, 40))).t()
    parameter = torch.nn.Parameter(make(wide((40, 70))))
    parameter.data = transposed
    check_same(parameter.detach().dequantize(), transposed.dequantize())
    alias = parameter.data
    assert not alias.requires_grad
    alias.zero_()
    assert not bool(parameter.dequantize().any())
    for error, wrong in ((ShapeError, torch.zeros(2)), (DTypeError, 5), (DTypeError, torch.zeros(40, 70).int())):
        with pytest.raises(error):
            parameter.data = wrong


# Usages, metadata, saving


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_usages(kind: str, internal: bool) -> None:
    make = quantizer(kind)
    make.internal = internal
    x = wide((70, 40))
    full = inner(make(x))
    for rowwise, columnwise in itertools.product((None, True, False), repeat=2):
        q = make(x)
        have = q.get_usages()
        assert have == {"rowwise": kind != "columnwise", "columnwise": kind != "rowwise"}
        wanted = {
            "rowwise": have["rowwise"] if rowwise is None else rowwise,
            "columnwise": have["columnwise"] if columnwise is None else columnwise,
        }
        lacking = [name for name in wanted if wanted[name] and not have[name]]
        if not any(wanted.values()):
            with pytest.raises(OptionError, match=r"neither usage.*clear\(\)"):
                q.update_usage(rowwise, columnwise)
            check_bytes(q, full)
        elif lacking:
            with pytest.raises(UsageError, match=rf"no {lacking[0]} data.*quantizer.set_usage\({lacking[0]}=True\)"):
                q.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
            check_bytes(q, full)
        else:
            q.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
            assert q.get_usages() == wanted
            kept = [wanted["rowwise"]] * 2 + [wanted["columnwise"]] * 2
            check_bytes(q, [t if keep else None for t, keep in zip(full, kept, strict=True)])
            check_same(q.dequantize(torch.float64), decoded(q, not wanted["rowwise"]))
    for wrong in ("no", 1):
        with pytest.raises(OptionError, match="rowwise_usage"):
            make(x).update_usage(rowwise_usage=wrong)


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("shape", [(70, 40), (64, 64), (5,), (), (2, 33, 65), (0, 40), (1, 1)])
def test_squares_give_either_usage(shape: tuple[int, ...], internal: bool) -> None:
    make = quantizer("square")
    x = wide(shape)
    both = make(x)
    assert both.rowwise_serves_columnwise
    for rowwise in (True, False):
        one = make.with_usage(rowwise, not rowwise)
        one.internal = internal
        q = one(x)
        q.update_usage(rowwise_usage=True, columnwise_usage=True)
        check_bytes(q, both)
        q.update_usage(rowwise_usage=not rowwise, columnwise_usage=rowwise)
        check_bytes(q, make.with_usage(not rowwise, rowwise)(x))
        # The direction that was made takes part in writes.
        q.update_usage(rowwise_usage=True, columnwise_usage=True)
        q.quantize_(2 * x.flip(0) if x.dim() else 2 * x)
        check_bytes(q, make(2 * x.flip(0) if x.dim() else 2 * x))


def test_squares_of_views_give_either_usage() -> None:
    x = wide((96, 70))
    for op in (lambda t: t.t(), lambda t: t[32:], lambda t: t[:, 32:64], lambda t: t.view(2, 48, 70)):
        view = op(quantizer("square").with_usage(True, False)(x))
        view.update_usage(rowwise_usage=True, columnwise_usage=True)
        check_bytes(view, quantizer("square")(op(x)))


def test_squares_take_squares_only() -> None:
    """A tensor that says that its directions hold the same is not given what differs."""
    x = wide((64, 64))
    square, lines = quantizer("square"), quantizer()
    for write in (
        lambda q: lines.quantize(x, out=q),
        lambda q: lines.update_quantized(x, q),
        lambda q: q.copy_from_storage(lines(x)),
        lambda q: (q.update_quantizer(lines), q.quantize_(x)),
    ):
        q = square(torch.ones(64, 64))
        try:
            write(q)
        except OttavaError:
            check_bytes(q, square(torch.ones(64, 64)))
        else:
            assert not q.rowwise_serves_columnwise or torch.equal(decoded(q, False), decoded(q, True))
    # The other way round nothing is promised that does not hold.
    q = lines(torch.ones(64, 64))
    square.quantize(x, out=q)
    check_bytes(q, square(x))


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_builds_it_again(kind: str) -> None:
    make = quantizer(kind, E5M2)
    bare = make.copy()
    bare.internal = True
    for q in (make(wide((70, 40), dtype=torch.float16)), bare(wide((70, 40), dtype=torch.float16))):
        metadata = q.get_metadata()
        again = type(q)(**metadata)
        assert type(again) is type(q)
        assert again.dtype == torch.float16
        for mine, theirs in zip(inner(again), inner(q), strict=True):
            assert mine is theirs or mine.data_ptr() == theirs.data_ptr()
        assert again._quantizer is q._quantizer
        assert metadata["fp8_dtype"] == E5M2
        assert metadata["with_2d_quantization"] is (kind == "square")
    like = MXFP8Tensor.make_like(make(wide((70, 40))), dtype=torch.bfloat16, requires_grad=True)
    assert like.dtype == torch.bfloat16
    assert like.requires_grad
    with pytest.raises(DTypeError, match="make_like of a Tensor"):
        MXFP8Tensor.make_like(torch.ones(2))


@pytest.mark.parametrize("kind", KINDS)
def test_size_shape_device_and_bytes(kind: str) -> None:
    for shape in SHAPES:
        for internal in (False, True):
            make = quantizer(kind)
            make.internal = internal
            q = make(wide(shape))
            assert tuple(q.size()) == tuple(q.shape) == shape
            assert q.numel() == math.prod(shape)
            assert q.device == torch.device("cpu")
            columns = shape[-1] if shape else 1
            rows = math.prod(shape[:-1])
            expected = 0
            if kind != "columnwise":
                expected += math.prod(shape) + rows * -(-columns // 32)
            if kind != "rowwise":
                expected += math.prod(shape) + -(-rows // 32) * columns
            assert q.nbytes == expected
            for dim, size in enumerate(shape):
                assert q.size(dim) == size


def test_storages_and_tensors_are_saved_in_any_order() -> None:
    make, bare = quantizer(), quantizer("rowwise")
    bare.internal = True
    things: list[Any] = [
        make(wide((70, 40))),
        None,
        bare(wide((3, 5))),
        torch.randn(3),
        quantizer("columnwise")(wide((33,))),
        make(wide((64, 64)))[32:].t(),
        quantizer("square")(wide(())),
    ]
    random = torch.Generator().manual_seed(0)
    for _ in range(6):
        order = [things[i] for i in torch.randperm(len(things), generator=random).tolist()]
        flat, objects = prepare_for_saving(*order)
        assert all(t is None or type(t) is torch.Tensor for t in flat)
        for restored in (restore_from_saved(flat, objects), restore_from_saved(objects, flat)):
            for got, thing in zip(restored, order, strict=True):
                assert type(got) is type(thing)
                if isinstance(thing, (MXFP8Tensor, MXFP8TensorStorage)):
                    check_bytes(got, thing)
                    check_same(got.dequantize(), thing.dequantize())
                    assert got._quantizer is thing._quantizer
                else:
                    assert got is thing
    with pytest.raises(ShapeError, match="saved tensors"):
        restore_from_saved(flat[:-1], objects)


@pytest.mark.parametrize("internal", [False, True])
def test_giving_up_and_taking_back(internal: bool) -> None:
    make = quantizer("rowwise")
    make.internal = internal
    q = make(wide((70, 40)))
    expected = inner(q)
    tensors, same = q.prepare_for_saving()
    assert same is q
    assert [t is None for t in tensors] == [False, False, True, True]
    assert inner(q) == [None] * 4
    with pytest.raises(UsageError, match="holds no data"):
        q.quantize_(torch.ones(70, 40)) if internal else q.block_operand(columnwise=False)
    rest = q.restore_from_saved([*tensors, None, torch.ones(1)])
    assert len(rest) == 2
    check_bytes(q, expected)
    with pytest.raises(ShapeError, match="saved tensors"):
        q.restore_from_saved(tensors[:3])
    with pytest.raises(DTypeError):
        q.restore_from_saved([1, 2, 3, 4])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_noop_flag(kind: str, flag: float) -> None:
    make = quantizer(kind)
    x, new = wide((70, 40)), wide((70, 40), seed=1)
    for internal in (False, True):
        own = make.copy()
        own.internal = internal
        q = own(x)
        assert q.quantize_(new, noop_flag=torch.tensor([flag])) is q
        check_bytes(q, make(x if flag else new))
        assert q.get_usages() == make.get_usages()
    whole = make(x)
    whole[32:64].quantize_(new[32:64], noop_flag=torch.tensor(flag))
    x[32:64] = x[32:64] if flag else new[32:64]
    check_bytes(whole, make(x))


@pytest.mark.parametrize("internal", [False, True])
def test_a_cleared_tensor(internal: bool) -> None:
    make = quantizer()
    make.internal = internal
    x = wide((70, 40))
    for write in (
        lambda q: q.quantize_(x),
        lambda q: q.copy_from_storage(quantizer()(x)),
        lambda q: q.dequantize(),
        lambda q: q.block_operand(columnwise=True),
        lambda q: pickle.dumps(q),
        lambda q: torch.save(q, io.BytesIO()),
    ):
        q = make(x)
        q.clear()
        assert inner(q) == [None] * 4
        assert q.nbytes == 0
        assert q.get_usages() == {"rowwise": False, "columnwise": False}
        assert "no readable data" in repr(q)
        with pytest.raises(UsageError, match="holds no data"):
            write(q)
    if not internal:
        assert q.shape == (70, 40)
        with pytest.raises(UsageError, match="holds no data"):
            q.copy_(x)
    else:
        with pytest.raises(UsageError, match="holds no data"):
            q.size()


def test_repr_never_raises() -> None:
    for shape, kind, dtype in itertools.product(SHAPES, KINDS, DTYPES):
        make = quantizer(kind)
        q = make(torch.ones(shape, dtype=dtype))
        assert "MXFP8Tensor" in repr(q)
        assert "no readable data" not in repr(q)
        if kind != "columnwise":
            assert "'rowwise'" in repr(q)
        assert "requires_grad=True" in repr(q.requires_grad_())
        assert "MXFP8Tensor" in str(torch.nn.Parameter(q.detach()))
        q.clear()
        assert "no readable data" in repr(q)
        make.internal = True
        storage = make(torch.ones(shape, dtype=dtype))
        assert repr(storage).startswith("MXFP8TensorStorage(shape=")
        storage.clear()
        assert "no readable data" in repr(storage)
    assert "MXFP8Tensor" in repr(quantizer().make_empty((3, 4), device="meta"))
    assert "MXFP8Tensor" in repr(quantizer()(wide((64, 64))).t()[32:])


def test_update_quantizer() -> None:
    q, x = quantizer()(wide((70, 40))), wide((70, 40), seed=1)
    other = quantizer("both", rounding="floor")
    q.update_quantizer(other)
    q.quantize_(x)
    check_bytes(q, other(x))
    q.update_quantizer(None)
    with pytest.raises(UsageError, match="update_quantizer"):
        q.quantize_(x)
    with pytest.raises(UsageError, match="update_quantizer"):
        q.mul_(2)
    with pytest.raises(DTypeError, match="int"):
        q.update_quantizer(5)
    check_bytes(q, other(x))


def test_names_of_torch_tensor_are_not_shadowed() -> None:
    q = quantizer()(wide((4, 6)))
    assert torch.equal(q.flatten().float(), q.dequantize().flatten())
    assert q.numel() == 24
    assert q.dim() == q.ndim == 2
    assert q.is_contiguous()
    assert q.element_size() == 4
    assert not q.is_sparse
    assert q.layout == torch.strided
    assert len(q) == 4
    assert q.T.shape == (6, 4)


def test_shared_memory() -> None:
    q = quantizer()(wide((70, 40)))
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()
    assert all(t.is_shared() for t in inner(q))
    check_bytes(q, quantizer()(wide((70, 40))))


def test_pinning_pins_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    q = quantizer()(wide((70, 40)))
    assert not q.is_pinned()
    pinned: list[torch.Size] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.shape)
        return tensor.clone()

    # Pinning itself needs an accelerator.
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    made = torch.ops.aten._pin_memory(q)
    assert isinstance(made, MXFP8Tensor)
    assert pinned == [t.shape for t in inner(q)]
    check_bytes(made, q)


# Freshness


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_refuses_a_value_that_was_overwritten(kind: str) -> None:
    make, w = quantizer(kind), torch.ones(64, 64, requires_grad=True)
    overwrites: dict[str, Callable[[MXFP8Tensor], Any]] = {
        "quantize_": lambda q: q.quantize_(torch.zeros(64, 64)),
        "update_quantized": lambda q: make.update_quantized(torch.zeros(64, 64), q),
        "out": lambda q: make.quantize(torch.zeros(64, 64), out=q),
        "copy_": lambda q: q.copy_(make(torch.zeros(64, 64))),
        "copy_ of values": lambda q: q.copy_(torch.zeros(64, 64)),
        "in place": lambda q: q.mul_(2.0),
        "rows": lambda q: q[32:64].zero_(),
        "rows by quantizing": lambda q: q[32:64].quantize_(torch.zeros(32, 64)),
        "rows by copying": lambda q: q[32:64].copy_(make(torch.zeros(32, 64))),
        "columns": lambda q: q[:, 32:].copy_(torch.zeros(64, 32)),
        "transpose": lambda q: q.t().zero_(),
        "view": lambda q: q.view(2, 32, 64)[1].zero_(),
        "split": lambda q: q.split(32)[1].quantize_(torch.zeros(32, 64)),
    }
    for name, overwrite in overwrites.items():
        q = make(wide((64, 64)))
        y = (q * w).sum()
        overwrite(q)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
            pytest.fail(f"{name} was not noticed")
        # And the other way round: a view was saved, the whole is overwritten.
        q = make(wide((64, 64)))
        y = (q[32:64] * w[32:64]).sum()
        overwrite(q)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
            pytest.fail(f"{name} was not noticed through a view")


def kept_operand(q: MXFP8Tensor, columnwise: bool) -> Any:
    """What the library's GEMM is given of a direction, kept with the tensor."""
    return _lines(BlockOperand(*q.block_operand(columnwise=columnwise), columnwise, q.gemm_cache()))


@pytest.mark.parametrize("inference", [False, True])
def test_a_write_through_a_view_outdates_what_the_gemm_keeps(inference: bool) -> None:
    """It is made of the codes and scales as they are now."""
    views: list[Op] = [
        lambda t: t,
        lambda t: t.detach(),
        lambda t: t.view(2, 32, 64),
        lambda t: t[32:64],
        lambda t: t[:, :32],
        lambda t: t.t(),
        lambda t: t.t()[32:],
        lambda t: t.split(32)[1],
        lambda t: t.view(2, 32, 64)[0],
        lambda t: t.to_dtype(torch.bfloat16),
        copy.copy,
    ]
    for op in views:
        with torch.inference_mode(inference):
            check_that_writes_are_noticed(op)


def check_that_writes_are_noticed(op: Op) -> None:
    """Kept: of a tensor and two views of it. Written to: one of these."""
    whole = quantizer()(wide((64, 64)))
    view, other = op(whole), op(whole)
    everything = [(q, columnwise) for q in (whole, view, other) for columnwise in (False, True)]
    for q, columnwise in everything:
        assert kept_operand(q, columnwise) is kept_operand(q, columnwise)
    view.copy_(wide(view.shape, seed=1))
    for q, columnwise in everything:
        elements, scales = q.block_operand(columnwise=columnwise)
        codes = elements.view(torch.uint8)
        if columnwise:
            codes, scales = codes.t(), scales.t()
        made = kept_operand(q, columnwise)
        assert torch.equal(made.scales, swizzle(scales))
        assert torch.equal(made.elements.view(torch.uint8)[: codes.shape[0], : codes.shape[1]], codes)


# Construction

ROWS, COLUMNS = torch.zeros(33, 70, dtype=torch.uint8), torch.zeros(33, 70, dtype=torch.uint8)


def parts(**replaced: Any) -> dict[str, Any]:
    made = {
        "dtype": torch.float32,
        "rowwise_data": ROWS.clone(),
        "rowwise_scale_inv": torch.zeros(33, 3, dtype=torch.uint8),
        "columnwise_data": COLUMNS.clone(),
        "columnwise_scale_inv": torch.zeros(2, 70, dtype=torch.uint8),
        "fp8_dtype": E4M3,
    }
    return made | replaced


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def bytes_of(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(shape, dtype=dtype)


CONSTRUCTION: dict[str, tuple[type[OttavaError], str, dict[str, Any]]] = {
    "padded rows": (ShapeError, r"rowwise_scale_inv.*\(33, 4\).*\(33, 3\)", {"rowwise_scale_inv": bytes_of(33, 4)}),
    "swapped rows": (ShapeError, r"\(3, 33\).*\(33, 3\)", {"rowwise_scale_inv": bytes_of(3, 33)}),
    "flat rows": (ShapeError, r"\(99,\).*\(33, 3\)", {"rowwise_scale_inv": bytes_of(99)}),
    "padded columns": (
        ShapeError,
        r"columnwise_scale_inv.*\(4, 70\).*\(2, 70\)",
        {"columnwise_scale_inv": bytes_of(4, 70)},
    ),
    "transposed columns": (ShapeError, r"\(70, 2\).*\(2, 70\)", {"columnwise_scale_inv": bytes_of(70, 2)}),
    "transposed data": (
        ShapeError,
        r"columnwise_data.*\(70, 33\).*\(33, 70\)",
        {"columnwise_data": bytes_of(70, 33), "columnwise_scale_inv": bytes_of(3, 33)},
    ),
    "rows without scales": (UsageError, "rowwise_scale_inv is missing", {"rowwise_scale_inv": None}),
    "columns without scales": (UsageError, "columnwise_scale_inv is missing", {"columnwise_scale_inv": None}),
    "scales without rows": (UsageError, "rowwise_data is missing", {"rowwise_data": None}),
    "scales without columns": (UsageError, "columnwise_data is missing", {"columnwise_data": None}),
    "rows on meta": (DeviceError, "rowwise_data is on meta, its scales on cpu", {"rowwise_data": meta(33, 70)}),
    "scales on meta": (DeviceError, "its scales on meta", {"columnwise_scale_inv": meta(2, 70)}),
    "directions apart": (
        DeviceError,
        "cpu and meta",
        {"columnwise_data": meta(33, 70), "columnwise_scale_inv": meta(2, 70)},
    ),
    "data of floats": (DTypeError, "rowwise_data is of torch.float32", {"rowwise_data": torch.zeros(33, 70)}),
    "data of int8": (DTypeError, "int8", {"columnwise_data": bytes_of(33, 70, dtype=torch.int8)}),
    "data of the other format": (DTypeError, "e5m2.*e4m3", {"rowwise_data": bytes_of(33, 70, dtype=E5M2)}),
    "data in a list": (DTypeError, "list", {"rowwise_data": [[0] * 70] * 33}),
    "scales of floats": (
        DTypeError,
        "rowwise_scale_inv is of torch.float32.*e8m0",
        {"rowwise_scale_inv": torch.ones(33, 3)},
    ),
    "scales of e4m3": (DTypeError, "e4m3", {"rowwise_scale_inv": bytes_of(33, 3, dtype=E4M3)}),
    "format": (DTypeError, "float16", {"fp8_dtype": torch.float16}),
    "format e8m0": (DTypeError, "e8m0", {"fp8_dtype": torch.float8_e8m0fnu}),
    "nominal float64": (DTypeError, "nominal dtype torch.float64", {"dtype": torch.float64}),
    "nominal int": (DTypeError, "nominal dtype torch.int32", {"dtype": torch.int32}),
    "squares": (OptionError, "with_2d_quantization is 1", {"with_2d_quantization": 1}),
    "values_from_columns": (OptionError, "values_from_columns is 'x'", {"values_from_columns": "x"}),
}


@pytest.mark.parametrize("cls", [MXFP8Tensor, MXFP8TensorStorage])
@pytest.mark.parametrize("case", CONSTRUCTION)
def test_refused_construction(case: str, cls: Any) -> None:
    error, message, replaced = CONSTRUCTION[case]
    with pytest.raises(error, match=message):
        cls(**parts(**replaced))


def test_construction() -> None:
    nothing = {name.removeprefix("_"): None for name in INNER}
    with pytest.raises(UsageError, match=r"needs data.*rowwise_data or columnwise_data"):
        MXFP8Tensor(**parts(**nothing))
    with pytest.raises(ShapeError, match=r"\(33, 70\).*\(3,\)"):
        MXFP8Tensor(**parts(), shape=(3,))
    for cls in (MXFP8Tensor, MXFP8TensorStorage):
        given = parts(
            rowwise_data=ROWS.view(E4M3),
            rowwise_scale_inv=bytes_of(33, 3, dtype=torch.float8_e8m0fnu),
            columnwise_scale_inv=bytes_of(2, 70, dtype=torch.float8_e8m0fnu),
        )
        made = cls(**given)
        assert {t.dtype for t in inner(made)} == {torch.uint8}
        # Viewed, not copied.
        assert made._rowwise_data.data_ptr() == ROWS.data_ptr()
        assert not bool(made.dequantize().any())
    assert MXFP8Tensor(**parts(), requires_grad=True).requires_grad
    assert MXFP8Tensor(**parts(), shape=(33, 70)).shape == (33, 70)


def test_bad_updates_change_nothing() -> None:
    q = quantizer()(wide((40, 70)))
    calls: list[tuple[type[OttavaError], Callable[[], Any]]] = [
        (ShapeError, lambda: q.quantize_(torch.zeros(3))),
        (ShapeError, lambda: q.quantize_(torch.zeros(70, 40))),
        (DTypeError, lambda: q.quantize_(torch.zeros(40, 70, dtype=torch.int64))),
        (DTypeError, lambda: q.quantize_(torch.zeros(40, 70, dtype=torch.float64))),
        (DeviceError, lambda: q.quantize_(torch.zeros(40, 70, device="meta"))),
        (DTypeError, lambda: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(1, dtype=torch.int32))),
        (ShapeError, lambda: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(2))),
        (DeviceError, lambda: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(1, device="meta"))),
        (DTypeError, lambda: q.dequantize("x")),
        (DTypeError, lambda: q.dequantize(torch.int32)),
    ]
    for number, (error, call) in enumerate(calls):
        with pytest.raises(error):
            call()
            pytest.fail(f"call {number} was accepted")
    check_bytes(q, quantizer()(wide((40, 70))))


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_usage_that_is_not_held_is_named_with_the_remedy(columnwise: bool) -> None:
    name, kind = ("columnwise", "rowwise") if columnwise else ("rowwise", "columnwise")
    q = quantizer(kind)(wide((64, 64)))
    for call in (
        lambda: q.block_operand(columnwise=columnwise),
        lambda: q.update_usage(**{f"{name}_usage": True}),
    ):
        with pytest.raises(UsageError, match=rf"no {name} data.*{name}=True.*quantizer.set_usage\({name}=True\)"):
            call()
    check_bytes(q, quantizer(kind)(wide((64, 64))))
