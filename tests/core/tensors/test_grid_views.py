"""Views of tensors on grids: what shares a scale with the rest, buffers that serve both usages, and
other shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava import GridQuantizer, GridTensor, Layout
from ottava.distributed import cast_master_weights_to_fp8, replace_raw_data
from ottava.errors import UsageError

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
ROWS = GridQuantizer(Layout(E4M3, (1, None)), columnwise=False)
COLUMNS = GridQuantizer(Layout(E4M3, (None, 1)), rowwise=False)
BANDS = GridQuantizer(Layout(E4M3, (None, 4)), columnwise=False)
BOTH = GridQuantizer(Layout(E4M3, (1, None)))
TURNED = GridQuantizer(Layout(E4M3, (1, None), columnwise="transposed"))
TENSOR = GridQuantizer(Layout(INT8, (None, None)))

# A quantizer, a shape, and an index of a part of blocks that reach beyond it.
PARTS: dict[str, tuple[GridQuantizer, tuple[int, ...], Any]] = {
    "rows": (ROWS, (16, 32), (slice(None), slice(0, 8))),
    "rows, 3-d": (ROWS, (2, 3, 32), (..., slice(0, 4))),
    "columns": (COLUMNS, (16, 32), (slice(None), slice(0, 8))),
    "bands": (BANDS, (16, 32), slice(0, 8)),
    "both": (BOTH, (16, 32), (slice(None), slice(0, 8))),
    "transposed columns": (TURNED, (16, 32), (slice(None), slice(0, 8))),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda part: part.copy_(torch.full(part.shape, 1000.0)),
    "mul_": lambda part: part.mul_(3),
    "fill_": lambda part: part.fill_(50.0),
    "zeros_": torch.nn.init.zeros_,
    "rows of it": lambda part: part[: part.shape[0] // 2].mul_(3),
    "an alias": lambda part: part.detach().unsqueeze(0).mul_(3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_block_does_not_change_its_scale(name: str, write: str) -> None:
    quantizer, shape, index = PARTS[name]
    tensor = quantizer(torch.randn(shape))
    before = tensor.dequantize()
    part = tensor[index]
    assert isinstance(part, GridTensor)
    with pytest.raises(UsageError, match="rest of the tensor"):
        WRITES[write](part)
    assert torch.equal(tensor.dequantize(), before)


@pytest.mark.parametrize("name", PARTS)
def test_an_assignment_to_a_part_of_a_block_quantizes_all_again(name: str) -> None:
    quantizer, shape, index = PARTS[name]
    tensor = quantizer(torch.randn(shape))
    expected = tensor.dequantize()
    tensor[index] = expected[index] = 100.0
    assert torch.equal(tensor.dequantize(), quantizer(expected).dequantize())


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_block_is_written_with_the_scale_that_it_has(name: str) -> None:
    """With both directions held that of the columns, which the part has for itself, may change."""
    quantizer, shape, index = PARTS[name]
    x = torch.randn(shape)
    largest = x.abs().max() + 1
    # The largest value of each block, in the part and outside of it.
    x[..., 0] = x[..., -1] = largest
    if name == "columns" or name == "bands":
        x[0] = x[-1] = largest
    tensor = quantizer(x)
    expected = x.clone()
    expected[index] /= 2
    expected[..., 0] = largest
    if name == "columns" or name == "bands":
        expected[0] = largest
    tensor[index].copy_(expected[index])
    assert torch.equal(tensor.dequantize(), quantizer(expected).dequantize())


def test_a_transposed_part_of_a_block_knows_its_tensor() -> None:
    for quantizer in (ROWS, BOTH, TURNED):
        tensor = quantizer(torch.randn(16, 32))
        before = tensor.dequantize()
        for part in (tensor[:, :8].t(), tensor.t()[:8], tensor.chunk(2, 1)[0], tensor.t()[:8, :4]):
            assert isinstance(part, GridTensor)
            with pytest.raises(UsageError, match="rest of the tensor"):
                part.mul_(3)
        assert torch.equal(tensor.dequantize(), before)


def test_rows_of_a_part_are_blocks_of_their_own() -> None:
    tensor = ROWS(torch.randn(16, 32))
    before = tensor.dequantize()
    tensor.t()[:, :8].mul_(2)
    torch.testing.assert_close(tensor.dequantize()[:8], 2 * before[:8])
    assert torch.equal(tensor.dequantize()[8:], before[8:])


@pytest.mark.parametrize(
    "usages", [(True, True), (True, False), (False, True)], ids=["both", "rowwise", "columnwise"]
)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.view(-1),
        lambda t: t.t(),
        lambda t: t.view(2, 8, 32),
        lambda t: t.view(2, 8, 32).permute(2, 0, 1),
        lambda t: t.unsqueeze(0),
    ],
    ids=["itself", "flat", "transposed", "3-d", "permuted", "unsqueezed"],
)
def test_a_write_to_a_view_reaches_both_usages(
    view: Callable[[Any], Any], usages: tuple[bool, bool]
) -> None:
    """One scale serves all, so that rows and columns are one buffer."""
    tensor = TENSOR.with_usage(*usages)(torch.randn(16, 32))
    seen = view(tensor)
    assert seen.get_usages() == tensor.get_usages()
    seen.zero_()
    for columnwise in (False, True):
        assert not tensor.for_usage(columnwise)[0].any()
        assert not seen.for_usage(columnwise)[0].any()


def test_columns_alone_are_taken_for_both_usages() -> None:
    x = torch.randn(16, 32)
    made = TENSOR(x)
    data, scale = made.for_usage(False)
    for given in ({}, {"rowwise_data": data, "rowwise_scale_inv": scale}):
        given |= {"columnwise_data": data, "columnwise_scale_inv": scale}
        tensor = GridTensor(**given, layout=TENSOR.layout, dtype=x.dtype, quantizer=TENSOR)
        assert torch.equal(tensor.dequantize(), made.dequantize())
        assert tensor.nbytes == made.nbytes
        assert tensor.new_zeros(4, 4).nbytes == 4 * 4 + 4


@pytest.mark.parametrize("block", [(1, 16), (1, 32)], ids=str)
def test_new_tensors_by_a_quantizer_of_another_layout_are_plain(block: tuple[int, int]) -> None:
    """Its blocks or its elements are not those of the tensor that they are made like."""
    tensor = GridQuantizer(Layout(E4M3, (1, 32)), columnwise=False)(torch.randn(4, 64))
    tensor.update_quantizer(GridQuantizer(Layout(torch.float8_e5m2, block), columnwise=False))
    for made in (tensor.new_zeros(6, 64), tensor.new_empty(4, 64)):
        assert type(made) is torch.Tensor


def test_new_tensors_share_scales_of_all_rows_where_they_have_as_many_columns() -> None:
    tensor = BANDS(torch.randn(16, 32))
    assert torch.equal(tensor.new_zeros(8, 32)._rowwise_scale_inv, tensor._rowwise_scale_inv)
    assert torch.equal(tensor.new_zeros(8, 4)._rowwise_scale_inv, torch.ones(1, 1))


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reshape": lambda t: t.reshape(-1),
    "reshape, rows": lambda t: t.reshape(4, -1),
    "ravel": lambda t: t.ravel(),
    "transposed": lambda t: t.mT.reshape(-1),
    "flatten": lambda t: t.mT.flatten(),
    "contiguous": lambda t: t.mT.contiguous().view(-1),
    "clone": lambda t: t.mT.clone().reshape(-1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "usages", [(True, True), (True, False), (False, True)], ids=["both", "rowwise", "columnwise"]
)
@pytest.mark.parametrize("block", [(1, 4), (4, 8), (4, 4), (4, None)], ids=str)
def test_transposed_columns_are_reshaped(block: Any, usages: tuple[bool, bool], shape: str) -> None:
    quantizer = GridQuantizer(Layout(E4M3, block, columnwise="transposed")).with_usage(*usages)
    for size in ((24, 16), (2, 8, 16)):
        tensor = quantizer(torch.randn(size))
        got: Any = SHAPES[shape](tensor)
        values = got.dequantize() if isinstance(got, GridTensor) else got
        assert torch.equal(values, SHAPES[shape](tensor.dequantize()))


def test_transposed_columns_are_reshaped_in_a_graph() -> None:
    tensor = GridQuantizer(Layout(E4M3, (1, 4), columnwise="transposed"))(torch.randn(24, 16))
    compiled = torch.compile(lambda t: t.t().reshape(-1) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(tensor), tensor.t().dequantize().reshape(-1) * 2)


def test_a_view_that_strides_do_not_have_is_refused() -> None:
    columns = GridQuantizer(Layout(E4M3, (1, 4), columnwise="transposed"), rowwise=False)(
        torch.randn(24, 16)
    )
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        columns.view(-1)


@pytest.mark.parametrize("block", [(1, 4), (4, 8), (4, 4)], ids=str)
def test_transposed_columns_alone_move_into_a_buffer(block: Any) -> None:
    quantizer = GridQuantizer(Layout(E4M3, block, columnwise="transposed"), rowwise=False)
    tensor, buffer = quantizer(torch.randn(16, 16)), torch.zeros(300, dtype=torch.uint8)
    values = tensor.dequantize()
    replace_raw_data(tensor, buffer[10:266])
    assert tensor._columnwise_data.data_ptr() == buffer[10:].data_ptr()
    assert torch.equal(tensor.dequantize(), values)
    # Their order is not that of the elements, of which shards are ranges.
    with pytest.raises(UsageError, match="not in the order of its elements"):
        cast_master_weights_to_fp8([tensor], [torch.randn(256)], start_offsets=[0])
