"""MXFP8 tensors that are updated, cleared, printed, shared, or overwritten under those who saved or
kept something."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ottava.errors import DTypeError, UsageError
from ottava.gemm import side_of
from ottava.gemm.scaled import _for_library, cached, swizzle
from ottava_mxfp8 import MXFP8Tensor
from tests.recipes_mxfp8.blocks import (
    DTYPES,
    KINDS,
    SHAPES,
    Op,
    check_bytes,
    inner,
    quantizer,
    wide,
)


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
        lambda q: q.grid_operand(columnwise=True),
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
    for number, (shape, kind) in enumerate(itertools.product(SHAPES, KINDS)):
        make, dtype = quantizer(kind), DTYPES[number % len(DTYPES)]
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
    operand: Any = side_of(q, columnwise)
    return cached(operand, partial(_for_library, operand))


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
        elements, scales = q.grid_operand(columnwise=columnwise)
        codes = elements.view(torch.uint8)
        if columnwise:
            codes, scales = codes.t(), scales.t()
        kept_elements, kept_scales, _ = kept_operand(q, columnwise)
        assert torch.equal(kept_scales.view(torch.uint8), swizzle(scales).view(torch.uint8))
        assert torch.equal(
            kept_elements.view(torch.uint8)[: codes.shape[0], : codes.shape[1]], codes
        )
