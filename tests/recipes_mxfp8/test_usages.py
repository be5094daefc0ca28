"""Usages, metadata and saving of MXFP8 tensors and their storages."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from ottava import prepare_for_saving, restore_from_saved
from ottava.errors import DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava_mxfp8 import MXFP8Tensor, MXFP8TensorStorage
from tests.recipes_mxfp8.blocks import (
    E5M2,
    KINDS,
    SHAPES,
    check_bytes,
    check_same,
    decoded,
    inner,
    quantizer,
    wide,
)


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
            with pytest.raises(
                UsageError, match=rf"no {lacking[0]} data.*quantizer.set_usage\({lacking[0]}=True\)"
            ):
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
    for op in (
        lambda t: t.t(),
        lambda t: t[32:],
        lambda t: t[:, 32:64],
        lambda t: t.view(2, 48, 70),
    ):
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
            assert not q.rowwise_serves_columnwise or torch.equal(
                decoded(q, False), decoded(q, True)
            )
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
        q.quantize_(torch.ones(70, 40)) if internal else q.grid_operand(columnwise=False)
    rest = q.restore_from_saved([*tensors, None, torch.ones(1)])
    assert len(rest) == 2
    check_bytes(q, expected)
    with pytest.raises(ShapeError, match="saved tensors"):
        q.restore_from_saved(tensors[:3])
    with pytest.raises(DTypeError):
        q.restore_from_saved([1, 2, 3, 4])
