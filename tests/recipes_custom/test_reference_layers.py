"""Products and layers of the reference of current scaling, against the reference backend and
float64."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from comparing import assert_same

import ottava
from ottava import kernels
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.gemm import gemm
from ottava.tensors import QuantizedTensor
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
    CustomRecipe,
    by_layer,
    current_scaling_ref_factory,
    current_scaling_ref_quantizer_factory,
)
from tests.cases import told

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HIGH = [torch.float32, torch.bfloat16, torch.float16]

SHAPES = {"fprop": ((5, 7), (6, 7)), "dgrad": ((5, 6), (6, 7)), "wgrad": ((5, 6), (5, 7))}


@pytest.mark.parametrize("gemm_type", SHAPES)
def test_products_are_the_reference_backends_bit_for_bit(gemm_type: Any) -> None:
    for out_dtype, with_bias in itertools.product(HIGH, (False, True)):
        with told(out_dtype, with_bias):
            check_product(gemm_type, out_dtype, with_bias)


def check_product(gemm_type: Any, out_dtype: Any, with_bias: bool) -> None:
    shapes = SHAPES[gemm_type]
    quantizers = [
        CurrentScalingQuantizerRef(d) for d in (E5M2 if gemm_type != "fprop" else E4M3, E4M3)
    ]
    a, b = (q(torch.randn(s)) for q, s in zip(quantizers, shapes, strict=True))
    columns = shapes[1][0] if gemm_type == "fprop" else shapes[1][1]
    bias = torch.randn(columns, dtype=out_dtype) if with_bias else None
    got = gemm(a, b, gemm_type, out_dtype=out_dtype, bias=bias)
    left, right = a.elements(), b.elements()
    left = left.t() if gemm_type == "wgrad" else left
    right = right.t() if gemm_type == "fprop" else right
    with kernels.use_backend("reference"):
        expected = torch.ops.ottava.scaled_mm(left, right, a.scale, b.scale, bias, out_dtype)
    assert torch.equal(got, expected)
    exact = a.dequantize(torch.float64), b.dequantize(torch.float64)
    exact = (exact[0].t() if gemm_type == "wgrad" else exact[0]) @ (
        exact[1].t() if gemm_type == "fprop" else exact[1]
    )
    exact = exact if bias is None else exact + bias.double()
    torch.testing.assert_close(got.double(), exact, rtol=2 * torch.finfo(out_dtype).eps, atol=2e-5)
    direct = quantizers[0].qgemm(
        a.data,
        b.data,
        None,
        out_dtype,
        a.scale,
        b.scale,
        bias,
        gemm_type=gemm_type,
        qresult_x=a,
        qresult_w=b,
    )
    assert torch.equal(direct, got)
    bare = quantizers[0].qgemm(
        a.data, b.data, None, out_dtype, a.scale, b.scale, bias, gemm_type=gemm_type
    )
    assert torch.equal(bare, got)


@pytest.mark.parametrize("out_dtype", HIGH)
def test_products_are_added_with_one_rounding(out_dtype: Any) -> None:
    q = CurrentScalingQuantizerRef(E4M3)
    a, b = q(torch.randn(5, 6)), q(torch.randn(5, 7))
    start = torch.randn(6, 7, dtype=out_dtype)
    product = gemm(a, b, "wgrad", out_dtype=torch.float32)
    out = start.clone()
    assert gemm(a, b, "wgrad", out=out, accumulate=True) is out
    assert torch.equal(out, (start.float() + product).to(out_dtype))
    gemm(a, b, "wgrad", out=out)
    assert torch.equal(out, product.to(out_dtype))


def test_products_read_the_usage_that_they_need() -> None:
    q = CurrentScalingQuantizerRef(E4M3)
    x, w = q(torch.randn(5, 7)), q(torch.randn(6, 7))
    columns = CurrentScalingQuantizerRef(E4M3, rowwise=False)
    with pytest.raises(UsageError, match="without rowwise data in a product"):
        gemm(columns(torch.randn(5, 7)), w, "fprop")
    dy = torch.randn(5, 6)
    assert torch.equal(gemm(q(dy), x, "wgrad"), gemm(columns(dy), columns(x.dequantize()), "wgrad"))
    with pytest.raises(OptionError, match="gemm_type"):
        q.qgemm(x, w, None, torch.float32, None, None, gemm_type="forward")
    with pytest.raises(OptionError, match="accumulate"):
        q.qgemm(x, w, None, torch.float32, None, None, accumulate=True)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"qx": torch.zeros(5, 7, dtype=torch.uint8)}, DTypeError),
        ({"qx": None}, DTypeError),
        ({"qx": torch.zeros(5, 6)}, ShapeError),
        ({"sx": 2.0}, DTypeError),
        ({"sw": torch.ones(2)}, DTypeError),
        ({"bias": torch.zeros(5)}, ShapeError),
        ({"out": torch.zeros(5, 5)}, ShapeError),
        ({"out": torch.zeros(1, 6)}, ShapeError),
        ({"out": torch.zeros(5, 6, dtype=torch.int32)}, DTypeError),
    ],
)
def test_operands_that_do_not_fit_are_refused(changed: Any, error: Any) -> None:
    arguments = {
        "qx": torch.ones(5, 7),
        "qw": torch.ones(6, 7),
        "sx": torch.ones(()),
        "sw": torch.ones(()),
    }
    arguments |= {"m_params": None, "out_dtype": torch.float32}
    CurrentScalingQuantizerRef(E4M3).qgemm(**arguments)
    with pytest.raises(error):
        CurrentScalingQuantizerRef(E4M3).qgemm(**(arguments | changed))


# -- in a layer --


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("primary", [False, True])
def test_a_layer_of_any_rank(dtype: torch.dtype, primary: bool) -> None:
    for lead in ((), (3,), (2, 3), (2, 1, 4), (0,), (2, 0)):
        with told(lead):
            check_layer(lead, dtype, primary)


def check_layer(lead: tuple[int, ...], dtype: torch.dtype, primary: bool) -> None:
    torch.manual_seed(0)
    with ottava.quantized_model_init("custom", enabled=primary):
        layer = ottava.nn.Linear(7, 5, dtype=dtype, recipe="custom")
    assert isinstance(layer.weight, CurrentScalingTensorRef) is primary
    x = torch.randn(*lead, 7, dtype=dtype, requires_grad=True)
    dy = torch.randn(*lead, 5, dtype=dtype)
    y = layer(x)
    y.backward(dy)
    quantized = {
        name: current_scaling_ref_quantizer_factory(name)(
            value.detach().reshape(-1, value.shape[-1])
        ).dequantize(torch.float64)
        for name, value in (("input", x), ("grad_output", dy))
    }
    weight = layer.weight.detach()
    qw = (
        weight.dequantize(torch.float64)
        if primary
        else current_scaling_ref_factory("weight")(weight).dequantize(torch.float64)
    )
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    expected = quantized["input"] @ qw.t() + layer.bias.detach().double()
    torch.testing.assert_close(y.detach().double(), expected.view(y.shape), **tolerance)
    torch.testing.assert_close(
        x.grad.double(), (quantized["grad_output"] @ qw).view(x.shape), **tolerance
    )
    torch.testing.assert_close(
        layer.weight.grad.double(), quantized["grad_output"].t() @ quantized["input"], **tolerance
    )


def test_microbatches_before_the_backward_passes() -> None:
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(ottava.nn.Linear(7, 5, recipe="custom"))
    batches = [torch.randn(3, 7) for _ in range(3)]
    outputs = [layers[0](x).square().sum() for x in batches]
    for output in reversed(outputs):
        output.backward()
    for x in reversed(batches):
        layers[1](x).square().sum().backward()
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)
    assert torch.equal(layers[0].bias.grad, layers[1].bias.grad)


@pytest.mark.parametrize("primary", [False, True])
def test_gradients_are_added_into_main_grad(primary: bool) -> None:
    torch.manual_seed(0)
    with ottava.quantized_model_init("custom", enabled=primary):
        layer = ottava.nn.Linear(7, 5, recipe="custom", fuse_wgrad_accumulation=True)
    twin = copy.deepcopy(layer)
    twin.fuse_wgrad_accumulation = False
    layer.weight.main_grad = torch.zeros(5, 7)
    batches = [torch.randn(2, 3, 7) for _ in range(3)]
    for x in batches:
        layer(x).square().sum().backward()
        twin(x).square().sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad, twin.weight.grad, rtol=1e-6, atol=1e-6)


def test_weights_that_live_in_it_train() -> None:
    torch.manual_seed(0)
    with ottava.quantized_model_init("custom"):
        layer = ottava.nn.Linear(16, 8, recipe="custom")
    assert torch.equal(
        layer.weight.dequantize(),
        current_scaling_ref_factory("weight")(
            layer.weight.get_high_precision_init_val()
        ).dequantize(),
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    target = torch.randn(8, 16)
    losses = []
    for _ in range(30):
        x = torch.randn(32, 16)
        loss = (layer(x) - x @ target.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert isinstance(layer.weight, CurrentScalingTensorRef)
    assert isinstance(layer.weight, QuantizedTensor)
    assert losses[-1] < 0.5 * losses[0]


def test_it_compiles() -> None:
    """A weight that is quantized in each step, and one that is kept quantized."""
    torch.manual_seed(0)
    layers = []
    for primary in (False, True):
        with ottava.quantized_model_init("custom", enabled=primary):
            layers.append(ottava.nn.Linear(16, 16, recipe="custom"))
    model = torch.nn.Sequential(*layers)
    x = torch.randn(4, 16, requires_grad=True)
    model(x).square().sum().backward()
    eager = [x.grad, *(layer.weight.grad for layer in layers)]
    x.grad = None
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for mine, theirs in zip([x.grad, *(layer.weight.grad for layer in layers)], eager, strict=True):
        assert torch.equal(mine, theirs)


class DefaultProduct(CurrentScalingQuantizerRef):
    """Its products are those that every quantizer has."""

    qgemm = ottava.Quantizer.qgemm


class Residual(torch.nn.Module):
    """Layers between which a compiler could leave out roundings."""

    def __init__(self, dtype: torch.dtype, main_grad: bool) -> None:
        super().__init__()
        both = by_layer(
            {"first": lambda role: CurrentScalingQuantizerRef(E4M3)},
            lambda role: DefaultProduct(E4M3),
        )
        for name in ("first", "second"):
            layer = ottava.nn.Linear(96, 96, dtype=dtype, name=name, recipe=CustomRecipe(both))
            layer.fuse_wgrad_accumulation = main_grad
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) + x)


@pytest.mark.parametrize(
    ("dtype", "autocast", "main_grad"),
    [
        (torch.bfloat16, None, True),
        pytest.param(torch.float32, None, False, marks=pytest.mark.slow),
        pytest.param(torch.float16, None, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_inductor_gives_the_bytes_of_eager_code(dtype: Any, autocast: Any, main_grad: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Residual(dtype, main_grad)
    twin = copy.deepcopy(eager)
    results = []
    for module, call in ((eager, eager), (twin, torch.compile(twin, fullgraph=True))):
        for layer in (module.first, module.second) if main_grad else ():
            layer.weight.main_grad = torch.ones(96, 96)
        random = torch.Generator().manual_seed(1)
        x = torch.randn(65, 96, generator=random).to(dtype).requires_grad_()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            y = call(x)
        y.backward(torch.randn(65, 96, generator=random).to(y.dtype))
        weights = [getattr(p, "main_grad", p.grad) for p in module.parameters()]
        results.append([y, x.grad, *weights])
    assert_same(*results)


def test_a_backward_pass_under_torch_autocast_multiplies_in_float32() -> None:
    torch.manual_seed(0)
    layer = ottava.nn.Linear(24, 8, dtype=torch.bfloat16, recipe="custom")
    x, dy = torch.randn(16, 24).bfloat16().requires_grad_(), torch.randn(16, 8).bfloat16()
    made = []
    for enabled in (False, True):
        y = layer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made.append(torch.autograd.grad(y, [x, layer.weight, layer.bias], dy))
    for plain, inside in zip(*made, strict=True):
        assert torch.equal(plain, inside)
