"""Bytes of weights that come from elsewhere, and the transposes that derive from them in the layout
of Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.distributed import post_all_gather_processing, quantize_master_weights, replace_raw_data
from ottava.errors import DTypeError
from ottava.tensors import columnwise_layout
from ottava_current import Float8CurrentScalingQuantizer
from ottava_mxfp8 import MXFP8Quantizer

E4M3 = torch.float8_e4m3fn


def no_stale_transpose(weight: Any) -> None:
    transposed = weight._transpose
    assert transposed is None or torch.equal(transposed, weight._data.movedim(-1, 0))


class Layer:
    """A layer with one weight in the Hopper layout, whose master has other values than the
    weight."""

    def __init__(self, recipe: str = "current") -> None:
        torch.manual_seed(0)
        with ottava.quantized_model_init(recipe):
            self.layer = ottava.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16, recipe=recipe)
        self.weight: Any = self.layer.weight
        self.master = torch.randn(64, 32)
        self.x = torch.randn(16, 32).bfloat16().requires_grad_()

    def gradient(self) -> torch.Tensor:
        """Of the input: a GEMM with columnwise weights."""
        self.x.grad = None
        self.layer(self.x).sum().backward()
        assert self.x.grad is not None
        return self.x.grad

    def expected(self) -> torch.Tensor:
        other = Layer()
        with torch.no_grad():
            other.weight.copy_(self.master.bfloat16())
        other.x = self.x.detach().clone().requires_grad_()
        return other.gradient()


@pytest.mark.parametrize("manual", [False, True])
def test_a_stale_transpose_is_never_read(manual: bool) -> None:
    with columnwise_layout("transpose"):
        made = Layer()
        made.gradient()
        assert made.weight._transpose is not None
        quantize_master_weights(
            [made.weight], [made.master], None, manual_post_all_gather_processing=manual
        )
        assert made.weight._transpose is None
        found = made.gradient()
        assert torch.equal(found, made.expected())
        # The forward pass makes the transpose, unless it is left to the caller.
        assert (made.weight._transpose is None) == manual
        no_stale_transpose(made.weight)
        post_all_gather_processing([made.weight])
        assert made.weight._transpose is not None
        no_stale_transpose(made.weight)
        assert torch.equal(made.gradient(), found)


@pytest.mark.parametrize("manual", [False, True])
def test_bytes_that_come_after_the_cast(manual: bool) -> None:
    """This rank has the first half; a gather brings the second, after a forward pass that came too
    early."""
    with columnwise_layout("transpose"):
        made = Layer()
        whole = Float8CurrentScalingQuantizer(E4M3).quantize(made.master.bfloat16())
        first = made.master.view(-1)[:1024].clone()
        # The amax of the whole is in the part that is here.
        first[0] = 100.0
        made.master.view(-1)[0] = 100.0
        whole = Float8CurrentScalingQuantizer(E4M3).quantize(made.master.bfloat16())
        quantize_master_weights([made.weight], [first], [0], None, None, manual)
        made.gradient()
        made.weight._data.view(-1)[1024:].copy_(whole._data.view(-1)[1024:])
        no_stale_transpose(made.weight)
        post_all_gather_processing([made.weight])
        no_stale_transpose(made.weight)
        assert made.weight._transpose is not None
        assert torch.equal(made.gradient(), made.expected())


def test_bytes_that_are_written_below_torch() -> None:
    """A collective or a pointer: torch sees no write, so the caller says that there was one."""
    with columnwise_layout("transpose"):
        made = Layer()
        buffer = torch.zeros(64, 32, dtype=torch.uint8)
        replace_raw_data(made.weight, buffer)
        made.gradient()
        whole = Float8CurrentScalingQuantizer(E4M3).quantize(made.master.bfloat16())
        buffer.numpy()[:] = whole._data.numpy()
        with torch.no_grad():
            made.weight._scale_inv.copy_(whole._scale_inv)
        post_all_gather_processing([made.weight])
        assert torch.equal(made.weight._transpose, whole._data.t())
        assert torch.equal(made.gradient(), made.expected())


def test_post_all_gather_processing_of_what_needs_none() -> None:
    plain, blocks = torch.ones(3), MXFP8Quantizer(E4M3).quantize(torch.randn(32, 32))
    shared = Float8CurrentScalingQuantizer(E4M3).quantize(torch.randn(4, 4))
    before = [t.clone() for t in blocks.inner_list()]
    post_all_gather_processing([plain, blocks, shared, torch.nn.Parameter(torch.ones(2))])
    post_all_gather_processing([])
    assert all(torch.equal(a, b) for a, b in zip(blocks.inner_list(), before, strict=True))
    assert shared._transpose is None
    for wrong in ([plain, None], ["w"], None, 3):
        with pytest.raises(DTypeError):
            post_all_gather_processing(wrong)  # type: ignore[arg-type]


def test_a_weight_for_rows_alone_gets_no_transpose() -> None:
    with columnwise_layout("transpose"):
        quantizer = Float8CurrentScalingQuantizer(E4M3, columnwise=False)
        weight = quantizer.quantize(torch.randn(4, 4))
        quantize_master_weights([weight], [torch.randn(4, 4)], None)
        post_all_gather_processing([weight])
        assert weight.get_usages() == {"rowwise": True, "columnwise": False}
