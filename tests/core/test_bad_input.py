"""Bad input to kernels, products, tensors, quantizers, layers: a typed error before any write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava import Layout, autocast, kernels, prepare_for_saving, restore_from_saved
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
from ottava.nn import Linear
from ottava.tensors import Float8Tensor, Float8TensorStorage, columnwise_layout

Cases = dict[str, tuple[type[OttavaError], Callable[[], Any]]]
E4M3 = torch.float8_e4m3fn
MX = Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up")
X = torch.ones(4, 8)
ONE = torch.ones(())
DATA = torch.zeros(4, 8, dtype=torch.uint8)
SCALES = torch.zeros(4, 1, dtype=torch.uint8)


def decode(data: Any = DATA, scales: Any = SCALES, **options: Any) -> Any:
    return kernels.grid_decode(data, scales, MX, options.pop("dtype", torch.float32), **options)


KERNELS: Cases = {
    "amax of integers": (DTypeError, lambda: kernels.amax(X.int())),
    "amax of complex numbers": (DTypeError, lambda: kernels.amax(X.cfloat())),
    "amax of float64": (DTypeError, lambda: kernels.amax(X.double())),
    "amax of a sparse tensor": (DTypeError, lambda: kernels.amax(X.to_sparse())),
    "amax of a nested tensor": (
        DTypeError, lambda: kernels.amax(torch.nested.nested_tensor([X, X]))),
    "amax of a list": (DTypeError, lambda: kernels.amax([1.0])),  # type: ignore[arg-type]
    "cast with a scale elsewhere": (DeviceError, lambda: kernels.cast(X, ONE.to("meta"), E4M3)),
    "cast with two scales": (ShapeError, lambda: kernels.cast(X, torch.ones(2), E4M3)),
    "cast with a wide scale": (DTypeError, lambda: kernels.cast(X, ONE.double(), E4M3)),
    "cast with a sparse scale": (
        DTypeError, lambda: kernels.cast(X, torch.ones(1).to_sparse(), E4M3)),
    "cast to float16": (DTypeError, lambda: kernels.cast(X, ONE, torch.float16)),
    "cast to a name": (DTypeError, lambda: kernels.cast(X, ONE, "e4m3")),  # type: ignore[arg-type]
    "transpose of a number": (ShapeError, lambda: kernels.cast_transpose(ONE, ONE, E4M3)),
    "an amax elsewhere": (
        DeviceError, lambda: kernels.cast_amax(X, ONE, ONE.to("meta"), E4M3)),
    "a counter of floats": (
        DTypeError, lambda: kernels.cast_amax(X, ONE, ONE, E4M3, saturated=ONE)),
    "quantize to int8": (DTypeError, lambda: kernels.quantize(X, torch.int8)),
    "quantize a number transposed": (
        ShapeError, lambda: kernels.quantize(ONE, E4M3, transposed=True)),
    "epsilon NaN": (OptionError, lambda: kernels.quantize(X, E4M3, math.nan)),
    "epsilon infinite": (OptionError, lambda: kernels.quantize(X, E4M3, math.inf)),
    "epsilon negative": (OptionError, lambda: kernels.scale_from_amax(ONE, E4M3, -1.0)),
    "epsilon True": (OptionError, lambda: kernels.scale_from_amax(ONE, E4M3, True)),
    "a wide amax": (DTypeError, lambda: kernels.scale_from_amax(ONE.double(), E4M3)),
    "transpose of a byte": (ShapeError, lambda: kernels.transpose(DATA[0, 0])),
    "transpose of floats": (DTypeError, lambda: kernels.transpose(X)),
    "decode to integers": (DTypeError, lambda: kernels.decode(DATA, ONE, E4M3, torch.int32)),
    "decode floats": (DTypeError, lambda: kernels.decode(X, ONE, E4M3, torch.float32)),
    "decode with scales": (
        ShapeError, lambda: kernels.decode(DATA, torch.ones(2), E4M3, torch.float32)),
    "quantize to a text": (DTypeError, lambda: kernels.grid_quantize(X, MX.text)),  # type: ignore[arg-type]
    "quantize in no direction": (
        OptionError, lambda: kernels.grid_quantize(X, MX, rowwise=False, columnwise=False)),
    "quantize float64 in blocks": (DTypeError, lambda: kernels.grid_quantize(X.double(), MX)),
    "scales to a dtype": (DTypeError, lambda: kernels.grid_scales(ONE, E4M3)),  # type: ignore[arg-type]
    "scales of bfloat16": (DTypeError, lambda: kernels.grid_scales(ONE.bfloat16(), MX)),
    "scales for integers": (DTypeError, lambda: kernels.grid_scales(ONE, MX, torch.int32)),
    "blocks to complex numbers": (DTypeError, lambda: decode(dtype=torch.complex64)),
    "blocks of float8": (DTypeError, lambda: decode(DATA.view(E4M3))),
    "scales of int8": (DTypeError, lambda: decode(scales=SCALES.view(torch.int8))),
    "scales of another layout": (DTypeError, lambda: decode(scales=SCALES.float())),
    "too few scales": (ShapeError, lambda: decode(scales=SCALES[:-1])),
    "scales turned": (ShapeError, lambda: decode(scales=SCALES.t())),
    "scales of rows for columns": (ShapeError, lambda: decode(columnwise=True)),
    "scales elsewhere": (DeviceError, lambda: decode(scales=SCALES.to("meta"))),
    "a backend that is no name": (BackendError, lambda: kernels.use_backend([]).__enter__()),  # type: ignore[arg-type]
    "an unknown backend": (BackendError, lambda: kernels.use_backend("gpu").__enter__()),
}  # fmt: skip

PRODUCTS: Cases = {
    "integers": (DTypeError, lambda: gemm(X.int(), X)),
    "complex numbers": (DTypeError, lambda: gemm(X, X.cfloat())),
    "float64": (DTypeError, lambda: gemm(X.double(), X.double())),
    "a list": (DTypeError, lambda: gemm(X, [[1.0]])),
    "a bias elsewhere": (DeviceError, lambda: gemm(X, X, bias=torch.ones(4, device="meta"))),
    "a bias of integers": (DTypeError, lambda: gemm(X, X, bias=torch.ones(4).int())),
    "a wide bias": (DTypeError, lambda: gemm(X, X, bias=torch.ones(4).double())),
    "a long bias": (ShapeError, lambda: gemm(X, X, bias=torch.ones(5))),
    "out elsewhere": (DeviceError, lambda: gemm(X, X, out=torch.empty(4, 4, device="meta"))),
    "out of integers": (DTypeError, lambda: gemm(X, X, out=torch.empty(4, 4).int())),
    "out of another shape": (ShapeError, lambda: gemm(X, X, out=torch.empty(4, 5))),
    "an unknown product": (OptionError, lambda: gemm(X, X, "prop")),
    "accumulation without out": (OptionError, lambda: gemm(X, X, accumulate=True)),
    "another device": (DeviceError, lambda: gemm(X, X.to("meta"))),
    "a number": (ShapeError, lambda: gemm(ONE, X)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", [*KERNELS, *PRODUCTS])
def test_kernels_and_products(case: str) -> None:
    error, call = (KERNELS | PRODUCTS)[case]
    with pytest.raises(error):
        call()


# -- kernels on many shards --


def byte(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0xA5, dtype=torch.uint8)


def without_memory() -> torch.Tensor:
    x = torch.ones(5)
    x.untyped_storage().resize_(0)
    return x


#: Arguments for one tensor of five elements; a case replaces one of them.
GOOD: dict[str, Callable[[], Any]] = {
    "xs": lambda: torch.ones(5),
    "dtypes": lambda: torch.bfloat16,
    "shapes": lambda: (2, 3),
    "starts": lambda: 1,
    "layouts": lambda: MX,
    "rowwise": lambda: (byte(2, 1), byte(5)),
    "columnwise": lambda: (byte(1, 3), byte(5)),
}
SHARDS: list[tuple[str, Any, type[OttavaError]]] = [
    ("xs", 3.0, DTypeError),
    ("xs", torch.ones(5).int(), DTypeError),
    ("xs", torch.ones(5).to_sparse(), DTypeError),
    ("xs", torch.empty(5, device="meta"), DeviceError),
    ("xs", without_memory(), DTypeError),
    ("dtypes", torch.float64, DTypeError),
    ("dtypes", "float32", DTypeError),
    ("shapes", (6,), ShapeError),
    ("shapes", 6, ShapeError),
    ("shapes", (2.0, 3), DTypeError),
    ("shapes", (-2, -3), ShapeError),
    ("shapes", (2**40, 2**40), ShapeError),
    ("shapes", (1, 5), ShapeError),
    ("starts", 2, ShapeError),
    ("starts", -1, ShapeError),
    ("starts", 0.0, DTypeError),
    ("layouts", None, DTypeError),
    ("layouts", MX.text, DTypeError),
    ("rowwise", byte(5), ShapeError),
    ("rowwise", (byte(2, 1),), ShapeError),
    ("rowwise", (byte(1, 2), byte(5)), ShapeError),
    ("rowwise", (byte(2, 2)[:, :1], byte(5)), ShapeError),
    ("rowwise", (byte(2, 1).int(), byte(5)), DTypeError),
    ("rowwise", (None, byte(5)), DTypeError),
    ("rowwise", (byte(2, 1).to("meta"), byte(5)), DeviceError),
    ("rowwise", (byte(2, 1), byte(4)), ShapeError),
    ("rowwise", (byte(2, 1), byte(10)[::2]), ShapeError),
    ("rowwise", (byte(2, 1), byte(5).float()), DTypeError),
    ("rowwise", (byte(2, 1), None), DTypeError),
    ("rowwise", (byte(2, 1), byte(5).to("meta")), DeviceError),
    ("rowwise", (byte(2, 1), byte(5).to_sparse()), DTypeError),
    ("columnwise", (byte(2, 3), byte(5)), ShapeError),
]


@pytest.mark.parametrize("number", range(-1, len(SHARDS)))
def test_shards(number: int) -> None:
    """The second of two tensors is bad, or its list is too short; nothing is written."""
    name, wrong, error = SHARDS[number] if number >= 0 else ("", None, OttavaError)
    arguments = {key: [make(), make()] for key, make in GOOD.items()}
    pairs = arguments["rowwise"] + arguments["columnwise"]
    first = list(arguments.values())[:5]
    if not name:
        kernels.grid_multi_amax(*first)
        kernels.grid_multi_cast(*arguments.values())
        assert all((out != 0xA5).all() for _, out in pairs)
        for key in arguments:
            short = {**arguments, key: arguments[key][:1]}
            with pytest.raises(ShapeError):
                kernels.grid_multi_cast(*short.values())
        twice = [arguments["rowwise"][0], (byte(2, 1), arguments["rowwise"][0][1])]
        with pytest.raises(OptionError, match="a buffer of another result"):
            kernels.grid_multi_cast(*first, twice, [None, None])
        return
    arguments[name][1] = wrong
    with pytest.raises(error):
        kernels.grid_multi_cast(*arguments.values())
    assert all((out == 0xA5).all() for _, out in pairs)
    if name not in ("rowwise", "columnwise"):
        with pytest.raises(error):
            kernels.grid_multi_amax(*first)


# -- tensors, quantizers and layers --

CONSTRUCTION: dict[str, tuple[type[OttavaError], dict[str, Any]]] = {
    "another format": (DTypeError, {"data": DATA.view(torch.float8_e5m2)}),
    "values": (DTypeError, {"data": X}),
    "a list": (DTypeError, {"data": [1, 2]}),
    "no scale": (DTypeError, {"fp8_scale_inv": None}),
    "a number": (DTypeError, {"fp8_scale_inv": 1.0}),
    "three scales": (ShapeError, {"fp8_scale_inv": torch.ones(3)}),
    "a scale elsewhere": (DeviceError, {"fp8_scale_inv": ONE.to("meta")}),
    "a transpose": (ShapeError, {"data_transpose": DATA.clone()}),
    "integers": (DTypeError, {"dtype": torch.int32}),
    "float64": (DTypeError, {"dtype": torch.float64}),
    "no format": (DTypeError, {"fp8_dtype": torch.int8}),
}


@pytest.mark.parametrize("cls", [Float8Tensor, Float8TensorStorage])
@pytest.mark.parametrize("case", CONSTRUCTION)
def test_construction(case: str, cls: type) -> None:
    error, wrong = CONSTRUCTION[case]
    right = {"dtype": torch.float32, "data": DATA.clone(), "fp8_dtype": E4M3, "fp8_scale_inv": ONE}
    with pytest.raises(error):
        cls(**right | wrong)


def test_tensors_are_not_made_of_values() -> None:
    said = r"called with Tensor as its values.*make it by a quantizer"
    with pytest.raises(DTypeError, match=said):
        Float8Tensor(torch.ones(2, 2), requires_grad=True)
    with pytest.raises(UsageError, match="needs data"):
        Float8Tensor(dtype=torch.float32, data=None, fp8_dtype=E4M3, fp8_scale_inv=ONE)


@pytest.mark.parametrize(
    ("error", "flag"),
    [
        (DTypeError, True),
        (DTypeError, torch.ones(1).int()),
        (ShapeError, torch.ones(3)),
        (DeviceError, torch.ones(1, device="meta")),
    ],
    ids=["bool", "integers", "three", "device"],
)
def test_noop_flag(error: type[OttavaError], flag: Any, quantizer: Any) -> None:
    tensor = quantizer(X)
    with pytest.raises(error):
        tensor.quantize_(2 * X, noop_flag=flag)
    with pytest.raises(error):
        tensor.copy_from_storage(quantizer(2 * X), noop_flag=flag)
    assert torch.equal(tensor.dequantize(), X)


def refuse(calls: list[tuple[type[OttavaError], Callable[[], Any]]]) -> None:
    for number, (error, call) in enumerate(calls):
        with pytest.raises(error):
            call()
            pytest.fail(f"call {number} was accepted")


def test_tensors(quantizer: Any) -> None:
    tensor = quantizer(X)
    refuse(
        [
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
            (OptionError, lambda: tensor.update_usage(False, False)),
            (DTypeError, lambda: tensor.restore_from_saved(None)),
            (DTypeError, lambda: tensor.restore_from_saved([1, 2, 3])),
            (ShapeError, lambda: tensor.restore_from_saved([DATA])),
            (DTypeError, lambda: prepare_for_saving(5)),
            (DTypeError, lambda: restore_from_saved([5], [7])),
            (ShapeError, lambda: restore_from_saved([X], [])),
            (OptionError, lambda: columnwise_layout("bogus").__enter__()),
        ]
    )
    assert torch.equal(tensor.dequantize(), X)


def test_quantizers(quantizer: Any) -> None:
    internal, nothing = quantizer.copy(), quantizer.copy()
    internal.internal = True
    nothing.set_usage(rowwise=False, columnwise=False)
    before = quantizer.get_usages()
    refuse(
        [
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
    )
    assert quantizer.get_usages() == before
    assert not quantizer.is_quantizable(X.to_sparse())


def test_layers_and_regions(recipe: Any) -> None:
    layer = Linear(8, 4, recipe=recipe)
    refuse(
        [
            (OptionError, lambda: layer(X, is_first_microbatch="x")),
            (OptionError, lambda: autocast(recipe, amax_reduction_group=3)),  # type: ignore[arg-type]
            (OptionError, lambda: autocast(recipe, enabled=1)),  # type: ignore[arg-type]
            (DTypeError, lambda: autocast(3)),  # type: ignore[arg-type]
            (DTypeError, lambda: recipe.quantizer(5)),
            (DTypeError, lambda: layer([1.0])),
            (DTypeError, lambda: layer(X.int())),
            (DTypeError, lambda: layer(X.cfloat())),
            (DTypeError, lambda: layer(X.double())),
            (ShapeError, lambda: layer(X[:, :7])),
            (DeviceError, lambda: layer(X.to("meta"))),
        ]
    )
