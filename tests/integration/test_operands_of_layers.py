"""Operands of layers on a CPU: how often Python is entered for one, and what a quantizer remembers
of the last."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ottava
from ottava import kernels
from ottava.tensors.saving import rebuild_saved

pytest.importorskip("ottava._cpu")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no table of DLPack's functions",
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ["current", "delayed", "mxfp8", "blockwise", "rowwise"]


def values() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def quantizer_of(name: str) -> Any:
    layer = ottava.convert(torch.nn.Linear(64, 32), name)
    layer(values())
    return layer._binding.state.quantizer("input", rowwise=True, columnwise=True)


def calls(function: Callable[[], Any]) -> int:
    """How many Python functions a call of ``function`` calls."""
    entered: list[str] = []
    sys.setprofile(lambda frame, event, _: entered.append(event) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(entered) - 1


@pytest.mark.parametrize("name", RECIPES)
def test_few_python_functions(name: str) -> None:
    """Of one operand: quantized, saved and built again. What was made first decides what does not
    change."""
    quantizer, x = quantizer_of(name), values()
    with torch.no_grad():
        operand = quantizer.quantize_impl(x, torch.float32)
        tensors, spec = operand.flatten_columnwise()
        assert calls(lambda: quantizer.quantize_impl(x, torch.float32)) <= 7
        assert calls(lambda: quantizer.quantize_impl(x, torch.float32).flatten_columnwise()) <= 10
        assert calls(lambda: rebuild_saved(tensors, [spec])) <= 3


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_built_again_is_the_same(name: str) -> None:
    quantizer = quantizer_of(name)
    with torch.no_grad():
        operand = quantizer.quantize_impl(values(), torch.bfloat16)
        columns = operand.grid_operand(columnwise=True)
        tensors, spec = operand.flatten_columnwise()
        (again,) = rebuild_saved(tensors, [spec])
        for mine, other in zip(again.grid_operand(columnwise=True), columns, strict=True):
            assert torch.equal(mine, other)
        assert (type(again), again.dtype, again._quantizer) == (
            type(operand),
            torch.bfloat16,
            quantizer,
        )
        assert again.get_metadata().keys() == operand.get_metadata().keys()
        assert torch.equal(spec[0].build(tensors).dequantize(), again.dequantize())
        # Nobody else sees what is written to one of them.
        again.mark_written()
        assert (again._writes.writes, operand._writes.writes) == (1, 0)
        # Another quantizer belongs to what is saved from then on.
        operand.update_quantizer(None)
        assert rebuild_saved(tensors, [operand.flatten_columnwise()[1]])[0]._quantizer is None


def test_options_that_change_are_noticed() -> None:
    quantizer, x = quantizer_of("current").copy(), values()
    with torch.no_grad():
        first = quantizer.quantize_impl(x, torch.float32)
        quantizer.fp8_dtype = E5M2
        second = quantizer.quantize_impl(x, torch.float32)
    assert (first._fp8_dtype, second._fp8_dtype) == (E4M3, E5M2)
    assert torch.equal(second.dequantize(), kernels.decode(*_decoded(x), E5M2, torch.float32))


def _decoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data, _, _, scale_inv, _ = kernels.quantize(x, E5M2)
    return data, scale_inv


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_waits_for_the_garbage_collector(name: str) -> None:
    quantizer = quantizer_of(name).copy()
    known = weakref.ref(quantizer)
    gc.disable()
    try:
        with torch.no_grad():
            operand = quantizer.quantize_impl(values(), torch.float32)
            tensors, spec = operand.flatten_columnwise()
            (again,) = rebuild_saved(tensors, [spec])
        del quantizer, operand, spec, again
        assert known() is None
    finally:
        gc.enable()
