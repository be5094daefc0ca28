"""Operands of layers: how they are made, saved, built again and multiplied."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import ottava
from ottava import kernels
from ottava.errors import UsageError
from ottava.gemm import Operand, multiply, side_of
from ottava.tensors import GridTensorStorage
from ottava.tensors.saving import rebuild_saved

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ["current", "delayed", "mxfp8", "blockwise", "rowwise"]
each_recipe = pytest.mark.parametrize("name", RECIPES)


def values(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))


def quantizer_of(name: str, tensor_type: str = "input", **usages: bool) -> Any:
    layer = ottava.convert(torch.nn.Linear(64, 32), name)
    layer(values())
    usages = {"rowwise": True, "columnwise": True} | usages
    return layer._binding.state.quantizer(tensor_type, **usages)


def operand_of(quantizer: Any, x: torch.Tensor) -> Operand:
    with torch.no_grad():
        operand = quantizer.quantization(x.device, torch.bfloat16)(x)
    assert isinstance(operand, Operand)
    return operand


@each_recipe
@pytest.mark.parametrize("tensor_type", ["input", "weight"])
def test_an_operand_has_the_bytes_of_the_storage(name: str, tensor_type: str) -> None:
    quantizer = quantizer_of(name, tensor_type)
    operand = operand_of(quantizer, values())
    storage = quantizer.quantize_impl(values(), torch.bfloat16)
    around = operand.stored()
    assert type(around) is type(storage)
    assert (around.dtype, around._quantizer) == (torch.bfloat16, quantizer)
    assert around.get_usages() == storage.get_usages()
    for columnwise in (False, True):
        mine, other = side_of(operand, columnwise), side_of(storage, columnwise)
        assert mine is not None is not other
        assert torch.equal(mine.values, other.values)
        assert torch.equal(mine.scales, other.scales)
        assert (mine.layout, mine.columnwise) == (side_of(around, columnwise).layout, columnwise)


@each_recipe
@pytest.mark.parametrize("columnwise", [False, True])
def test_an_operand_of_one_usage(name: str, columnwise: bool) -> None:
    quantizer = quantizer_of(name, rowwise=not columnwise, columnwise=columnwise)
    operand = operand_of(quantizer, values())
    storage = quantizer.quantize_impl(values(), torch.bfloat16)
    assert operand.stored().get_usages() == storage.get_usages()
    assert operand.device == torch.device("cpu")
    for mine, other in zip(operand.stored().inner_list(), storage.inner_list(), strict=True):
        assert (mine is None) is (other is None)
        assert mine is None or torch.equal(mine, other)


@each_recipe
def test_what_is_built_again_multiplies_as_before(name: str) -> None:
    quantizer = quantizer_of(name)
    x, dy = operand_of(quantizer, values()), operand_of(quantizer, values())
    tensors, spec = x.flatten_columnwise()
    (again,) = rebuild_saved(tensors, [spec])
    assert again.rows is None
    made = [multiply(dy, each, "wgrad", torch.float32) for each in (x, again)]
    assert torch.equal(*made)


@each_recipe
def test_products_of_operands_are_those_of_storages(name: str) -> None:
    quantizer = quantizer_of(name)
    operands = [operand_of(quantizer, values(rows)) for rows in (16, 24)]
    storages = [operand.stored() for operand in operands]
    made = [multiply(a, b, "fprop", torch.float32) for a, b in (operands, storages)]
    assert torch.equal(*made)
    assert torch.equal(multiply(operands[0], storages[1], "fprop", torch.float32), made[0])


def test_missing_columns_are_those_of_the_storage() -> None:
    rows_alone = operand_of(quantizer_of("mxfp8", columnwise=False), values())
    with pytest.raises(UsageError, match="no columnwise data"):
        multiply(rows_alone, rows_alone, "wgrad", torch.float32)
    with pytest.raises(UsageError, match="no columnwise data"):
        rows_alone.flatten_columnwise()


def test_a_class_with_operands_of_its_own_gives_storages() -> None:
    class OwnValues(GridTensorStorage):
        def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
            return self.dequantize(dtype), None

    class Own(ottava.tensors.GridQuantizer):
        storage_class = OwnValues

    quantizer = Own(ottava.Layout(E4M3, (1, 32)))
    quantizer.internal = True
    made = quantizer.quantization(torch.device("cpu"), torch.float32)(torch.ones(4, 64))
    assert isinstance(made, OwnValues)


def test_a_subclass_with_another_quantize_impl_is_asked_for_it() -> None:
    class Doubling(type(quantizer_of("current"))):  # type: ignore[misc]
        def quantize_impl(self, tensor: torch.Tensor, dtype: Any = None) -> Any:
            return super().quantize_impl(2 * tensor, dtype)

    quantizer = Doubling(E4M3)
    quantizer.internal = True
    made = quantizer.quantization(torch.device("cpu"), torch.float32)(torch.ones(4, 64))
    assert torch.equal(made.dequantize(), torch.full((4, 64), 2.0))


def test_options_that_change_are_noticed() -> None:
    quantizer, x = quantizer_of("current").copy(), values()
    first = operand_of(quantizer, x).stored()
    quantizer.fp8_dtype = E5M2
    second = operand_of(quantizer, x).stored()
    assert (first._fp8_dtype, second._fp8_dtype) == (E4M3, E5M2)
    data, _, _, scale_inv, _ = kernels.quantize(x, E5M2)
    assert torch.equal(second.dequantize(), kernels.decode(data, scale_inv, E5M2, torch.bfloat16))


@each_recipe
def test_nothing_waits_for_the_garbage_collector(name: str) -> None:
    quantizer = quantizer_of(name).copy()
    known = weakref.ref(quantizer)
    gc.disable()
    try:
        operand = operand_of(quantizer, values())
        tensors, spec = operand.flatten_columnwise()
        (again,) = rebuild_saved(tensors, [spec])
        del quantizer, operand, spec, again
        assert known() is None
    finally:
        gc.enable()
