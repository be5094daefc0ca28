"""Rows that a layer's operand holds without tensors: whoever reads them finds what they would have
been."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from mx_arrays import mx
from torch.utils.flop_counter import FlopCounterMode

from ottava import Layout, kernels
from ottava.errors import UsageError
from ottava.gemm import _scratch, gemm, multiply
from ottava.kernels import use_backend
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.grid_quantizer import GridQuantizer
from ottava.tensors.saving import rebuild_saved

pytest.importorskip("ottava._cpu")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no table of DLPack's functions",
)
E4M3 = torch.float8_e4m3fn
kernels.amax(torch.ones(1))


def quantizer(**options: bool) -> GridQuantizer:
    made = GridQuantizer(mx(E4M3), **options)
    made.internal = True
    # What it makes first, of a dtype, is kept as the pattern of the others.
    for dtype in (torch.float32, torch.bfloat16):
        made.quantize_impl(torch.ones(2, 2), dtype)
    return made


def unread(shape: tuple[int, ...] = (40, 70), seed: int = 0, **options: bool) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made: Any = quantizer(**options).quantize_impl(x, torch.bfloat16)
    assert made._unread is not None
    assert "_rowwise_data" not in vars(made)
    return made


def read(shape: tuple[int, ...] = (40, 70), seed: int = 0, **options: bool) -> Any:
    """The same with tensors from the beginning."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    rows, scales, columns, column_scales = torch.ops.ottava.grid_quantize(
        x, mx(E4M3).text, True, True
    )
    wanted = quantizer(**options)
    data = {"rowwise_data": rows, "rowwise_scale_inv": scales}
    if wanted.columnwise_usage:
        data |= {"columnwise_data": columns, "columnwise_scale_inv": column_scales}
    return GridTensorStorage(layout=mx(E4M3), dtype=torch.bfloat16, quantizer=wanted, **data)


def flat(result: Any) -> list[Any]:
    """Tensors and plain values in what an operation gives."""
    if isinstance(result, GridTensorStorage):
        return [result.dtype, *flat(result.inner_list())]
    if isinstance(result, dict):
        return [part for value in result.values() for part in flat(value)]
    if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
        return [part for value in result for part in flat(value)]
    return (
        [result]
        if isinstance(result, torch.Tensor | int | str | torch.Size | torch.device | None)
        else []
    )


def saved_and_back(storage: Any) -> Any:
    tensors, _ = storage.prepare_for_saving()
    cleared = storage.inner_list()
    return cleared, storage.restore_from_saved(tensors), storage.inner_list()


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "data": lambda s: s._rowwise_data,
    "scales": lambda s: s._rowwise_scale_inv,
    "dequantize": lambda s: s.dequantize(),
    "size": lambda s: (s.size(), s.shape, s.numel(), s.nbytes, s.device),
    "usages": lambda s: s.get_usages(),
    "metadata": lambda s: s.get_metadata(),
    "flatten": lambda s: s.flatten_storage()[0],
    "flatten_columnwise": lambda s: s.flatten_columnwise()[0],
    "direction": lambda s: [s.direction(columnwise=c) for c in (False, True)],
    "operand": lambda s: s.grid_operand(columnwise=False),
    "clone": lambda s: s.clone_storage(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "saving": saved_and_back,
    "drop columns": lambda s: (s.update_usage(columnwise_usage=False), s.inner_list()),
    "drop rows": lambda s: (s.update_usage(rowwise_usage=False), s.inner_list()),
    "copy": lambda s: (s.copy_from_storage(read(seed=1)), s.inner_list()),
    "a custom product": lambda s: gemm(s, read((7, 70)), "fprop"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_find_what_they_would_have(name: str) -> None:
    mine, other = flat(OPERATIONS[name](unread())), flat(OPERATIONS[name](read()))
    assert len(mine) == len(other) > 0
    for a, b in zip(mine, other, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (
            b.dtype,
            b.shape,
            b.stride(),
            b.requires_grad,
        )
        assert torch.equal(a, b)


def test_rows_get_tensors_once() -> None:
    storage = unread()
    data = storage._rowwise_data
    assert storage._unread is None
    assert storage._rowwise_data is data
    data.zero_()
    assert not storage.dequantize().any()
    assert not storage.grid_operand(columnwise=False)[0].any()


def test_the_memory_lives_as_long_as_its_last_owner() -> None:
    expected = read((300, 500))
    for kept in (0, 1):
        storage = unread((300, 500))
        held, storage = storage._unread, None
        tensors = [held.tensors(), held.tensors()]
        del held
        last = tensors[1][kept]
        tensors.clear()
        [unread((300, 500), seed) for seed in range(20)]
        assert torch.equal(last, (expected._rowwise_data, expected._rowwise_scale_inv)[kept])
        assert last.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "give_up",
    [
        lambda s: s.clear(),
        lambda s: s.update_usage(rowwise_usage=False),
        lambda s: s.prepare_for_saving(),
    ],
    ids=["clear", "usage", "saving"],
)
def test_data_that_was_given_up_is_not_multiplied(give_up: Callable[[Any], Any]) -> None:
    storage, weight = unread(), read((7, 70))
    give_up(storage)
    with pytest.raises(UsageError, match=r"holds no data|rowwise"):
        multiply(storage, weight, "fprop", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_bytes_of_tensors(dtype: torch.dtype) -> None:
    bias = torch.randn(24)
    for m, k in ((16, 64), (5, 70), (1, 1), (40, 33)):
        expected = multiply(read((m, k)), read((24, k), 1), "fprop", dtype, bias)
        for _ in range(2):
            a, b = unread((m, k)), unread((24, k), 1)
            assert torch.equal(multiply(a, b, "fprop", dtype, bias), expected)
            assert torch.equal(multiply(a, read((24, k), 1), "fprop", dtype, bias), expected)
        # Nobody has asked for tensors.
        assert a._unread is not None is not b._unread
        for region in (torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
            a, b = unread((m, k)), unread((24, k), 1)
            with region:
                assert torch.equal(multiply(a, b, "fprop", dtype, bias), expected)
        pairs = [(make((m, k)), make((24, k), 1)) for make in (unread, read)]
        with use_backend("reference"):
            mine, other = (multiply(*pair, "fprop", dtype, bias) for pair in pairs)
        assert torch.equal(mine, other)


@pytest.mark.parametrize("makers", [(read, unread), (unread, read), (unread, unread)])
def test_first_products_of_a_shape(makers: Any) -> None:
    """What they have in common is found with tensors."""
    _scratch.plans.clear()
    a, b = (make((size, 48), size) for make, size in zip(makers, (3, 9), strict=True))
    expected = multiply(read((3, 48), 3), read((9, 48), 9), "fprop", torch.float32)
    _scratch.plans.clear()
    assert torch.equal(multiply(a, b, "fprop", torch.float32), expected)


def test_products_with_high_precision() -> None:
    dense = torch.randn(9, 70)
    for dtype in (torch.float32, torch.bfloat16):
        made = [multiply(make(), dense, "fprop", dtype) for make in (unread, read)]
        assert torch.equal(*made)
        made = [multiply(dense, make(), "fprop", dtype) for make in (unread, read)]
        assert torch.equal(*made)


def test_products_of_columns() -> None:
    dy = read((16, 40), 1)
    for kind, other in (("dgrad", (40, 70)), ("wgrad", (16, 70))):
        made = multiply(dy, unread(other), kind, torch.float32)  # type: ignore[arg-type]
        assert torch.equal(made, multiply(dy, read(other), kind, torch.float32))  # type: ignore[arg-type]


def test_what_was_replaced_before_the_first_look_stays() -> None:
    storage, scales = unread(), torch.full((40, 3), 127, dtype=torch.uint8)
    storage._rowwise_scale_inv = scales
    assert storage._rowwise_data is not None
    assert storage._rowwise_scale_inv is scales


def test_rows_of_another_shape_are_left_to_python() -> None:
    multiply(unread((4, 64)), unread((8, 64)), "fprop", torch.float32)
    (planned,) = [
        plan[2]
        for key, plan in _scratch.plans.items()
        if plan and key[1] == (4, 64) and key[4] == (8, 64)
    ]
    for m, n, k in ((4, 8, 64), (4, 8, 65), (5, 8, 64), (4, 7, 64)):
        a, b = unread((m, k))._unread, unread((n, k))._unread
        assert (planned(a, a, b, b, None) is None) is ((m, n, k) != (4, 8, 64))


def test_tensors_that_inference_asked_for_can_be_saved() -> None:
    storage = unread()
    with torch.inference_mode():
        assert not storage.dequantize().requires_grad
    assert not storage._rowwise_data.is_inference()


def test_threads_that_read_at_once() -> None:
    expected = read()._rowwise_data
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            storage = unread()
            found = list(
                threads.map(partial(getattr, storage), ["_rowwise_data", "_rowwise_scale_inv"] * 4)
            )
            assert all(torch.equal(data, expected) for data in found[::2])
            assert all(scales is not None for scales in found)


class OwnOperand(GridTensorStorage):
    def grid_operand(self, *, columnwise: bool) -> Any:
        return super().grid_operand(columnwise=columnwise)


class OwnValues(GridTensorStorage):
    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        return self.dequantize(dtype), None


class OwnConstructor(GridTensorStorage):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)


class OwnRows(GridTensorStorage):
    _rowwise_data = None


class OwnNames(GridTensorStorage):
    data_names = tuple(reversed(("_columnwise_data", "_rowwise_data")))  # type: ignore[assignment]


class OwnScales(GridTensorStorage):
    scale_names = tuple(reversed(("_columnwise_scale_inv", "_rowwise_scale_inv")))  # type: ignore[assignment]


@pytest.mark.parametrize(
    "cls", [OwnOperand, OwnValues, OwnConstructor, OwnRows, OwnNames, OwnScales]
)
def test_classes_with_operands_of_their_own_get_tensors(cls: type[GridTensorStorage]) -> None:
    class Own(GridQuantizer):
        storage_class = cls

    made = Own(mx(E4M3))
    made.internal = True
    for _ in range(2):
        storage: Any = made.quantize_impl(torch.ones(4, 64), torch.float32)
        assert storage._unread is None
        assert isinstance(vars(storage)["_rowwise_data"], torch.Tensor)


class OwnOption(GridTensorStorage):
    """Nothing of it is in the way."""

    squares = "their own"


def test_other_classes_are_read_late() -> None:
    class Own(GridQuantizer):
        storage_class = OwnOption

    made = Own(mx(E4M3))
    made.internal = True
    storages: list[Any] = [made.quantize_impl(torch.ones(4, 64), torch.float32) for _ in range(2)]
    assert storages[1]._unread is not None


def test_one_buffer_and_squares_get_tensors() -> None:
    """Rows are what the backward pass is left with, or what columns are made of."""
    same = Layout(E4M3, (None, None), rounding="floor", columnwise="same")
    for layout in (same, Layout(E4M3, (32, 32), rounding="floor", columnwise="transposed")):
        made = GridQuantizer(layout)
        made.internal = True
        for _ in range(2):
            storage: Any = made.quantize_impl(torch.ones(4, 64), torch.float32)
            assert storage._unread is None
            assert torch.equal(storage.dequantize(), torch.ones(4, 64))
            tensors, spec = storage.flatten_columnwise()
            assert torch.equal(rebuild_saved(tensors, [spec])[0].dequantize(), torch.ones(4, 64))


def test_without_rows_and_in_more_dimensions() -> None:
    x = torch.randn(3, 4, 40)
    made: Any = quantizer().quantize_impl(x, torch.float32)
    assert made._unread is None
    assert made._rowwise_data.shape == x.shape
    columns: Any = quantizer(rowwise=False).quantize_impl(x[0], torch.float32)
    assert columns._unread is None
    assert columns._rowwise_data is None
