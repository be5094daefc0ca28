"""Quantized tensors as torch tensors: conversions, gradients, other ops, updates in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava.errors import OttavaError
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    DTYPES,
    EACH,
    QUANTIZERS,
    ROTATED_ONCE,
    USAGES,
    assert_directions,
    boundary,
    inner,
    quantizer,
    rows_share,
)
from tests.samples import wide


@EACH
def test_conversions(name: str) -> None:
    q = QUANTIZERS[name](wide(33, 70, sigma=1.0))
    exact = q.dequantize(torch.float64)
    for made, dtype in (
        (q.float(), torch.float32),
        (q.half(), torch.float16),
        (q.bfloat16(), torch.bfloat16),
        (q.double(), torch.float64),
        (q.to(torch.float64), torch.float64),
    ):
        assert type(made) is torch.Tensor
        assert_same(made, exact.float().to(dtype) if dtype != torch.float64 else exact)
    for dtype in DTYPES:
        for made in (q.to(dtype), q.to_dtype(dtype), q.to("cpu", dtype), q.type(dtype)):
            assert type(made) is type(q)
            assert made.dtype == dtype
            assert_same(inner(made), inner(q))
            assert_same(made.dequantize(), exact.float().to(dtype))
    assert q.to(torch.float32) is q.cpu() is q
    assert type(q.to(torch.int32)) is torch.Tensor
    moved = q.to("meta")
    assert type(moved) is type(q)
    assert moved.is_meta
    assert all(t.is_meta for t in moved.inner_list() if t is not None)
    assert moved.dequantize().is_meta


@EACH
def test_values_are_rounded_to_their_dtype_once(name: str) -> None:
    """They are rotated back before that, in float32."""
    for usages in ("rowwise", "columnwise"):
        q = quantizer(name, usages)(wide(33, 70, sigma=1.0))
        exact = q.dequantize(torch.float32)
        for dtype in DTYPES:
            assert_same(q.dequantize(dtype), exact.to(dtype))


@EACH
def test_gradients_pass_straight_through(name: str) -> None:
    """By quantizing, dequantizing, other dtypes, and views, also those that are written to."""
    step, weights = boundary(name), torch.randint(-4, 5, (2 * boundary(name), 70)).float()
    views: list[Callable[[Any], Any]] = [
        lambda t: t,
        lambda t: t.dequantize(),
        lambda t: t.to_dtype(torch.bfloat16),
        lambda t: t[step:],
        lambda t: t[5:7],
        lambda t: t.t()[:3],
        lambda t: t.view(2, step, 70)[1],
    ]
    for number, view in enumerate(views):
        with told(number):
            leaves = [torch.ones(2 * step, 70, requires_grad=True) for _ in range(2)]
            for leaf, whole in ((leaves[0], QUANTIZERS[name](leaves[0])), (leaves[1], leaves[1])):
                assert whole.requires_grad
                plain = number in (1, 2) and whole is leaf
                part = whole if plain else view(whole)
                (part * (weights if number in (1, 2) else view(weights))).sum().backward()
            assert_same(leaves[0].grad, leaves[1].grad)
    plain, quantized = (torch.ones(2 * step, 70, requires_grad=True) for _ in range(2))
    for whole in (QUANTIZERS[name](quantized), plain.clone()):
        whole.mul_(2.0)
        (whole * weights).sum().backward()
    assert_same(quantized.grad, plain.grad)
    for given, nominal in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        leaf = torch.ones(3, 5, dtype=given, requires_grad=True)
        q = QUANTIZERS[name](leaf, dtype=nominal)
        assert q.dtype == nominal
        q.dequantize().sum().backward()
        assert_same(leaf.grad, torch.ones(3, 5, dtype=given))
    with torch.no_grad():
        assert not QUANTIZERS[name](leaf).requires_grad


OPS: list[Callable[[Any], Any]] = [
    lambda t: t + 1,
    lambda t: t @ torch.eye(64).bfloat16(),
    lambda t: torch.cat([t, t]),
    lambda t: t.sum(),
    lambda t: t[torch.tensor([3, 1])],
    lambda t: t[t > 0],
    lambda t: torch.nn.functional.linear(torch.eye(64).bfloat16(), t),
    lambda t: torch.where(t > 0, t, -t),
    lambda t: t.flip(0),
    lambda t: torch.ones_like(t),
    lambda t: torch.zeros(64, 64).bfloat16().copy_(t),
    lambda t: torch.zeros(2).new_full((2,), 3.0) * t[0, 0].item(),
]


@EACH
def test_other_ops_see_dequantized_values(name: str) -> None:
    q = QUANTIZERS[name](wide(64, 64, sigma=1.0, dtype=torch.bfloat16))
    values = q.dequantize()
    for number, op in enumerate(OPS):
        with told(number):
            found = op(q)
            assert type(found) is torch.Tensor
            assert_same(found, op(values))
    assert_same(torch.empty_like(values).view(torch.int16).shape, q.view(torch.int16).shape)
    assert torch.equal(q.view(torch.int16), values.view(torch.int16))
    for attribute in ("dim", "numel", "element_size", "is_contiguous", "__len__"):
        assert getattr(q, attribute)() == getattr(values, attribute)()
    assert (q.ndim, q.layout, q.is_sparse, q.T.shape) == (2, torch.strided, False, (64, 64))


IN_PLACE: list[Callable[[Any], Any]] = [
    lambda t: t.mul_(3.0),
    lambda t: t.add_(torch.ones(70, 40)),
    lambda t: t.add_(t),
    lambda t: torch._foreach_mul_([t], 0.5),
    lambda t: torch.add(torch.ones(70, 40), 1.0, out=t),
    lambda t: t.fill_(3.0),
    lambda t: t.zero_(),
    lambda t: torch.nn.init.constant_(t, 5.0),
]


@EACH
def test_in_place_ops_quantize_their_results(name: str) -> None:
    for number, op in enumerate(IN_PLACE):
        make = quantizer(name, list(USAGES)[number % 3])
        q = make(wide(70, 40))
        x = q.dequantize()
        result = op(q)
        op(x)
        assert result is q or type(result) in (type(None), list)
        expected = make(x)
        assert_same(q.dequantize(), expected.dequantize())
        assert_directions(q, expected)


INDICES: list[Callable[[int], Any]] = [
    lambda step: 5,
    lambda step: -1,
    lambda step: (slice(None), 3),
    lambda step: slice(None, None, 2),
    lambda step: slice(0, 2),
    lambda step: slice(step, None),
    lambda step: ...,
    lambda step: (0, slice(2, 4)),
    lambda step: (4, 5),
    lambda step: torch.tensor([0, 3]),
]


@EACH
def test_an_assignment_reaches_the_whole(name: str) -> None:
    """Entries with scales of their own are written alone; else all is quantized again."""
    step = boundary(name)
    x = wide(max(2 * step, 8), 40)
    for number, index_of in enumerate(INDICES):
        index, make = index_of(step), quantizer(name, list(USAGES)[number % 3])
        with told(index, make):
            q = make(x)
            expected = q.dequantize()
            expected[index] = 0.5
            q[index] = 0.5
            assert_same(q.dequantize()[index], make(expected).dequantize()[index])
            # Values of four bits move further when they are quantized again.
            atol = float(expected.abs().max()) / (50 if make.layout.format.bits == 4 else 100)
            torch.testing.assert_close(q.dequantize(), expected, rtol=0.13, atol=atol)
    # A quantized value is taken by its bytes, where these mean the same, or by its values.
    q, value = make(x), make(wide(40, seed=1))
    expected = q.dequantize()
    expected[3] = value.dequantize()
    q[3] = value
    found = q.dequantize()[3]
    assert torch.equal(found, expected[3]) or torch.equal(found, make(expected).dequantize()[3])
    with pytest.raises(RuntimeError):
        q[1] = torch.ones(7)
    with pytest.raises(IndexError):
        q[9999] = 1.0
    parameter = torch.nn.Parameter(q)
    with pytest.raises(RuntimeError, match="in-place"):
        parameter[0] = 1.0


PARTS: dict[str, tuple[str, Any]] = {
    "rows": ("rowwise", (slice(None), slice(0, 8))),
    "columns": ("columnwise", (slice(None), slice(0, 8))),
    "bands": ("rowwise", slice(0, 8)),
    "rows-transposed": ("both", (slice(None), slice(0, 8))),
    "tensor": ("both", slice(0, 8)),
    "Float8Tensor": ("both", (slice(0, 8), slice(3, 5))),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_block_is_written_with_the_scale_that_it_shares(name: str) -> None:
    """By an assignment, or where the scale stays; ``test_views.py`` has the refusals of others."""
    usages, index = PARTS[name]
    make = quantizer(name, usages)
    q = make(wide(16, 32))
    assert type(q[index]) is type(q)
    expected = q.dequantize()
    q[index] = expected[index] = 100.0
    assert_same(inner(q), inner(make(expected)))
    # The same scales: the largest values of each block, in the part and outside of it.
    x = torch.rand(16, 32)
    x[:, 0] = x[:, -1] = x[0] = x[-1] = 2.0
    q, new = make(x), x.clone()
    new[1:-1, 1:-1] /= 2
    q[index].copy_(new[index])
    x[index] = new[index]
    assert_same(inner(q), inner(make(x)))
    # Bytes of equal scales are taken as they are.
    other = make(x.flip(0))
    q[index] = other[index]
    assert_same(q.dequantize()[index], other.dequantize()[index])


@EACH
def test_autograd_refuses_a_value_that_was_overwritten(name: str) -> None:
    make, step = QUANTIZERS[name], boundary(name)
    shape = (2 * step, 3 * step)
    w = torch.ones(shape, requires_grad=True)
    overwrites: dict[str, Callable[[Any], Any]] = {
        "quantize_": lambda q: q.quantize_(torch.zeros(shape)),
        "update_quantized": lambda q: make.update_quantized(torch.zeros(shape), q),
        "out": lambda q: make.quantize(torch.zeros(shape), out=q),
        "copy_ of bytes": lambda q: q.copy_(make(torch.zeros(shape))),
        "copy_ of values": lambda q: q.copy_(torch.zeros(shape)),
        "in place": lambda q: q.mul_(2.0),
        "transpose": lambda q: q.t().zero_(),
        "rows": lambda q: q[step:].zero_(),
        "split": lambda q: q.split(step)[1].quantize_(torch.zeros(step, 3 * step)),
        "view": lambda q: q.view(2, step, 3 * step)[1].zero_(),
    }
    if name in ROTATED_ONCE:
        del overwrites["transpose"]
    if rows_share(name):
        # A write to some of the rows alone is refused.
        for what in ("rows", "split", "view"):
            del overwrites[what]
    for what, overwrite in overwrites.items():
        for saved in (lambda t: t, lambda t: t[step:]):
            with told(what):
                q = make(wide(*shape))
                y = (saved(q) * saved(w)).sum()
                overwrite(q)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.backward()


@EACH
def test_memory(name: str) -> None:
    """A tensor shows where its bytes lie, gives away no memory of values, and can be shared."""
    for usages in USAGES:
        q = quantizer(name, usages)(wide(4, 6))
        holder = next(t for t in q.inner_list() if t is not None)
        assert q.data_ptr() == holder.data_ptr()
        assert q.untyped_storage().data_ptr() == holder.untyped_storage().data_ptr()
        assert q.untyped_storage().nbytes() == holder.nbytes
        for export in (torch.from_dlpack, torch.Tensor.numpy, torch.Tensor.tolist):
            with pytest.raises((OttavaError, RuntimeError)):
                export(q)
        before = inner(q)
        assert not q.is_shared()
        assert q.share_memory_() is q
        assert q.is_shared()
        assert_same(inner(q), before)


def test_pinning_pins_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pinned = QUANTIZERS["mxfp8"](wide(70, 40)), []
    assert not q.is_pinned()
    # Pinning itself needs an accelerator.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t.shape) or t.clone())
    made = torch.ops.aten._pin_memory(q)
    assert type(made) is type(q)
    assert pinned == [t.shape for t in q.inner_list()]
    assert_same(inner(made), inner(q))
