"""A write to a view of a tensor of any recipe reaches the tensor, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava.errors import OttavaError
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_custom import CurrentScalingQuantizerRef, HybridQuantizer, IdentityQuantizer
from ottava_mxfp8 import MXFP8Quantizer
from tests.cases import told
from tests.comparing import assert_same

E4M3 = torch.float8_e4m3fn
CURRENT, MX = Float8CurrentScalingQuantizer(E4M3), MXFP8Quantizer(E4M3)
BLOCKS = Float8BlockQuantizer(E4M3)
#: The views of grids are those of tests/core/layouts; these are tensors of two kinds, or of none.
KINDS: dict[str, Any] = {
    "reference": CurrentScalingQuantizerRef(E4M3),
    "identity": IdentityQuantizer(),
    "hybrid of blocks": HybridQuantizer(BLOCKS, MX),
    "hybrid with identity": HybridQuantizer(IdentityQuantizer(), CURRENT),
}
Op = Callable[[Any], Any]
VIEWS: dict[str, Op] = {
    "view": lambda t: t.view(-1),
    "as_strided": lambda t: t.as_strided(t.shape, t.stride()),
    "rows": lambda t: t[32:64],
    "some rows": lambda t: t[3:50],
    "some columns": lambda t: t[:, 3:5],
    "steps": lambda t: t[::2],
    "transpose": lambda t: t.transpose(0, 1),
    "squeeze": lambda t: t[:1].squeeze(),
    "select": lambda t: t[5],
    "split, columns": lambda t: t.split([100, 28], 1)[1],
    "unbind": lambda t: t.unbind()[2],
    "diagonal": lambda t: t.diagonal(),
    "detach": lambda t: t.detach(),
    "as_strided before rows": lambda t: t[32:64].as_strided((64,), (1,), 0),
    "view of a view": lambda t: t.view(-1)[3:5],
}
WRITES: list[Op] = [
    lambda v: v.zero_(),
    lambda v: v.fill_(1.0),
    lambda v: v.copy_(torch.ones(v.shape)),
    lambda v: v.mul_(2),
    lambda v: torch.add(torch.ones(v.shape), 1, out=v),
    lambda v: torch._foreach_mul_([v], 2),
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_write_to_a_view_is_lost(kind: str) -> None:
    x = torch.randn(128, 128)
    for number, (name, view) in enumerate(VIEWS.items()):
        for write in WRITES[number % 2 :: 2]:
            with told(kind, name):
                _check(KINDS[kind](x), view, write)


def _check(tensor: Any, view: Op, write: Op) -> None:
    before = tensor.dequantize()
    plain = before.clone()
    of_plain = view(plain)
    try:
        part = view(tensor)
    except OttavaError:
        return
    assert_same(part.dequantize(), of_plain)
    try:
        write(part)
    except OttavaError:
        assert_same(tensor.dequantize(), before)
        return
    write(of_plain)
    torch.testing.assert_close(tensor.dequantize(), plain, rtol=0.07, atol=0.02)


@pytest.mark.parametrize("kind", ["identity", "reference"])
def test_views_of_elements_share_them(kind: str) -> None:
    for name, view in VIEWS.items():
        tensor = KINDS[kind](torch.randn(128, 128))
        with told(kind, name):
            assert type(view(tensor)) is type(tensor)
    tensor.view(-1).zero_()
    assert not tensor.dequantize().any()
