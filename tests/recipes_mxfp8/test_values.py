"""The values of MXFP8 tensors: decoding, conversions, gradients, what other ops see, updates in
place."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from ottava.errors import OttavaError, UsageError
from ottava_mxfp8 import MXFP8Tensor, MXFP8TensorStorage
from tests.recipes_mxfp8.blocks import (
    DTYPES,
    E4M3,
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


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("columnwise", [False, True])
def test_all_codes_and_scales_are_decoded(fp8_dtype: torch.dtype, columnwise: bool) -> None:
    """Each code under each scale, in all dtypes; NaN scales too."""
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    parts = (data.t().contiguous(), scales.t().contiguous()) if columnwise else (data, scales)
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
    for method, dtype in (
        ("float", torch.float32),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
    ):
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
    for op in (
        lambda t: t[32:64],
        lambda t: t.t()[:32],
        lambda t: t[5:7],
        lambda t: t.view(2, 48, 64)[1],
    ):
        leaf, plain = (
            torch.randn(96, 64, requires_grad=True),
            torch.randn(96, 64, requires_grad=True),
        )
        for start, whole in ((leaf, quantizer()(leaf)), (plain, plain)):
            (op(whole) * op(weights)).sum().backward()
            assert start.grad is not None
        assert torch.equal(leaf.grad, plain.grad)
    for op in (lambda t: t[:32], lambda t: t[32:64], lambda t: t.t()[32:]):
        leaf, plain = (
            torch.randn(96, 64, requires_grad=True),
            torch.randn(96, 64, requires_grad=True),
        )
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
        lambda t: torch.stack([t, t]),
    ):
        got, expected = op(q), op(values)
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected)
    assert torch.equal(q.view(torch.int16), values.view(torch.int16))
    assert q[3, 4].item() == values[3, 4].item()
    assert torch.equal(torch.zeros(64, 64).bfloat16().copy_(q), values)


def test_flat_values_are_like_any_other_tensor() -> None:
    q = quantizer()(wide((33, 70)))
    values = q.dequantize()
    flats = [q.flatten(), q.ravel(), q.view(-1), q.reshape(-1)]
    for flat in flats:
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
    doubled = torch.compile(lambda ts: [t * 2 for t in ts], fullgraph=True, backend="aot_eager")(
        flats
    )
    for flat in doubled:
        check_same(flat, values.flatten() * 2)


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


def test_a_write_to_a_view_across_blocks_is_refused() -> None:
    x = wide((64, 64))
    q = quantizer()(x)
    for write in (
        lambda t: t[:, 3:5].zero_(),
        lambda t: t.view(-1).zero_(),
        lambda t: t[::2].zero_(),
        lambda t: t.fill_diagonal_(1.0),
    ):
        with pytest.raises(UsageError, match="a view of a MXFP8Tensor that cannot share"):
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
    for call in (
        lambda: torch.from_dlpack(q),
        lambda: q.__dlpack__(),
        lambda: q.numpy(),
        lambda: q.tolist(),
    ):
        with pytest.raises((OttavaError, RuntimeError)):
            call()
