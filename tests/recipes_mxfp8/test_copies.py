"""New MXFP8 tensors, copies, copying into one another, and ``.data``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ottava.errors import DeviceError, DTypeError, ShapeError, UsageError
from ottava_mxfp8 import MXFP8Tensor, MXFP8TensorStorage
from tests.recipes_mxfp8.blocks import (
    E5M2,
    KINDS,
    check_bytes,
    check_same,
    inner,
    quantizer,
    wide,
)


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
        copies = [
            q.clone(),
            copy.deepcopy(q),
            q.clone(memory_format=torch.contiguous_format),
            q.to(torch.bfloat16),
        ]
        copies.append(pickle.loads(pickle.dumps(q)))
        for made in copies:
            assert isinstance(made, MXFP8Tensor)
            assert made._quantizer == q._quantizer
            assert made._quantizer is not q._quantizer
        q.copy_(wide(q.shape, seed=1))
        for made in copies:
            check_bytes(made, before)
            check_same(
                made.dequantize(torch.float32),
                values if made.dtype == q.dtype else values.bfloat16().float(),
            )
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
    """Bytes where the source has all that the destination holds; else its values, quantized
    again."""
    src, dst = quantizer(source)(wide((70, 40))), quantizer(target)(wide((70, 40), seed=1))
    held = dst.get_usages()
    enough = all(src.get_usages()[usage] for usage, wanted in held.items() if wanted)
    adopted = enough and (target != "square" or source == "square")
    assert dst.copy_(src) is dst
    assert dst.get_usages() == held
    if adopted:
        check_bytes(
            dst,
            [theirs if mine is not None else None for mine, theirs in zip(inner(dst), inner(src))],
        )
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
    for wrong in (5, torch.zeros(40, 70).int()):
        with pytest.raises(DTypeError):
            parameter.data = wrong


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_another_shape_is_adopted(kind: str) -> None:
    make = quantizer(kind)
    for new in (
        wide((96, 3, 5), seed=1),
        make(wide((96, 64), seed=1)),
        make(wide((96, 64), seed=1))[32:],
    ):
        parameter = torch.nn.Parameter(make(wide((40, 70))))
        parameter.data = new
        expected = new if isinstance(new, MXFP8Tensor) else make(new)
        assert parameter.shape == expected.shape
        check_bytes(parameter, expected)
        (parameter.dequantize() * 2).sum().backward()
        assert torch.equal(parameter.grad, torch.full(new.shape, 2.0))
