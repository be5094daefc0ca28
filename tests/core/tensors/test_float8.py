"""``Float8Tensor`` where columns are a transpose: a transpose that is stale is never read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ottava import Float8Tensor, Float8TensorStorage
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.tensors import columnwise_is_transpose, columnwise_layout
from tests.cases import told
from tests.comparing import assert_same
from tests.copying import by_file
from tests.core.layouts.layouts import E4M3, E5M2, PerTensor, quantizer
from tests.samples import wide
from tests.strided import VIEWS as PLACES
from tests.strided import check_places

MAKE = PerTensor(E4M3)


@pytest.fixture(autouse=True)
def _transpose() -> Iterator[None]:
    with columnwise_layout("transpose"):
        yield


@pytest.fixture
def q() -> Float8Tensor:
    made = MAKE(wide(4, 6))
    assert isinstance(made, Float8Tensor)
    return made


def assert_fresh(tensor: Float8Tensor) -> None:
    """Its transpose, if it has one, is that of its data; it makes one where it has none."""
    if tensor._data is not None:
        expected = tensor._data.movedim(-1, 0)
        assert tensor._transpose is None or torch.equal(tensor._transpose, expected)
        tensor.update_usage(columnwise_usage=True)
        assert_same(tensor._transpose, expected)


def test_the_transpose_has_the_bytes_of_the_data() -> None:
    for shape in ((4, 6), (2, 3, 5), (5,), (0, 3), ()):
        for internal in (False, True):
            both = quantizer("Float8Tensor", internal=internal)(wide(*shape))
            assert type(both) is (Float8TensorStorage if internal else Float8Tensor)
            if not shape:
                # A scalar is its own transpose.
                assert both.get_usages() == {"rowwise": True, "columnwise": False}
                continue
            assert_same(both._transpose, both._data.movedim(-1, 0).contiguous())
            columns = quantizer("Float8Tensor", "columnwise", internal=internal)(wide(*shape))
            assert columns._data is None
            assert_same(columns._transpose, both._transpose)
            assert tuple(columns.size()) == shape
            assert_same(columns.dequantize(), both.dequantize())
            columns.update_usage(rowwise_usage=True)
            assert_same(columns._data, both._data)
            both.update_usage(columnwise_usage=False)
            assert both._transpose is None
            with pytest.raises(OptionError, match="neither usage"):
                both.update_usage(rowwise_usage=False)


def test_views_lie_where_plain_ones_do() -> None:
    check_places(MAKE(torch.randn(96, 64)), set(PLACES))


def test_the_order_of_elements_is_not_taken_for_another(q: Float8Tensor) -> None:
    for strides in [((6, 4), (1, 6)), ((6, 4), (4, 1)), ((24,), (1,)), ((4, 6), (6, 1))]:
        view = q.as_strided(*strides)
        assert_same(view._data, q._data.as_strided(*strides))
        assert_fresh(view)
    transposed = q.t()
    made = transposed.contiguous()
    assert made.is_contiguous()
    assert made._data.is_contiguous()
    assert_same(made.dequantize(), transposed.dequantize())
    assert_same(transposed.reshape(-1).dequantize(), transposed.dequantize().reshape(-1))


def test_every_write_is_noticed(q: Float8Tensor) -> None:
    alias = q.detach()
    writes: list[Callable[[], Any]] = [
        lambda: q.quantize_(wide(4, 6, seed=1)),
        lambda: alias.mul_(2),
        lambda: q.__setitem__(0, 0.0),
        lambda: q.view(24).add_(1),
        lambda: q._data.fill_(56),
        lambda: setattr(q, "_data", torch.full_like(q._data, 40)),
    ]
    for number, write in enumerate(writes):
        with told(number):
            write()
            for tensor in (q, alias, copy.copy(q)):
                assert tensor._transpose is None or torch.equal(tensor._transpose, tensor._data.t())
            assert_fresh(q)


def test_it_survives_copies_and_a_stale_one_does_not_come_back(q: Float8Tensor) -> None:
    ways: list[Callable[[Any], Any]] = [
        lambda t: t.clone(),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.detach(),
        copy.deepcopy,
        by_file,
    ]
    for way in ways:
        assert_same(way(q)._transpose, q._data.t().contiguous())
    assert_same(q.view(2, 2, 6)._transpose, q._data.view(2, 2, 6).movedim(-1, 0).contiguous())
    q._data.fill_(56)
    for way in ways:
        assert way(q)._transpose is None


def test_the_scale_has_one_dimension_and_shares_its_memory(q: Float8Tensor) -> None:
    before = q.dequantize()
    assert q._scale_inv.shape == (1,)
    q._scale_inv.mul_(2)
    assert_same(q.dequantize(), 2 * before)
    q._scale_inv = q._scale_inv / 2
    assert q._scale_inv.shape == (1,)
    assert_same(q.dequantize(), before)
    assert q.detach()._scale_inv.data_ptr() == q._scale_inv.data_ptr()


def test_construction() -> None:
    data, one = torch.zeros(2, 3, dtype=torch.uint8), torch.ones(())
    for cls in (Float8Tensor, Float8TensorStorage):
        parts = {
            "data": data,
            "fp8_dtype": E4M3,
            "fp8_scale_inv": one,
            "dtype": torch.bfloat16,
        }
        viewed = cls(**parts | {"data": data.view(E4M3), "fp8_scale_inv": torch.ones(1)})
        assert viewed._data.dtype == torch.uint8
        assert viewed._data.data_ptr() == data.data_ptr()
        turned = torch.zeros(2, 3, dtype=torch.uint8)
        for error, match, replaced in (
            (DTypeError, "data is of torch.float32", {"data": torch.zeros(2, 3)}),
            (DTypeError, "e5m2", {"data": data.view(E5M2)}),
            (DTypeError, "int8", {"fp8_dtype": torch.int8}),
            (ShapeError, r"\(2, 3\).*\(3, 2\)", {"data_transpose": turned}),
            (ShapeError, "fp8_scale_inv", {"fp8_scale_inv": torch.ones(2)}),
            (DTypeError, "fp8_scale_inv", {"fp8_scale_inv": 1.0}),
            (OptionError, "unknown keyword 'scale'", {"scale": 1}),
            (DTypeError, "nominal dtype torch.float64", {"dtype": torch.float64}),
        ):
            with pytest.raises(error, match=match):
                cls(**parts | replaced)
        # A transpose that is given is kept, whatever the device wants.
        with columnwise_layout("shared"):
            both = cls(**parts | {"data_transpose": data.t().contiguous()})
            assert both._transpose is not None
            assert not both.grid_layout.one_buffer
            both.update_usage(rowwise_usage=False)
            assert both._data is None
            assert both.dequantize().shape == (2, 3)
        with pytest.raises(OptionError, match="no 'fp8_dtype'"):
            cls(data=data, fp8_scale_inv=one, dtype=torch.float32)
    with pytest.raises(ShapeError):
        Float8Tensor(shape=(3,), **parts)
    with pytest.raises(UsageError, match="needs data"):
        Float8Tensor(**parts | {"data": None})


def test_a_forced_layout_is_that_of_its_block_alone() -> None:
    cpu, rows = torch.device("cpu"), quantizer("Float8Tensor", "rowwise", internal=True)

    def serves_columns() -> bool:
        return bool(rows.make_empty((4, 6)).get_usages()["columnwise"])

    for layout in ("shared", "transpose", "shared"):
        with columnwise_layout(layout):  # type: ignore[arg-type]
            assert columnwise_is_transpose(cpu) is (layout == "transpose")
            assert serves_columns() is (layout == "shared")
    assert columnwise_is_transpose(cpu)
    with pytest.raises(OptionError, match="columnwise layout 'rows'"), columnwise_layout("rows"):
        pass
