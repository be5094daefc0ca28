"""Usages of quantizers and of tensors: what is produced, dropped, made of the other, refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ottava import prepare_for_saving, restore_from_saved
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    DTYPES,
    EACH,
    QUANTIZERS,
    USAGES,
    has_one_scale,
    inner,
    quantizer,
)
from tests.samples import wide

NAMES = ("rowwise", "columnwise")


@EACH
def test_update_usage(name: str) -> None:
    """Data are dropped, made of the other usage where both hold the same values, or refused."""
    layout, x = QUANTIZERS[name].layout, wide(70, 40)
    for usages in USAGES:
        asks = itertools.product((None, True, False), repeat=2)
        for number, (rowwise, columnwise) in enumerate(asks):
            with told(usages, rowwise, columnwise):
                q = quantizer(name, usages, internal=number % 2 == 0)(x)
                before, held = inner(q), q.get_usages()
                if not layout.one_buffer:
                    assert held == dict(zip(NAMES, USAGES[usages], strict=True))
                asked = dict(zip(NAMES, (rowwise, columnwise), strict=True))
                wanted = {u: held[u] if asked[u] is None else asked[u] for u in NAMES}
                lacking = [u for u in NAMES if wanted[u] and not held[u]]
                if not any(wanted.values()):
                    with pytest.raises(OptionError, match=r"neither usage.*clear\(\)"):
                        q.update_usage(rowwise, columnwise)
                    assert_same(inner(q), before)
                elif lacking and not layout.square:
                    said = rf"no {lacking[0]} data.*quantizer.set_usage\({lacking[0]}=True\)"
                    with pytest.raises(UsageError, match=said):
                        q.update_usage(rowwise, columnwise)
                    with pytest.raises(UsageError, match=said):
                        q.grid_operand(columnwise=lacking == ["columnwise"])
                    assert_same(inner(q), before)
                else:
                    q.update_usage(rowwise_usage=rowwise, columnwise_usage=columnwise)
                    _check_usages(q, name, x, wanted)


def _check_usages(q: Any, name: str, x: torch.Tensor, wanted: dict[str, bool]) -> None:
    """The data are those of quantizing for these usages, and take part in writes."""
    make = QUANTIZERS[name].with_usage(**wanted)
    assert_same(inner(q), inner(make(x)))
    if not QUANTIZERS[name].layout.one_buffer:
        assert q.get_usages() == wanted
    q.quantize_(2 * x.flip(0))
    assert_same(inner(q), inner(make(2 * x.flip(0))))


@pytest.mark.parametrize("name", [n for n, q in QUANTIZERS.items() if q.layout.square])
def test_either_usage_of_squares_is_made_for_any_shape_and_view(name: str) -> None:
    make = QUANTIZERS[name]
    shapes: list[tuple[int, ...]] = [(), (5,), (0, 40), (2, 33, 65)]
    for shape, rowwise in itertools.product(shapes, (True, False)):
        with told(shape, rowwise):
            x = wide(*shape)
            q = make.with_usage(rowwise, not rowwise)(x)
            q.update_usage(rowwise_usage=True, columnwise_usage=True)
            assert_same(inner(q), inner(make(x)))
            q.update_usage(rowwise_usage=not rowwise, columnwise_usage=rowwise)
            assert_same(inner(q), inner(make.with_usage(not rowwise, rowwise)(x)))
    x = wide(128, 256)
    for op in (lambda t: t.t(), lambda t: t[:, 128:], lambda t: t.view(1, 128, 256)):
        view = op(make.with_usage(True, False)(x))
        view.update_usage(rowwise_usage=True, columnwise_usage=True)
        for columnwise in (False, True):
            if has_one_scale(name) and view.numel() < x.numel():
                continue
            assert_same(view.for_usage(columnwise), make(op(x)).for_usage(columnwise))


def test_flags_that_are_no_bools_are_refused() -> None:
    q = QUANTIZERS["mxfp8"](wide(4, 4))
    for wrong in ("no", 1):
        with pytest.raises(OptionError, match="rowwise_usage"):
            q.update_usage(rowwise_usage=wrong)


def kinds(storage: Any) -> list[Any]:
    """Shape, dtype and device of each inner tensor."""
    return [t if t is None else (t.shape, t.dtype, t.device) for t in storage.inner_list()]


@EACH
def test_empty_results(name: str) -> None:
    """For any usages, shapes, dtypes and devices, of the kind that quantizing gives."""
    shapes = [(), (5,), (0, 7), (7, 0), (33, 70), (2, 3, 65)]
    for number, (shape, device) in enumerate(itertools.product(shapes, (None, "cpu", "meta"))):
        usages, dtype = list(USAGES)[number // 3 % 3], DTYPES[number % 3]
        make = quantizer(name, usages)
        with told(shape, device, usages, dtype):
            q = make.make_empty(shape, dtype=dtype, device=device, requires_grad=True)
            like = make(torch.zeros(shape, dtype=dtype, device=device or "cpu"))
            assert (q.shape, q.dtype, q.device.type) == (shape, dtype, device or "cpu")
            assert q.requires_grad
            assert q.is_leaf
            assert kinds(q) == kinds(like)
            assert type(q).__name__ in repr(q)
            if q.device.type != "meta":
                directions = [q.direction(columnwise=side) for side in (False, True)]
                assert all((side.scales == 1).all() for side in directions if side is not None)
                values = wide(*shape, dtype=dtype)
                make.update_quantized(values, q)
                assert_same(inner(q), inner(make(values)))
    with torch.device("meta"):
        assert QUANTIZERS[name].make_empty([3]).is_meta


@EACH
def test_quantizing_into_a_destination_keeps_its_buffers_usages_and_dtype(name: str) -> None:
    new = wide(40, 70, seed=2, dtype=torch.bfloat16)
    for usages, internal in itertools.product(USAGES, (False, True)):
        target = quantizer(name, usages, internal=internal)
        expected = inner(target(new))
        for number, write in enumerate(
            [
                lambda q, out: q.quantize(new, out=out),
                lambda q, out: q(new, out=out),
                lambda q, out: q.update_quantized(new, out),
                lambda q, out: q.update_quantized(new, out, noop_flag=torch.zeros(1)),
            ]
        ):
            out = target(wide(40, 70, seed=1))
            places = [t is not None and t.data_ptr() for t in out.inner_list()]
            assert write(quantizer(name, list(USAGES)[number % 3]), out) is out
            assert_same(inner(out), expected)
            assert [t is not None and t.data_ptr() for t in out.inner_list()] == places
            assert out.dtype == torch.float32
        for flag in (torch.ones(1), torch.ones(()), torch.ones(1, 1)):
            out.quantize_(wide(40, 70, seed=3), noop_flag=flag)
            assert_same(inner(out), expected)


@pytest.mark.every_layout
def test_storages_and_tensors_are_saved_among_others() -> None:
    things: list[Any] = [None, torch.randn(3)]
    for number, name in enumerate(QUANTIZERS):
        usages = list(USAGES)[number % 3]
        things.append(quantizer(name, usages, internal=number % 2 == 0)(wide(33, 5)))
    things += [None, QUANTIZERS["mxfp8"](wide(64, 64))[32:].t()]
    flat, objects = prepare_for_saving(*things)
    assert all(t is None or type(t) is torch.Tensor for t in flat)
    for restored in (restore_from_saved(flat, objects), restore_from_saved(objects, flat)):
        for got, thing in zip(restored, things, strict=True):
            assert type(got) is type(thing)
            if hasattr(thing, "inner_list"):
                assert_same(inner(got), inner(thing))
                assert got._quantizer is thing._quantizer
            else:
                assert got is thing
    plain = prepare_for_saving(*things[:2])
    for lists in (plain, plain[::-1]):
        assert restore_from_saved(*lists)[1] is things[1]
    with pytest.raises(ShapeError, match="saved tensors"):
        restore_from_saved(flat[:-1], objects)
    with pytest.raises(DTypeError, match="cannot save a str"):
        prepare_for_saving("x")
    with pytest.raises(DTypeError, match="holds no saved objects"):
        restore_from_saved(flat, ["x"])
