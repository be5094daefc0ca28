"""The reference of current scaling: its bytes against numbers, its products, its tensors, and a layer of it."""

from __future__ import annotations

import copy
import io
import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ottava
from ottava import kernels, prepare_for_saving, restore_from_saved
from ottava.distributed import is_custom
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava.gemm import gemm
from ottava.tensors import QuantizedTensor
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
    CurrentScalingTensorRefStorage,
    current_scaling_ref_factory,
    current_scaling_ref_quantizer_factory,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import oracle

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMATS = pytest.mark.parametrize("quant_dtype", [E4M3, E5M2])
HIGH = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 6e-8, 448.0, 464.0, 57344.0, 3.4e38, -1.0]


def codes_of(tensor: Any) -> torch.Tensor:
    return tensor.data.view(torch.uint8)


def by_numbers(x: torch.Tensor, quant_dtype: torch.dtype, pow_2: bool, eps: float) -> tuple[list[int], float]:
    """Codes and the inverse of the scale, by the scalar oracle."""
    values = [float(v) for v in x.flatten().float()]
    amax = max((abs(v) for v in values if not math.isnan(v)), default=0.0)
    scale, inverse = oracle.scale_from_amax(amax, oracle.MAX[NAMES[quant_dtype]], eps, pow_2)
    return [oracle.encode(oracle.float32(v * scale), NAMES[quant_dtype]) for v in values], inverse


@FORMATS
@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
@given(
    values=st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32)), max_size=20),
    dtype=st.sampled_from(HIGH),
)
@settings(max_examples=60, deadline=None)
def test_bytes_and_scale_are_those_of_the_oracle(
    quant_dtype: torch.dtype, pow_2: bool, eps: float, values: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    tensor = CurrentScalingQuantizerRef(quant_dtype, pow_2_scales=pow_2, eps=eps)(x)
    codes, inverse = by_numbers(x, quant_dtype, pow_2, eps)
    assert codes_of(tensor).tolist() == codes
    assert tensor.scale.item() == inverse


@FORMATS
def test_every_bfloat16_value_at_scale_one(quant_dtype: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = x[x.abs() <= oracle.MAX[NAMES[quant_dtype]]]
    tensor = CurrentScalingQuantizerRef(quant_dtype)(finite)
    assert tensor.scale.item() == 1.0
    expected = finite.float().numpy().astype(NUMPY[quant_dtype]).view(np.uint8)
    assert np.array_equal(codes_of(tensor).numpy(), expected)
    assert torch.equal(
        tensor.dequantize(), torch.from_numpy(expected.view(NUMPY[quant_dtype]).astype(np.float32)).bfloat16()
    )
    # Those beyond, and NaN.
    everything = CurrentScalingQuantizerRef(quant_dtype)(torch.cat([x, torch.tensor([math.inf]).bfloat16()]))
    assert set(codes_of(everything)[:-1][x.isnan()].tolist()) == {0x7F}
    top = oracle.encode(math.inf, NAMES[quant_dtype])
    assert set(codes_of(everything)[:-1][x > oracle.MAX[NAMES[quant_dtype]]].tolist()) == {top}


@FORMATS
@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 0), (33, 17), (2, 3, 4)])
def test_the_kernels_give_the_same(quant_dtype: Any, pow_2: bool, dtype: torch.dtype, shape: Any) -> None:
    torch.manual_seed(len(shape))
    x = torch.randn(shape, dtype=dtype)
    tensor = CurrentScalingQuantizerRef(quant_dtype, pow_2_scales=pow_2)(x)
    data, _, _, scale_inv, _ = kernels.quantize(x, quant_dtype, 0.0, pow_2)
    assert torch.equal(codes_of(tensor), data)
    assert torch.equal(tensor.scale, scale_inv.reshape(()))
    assert torch.equal(tensor.dequantize(), kernels.decode(data, scale_inv, quant_dtype, dtype))


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 1:3], lambda x: x[1]])
def test_other_strides_are_read_right(view: Any) -> None:
    x = torch.randn(6, 8)
    quantizer = CurrentScalingQuantizerRef(E4M3)
    assert torch.equal(codes_of(quantizer(view(x))), codes_of(quantizer(view(x).contiguous())))


# -- usages and parts --


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (5,), (0, 3)])
def test_the_parts_are_those_of_the_usages(shape: Any, rowwise: bool, columnwise: bool, internal: bool) -> None:
    x = torch.randn(shape)
    quantizer = CurrentScalingQuantizerRef(E4M3, rowwise, columnwise)
    quantizer.internal = internal
    tensor = quantizer(x)
    both = CurrentScalingQuantizerRef(E4M3)(x)
    assert type(tensor) is (CurrentScalingTensorRefStorage if internal else CurrentScalingTensorRef)
    assert tensor.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    for held, data, scale, expected in (
        (rowwise, tensor.data, tensor.scale, codes_of(both)),
        (columnwise, tensor.data_t, tensor.scale_t, codes_of(both).movedim(-1, 0)),
    ):
        assert (data is not None) is (scale is not None) is held
        if held:
            assert data.dtype == E4M3
            assert torch.equal(data.view(torch.uint8), expected)
            assert torch.equal(scale, both.scale)
    assert tensor.quant_dtype == E4M3
    assert tensor.original_shape == tuple(tensor.size()) == shape
    assert torch.equal(tensor.dequantize(), both.dequantize())


def test_update_usage_turns_one_into_the_other() -> None:
    x = torch.randn(4, 6)
    tensor = CurrentScalingQuantizerRef(E4M3, columnwise=False)(x)
    values = tensor.dequantize()
    for rowwise, columnwise in ((True, True), (False, True), (True, True), (True, False), (False, True), (True, None)):
        tensor.update_usage(rowwise, columnwise)
        assert tensor.get_usages()["rowwise"] is rowwise
        assert (tensor.data is not None, tensor.data_t is not None) == tuple(tensor.get_usages().values())
        assert torch.equal(tensor.dequantize(), values)
        assert tensor.shape == (4, 6)
    with pytest.raises(OptionError):
        tensor.update_usage(False, False)


def test_a_transpose_is_never_stale() -> None:
    tensor = CurrentScalingQuantizerRef(E4M3)(torch.randn(4, 6))
    alias, copied = tensor.detach(), tensor.clone()
    before = copied.dequantize()
    tensor.copy_(torch.randn(4, 6))
    for one in (tensor, alias):
        assert torch.equal(one.data_t.view(torch.uint8), codes_of(one).t())
        assert torch.equal(one.dequantize(), tensor.dequantize())
    tensor._codes.zero_()
    assert not tensor.data_t.view(torch.uint8).any()
    assert torch.equal(copied.dequantize(), before)


def test_it_is_built_from_its_parts() -> None:
    both = CurrentScalingQuantizerRef(E5M2)(torch.randn(2, 3, 4))
    rows = both.data.reshape(6, 4)
    for cls in (CurrentScalingTensorRef, CurrentScalingTensorRefStorage):
        for parts in (
            {"data": both.data, "scale": both.scale},
            {"data": codes_of(both), "scale": both.scale.reshape(1)},
            {"data": rows, "scale": both.scale, "original_shape": (2, 3, 4)},
            {"data_t": both.data_t, "scale_t": both.scale_t},
            {"data_t": rows.view(torch.uint8).t().contiguous(), "scale_t": both.scale, "original_shape": (2, 3, 4)},
            {"data": both.data, "scale": both.scale, "data_t": both.data_t, "scale_t": both.scale_t},
        ):
            made = cls(**parts, dtype=torch.float32, quant_dtype=E5M2)
            assert torch.equal(made.dequantize(), both.dequantize())
            assert made.original_shape == (2, 3, 4)
            assert made.get_usages() == {"rowwise": "data" in parts, "columnwise": "data_t" in parts}


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({}, UsageError),
        ({"scale": torch.ones(())}, UsageError),
        ({"data": torch.zeros(2, 2, dtype=torch.uint8)}, DTypeError),
        ({"data": torch.zeros(2, 2, dtype=torch.uint8), "scale": torch.ones(2)}, ShapeError),
        ({"data": torch.zeros(2, 2, dtype=torch.uint8), "scale": torch.ones((), dtype=torch.float64)}, DTypeError),
        ({"data": torch.zeros(2, 2), "scale": torch.ones(())}, DTypeError),
        ({"data": torch.zeros(2, 2, dtype=torch.uint8), "scale": torch.ones(()), "original_shape": (3, 2)}, ShapeError),
        (
            {
                "data": torch.zeros(2, 3, dtype=torch.uint8),
                "data_t": torch.zeros(2, 2, dtype=torch.uint8),
                "scale": torch.ones(()),
            },
            ShapeError,
        ),
        (
            {"data": torch.zeros(2, 2, dtype=torch.uint8), "scale": torch.ones(()), "quant_dtype": torch.int8},
            DTypeError,
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: Any, error: Any) -> None:
    with pytest.raises(error):
        CurrentScalingTensorRef(**parts)


def test_data_of_a_parameter_is_what_torch_means() -> None:
    tensor = CurrentScalingQuantizerRef(E4M3)(torch.randn(4, 6))
    assert tensor.data.dtype == E4M3
    parameter = torch.nn.Parameter(tensor)
    assert isinstance(parameter.data, CurrentScalingTensorRef)
    assert not parameter.data.requires_grad
    parameter.data = torch.ones(4, 6)
    assert torch.equal(parameter.dequantize(), torch.ones(4, 6))
    tensor.data = torch.full((4, 6), 2.0)
    assert torch.equal(tensor.dequantize(), torch.full((4, 6), 2.0))


# -- saving, copying --


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_saving_and_restoring(rowwise: bool, columnwise: bool, internal: bool) -> None:
    quantizer = CurrentScalingQuantizerRef(E4M3, rowwise, columnwise)
    quantizer.internal = internal
    tensor = quantizer(torch.randn(4, 6))
    values = tensor.dequantize()
    (back,) = restore_from_saved(*prepare_for_saving(tensor))
    tensors, owner = copy.copy(tensor).prepare_for_saving() if not internal else quantizer(values).prepare_for_saving()
    assert owner.restore_from_saved([*tensors, torch.ones(2)])[0].sum() == 2
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for other in (back, owner, torch.load(file, weights_only=True), copy.deepcopy(tensor)):
        assert type(other) is type(tensor)
        assert other.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert torch.equal(other.dequantize(), values)


def test_copies_of_quantizers_and_equality() -> None:
    one = CurrentScalingQuantizerRef(E4M3, pow_2_scales=True, eps=0.5)
    other = one.copy()
    assert one == other
    assert hash(one) == hash(other)
    other.set_usage(columnwise=False)
    assert one.columnwise_usage
    assert one != CurrentScalingQuantizerRef(E4M3, pow_2_scales=True)
    assert one != CurrentScalingQuantizerRef(E5M2, pow_2_scales=True, eps=0.5)
    assert is_custom(one)
    assert is_custom(one(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dtype": torch.int8}, DTypeError),
        ({"dtype": E4M3, "eps": -1.0}, OptionError),
        ({"dtype": E4M3, "eps": math.nan}, OptionError),
        ({"dtype": E4M3, "pow_2_scales": 1}, OptionError),
        ({"dtype": E4M3, "rowwise": None}, OptionError),
    ],
)
def test_wrong_options_are_refused(arguments: Any, error: Any) -> None:
    with pytest.raises(error):
        CurrentScalingQuantizerRef(**arguments)


def test_the_factory_has_the_formats_of_the_roles() -> None:
    formats = {
        t: current_scaling_ref_quantizer_factory(t).dtype
        for t in ("input", "weight", "output", "grad_output", "grad_input")
    }
    assert formats == {"input": E4M3, "weight": E4M3, "output": E5M2, "grad_output": E5M2, "grad_input": E5M2}
    assert current_scaling_ref_factory is current_scaling_ref_quantizer_factory
    with pytest.raises(OptionError, match="tensor type 'bias'"):
        current_scaling_ref_quantizer_factory("bias")


# -- products --

SHAPES = {"fprop": ((5, 7), (6, 7)), "dgrad": ((5, 6), (6, 7)), "wgrad": ((5, 6), (5, 7))}


@pytest.mark.parametrize("gemm_type", SHAPES)
@pytest.mark.parametrize("out_dtype", HIGH)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_the_reference_backends_bit_for_bit(gemm_type: Any, out_dtype: Any, with_bias: bool) -> None:
    shapes = SHAPES[gemm_type]
    quantizers = [CurrentScalingQuantizerRef(d) for d in (E5M2 if gemm_type != "fprop" else E4M3, E4M3)]
    a, b = (q(torch.randn(s)) for q, s in zip(quantizers, shapes, strict=True))
    columns = shapes[1][0] if gemm_type == "fprop" else shapes[1][1]
    bias = torch.randn(columns, dtype=out_dtype) if with_bias else None
    got = gemm(a, b, gemm_type, out_dtype=out_dtype, bias=bias)
    left, right = a.elements(), b.elements()
    left = left.t() if gemm_type == "wgrad" else left
    right = right.t() if gemm_type == "fprop" else right
    with kernels.use_backend("reference"):
        expected = kernels.scaled_mm(left, right, a.scale, b.scale, bias, out_dtype)
    assert torch.equal(got, expected)
    exact = a.dequantize(torch.float64), b.dequantize(torch.float64)
    exact = (exact[0].t() if gemm_type == "wgrad" else exact[0]) @ (exact[1].t() if gemm_type == "fprop" else exact[1])
    exact = exact if bias is None else exact + bias.double()
    torch.testing.assert_close(got.double(), exact, rtol=2 * torch.finfo(out_dtype).eps, atol=2e-5)
    direct = quantizers[0].qgemm(
        a.data, b.data, None, out_dtype, a.scale, b.scale, bias, gemm_type=gemm_type, qresult_x=a, qresult_w=b
    )
    assert torch.equal(direct, got)
    bare = quantizers[0].qgemm(a.data, b.data, None, out_dtype, a.scale, b.scale, bias, gemm_type=gemm_type)
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
    arguments = {"qx": torch.ones(5, 7), "qw": torch.ones(6, 7), "sx": torch.ones(()), "sw": torch.ones(())}
    arguments |= {"m_params": None, "out_dtype": torch.float32}
    CurrentScalingQuantizerRef(E4M3).qgemm(**arguments)
    with pytest.raises(error):
        CurrentScalingQuantizerRef(E4M3).qgemm(**(arguments | changed))


# -- in a layer --


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 4), (0,), (2, 0)])
@pytest.mark.parametrize("primary", [False, True])
def test_a_layer_of_any_rank(lead: Any, dtype: torch.dtype, primary: bool) -> None:
    torch.manual_seed(0)
    with ottava.quantized_model_init("custom", enabled=primary):
        layer = ottava.nn.Linear(7, 5, dtype=dtype, recipe="custom")
    assert isinstance(layer.weight, CurrentScalingTensorRef) is primary
    x = torch.randn(*lead, 7, dtype=dtype, requires_grad=True)
    dy = torch.randn(*lead, 5, dtype=dtype)
    y = layer(x)
    y.backward(dy)
    quantized = {
        name: current_scaling_ref_quantizer_factory(name)(value.detach().reshape(-1, value.shape[-1])).dequantize(
            torch.float64
        )
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
    torch.testing.assert_close(x.grad.double(), (quantized["grad_output"] @ qw).view(x.shape), **tolerance)
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
        current_scaling_ref_factory("weight")(layer.weight.get_high_precision_init_val()).dequantize(),
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


@pytest.mark.parametrize("primary", [False, True])
def test_it_compiles(primary: bool) -> None:
    torch.manual_seed(0)
    with ottava.quantized_model_init("custom", enabled=primary):
        layer = ottava.nn.Linear(16, 8, recipe="custom")
    x = torch.randn(4, 16, requires_grad=True)
    layer(x).square().sum().backward()
    eager = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    assert torch.equal(x.grad, eager[0])
    assert torch.equal(layer.weight.grad, eager[1])
