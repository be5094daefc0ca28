"""Bytes of weights that lie in a caller's buffer or come from elsewhere, and the transposes that
derive from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ottava
from ottava.distributed import (
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from ottava.errors import DeviceError, DTypeError, OttavaError, ShapeError, UsageError
from ottava.tensors import columnwise_layout
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer
from tests.comparing import assert_same

E4M3, E5M2, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
MAKERS = {
    "current": lambda: Float8CurrentScalingQuantizer(E5M2),
    "delayed": lambda: Float8Quantizer(torch.tensor([3.0]), torch.zeros(1), E4M3),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "blockwise": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
}


@pytest.fixture(params=["shared", "transpose"])
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    with columnwise_layout(request.param):
        yield request.param


def data_of(weight: Any) -> list[torch.Tensor]:
    """The data that can be moved."""
    return [getattr(weight, inner.attribute) for inner in weight.raw_inner()]


def no_stale_transpose(weight: Any) -> None:
    transposed = getattr(weight, "_transpose", None)
    assert transposed is None or torch.equal(transposed, weight._data.movedim(-1, 0))


@pytest.mark.parametrize("name", MAKERS)
def test_writes_reach_both_sides(name: str, layout: str) -> None:
    weight, expected = (MAKERS[name]().quantize(torch.randn(64, 32)) for _ in range(2))
    buffers = [torch.zeros(64 * 32 + 3, dtype=U8)[3:] for _ in data_of(weight)]
    replace_raw_data(weight, buffers)
    values = torch.randn(64, 32)
    with torch.no_grad():
        weight.copy_(values)
        expected.copy_(values)
    assert_same([buffer.view(64, 32) for buffer in buffers], data_of(expected))
    no_stale_transpose(weight)
    # A collective writes below torch, which counts no write.
    for buffer in buffers:
        buffer.numpy()[:] = 7
    post_all_gather_processing([weight])
    assert all((data == 7).all() for data in data_of(weight))
    no_stale_transpose(weight)


def test_an_alias_keeps_the_old_bytes(layout: str) -> None:
    weight: Any = Float8CurrentScalingQuantizer(E4M3).quantize(torch.randn(6, 8))
    alias, old, buffer = weight.detach(), weight._data, torch.zeros(48, dtype=U8)
    replace_raw_data(weight, buffer)
    assert alias._data.data_ptr() == old.data_ptr()
    alias.copy_(torch.randn(6, 8))
    assert_same(buffer.view(6, 8), weight._data)
    no_stale_transpose(alias)
    no_stale_transpose(weight)


def test_weights_of_one_buffer_keep_their_transposes() -> None:
    """Those of the first weight are still current when the second one moves into the buffer."""
    with columnwise_layout("transpose"):
        quantizer = Float8CurrentScalingQuantizer(E4M3)
        weights: list[Any] = [quantizer.quantize(torch.randn(6, 8)) for _ in range(2)]
        for weight, buffer in zip(weights, torch.zeros(96, dtype=U8).split(48), strict=True):
            replace_raw_data(weight, buffer)
        for weight in weights:
            assert_same(weight._transpose, weight._data.t())


def test_one_buffer_moves_the_rowwise_data_alone() -> None:
    blocks = MXFP8Quantizer(E4M3).quantize(torch.randn(64, 32))
    columns, buffer = blocks._columnwise_data, torch.zeros(2048, dtype=U8)
    replace_raw_data(blocks, buffer)
    assert blocks._rowwise_data.data_ptr() == buffer.data_ptr()
    assert blocks._columnwise_data is columns


REFUSED: dict[str, tuple[type[Exception], Any]] = {
    "dtype": (DTypeError, lambda n: torch.zeros(n, dtype=torch.int8)),
    "another format": (DTypeError, lambda n: torch.zeros(n, dtype=U8).view(torch.float8_e8m0fnu)),
    "no tensor": (DTypeError, lambda n: b"\0" * n),
    "too small": (ShapeError, lambda n: torch.zeros(n - 1, dtype=U8)),
    "too large": (ShapeError, lambda n: torch.zeros(n + 1, dtype=U8)),
    "device": (DeviceError, lambda n: torch.zeros(n, dtype=U8, device="meta")),
    "not contiguous": (UsageError, lambda n: torch.zeros(2 * n, dtype=U8)[::2]),
    "none": (ShapeError, lambda n: []),
    "too many": (ShapeError, lambda n: [torch.zeros(n, dtype=U8) for _ in range(3)]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_wrong_buffer_is_refused_before_anything_is_written(why: str) -> None:
    error, make = REFUSED[why]
    for name in ("current", "mxfp8"):
        weight, good = MAKERS[name]().quantize(torch.randn(32, 32)), torch.full((1024,), 7).to(U8)
        before, values = data_of(weight), weight.dequantize()
        wrong = make(1024)
        if name == "mxfp8" and not isinstance(wrong, list):
            # The second of two.
            wrong = [good, wrong]
        with pytest.raises(error):
            replace_raw_data(weight, wrong)
        assert (good == 7).all()
        assert all(now is old for now, old in zip(data_of(weight), before, strict=True))
        assert_same(weight.dequantize(), values)


def test_weights_without_bytes_of_their_own_are_refused() -> None:
    buffer, values = torch.zeros(48, dtype=U8), torch.randn(6, 8)
    weight, cleared = (MAKERS["current"]().quantize(values) for _ in range(2))
    cleared.clear()
    part, before = weight[2:4], weight.dequantize()
    # A part shares the scale of the whole, which finds its views by where their bytes are.
    for wrong in (values, cleared, weight.t(), part):
        with pytest.raises(OttavaError):
            replace_raw_data(wrong, buffer[: wrong.numel()])
    assert_same(part.dequantize(), before[2:4])
    # Two directions need two buffers.
    blocks, both = MXFP8Quantizer(E4M3).quantize(torch.randn(32, 32)), torch.zeros(1024, dtype=U8)
    expected = [tensor.clone() for tensor in blocks.inner_list()]
    with pytest.raises(OttavaError):
        replace_raw_data(blocks, [both, both])
    assert_same(blocks.inner_list(), expected)


# -- bytes that come from elsewhere, in the layout of Hopper --


@pytest.mark.parametrize("manual", [False, True])
def test_a_gather_after_a_forward_pass_that_came_too_early(manual: bool) -> None:
    """A transpose that was made before the last bytes came is never read."""
    with columnwise_layout("transpose"), ottava.quantized_model_init("current"):
        layer, twin = (
            ottava.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16, recipe="current")
            for _ in range(2)
        )
        weight, master = layer.weight, torch.randn(64, 32)
        # The amax of the whole is in the first half.
        master[0, 0] = 100.0
        with torch.no_grad():
            twin.weight.copy_(master.bfloat16())
        quantize_master_weights([weight], [master.view(-1)[:1024]], [0], None, None, manual)
        x = torch.randn(16, 32).bfloat16().requires_grad_()
        layer(x).sum().backward()
        weight._data.view(-1)[1024:].copy_(twin.weight._data.view(-1)[1024:])
        no_stale_transpose(weight)
        post_all_gather_processing([weight])
        assert weight._transpose is not None
        # Of an input: products with columnwise weights.
        gradients = [torch.autograd.grad(each(x).sum(), x)[0] for each in (layer, twin)]
        assert_same(*gradients)


def test_weights_that_need_no_processing() -> None:
    blocks = MXFP8Quantizer(E4M3).quantize(torch.randn(32, 32))
    shared = Float8CurrentScalingQuantizer(E4M3).quantize(torch.randn(4, 4))
    with columnwise_layout("transpose"):
        rows = Float8CurrentScalingQuantizer(E4M3, columnwise=False).quantize(torch.randn(4, 4))
        quantize_master_weights([rows], [torch.randn(4, 4)], None)
        post_all_gather_processing([torch.ones(3), blocks, shared, rows])
    post_all_gather_processing([])
    assert shared._transpose is None
    assert rows.get_usages() == {"rowwise": True, "columnwise": False}
    for wrong in (["w"], None, 3):
        with pytest.raises(DTypeError):
            post_all_gather_processing(wrong)  # type: ignore[arg-type]
