"""The reference of current scaling: bytes, tensors, products and layers, against numbers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import ottava
from ottava import Layout, kernels
from ottava.contract import Contract
from ottava.distributed import is_custom
from ottava.errors import OptionError, UsageError
from ottava.gemm import gemm
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
    CurrentScalingTensorRefStorage,
    CustomRecipe,
    current_scaling_ref_factory,
    current_scaling_ref_quantizer_factory,
)
from tests import arrays
from tests.comparing import assert_same
from tests.samples import DTYPES, patterns, special, strided, wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
reference = CurrentScalingQuantizerRef


def codes(tensor: Any) -> torch.Tensor:
    return tensor.data.view(torch.uint8)  # type: ignore[no-any-return]


@pytest.mark.parametrize("quant_dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize(("pow_2", "eps"), [(False, 0.0), (True, 1e-3)])
def test_bytes_and_scales_are_those_of_the_oracle(
    quant_dtype: Any, pow_2: bool, eps: float
) -> None:
    layout = Layout(
        quant_dtype, (None, None), rounding="floor" if pow_2 else "nearest", epsilon=eps
    )
    contract = reference(quant_dtype, pow_2_scales=pow_2, eps=eps).contract
    assert contract.rowwise == Contract.of_layout(layout).rowwise
    for dtype in DTYPES:
        every = patterns(dtype)
        finite = torch.where(every.isfinite(), every, 0)
        matrices = [("every value", every), ("every finite value", finite), *special(dtype)]
        matrices += [(str(shape), wide(*shape, dtype=dtype)) for shape in ((), (0, 3), (2, 3, 4))]
        for name, x in [*matrices, *strided(wide(6, 10, dtype=dtype))]:
            tensor = reference(quant_dtype, pow_2_scales=pow_2, eps=eps)(x)
            data, stored, *_ = arrays.quantize(x, layout)
            note = f"{name}, {dtype}"
            assert_same(codes(tensor), data, x, note)
            assert_same(tensor.scale, stored.reshape(()), note=note)
            values = arrays.decode(data, stored, layout, columnwise=False, dtype=dtype)
            assert_same(tensor.dequantize(), values, x, note)


# -- tensors --


def test_update_usage_turns_one_usage_into_the_other() -> None:
    tensor = reference(E4M3, columnwise=False)(torch.randn(4, 6))
    values, order = tensor.dequantize(), ((1, 1), (0, 1), (1, 1), (1, 0), (0, 1), (1, None))
    for rowwise, columnwise in order:
        tensor.update_usage(bool(rowwise), None if columnwise is None else bool(columnwise))
        usages = tensor.get_usages()
        assert usages["rowwise"] is bool(rowwise)
        parts = (tensor.data is not None, tensor.data_t is not None)
        assert parts == tuple(usages.values())
        assert torch.equal(tensor.dequantize(), values)
    with pytest.raises(OptionError):
        tensor.update_usage(False, False)


@pytest.mark.parametrize("kind", [CurrentScalingTensorRef, CurrentScalingTensorRefStorage])
def test_it_is_built_from_its_parts(kind: Any) -> None:
    both = reference(E5M2)(torch.randn(2, 3, 4))
    rows, shape = both.data.reshape(6, 4), {"original_shape": (2, 3, 4)}
    columns = rows.view(torch.uint8).t().contiguous()
    for parts in (
        {"data": both.data, "scale": both.scale},
        {"data": codes(both), "scale": both.scale.reshape(1)},
        {"data": rows, "scale": both.scale, **shape},
        {"data_t": both.data_t, "scale_t": both.scale_t},
        {"data_t": columns, "scale_t": both.scale, **shape},
        {"data": both.data, "scale": both.scale, "data_t": both.data_t, "scale_t": both.scale_t},
    ):
        tensor = kind(**parts, dtype=torch.float32, quant_dtype=E5M2)
        assert torch.equal(tensor.dequantize(), both.dequantize())
        assert not getattr(tensor, "requires_grad", False)
        assert tensor.original_shape == (2, 3, 4)
        assert tensor.get_usages() == {"rowwise": "data" in parts, "columnwise": "data_t" in parts}


def test_a_clone_in_another_format_of_memory_has_its_own_scale() -> None:
    tensor = reference(E4M3)(torch.randn(4, 6))
    values, clone = tensor.dequantize(), tensor.clone(memory_format=torch.contiguous_format)
    clone.copy_(100 * values)
    assert_same(tensor.dequantize(), values)


def test_the_data_of_a_parameter_is_what_torch_means() -> None:
    tensor = reference(E4M3)(torch.randn(4, 6))
    assert tensor.data.dtype == E4M3
    parameter = torch.nn.Parameter(tensor)
    assert isinstance(parameter.data, CurrentScalingTensorRef)
    assert not parameter.data.requires_grad
    parameter.data = torch.ones(4, 6)
    assert torch.equal(parameter.dequantize(), torch.ones(4, 6))
    tensor.data = torch.full((2, 3), 2.0)
    assert torch.equal(tensor.dequantize(), torch.full((2, 3), 2.0))


def test_a_quantizer_is_custom_and_has_its_dtype_by_two_names() -> None:
    quantizer = reference(E4M3)
    assert is_custom(quantizer)
    assert is_custom(quantizer(torch.ones(2, 2)))
    quantizer.fp8_dtype = E5M2
    assert quantizer.dtype == quantizer.fp8_dtype == E5M2


def test_the_factory_has_the_formats_of_the_roles() -> None:
    for tensor_type in ("input", "weight", "output", "grad_output", "grad_input"):
        expected = E4M3 if tensor_type in ("input", "weight") else E5M2
        assert current_scaling_ref_factory(tensor_type).dtype == expected
    assert current_scaling_ref_factory is current_scaling_ref_quantizer_factory


# -- products --

SHAPES = {"fprop": ((5, 7), (6, 7)), "dgrad": ((5, 6), (6, 7)), "wgrad": ((5, 6), (5, 7))}


@pytest.mark.parametrize("gemm_type", SHAPES)
def test_products_are_those_of_the_reference_backend_bit_for_bit(gemm_type: Any) -> None:
    quantizers = reference(E4M3 if gemm_type == "fprop" else E5M2), reference(E4M3)
    a, b = (q(wide(*s, sigma=1.0)) for q, s in zip(quantizers, SHAPES[gemm_type], strict=True))
    turns = gemm_type == "wgrad", gemm_type == "fprop"
    left, right = (x.t() if turn else x for x, turn in zip((a, b), turns, strict=True))
    exact = left.dequantize(torch.float64) @ right.dequantize(torch.float64)
    left, right = (
        x.elements().t() if turn else x.elements() for x, turn in zip((a, b), turns, strict=True)
    )
    for out_dtype, with_bias in itertools.product(DTYPES, (False, True)):
        bias = torch.randn(exact.shape[1], dtype=out_dtype) if with_bias else None
        with kernels.use_backend("reference"):
            expected = torch.ops.ottava.scaled_mm(left, right, a.scale, b.scale, bias, out_dtype)
        arguments = (a.data, b.data, None, out_dtype, a.scale, b.scale, bias)
        for product in (
            gemm(a, b, gemm_type, out_dtype=out_dtype, bias=bias),
            quantizers[0].qgemm(*arguments, gemm_type=gemm_type, qresult_x=a, qresult_w=b),
            quantizers[0].qgemm(*arguments, gemm_type=gemm_type),
        ):
            assert_same(product, expected, note=(out_dtype, with_bias))
        biased = exact if bias is None else exact + bias.double()
        tolerance = {"rtol": 2 * torch.finfo(out_dtype).eps, "atol": 1e-4}
        torch.testing.assert_close(product.double(), biased, **tolerance)


def test_scales_may_be_missing() -> None:
    x, w, scale = torch.randn(5, 7), torch.randn(6, 7), torch.tensor(2.0)
    plain = reference(E4M3).qgemm(x, w, None, torch.float32, None, None)
    for sx, sw, factor in ((scale, None, 2.0), (None, scale, 2.0), (scale, scale, 4.0)):
        assert_same(reference(E4M3).qgemm(x, w, None, torch.float32, sx, sw), plain * factor)


def test_products_are_added_with_one_rounding() -> None:
    a, b = reference(E4M3)(torch.randn(5, 6)), reference(E4M3)(torch.randn(5, 7))
    product = gemm(a, b, "wgrad", out_dtype=torch.float32)
    for out_dtype in DTYPES:
        start = torch.randn(6, 7, dtype=out_dtype)
        out = start.clone()
        assert gemm(a, b, "wgrad", out=out, accumulate=True) is out
        assert_same(out, (start.float() + product).to(out_dtype))
        gemm(a, b, "wgrad", out=out)
        assert_same(out, product.to(out_dtype))


def test_products_read_the_usage_that_they_need() -> None:
    q, columns, dy = reference(E4M3), reference(E4M3, rowwise=False), torch.randn(5, 6)
    x, w = q(torch.randn(5, 7)), q(torch.randn(6, 7))
    with pytest.raises(UsageError, match="without rowwise data in a product"):
        gemm(columns(torch.randn(5, 7)), w, "fprop")
    assert torch.equal(gemm(q(dy), x, "wgrad"), gemm(columns(dy), columns(x.dequantize()), "wgrad"))


# -- layers --


def test_a_backward_pass_under_torch_autocast_multiplies_in_float32() -> None:
    layer = ottava.nn.Linear(24, 8, dtype=torch.bfloat16, recipe="custom")
    x, dy = torch.randn(16, 24).bfloat16().requires_grad_(), torch.randn(16, 8).bfloat16()
    results = []
    for enabled in (False, True):
        y = layer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(torch.autograd.grad(y, [x, layer.weight, layer.bias], dy))
    assert_same(*results)


class DefaultProduct(CurrentScalingQuantizerRef):
    """Its products are those that every quantizer has."""

    qgemm = ottava.Quantizer.qgemm


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inductor_gives_the_bytes_of_eager_code(dtype: torch.dtype) -> None:
    """Between layers a compiler could leave out roundings."""
    torch._dynamo.reset()
    kinds = (reference, DefaultProduct)
    recipes = [CustomRecipe(lambda role, kind=kind: kind(E4M3)) for kind in kinds]
    layers = [ottava.nn.Linear(32, 32, dtype=dtype, recipe=recipe) for recipe in recipes]
    eager = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
    twin, results = copy.deepcopy(eager), []
    x, dy = torch.randn(65, 32).to(dtype), torch.randn(65, 32).to(dtype)
    for module, run in ((eager, eager), (twin, torch.compile(twin, fullgraph=True))):
        own = x.clone().requires_grad_()
        y = run(own)
        y.backward(dy)
        results.append([y, own.grad, *(parameter.grad for parameter in module.parameters())])
    assert_same(*results)
