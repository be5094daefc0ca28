"""Bad input to kernels, gemm, tensors and quantizers: a typed error before anything is read or
written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava import autocast, kernels, prepare_for_saving, restore_from_saved
from ottava.errors import (
    BackendError,
    DeviceError,
    DTypeError,
    OptionError,
    OttavaError,
    ShapeError,
    UsageError,
)
from ottava.gemm import gemm
from ottava.kernels.backends import use_backend
from ottava.nn import Linear
from ottava.tensors import Float8Tensor, Float8TensorStorage, columnwise_layout

E4M3 = torch.float8_e4m3fn
X = torch.ones(4, 8)
ONE = torch.ones(())
CODES = torch.zeros(4, 8, dtype=torch.uint8)


def on_meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


KERNELS: dict[str, tuple[type[OttavaError], Callable[[], Any]]] = {
    "cast scale device": (DeviceError, lambda: kernels.cast(X, ONE.to("meta"), E4M3)),
    "cast scale size": (ShapeError, lambda: kernels.cast(X, torch.ones(2), E4M3)),
    "cast scale dtype": (DTypeError, lambda: kernels.cast(X, ONE.double(), E4M3)),
    "cast scale sparse": (DTypeError, lambda: kernels.cast(X, torch.ones(1).to_sparse(), E4M3)),
    "cast integers": (DTypeError, lambda: kernels.cast(X.int(), ONE, E4M3)),
    "cast complex": (DTypeError, lambda: kernels.cast(X.cfloat(), ONE, E4M3)),
    "quantize epsilon": (OptionError, lambda: kernels.quantize(X, E4M3, float("nan"))),
    "transpose of a scalar": (ShapeError, lambda: kernels.transpose(CODES[0, 0])),
    "decode dtype": (DTypeError, lambda: kernels.decode(CODES, ONE, E4M3, torch.int32)),
    "decode codes": (DTypeError, lambda: kernels.decode(X, ONE, E4M3, torch.float32)),
    "scale_from_amax": (DTypeError, lambda: kernels.scale_from_amax(ONE.double(), E4M3)),
    "backend": (BackendError, lambda: use_backend([]).__enter__()),
}

GEMM: dict[str, tuple[type[OttavaError], Callable[[], Any]]] = {
    "integers": (DTypeError, lambda: gemm(X.int(), X)),
    "complex": (DTypeError, lambda: gemm(X, X.cfloat())),
    "float64": (DTypeError, lambda: gemm(X.double(), X.double())),
    "no tensor": (DTypeError, lambda: gemm(X, [[1.0]])),
    "bias device": (DeviceError, lambda: gemm(X, X, bias=torch.ones(4, device="meta"))),
    "bias dtype": (DTypeError, lambda: gemm(X, X, bias=torch.ones(4, dtype=torch.int32))),
    "bias float64": (DTypeError, lambda: gemm(X, X, bias=torch.ones(4, dtype=torch.float64))),
    "bias complex": (DTypeError, lambda: gemm(X, X, bias=torch.ones(4, dtype=torch.cfloat))),
    "bias size": (ShapeError, lambda: gemm(X, X, bias=torch.ones(5))),
    "out device": (DeviceError, lambda: gemm(X, X, out=torch.empty(4, 4, device="meta"))),
    "out dtype": (DTypeError, lambda: gemm(X, X, out=torch.empty(4, 4, dtype=torch.int32))),
    "out shape": (ShapeError, lambda: gemm(X, X, out=torch.empty(4, 5))),
    "type": (OptionError, lambda: gemm(X, X, "prop")),
    "accumulate": (OptionError, lambda: gemm(X, X, accumulate=True)),
    "devices": (DeviceError, lambda: gemm(X, X.to("meta"))),
    "dimensions": (ShapeError, lambda: gemm(ONE, X)),
}


@pytest.mark.parametrize("case", KERNELS)
def test_kernels(case: str) -> None:
    error, call = KERNELS[case]
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("case", GEMM)
def test_gemm(case: str) -> None:
    error, call = GEMM[case]
    with pytest.raises(error):
        call()


def made(**replaced: Any) -> dict[str, Any]:
    return {
        "dtype": torch.float32,
        "data": CODES.clone(),
        "fp8_dtype": E4M3,
        "fp8_scale_inv": ONE,
    } | replaced


CONSTRUCTION: dict[str, tuple[type[OttavaError], dict[str, Any]]] = {
    "another format": (DTypeError, made(data=CODES.view(torch.float8_e5m2))),
    "values": (DTypeError, made(data=X)),
    "a list": (DTypeError, made(data=[1, 2])),
    "no scale": (DTypeError, made(fp8_scale_inv=None)),
    "a number": (DTypeError, made(fp8_scale_inv=1.0)),
    "three scales": (ShapeError, made(fp8_scale_inv=torch.ones(3))),
    "scale elsewhere": (DeviceError, made(fp8_scale_inv=ONE.to("meta"))),
    "transpose": (ShapeError, made(data_transpose=CODES.clone())),
    "int nominal": (DTypeError, made(dtype=torch.int32)),
    "float64 nominal": (DTypeError, made(dtype=torch.float64)),
    "no format": (DTypeError, made(fp8_dtype=torch.int8)),
}


@pytest.mark.parametrize("cls", [Float8Tensor, Float8TensorStorage])
@pytest.mark.parametrize("case", CONSTRUCTION)
def test_construction(case: str, cls: type) -> None:
    error, arguments = CONSTRUCTION[case]
    with pytest.raises(error):
        cls(**arguments)


def test_tensors_are_not_made_of_values() -> None:
    with pytest.raises(
        DTypeError, match=r"called with Tensor as its values.*make it by a quantizer"
    ):
        Float8Tensor(torch.ones(2, 2), requires_grad=True)


def test_nothing_to_hold() -> None:
    with pytest.raises(UsageError, match="needs data"):
        Float8Tensor(dtype=torch.float32, data=None, fp8_dtype=E4M3, fp8_scale_inv=ONE)


@pytest.mark.parametrize(
    ("error", "flag"),
    [
        (DTypeError, True),
        (DTypeError, torch.ones(1).int()),
        (ShapeError, torch.ones(3)),
        (DeviceError, "meta"),
    ],
)
def test_noop_flag(error: type[OttavaError], flag: Any, quantizer: Any) -> None:
    flag = torch.ones(1, device="meta") if isinstance(flag, str) else flag
    tensor = quantizer(X)
    for write in (
        lambda: tensor.quantize_(2 * X, noop_flag=flag),
        lambda: tensor.copy_from_storage(quantizer(2 * X), noop_flag=flag),
    ):
        with pytest.raises(error):
            write()
    assert torch.equal(tensor.dequantize(), X)


def test_tensors(quantizer: Any) -> None:
    tensor = quantizer(X)
    calls: list[tuple[type[OttavaError], Callable[[], Any]]] = [
        (DTypeError, lambda: tensor.copy_from_storage(X)),
        (DTypeError, lambda: Float8Tensor.make_like(X)),
        (DTypeError, lambda: setattr(tensor, "data", 5)),
        (DTypeError, lambda: setattr(tensor, "data", X.int())),
        (ShapeError, lambda: tensor.copy_(torch.ones(3, 8))),
        (DeviceError, lambda: tensor.copy_(X.to("meta"))),
        (DTypeError, lambda: tensor.copy_(X.int())),
        (DTypeError, lambda: tensor.dequantize("x")),
        (DTypeError, lambda: tensor.dequantize(torch.int32)),
        (DTypeError, lambda: tensor.update_quantizer(5)),
        (OptionError, lambda: tensor.update_usage(rowwise_usage="no")),
        (OptionError, lambda: tensor.update_usage(rowwise_usage=False, columnwise_usage=False)),
        (DTypeError, lambda: tensor.restore_from_saved(None)),
        (DTypeError, lambda: tensor.restore_from_saved([1, 2, 3])),
        (ShapeError, lambda: tensor.restore_from_saved([CODES])),
        (DTypeError, lambda: prepare_for_saving(5)),
        (DTypeError, lambda: restore_from_saved([5], [7])),
        (ShapeError, lambda: restore_from_saved([X], [])),
        (OptionError, lambda: columnwise_layout("bogus").__enter__()),
    ]
    for number, (error, call) in enumerate(calls):
        with pytest.raises(error):
            call()
            pytest.fail(f"call {number} was accepted")
    assert torch.equal(tensor.dequantize(), X)


def test_quantizers(quantizer: Any) -> None:
    internal = quantizer.copy()
    internal.internal = True
    nothing = quantizer.copy()
    nothing.set_usage(rowwise=False, columnwise=False)
    calls: list[tuple[type[OttavaError], Callable[[], Any]]] = [
        (OptionError, lambda: quantizer.set_usage(rowwise="x")),
        (OptionError, lambda: quantizer.set_usage(rowwise=False, columnwise=1)),
        (OptionError, lambda: type(quantizer)(E4M3, rowwise="x")),
        (OptionError, lambda: nothing(X)),
        (OptionError, lambda: nothing.make_empty((2, 2))),
        (ShapeError, lambda: quantizer.make_empty(5)),
        (ShapeError, lambda: quantizer.make_empty((-1, 2))),
        (DTypeError, lambda: quantizer.make_empty((2, 2), dtype=torch.int32)),
        (DeviceError, lambda: quantizer.make_empty((2, 2), device="bogus")),
        (OptionError, lambda: internal.make_empty((2, 2), requires_grad=True)),
        (DTypeError, lambda: quantizer(X, dtype=torch.int32)),
        (ShapeError, lambda: quantizer.update_quantized(X[:2], quantizer(X))),
        (DeviceError, lambda: quantizer.update_quantized(X.to("meta"), quantizer(X))),
        (DTypeError, lambda: quantizer.update_quantized(X, X)),
    ]
    before = quantizer.get_usages()
    for number, (error, call) in enumerate(calls):
        with pytest.raises(error):
            call()
            pytest.fail(f"call {number} was accepted")
    assert quantizer.get_usages() == before
    assert not quantizer.is_quantizable(X.to_sparse())


def test_layers_and_regions(recipe: Any) -> None:
    layer = Linear(8, 4, recipe=recipe)
    calls: list[tuple[type[OttavaError], Callable[[], Any]]] = [
        (OptionError, lambda: layer(X, is_first_microbatch="x")),
        (OptionError, lambda: autocast(recipe, amax_reduction_group=3)),
        (OptionError, lambda: autocast(recipe, enabled=1)),
        (DTypeError, lambda: autocast(3)),
        (DTypeError, lambda: recipe.quantizer(5)),
        (DTypeError, lambda: layer([1.0])),
        (DTypeError, lambda: layer(X.int())),
        (DTypeError, lambda: layer(X.cfloat())),
        (DTypeError, lambda: layer(X.double())),
        (ShapeError, lambda: layer(X[:, :7])),
        (DeviceError, lambda: layer(X.to("meta"))),
    ]
    for number, (error, call) in enumerate(calls):
        with pytest.raises(error):
            call()
            pytest.fail(f"call {number} was accepted")
    assert layer._binding.microbatch_weight is None
