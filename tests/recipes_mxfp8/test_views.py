"""Views of MXFP8 tensors on the boundaries of blocks and off them, writes through them, splits.

A view is held against two things: the same view of the dequantized values, and the quantization of
the same view of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava_mxfp8 import MXFP8Tensor
from tests.cases import told
from tests.recipes_mxfp8.blocks import (
    VIEW_KINDS,
    Op,
    check_bytes,
    check_same,
    inner,
    quantizer,
    values_of,
    wide,
)

# Views. Letters say with which usages the class is kept: (r)owwise only, (c)olumnwise only, (b)oth,
# (s)quares.

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
    "element of a vector": ((96,), lambda t: t[3], "c"),
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
    "as_strided rows": ((96, 40), lambda t: t.as_strided((32, 40), (40, 1), 32 * 40), ""),
    "as_strided rows off the boundary": (
        (96, 40),
        lambda t: t.as_strided((32, 40), (40, 1), 3 * 40),
        "",
    ),
    "as_strided lines": ((96, 128), lambda t: t.as_strided((384, 32), (32, 1)), ""),
    "as_strided stack": ((3, 32, 40), lambda t: t.as_strided((96, 40), (40, 1)), ""),
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


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_the_class_where_blocks_allow_and_the_values_anywhere(name: str) -> None:
    for kind in VIEW_KINDS:
        with told(kind):
            check_view(*VIEWS[name], kind)


def check_view(shape: tuple[int, ...], op: Op, kept: str, kind: str) -> None:
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


@pytest.mark.parametrize("name", [name for name, (_, _, kept) in VIEWS.items() if kept])
def test_a_write_to_a_view_reaches_the_whole_and_nothing_else(name: str) -> None:
    """The whole is then what quantizing it anew gives, block for block."""
    shape, op, kept = VIEWS[name]
    for kind in (kind for kind in VIEW_KINDS if LETTER[kind] in kept):
        for number, (way, write) in enumerate(WRITES.items()):
            with told(kind, way):
                x, make = wide(shape), quantizer(kind)
                whole = make(x)
                view = op(whole)
                new = wide(view.shape, seed=7 + number)
                write(view, new)
                op(x).copy_(new)
                check_bytes(whole, make(x))
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


@pytest.mark.parametrize("name", SPLITS)
def test_splits(name: str) -> None:
    for kind in VIEW_KINDS:
        with told(kind):
            check_split(*SPLITS[name], kind)


def check_split(shape: tuple[int, ...], op: Op, kept: str, kind: str) -> None:
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
