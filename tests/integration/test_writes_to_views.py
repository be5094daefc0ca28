"""A write to a view of a quantized tensor reaches the tensor, or is refused: of all kinds of
tensors and views."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import told

import ottava
from ottava.errors import OttavaError, UsageError
from ottava.tensors import DequantizedView
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_custom import CurrentScalingQuantizerRef, HybridQuantizer, IdentityQuantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_rowwise import Float8RowwiseQuantizer

E4M3 = torch.float8_e4m3fn
CURRENT = Float8CurrentScalingQuantizer(E4M3)
MX = MXFP8Quantizer(E4M3)
BLOCKS = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)
KINDS: dict[str, Any] = {
    "current": CURRENT,
    "reference": CurrentScalingQuantizerRef(E4M3),
    "identity": IdentityQuantizer(),
    "mxfp8": MX,
    "blockwise": BLOCKS,
    "rowwise": Float8RowwiseQuantizer(E4M3),
    "hybrid of one kind": HybridQuantizer(CURRENT, CURRENT),
    "hybrid of blocks": HybridQuantizer(BLOCKS, MX),
    "hybrid with identity": HybridQuantizer(IdentityQuantizer(), CURRENT),
    "identities": HybridQuantizer(IdentityQuantizer(), IdentityQuantizer()),
}
Op = Callable[[Any], Any]
VIEWS: dict[str, Op] = {
    "view": lambda t: t.view(-1),
    "view, rows": lambda t: t.view(4, -1, t.shape[-1]),
    "view, dtype": lambda t: t.view(torch.int32),
    "reshape": lambda t: t.reshape(2, -1),
    "reshape, a copy": lambda t: t.t().reshape(-1),
    "as_strided": lambda t: t.as_strided(t.shape, t.stride()),
    "as_strided, flat": lambda t: t.as_strided((t.numel(),), (1,)),
    "as_strided, part": lambda t: t.as_strided((3, 5), (t.stride(0), 1), 7),
    "rows": lambda t: t[32:64],
    "some rows": lambda t: t[3:50],
    "columns": lambda t: t[:, 32:64],
    "some columns": lambda t: t[:, 3:5],
    "steps": lambda t: t[::2],
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "unsqueeze, last": lambda t: t.unsqueeze(-1),
    "squeeze": lambda t: t[:1].squeeze(),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(0, (2, -1)),
    "select": lambda t: t[5],
    "select, columns": lambda t: t.select(1, 5),
    "split": lambda t: t.split(32)[1],
    "split, columns": lambda t: t.split([100, 28], 1)[1],
    "chunk": lambda t: t.chunk(2)[1],
    "unbind": lambda t: t.unbind()[2],
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(0, 2, 2),
    "detach": lambda t: t.detach(),
    "view of rows": lambda t: t[32:64].view(-1),
    "as_strided of rows": lambda t: t[32:64].as_strided((64,), (1,)),
    "as_strided before rows": lambda t: t[32:64].as_strided((64,), (1,), 0),
    "view of a view": lambda t: t.view(-1)[3:5],
}
WRITES: dict[str, Op] = {
    "zero_": lambda v: v.zero_(),
    "fill_": lambda v: v.fill_(1.0),
    "copy_": lambda v: v.copy_(torch.ones(v.shape)),
    "mul_": lambda v: v.mul_(2),
    "out=": lambda v: torch.add(torch.ones(v.shape), 1, out=v),
    "foreach": lambda v: torch._foreach_mul_([v], 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_write_to_a_view_is_lost(kind: str) -> None:
    for name, view in VIEWS.items():
        for how, write in WRITES.items():
            if name == "view, dtype" and how not in ("zero_", "fill_"):
                continue
            with told(kind, name, how):
                _check(KINDS[kind](torch.randn(128, 128)), view, write)


def _check(tensor: Any, view: Op, write: Op) -> None:
    before = tensor.dequantize()
    plain = before.clone()
    of_plain = view(plain)
    try:
        part = view(tensor)
    except OttavaError:
        return
    values = part.dequantize() if part.dtype.is_floating_point else part
    assert torch.equal(values, of_plain)
    try:
        write(part)
    except OttavaError:
        assert torch.equal(tensor.dequantize(), before)
        return
    write(of_plain)
    assert torch.allclose(tensor.dequantize(), plain, rtol=0.07, atol=0.02)


@pytest.mark.parametrize("kind", ["identity", "reference"])
def test_views_of_elements_share_them(kind: str) -> None:
    for name, view in VIEWS.items():
        tensor = KINDS[kind](torch.randn(128, 128))
        if name not in ("view, dtype", "reshape, a copy"):
            with told(kind, name):
                assert type(view(tensor)) is type(tensor)
    tensor.view(-1).zero_()
    assert not tensor.dequantize().any()


def test_as_strided_out_of_the_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match=r"elements 0 to 64 of memory.*4096 to 8192.*on the whole"):
        MX(torch.randn(128, 128))[32:64].as_strided((64,), (1,), 0)
    with pytest.raises(UsageError, match=r"elements 0 to 16385 of memory"):
        MX(torch.randn(128, 128)).as_strided((16385,), (1,))


def test_values_of_a_view_are_read_like_a_plain_tensor() -> None:
    tensor = MX(torch.randn(64, 64))
    part, plain = tensor[3:5], tensor.dequantize()[3:5]
    assert type(part) is DequantizedView
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    read: dict[str, Op] = {
        "+": lambda t: t + 1,
        "sum": lambda t: t.sum(),
        "cat": lambda t: torch.cat([t, t]),
        "clone": lambda t: t.clone(),
        "to": lambda t: t.to(torch.bfloat16),
        "deepcopy": copy.deepcopy,
        "numpy": lambda t: torch.from_numpy(t.numpy()),
        "tolist": lambda t: torch.tensor(t.tolist()),
        "quantize": lambda t: CURRENT(t).dequantize(),
        "copied": lambda t: torch.zeros(2, 64).copy_(t),
        "load": lambda t: torch.load(file) if t is part else t,
        "layer": lambda t: ottava.nn.Linear(64, 8, recipe="current").requires_grad_(False)(t).shape,
    }
    for name, op in read.items():
        with told(name):
            found, expected = op(part), op(plain)
            assert type(found) is type(expected)
            assert found == expected if name == "layer" else torch.equal(found, expected)
    assert repr(part).endswith("of=MXFP8Tensor)")
    part.dequantize().zero_()


def test_gradients_pass_a_view_of_values() -> None:
    tensor = torch.nn.Parameter(MX(torch.randn(64, 64)))
    tensor[3:5].sum().backward()
    expected = torch.zeros(64, 64)
    expected[3:5] = 1
    assert torch.equal(tensor.grad, expected)


def test_collectives_do_not_write_to_views() -> None:
    dist = torch.distributed
    tensor = MX(torch.ones(64, 64))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for collective in (lambda v: dist.broadcast(v, 0), dist.all_reduce):
            with pytest.raises(UsageError, match=r"c10d::\w+ may write to a view of a MXFP8Tensor"):
                collective(tensor[1:2])
    finally:
        dist.destroy_process_group()


def test_a_view_is_formatted_as_its_value() -> None:
    assert f"{MX(torch.full((64, 64), 0.5))[0, 0]:.3f}" == "0.500"
