"""Copies share nothing, aliases share all, and copying takes bytes where these mean the same."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ottava import (
    GridQuantizer,
    Layout,
    QuantizedTensor,
    prepare_for_saving,
    restore_from_saved,
)
from ottava.errors import DeviceError, DTypeError, ShapeError, UsageError
from ottava.gemm import gemm
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    E4M3,
    E5M2,
    EACH,
    QUANTIZERS,
    ROTATED_ONCE,
    USAGES,
    PerTensor,
    assert_directions,
    boundary,
    inner,
    quantizer,
)
from tests.samples import wide

COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "clone contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "to": lambda t: t.to(torch.bfloat16),
    "to a copy": lambda t: t.to("cpu", copy=True),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
}
ALIASES: dict[str, Callable[[Any], Any]] = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "copy.copy": copy.copy,
    "to_dtype": lambda t: t.to_dtype(torch.float16),
    "make_like": lambda t: type(t).make_like(t),
    "saved": lambda t: restore_from_saved(*prepare_for_saving(t))[0],
}


@EACH
def test_copies_share_nothing(name: str) -> None:
    for number, (what, make_copy) in enumerate(COPIES.items()):
        usages = list(USAGES)[number % 3]
        whole = quantizer(name, usages)(wide(140, 40))
        transpose = whole if name in ROTATED_ONCE else whole.t()
        q = (whole, whole[boundary(name) :], transpose)[number % 3]
        with told(what, usages):
            values = q.dequantize(torch.float32)
            made = make_copy(q)
            assert type(made) is type(q)
            if "contiguous" in what:
                assert made.is_contiguous()
                assert_same(made.view(-1).dequantize(torch.float32), values.reshape(-1))
            assert made._quantizer == q._quantizer
            assert made._quantizer is not q._quantizer
            before = inner(made)
            for tensor in q.inner_list():
                if tensor is not None:
                    tensor.zero_()
            assert_same(inner(made), before)
            assert_same(made.dequantize(torch.float32), values)
    storage = quantizer(name, internal=True)(wide(70, 40))
    duplicate = copy.deepcopy(storage)
    assert type(duplicate) is type(storage)
    storage.quantize_(torch.zeros(70, 40))
    assert_same(inner(duplicate), inner(QUANTIZERS[name](wide(70, 40))))


@EACH
def test_aliases_see_each_others_writes(name: str) -> None:
    new = wide(70, 40, seed=1)
    for (what, alias_of), usages in zip(ALIASES.items(), [*USAGES] * 2, strict=True):
        with told(what, usages):
            make = quantizer(name, usages)
            q = make(wide(70, 40))
            alias = alias_of(q)
            assert type(alias) is type(q)
            for target, other, values in ((alias, q, new), (q, alias, 2 * new.flip(0))):
                target.copy_(values)
                expected = make(values)
                assert_same(other.dequantize(torch.float32), expected.dequantize())
                assert_directions(other, expected)


def adopted(part: Any) -> Any:
    parameter = torch.nn.Parameter(QUANTIZERS["tensor"](torch.zeros(3, 4)), requires_grad=False)
    parameter.data = part
    return parameter


def test_an_alias_of_a_part_refuses_another_scale_for_the_rest_too() -> None:
    for what, alias_of in (ALIASES | {"adopted": adopted}).items():
        whole = QUANTIZERS["tensor"](wide(64, 40))
        before = inner(whole)
        with told(what), pytest.raises(UsageError, match="would change the scale of the rest"):
            alias_of(whole[32:]).copy_(torch.full((32, 40), 1e4))
        assert_same(inner(whole), before)


def test_a_write_to_a_saved_part_outdates_the_columns_of_the_whole() -> None:
    """In inference mode, too, where tensors count no writes."""
    make = GridQuantizer(Layout(torch.float8_e4m3fn, (None, None), columnwise="transposed"))
    x, dy = wide(32, 64), wide(8, 64)
    with torch.inference_mode():
        whole = make.quantize(torch.cat([x, x / 2]))
        gemm(dy, whole, "dgrad", out_dtype=torch.float32)
        part, same_scale = restore_from_saved(*prepare_for_saving(whole[32:], whole[:32]))
        part.copy_(same_scale)
        expected = gemm(dy, make.quantize(torch.cat([x, x])), "dgrad", out_dtype=torch.float32)
        assert_same(gemm(dy, whole, "dgrad", out_dtype=torch.float32), expected)


def test_a_backward_pass_refuses_values_that_were_quantized_anew() -> None:
    q = QUANTIZERS["mxfp8"](wide(33, 40))
    product = torch.ones(33, 40, requires_grad=True) * q
    q.quantize_(wide(33, 40, seed=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_deep_copy_keeps_what_a_parameter_has() -> None:
    parameter = torch.nn.Parameter(QUANTIZERS["mxfp8"](wide(33, 40)))
    parameter.grad = torch.ones(33, 40)
    parameter._high_precision_init_val = wide(33, 40)
    pair = copy.deepcopy([parameter, parameter])
    assert pair[0] is pair[1]
    assert isinstance(pair[0], torch.nn.Parameter)
    assert pair[0].requires_grad
    assert torch.equal(pair[0].grad, parameter.grad)
    assert pair[0].grad is not parameter.grad
    parameter.get_high_precision_init_val().zero_()
    assert_same(pair[0].get_high_precision_init_val(), wide(33, 40))
    with pytest.raises(UsageError, match="leaf"):
        copy.deepcopy(QUANTIZERS["mxfp8"](torch.ones(2, requires_grad=True)))


@pytest.mark.every_layout
@EACH
def test_copying_between_tensors(name: str) -> None:
    """Bytes where the source means the same and has all that is held; else its values, quantized
    again."""
    for number, source in enumerate(QUANTIZERS):
        pairs = [("both", list(USAGES)[number % 3]), (list(USAGES)[number % 3], "both")]
        pairs = [pairs[number // 3 % 2]]
        if source == name:
            pairs = list(itertools.product(USAGES, repeat=2))
        for source_usages, usages in pairs:
            with told(source, source_usages, usages):
                src = quantizer(source, source_usages)(wide(70, 40))
                make = quantizer(name, usages)
                dst = make(wide(70, 40, seed=1))
                held = dst.get_usages()
                assert dst.copy_(src) is dst
                assert dst.get_usages() == held
                has_all = all(src.get_usages()[u] for u in held if held[u])
                if source == name and has_all:
                    parts = zip(dst.inner_list(), src.inner_list(), strict=True)
                    expected = [None if mine is None else theirs for mine, theirs in parts]
                    assert_same(inner(dst), expected)
                elif not _shares_more(src, dst):
                    assert_same(inner(dst), inner(make(src.dequantize())))
                elif has_all:
                    # Scales that are shared may serve where fewer are.
                    assert_same(dst.dequantize(), src.dequantize())


def _shares_more(src: Any, dst: Any) -> bool:
    """Whether scales that the source shares over squares may serve the destination."""
    return (
        src.grid_layout.shared is not None
        and replace(src.grid_layout, shared=None) == dst.grid_layout
    )


@EACH
def test_copying_values(name: str) -> None:
    make = QUANTIZERS[name]
    dst = make(wide(70, 40))
    for source in (
        torch.arange(40.0),
        wide(70, 40, dtype=torch.bfloat16),
        wide(70, 40).t().contiguous().t(),
        make(wide(40)),
    ):
        dst.copy_(source)
        plain = source.dequantize() if isinstance(source, QuantizedTensor) else source
        assert_same(inner(dst), inner(make(plain.expand(70, 40))))
    assert dst.dtype == torch.float32
    before = inner(dst)
    for error, match, wrong in (
        (ShapeError, r"\(3, 40\)", torch.ones(3, 40)),
        (DTypeError, "int32", torch.ones(70, 40).int()),
        (DeviceError, "meta", torch.ones(70, 40, device="meta")),
        (DTypeError, r"sparse_coo.*to_dense", torch.ones(70, 40).to_sparse()),
    ):
        with pytest.raises(error, match=match):
            dst.copy_(wrong)
    assert_same(inner(dst), before)
    plain = torch.empty(70, 40, dtype=torch.float64)
    assert_same(plain.copy_(dst), dst.dequantize().double())


@EACH
def test_copy_from_storage(name: str) -> None:
    for dst_internal, src_internal in ((False, True), (True, False)):
        make = quantizer(name)
        dst = quantizer(name, internal=dst_internal)(torch.zeros(70, 40))
        src = quantizer(name, internal=src_internal)(wide(70, 40))
        dst.copy_from_storage(src, noop_flag=torch.zeros(1))
        assert_same(inner(dst), inner(src))
        dst.copy_from_storage(make(torch.ones(70, 40)), noop_flag=torch.ones(1))
        assert_same(inner(dst), inner(src))
        wrong: list[tuple[type[Exception], Any, str]] = [
            (ShapeError, make(torch.ones(40, 70)), r"\(40, 70\)"),
            (DTypeError, torch.ones(70, 40), "Tensor"),
        ]
        if not make.layout.one_buffer:
            rows = quantizer(name, "rowwise")(wide(70, 40))
            wrong.append((UsageError, rows, "columnwise_data"))
        for error, source, match in wrong:
            with pytest.raises(error, match=match):
                dst.copy_from_storage(source)
        assert_same(inner(dst), inner(src))
    # A destination that holds less takes what it holds.
    rows = quantizer(name, "rowwise")(torch.zeros(70, 40))
    rows.copy_from_storage(src)
    assert_same(inner(rows), inner(quantizer(name, "rowwise")(wide(70, 40))))


def test_other_elements_and_scales_for_both_directions_are_no_source() -> None:
    x = wide(64, 64)
    dst = QUANTIZERS["mxfp8-squares"](torch.ones(64, 64))
    lines, before = QUANTIZERS["mxfp8"], inner(dst)
    for write in (
        lambda: lines.quantize(x, out=dst),
        lambda: dst.copy_from_storage(lines(x)),
    ):
        with pytest.raises(UsageError, match="scales for rows and for columns"):
            write()
    assert_same(inner(dst), before)
    with pytest.raises(DTypeError, match=r"one kind.*quantizer.copy\(\)"):
        lines(x).copy_from_storage(QUANTIZERS["mxfp8-E5M2-floor"](x))
    with pytest.raises(DTypeError, match=r"source holds torch.float8_e5m2.*e4m3fn"):
        PerTensor(E4M3)(x).copy_from_storage(PerTensor(E5M2)(x))


@EACH
def test_data_adopts_or_quantizes(name: str) -> None:
    """Of any shape, with what was noted of the parameter: its gradient, and hooks."""
    news: list[Callable[[Any], Any]] = [
        lambda make: wide(96, 3, 5, seed=1),
        lambda make: wide(40, 70, seed=1, dtype=torch.bfloat16),
        lambda make: make(wide(140, 64, seed=1)),
        lambda make: make(wide(140, 64, seed=1))[boundary(name) :],
        lambda make: make(wide(70, 40)).t(),
    ]
    for number, new_of in enumerate(news):
        usages = list(USAGES)[number % 3]
        with told(number, usages):
            make = quantizer(name, usages)
            new = new_of(make)
            parameter = torch.nn.Parameter(make(wide(40, 70)))
            alias, seen = parameter.detach(), []
            parameter.register_hook(lambda grad, seen=seen: seen.append(grad.shape))
            parameter.data = new
            expected = new if isinstance(new, QuantizedTensor) else make(new)
            assert (parameter.shape, parameter.dtype) == (expected.shape, expected.dtype)
            assert parameter.stride() == expected.stride()
            assert parameter.storage_offset() == expected.storage_offset()
            assert_same(inner(parameter), inner(expected))
            assert_same(inner(alias), inner(make(wide(40, 70))))
            (parameter.dequantize() * 2).sum().backward()
            assert torch.equal(parameter.grad, torch.full_like(parameter.grad, 2.0))
            assert seen == [expected.shape]
            assert not parameter.data.requires_grad
            if not isinstance(new, QuantizedTensor):
                parameter.data.zero_()
                assert not parameter.dequantize().any()
    for wrong in (5, torch.zeros(40, 70).int()):
        with pytest.raises(DTypeError):
            parameter.data = wrong


@EACH
def test_new_tensors(name: str) -> None:
    """Zeros and empty tensors keep the class and the usages; moments of an optimizer do not."""
    for usages in USAGES:
        make = quantizer(name, usages)
        q = make(wide(40, 70, dtype=torch.bfloat16))
        for whole in (q, q if name in ROTATED_ONCE else q.t()):
            zeros = whole.new_zeros(33, 5)
            # A rotation back gives zeros of both signs.
            assert_same(zeros.dequantize().abs(), torch.zeros(33, 5, dtype=torch.bfloat16))
            for made, shape in (
                (zeros, (33, 5)),
                (whole.new_empty(()), ()),
                (torch.empty_like(whole), whole.shape),
                (whole.new_empty_strided((3, 2), (2, 1)), (3, 2)),
            ):
                assert type(made) is type(whole)
                assert (made.shape, made.dtype) == (shape, torch.bfloat16)
                if not (make.layout.square and make.layout.transposed):
                    # Columns that are made of rows are made when they are asked for.
                    assert made.get_usages() == whole.get_usages()
                made.copy_(wide(*shape))
                expected = make.with_usage(**made.get_usages())(wide(*shape))
                assert_same(inner(made), inner(expected))
                assert made._quantizer is not whole._quantizer
    assert torch.empty_like(q, dtype=torch.float32).dtype == torch.float32
    assert q.new_zeros(2, device="meta").is_meta
    assert torch.empty_like(q.to("meta"), device="cpu").device.type == "cpu"
    for plain in (
        q.new_zeros(2, dtype=torch.int32),
        torch.empty_like(q, dtype=torch.float64),
        q.new_empty_strided((3, 2), (1, 3)),
        q.new_ones(2),
        torch.zeros_like(q),
    ):
        assert type(plain) is torch.Tensor
    # Tensors of a file have no quantizer.
    q.update_quantizer(None)
    for shape in ((6, 9), (), (0, 8), (3, 2, 5)):
        assert type(q.new_zeros(shape)) is type(q)
        assert not q.new_zeros(shape).dequantize().any()


def test_new_tensors_by_a_quantizer_of_another_layout_are_plain() -> None:
    tensor = QUANTIZERS["mxfp8"](wide(4, 64))
    for other in ("mxfp8-E5M2-floor", "4x8-transposed"):
        tensor.update_quantizer(QUANTIZERS[other])
        assert type(tensor.new_zeros(6, 64)) is torch.Tensor


def test_update_quantizer() -> None:
    q, x = QUANTIZERS["mxfp8"](wide(70, 40)), wide(70, 40, seed=1)
    other = QUANTIZERS["mxfp8-squares"]
    q.update_quantizer(other)
    q.quantize_(x)
    assert_same(q.dequantize(), other(x).dequantize())
    # New data for some of the usages keep the quantizer, whose usages are those of later tensors.
    q.update_usage(columnwise_usage=False)
    q.data = x
    assert q._quantizer is other
    q.update_quantizer(None)
    for write in (lambda: q.quantize_(x), lambda: q.mul_(2), lambda: q.__setitem__(0, 1.0)):
        with pytest.raises(UsageError, match="update_quantizer"):
            write()
    with pytest.raises(DTypeError, match="int"):
        q.update_quantizer(5)
    assert_same(q.dequantize(), other(x).dequantize())


@EACH
def test_a_cleared_tensor_refuses_all(name: str) -> None:
    x = wide(70, 40)
    for internal in (False, True):
        q = quantizer(name, internal=internal)(x)
        q.clear()
        assert all(t is None for t in q.inner_list())
        assert (q.nbytes, q.get_usages()) == (0, dict.fromkeys(("rowwise", "columnwise"), False))
        assert "no readable data" in repr(q)
        if not internal:
            assert (q.data_ptr(), q.untyped_storage().nbytes()) == (0, 0)
        for number, call in enumerate(
            [
                lambda q: q.quantize_(x),
                lambda q: q.copy_from_storage(QUANTIZERS[name](x)),
                lambda q: q.dequantize(),
                lambda q: q.grid_operand(columnwise=True),
                lambda q: torch.save(q, io.BytesIO()),
                (lambda q: q.size()) if internal else (lambda q: q.copy_(x)),
            ]
        ):
            with told(number), pytest.raises(UsageError, match="holds no data"):
                call(q)
