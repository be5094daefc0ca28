"""Rows of tensors of any class: views that share their data, and what is written to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import OneScaleQuantizer, RowQuantizer
from strided import ROWS, check_places

from ottava import QuantizedTensor
from ottava.errors import UsageError
from ottava.tensors import DequantizedView, Float8Tensor, InnerTensor

BOTH = pytest.mark.parametrize(
    "quantizer", [RowQuantizer(), OneScaleQuantizer()], ids=["rows", "one"]
)


class BlockTensor(QuantizedTensor):
    """A scale for each two rows, which are one row of the scales."""

    inner_tensors = (
        InnerTensor("_codes", "codes", gather=True),
        InnerTensor("_scales", "scales", gather=True, block_rows=2),
    )

    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        return (self._codes.float() * self._scales.repeat_interleave(2, 0)[: len(self._codes)]).to(
            dtype
        )


@BOTH
@pytest.mark.parametrize(
    "rows", [slice(0, 2), slice(2, 5), slice(3, 3), slice(0, 5), slice(-2, None), slice(9, 12)]
)
def test_a_slice_of_rows_keeps_the_class(quantizer: Any, rows: slice) -> None:
    x = torch.randn(5, 8)
    tensor = quantizer(x)
    part = tensor[rows]
    assert type(part) is type(tensor)
    assert torch.equal(part.dequantize(), tensor.dequantize()[rows])
    if part.numel():
        assert (
            part._codes.untyped_storage().data_ptr() == tensor._codes.untyped_storage().data_ptr()
        )


@BOTH
def test_parts_of_rows_keep_the_class(quantizer: Any) -> None:
    tensor = quantizer(torch.randn(7, 4))
    values = tensor.dequantize()
    for parts, expected in (
        (tensor.split(3), values.split(3)),
        (tensor.split([2, 5]), values.split([2, 5])),
        (tensor.chunk(3), values.chunk(3)),
        ((tensor.narrow(0, 2, 4),), (values.narrow(0, 2, 4),)),
        ((tensor[2:][1:3],), (values[2:][1:3],)),
    ):
        assert len(parts) == len(expected)
        for part, own in zip(parts, expected, strict=True):
            assert type(part) is type(tensor)
            assert torch.equal(part.dequantize(), own)


@BOTH
@pytest.mark.parametrize("take", [lambda t: t[::2], lambda t: t[:, :2], lambda t: t.split(2, 1)[0]])
def test_what_is_not_rows_is_dequantized(quantizer: Any, take: Any) -> None:
    tensor = quantizer(torch.randn(4, 6))
    assert type(take(tensor)) is DequantizedView
    assert torch.equal(take(tensor), take(tensor.dequantize()))


@BOTH
def test_views_lie_where_plain_ones_do(quantizer: Any) -> None:
    check_places(quantizer(torch.randn(96, 64)), ROWS)


@BOTH
def test_data_of_another_shape_is_adopted(quantizer: Any) -> None:
    for new in (torch.randn(2, 3), quantizer(torch.randn(7, 3)), quantizer(torch.randn(7, 3))[2:]):
        tensor = quantizer(torch.randn(5, 8))
        tensor.data = new
        expected = new if isinstance(new, QuantizedTensor) else quantizer(new)
        assert tensor.shape == new.shape
        assert tensor.storage_offset() == expected.storage_offset()
        assert torch.equal(tensor.dequantize(), expected.dequantize())


def test_wrong_sizes_are_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        RowQuantizer()(torch.randn(4, 6)).split([1, 2])


# In place on two rows of eight, of a quantized or a plain tensor.
CHANGES = {
    "copy_": lambda rows: rows.copy_(torch.full((2, 8), 3.0)),
    "mul_": lambda rows: rows.mul_(2),
    "a row of the rows": lambda rows: rows[:1].zero_(),
    "an alias": lambda rows: rows.detach().copy_(torch.ones(2, 8)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_are_written_are_written_in_the_whole(change: str) -> None:
    quantizer = RowQuantizer()
    tensor = quantizer(torch.randn(5, 8))
    before, expected = tensor.dequantize(), tensor.dequantize()
    rows = tensor[1:3]
    CHANGES[change](rows)
    CHANGES[change](expected[1:3])
    assert torch.equal(rows.dequantize(), tensor.dequantize()[1:3])
    assert torch.equal(tensor.dequantize()[[0, 3, 4]], before[[0, 3, 4]])
    assert torch.equal(tensor.dequantize()[1:3], quantizer(expected[1:3]).dequantize())


@pytest.mark.parametrize("change", CHANGES)
def test_rows_with_the_scale_of_others_are_not_written(change: str) -> None:
    """Their scale would change, and with it the other rows: nothing is written, and the error says
    what to do."""
    tensor = OneScaleQuantizer()(torch.randn(5, 8))
    before = tensor.dequantize()
    with pytest.raises(
        UsageError,
        match=r"rest of the tensor.*assign with tensor\[index\] = values, or write to the whole",
    ):
        CHANGES[change](tensor[1:3])
    assert torch.equal(tensor.dequantize(), before)
    values = torch.full((2, 8), 3.0)
    tensor[1:3] = values
    before[1:3] = values
    assert torch.equal(tensor.dequantize(), OneScaleQuantizer()(before).dequantize())


def test_rows_beside_zeros_may_have_another_scale() -> None:
    """As those of a shard that is padded: zeros are zeros at any scale."""
    tensor = OneScaleQuantizer()(torch.randn(4, 8))
    padded = tensor.new_zeros((6, 8))
    values = 100 * torch.randn(4, 8)
    padded[:4].copy_(values)
    assert torch.equal(padded.dequantize()[:4], OneScaleQuantizer()(values).dequantize())
    assert not padded.dequantize()[4:].any()
    with pytest.raises(UsageError, match="rest of the tensor"):
        padded[4:].copy_(torch.full((2, 8), 1e5))


@BOTH
def test_all_rows_are_the_tensor(quantizer: Any) -> None:
    tensor = quantizer(torch.randn(4, 8))
    tensor[:].copy_(torch.full((4, 8), 7.0))
    assert torch.equal(tensor.dequantize(), quantizer(torch.full((4, 8), 7.0)).dequantize())


def test_rows_of_equal_scales_take_over_the_bytes() -> None:
    quantizer = OneScaleQuantizer()
    x = torch.randn(4, 8)
    tensor, other = quantizer(x), quantizer(x)
    other._codes.random_(0, 100)
    tensor[1:3].copy_(other[0:2])
    assert torch.equal(tensor._codes[1:3], other._codes[0:2])
    assert torch.equal(tensor._codes[0], quantizer(x)._codes[0])


def test_a_noop_leaves_the_whole() -> None:
    tensor = RowQuantizer()(torch.randn(4, 8))
    before = tensor.dequantize()
    tensor[1:3].quantize_(torch.full((2, 8), 9.0), noop_flag=torch.ones(1))
    assert torch.equal(tensor.dequantize(), before)
    tensor[1:3].quantize_(torch.full((2, 8), 9.0), noop_flag=torch.zeros(1))
    assert (tensor.dequantize()[1:3] - 9.0).abs().max() < 0.1


@BOTH
def test_padding_has_the_class_and_what_rows_share(quantizer: Any) -> None:
    tensor = quantizer(torch.randn(4, 8))
    padded = tensor.new_zeros((6, 8))
    assert type(padded) is type(tensor)
    assert torch.equal(padded.dequantize(), torch.zeros(6, 8))
    padded[:4].copy_(tensor)
    assert torch.equal(padded[:4]._codes, tensor._codes)
    assert torch.equal(padded.dequantize()[:4], tensor.dequantize())
    for shape in ((6, 9), (3,), ()):
        for made in (tensor.new_zeros(shape), tensor.new_empty(shape), torch.empty_like(tensor)):
            assert type(made) is type(tensor)
        assert torch.equal(tensor.new_zeros(shape).dequantize(), torch.zeros(shape))
    tensor.update_quantizer(None)
    assert type(tensor.new_zeros((6, 8))) is torch.Tensor
    assert type(tensor.new_zeros((6, 8), dtype=torch.int32)) is torch.Tensor
    assert type(torch.zeros_like(tensor)) is torch.Tensor


@BOTH
def test_tensors_that_leave_the_meta_device_keep_the_class(quantizer: Any) -> None:
    """As ``Module.to_empty`` makes them; what their rows share has no values that they could take
    over."""
    tensor = quantizer(torch.randn(4, 8)).to("meta")
    for made in (torch.empty_like(tensor, device="cpu"), tensor.new_zeros((6, 8), device="cpu")):
        assert type(made) is type(tensor)
        assert made.device.type == "cpu"
        made.copy_(torch.full(made.shape, 3.0))
        assert torch.equal(made.dequantize(), quantizer(torch.full(made.shape, 3.0)).dequantize())


def test_blocks_are_not_cut() -> None:
    tensor = BlockTensor(
        codes=torch.arange(20, dtype=torch.uint8).view(5, 4),
        scales=torch.tensor([[1.0], [2.0], [3.0]]),
        dtype=torch.float32,
    )
    values = tensor.dequantize()
    for rows, whole in (
        (slice(0, 2), True),
        (slice(2, 5), True),
        (slice(4, 5), True),
        (slice(1, 3), False),
        (slice(0, 3), False),
    ):
        part = tensor[rows]
        assert (type(part) is BlockTensor) is whole, rows
        assert torch.equal(part.dequantize() if whole else part, values[rows])


def test_a_class_with_an_op_of_its_own_decides() -> None:
    data = torch.zeros(4, 4, dtype=torch.uint8)
    tensor = Float8Tensor(
        data=data, fp8_dtype=torch.float8_e4m3fn, fp8_scale_inv=torch.ones(()), dtype=torch.float32
    )
    assert type(tensor[:, 1:]) is Float8Tensor
    assert type(tensor[1:]) is Float8Tensor


INDICES = [
    0,
    -1,
    (1, 2),
    (slice(None), 2),
    slice(None, None, 2),
    slice(1, 3),
    ...,
    (0, slice(2, 4)),
    torch.tensor([0, 3]),
]


@BOTH
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_assignment_reaches_the_tensor(quantizer: Any, index: Any) -> None:
    tensor = quantizer(torch.randn(4, 6))
    expected = tensor.dequantize()
    expected[index] = 0.5
    tensor[index] = 0.5
    assert torch.equal(tensor.dequantize()[index], quantizer(expected).dequantize()[index])
    torch.testing.assert_close(tensor.dequantize(), expected, rtol=2**-4, atol=2e-4)


def test_an_assignment_takes_tensors_and_keeps_autograds_rules() -> None:
    tensor, other = RowQuantizer()(torch.randn(4, 6)), RowQuantizer()(torch.ones(6))
    tensor[2] = other
    assert torch.equal(tensor.dequantize()[2], torch.ones(6))
    parameter = torch.nn.Parameter(tensor)
    with pytest.raises(RuntimeError, match="in-place"):
        parameter[0] = 1.0
    with torch.no_grad():
        parameter[0] = 1.0
    assert torch.equal(parameter.dequantize()[0], torch.ones(6))
    with pytest.raises(RuntimeError):
        tensor[1] = torch.ones(7)
    with pytest.raises(IndexError):
        tensor[9] = 1.0


@BOTH
def test_padding_takes_rows_at_the_scale_that_they_have(quantizer: Any) -> None:
    """Also rows whose own largest value would give another one: a shard is padded so."""
    tensor = quantizer(torch.tensor([[1.0, 0.3]] * 3 + [[100.0, 7.0]]))
    padded = tensor.new_zeros((6, 2))
    padded[:3].copy_(tensor[:3])
    assert torch.equal(padded[:3]._codes, tensor[:3]._codes)
    assert torch.equal(padded[:3].dequantize(), tensor[:3].dequantize())


@BOTH
def test_rows_on_the_meta_device(quantizer: Any) -> None:
    """As a model that is sharded before it has values."""
    tensor = quantizer(torch.empty(4, 8, device="meta"))
    padded = tensor.new_zeros((6, 8))
    padded[:4].copy_(tensor)
    assert type(padded[:4]) is type(tensor)
    assert padded.is_meta
