"""The values of views that blocks do not allow: read like plain tensors, and never written to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava.errors import DTypeError, UsageError
from ottava.nn import Linear
from ottava.tensors import DequantizedView
from tests.cases import told
from tests.comparing import assert_same
from tests.copying import by_file
from tests.core.layouts.layouts import QUANTIZERS, OneQuantizer, inner
from tests.samples import wide

MX = QUANTIZERS["mxfp8"]


READS: list[Callable[[Any], Any]] = [
    lambda t: t + 1,
    lambda t: t.sum(),
    lambda t: torch.cat([t, t]),
    lambda t: t.clone(),
    lambda t: t.to(torch.bfloat16),
    copy.deepcopy,
    by_file,
    lambda t: torch.from_numpy(t.numpy()),
    lambda t: torch.tensor(t.tolist()),
    lambda t: torch.from_dlpack(t),
    lambda t: QUANTIZERS["tensor"](t).dequantize(),
    lambda t: torch.zeros(2, 64).copy_(t),
    lambda t: Linear(64, 1, bias=False, recipe=OneQuantizer()).requires_grad_(False)(t).isnan(),
]


def test_it_is_read_like_a_plain_tensor() -> None:
    tensor = MX(wide(64, 64))
    part, plain = tensor[3:5], tensor.dequantize()[3:5]
    assert type(part) is DequantizedView
    for number, read in enumerate(READS):
        with told(number):
            found = read(part)
            assert type(found) is torch.Tensor
            assert_same(found, read(plain))
    for view in (lambda t: t[1], lambda t: t.view(-1), lambda t: t.t()):
        assert type(view(part)) is DequantizedView
        assert_same(view(part).clone(), view(plain))
    assert copy.deepcopy(part.detach().requires_grad_()).requires_grad
    assert repr(part).endswith("of=GridTensor)")
    assert f"{MX(torch.full((64, 64), 0.5))[0, 0]:.3f}" == "0.500"
    assert_same(part.dequantize(torch.float64), plain.double())
    with pytest.raises(DTypeError, match="int32"):
        part.dequantize(torch.int32)
    memory = part.untyped_storage()
    assert part.data_ptr() == memory.data_ptr() + 4 * part.storage_offset()
    # Copies are the reader's own.
    for own in (part.dequantize(), torch.from_numpy(part.numpy()), torch.from_dlpack(part)):
        own.zero_()
    assert_same(part.clone(), plain)


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t[:, 3:5].zero_(),
        lambda t: t.view(-1).mul_(2.0),
        lambda t: t[::2].fill_(1.0),
        lambda t: t[3].copy_(torch.ones(64)),
        lambda t: t.fill_diagonal_(1.0),
        lambda t: torch.add(torch.ones(64), 1, out=t[3]),
        lambda t: torch._foreach_mul_([t[3]], 2),
        lambda t: t.view(torch.int32).zero_(),
        lambda t: t[3:5][1:].zero_(),
    ],
)
def test_a_write_is_refused_before_anything_changes(write: Callable[[Any], Any]) -> None:
    q = MX(wide(64, 64))
    before = inner(q)
    with pytest.raises(UsageError, match=r"a view of a GridTensor that cannot share.*assign with"):
        write(q)
    assert_same(inner(q), before)


def test_as_strided_out_of_the_tensor_is_refused() -> None:
    q = MX(wide(128, 128))
    with pytest.raises(UsageError, match=r"elements 0 to 64 of memory.*4096 to 8192.*on the whole"):
        q[32:64].as_strided((64,), (1,), 0)
    with pytest.raises(UsageError, match=r"elements 0 to 16385 of memory"):
        q.as_strided((16385,), (1,))
    with pytest.raises(UsageError, match=r"as_strided of a view.*view.dequantize\(\)"):
        q[:, 32:].as_strided((3, 2), (128, 1), 40)


def test_gradients_pass() -> None:
    parameter = torch.nn.Parameter(MX(wide(64, 64)))
    parameter[3:5].sum().backward()
    expected = torch.zeros(64, 64)
    expected[3:5] = 1
    assert_same(parameter.grad, expected)


def test_collectives_are_refused() -> None:
    """Their schemas do not say what they write: what they would write to is a copy."""
    dist, tensor = torch.distributed, MX(torch.ones(64, 64))
    calls = [
        dist.all_reduce,
        lambda v: dist.broadcast(v, 0),
        lambda v: dist.all_gather([v], v),
        lambda v: dist.scatter(v, [v]),
    ]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for call in calls:
            with pytest.raises(UsageError, match=r"collective c10d::\w+ was called with"):
                call(tensor)
        for call in calls[:2]:
            with pytest.raises(UsageError, match=r"c10d::\w+ may write to a view of a GridTensor"):
                call(tensor[1:2])
    finally:
        dist.destroy_process_group()
    assert_same(tensor.dequantize(), torch.ones(64, 64))
