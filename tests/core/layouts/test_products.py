"""Products read each operand along the dimension that they sum over, and layers do, too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from ottava import GridQuantizer, Layout
from ottava.errors import UsageError
from ottava.gemm import gemm
from ottava.kernels.backends import use_backend
from ottava.layout import Rotation
from ottava.nn import Linear
from tests.cases import told
from tests.comparing import assert_same
from tests.core.gemm.operands import (
    DIRECTIONS,
    PRODUCTS,
    SHAPES,
    WAYS,
    cases,
    check,
    chosen,
    far,
)
from tests.core.layouts.layouts import (
    E5M2,
    EACH,
    EACH_OF_A_LAYER,
    QUANTIZERS,
    ROTATED_ONCE,
    OneQuantizer,
    quantizer,
)
from tests.samples import wide


@pytest.mark.parametrize("kind", PRODUCTS)
@EACH
def test_a_product_is_that_of_the_decoded_operands(name: str, kind: str) -> None:
    """In every way that a CPU multiplies; a sum into ``out`` is rounded once."""
    if name in ROTATED_ONCE and kind == "dgrad":
        a, b = (QUANTIZERS[name](wide(*shape)) for shape in SHAPES[kind](4, 5, 9))
        with pytest.raises(UsageError, match=r"one that is rotated.*same rotation"):
            gemm(a, b, kind)
        return
    for number, (m, n, k) in enumerate([(70, 33, 140), (1, 1, 1), (0, 5, 9), (4, 0, 9), (4, 5, 0)]):
        a, b = (
            QUANTIZERS[name](wide(*shape, seed=seed, sigma=1.0))
            for seed, shape in enumerate(SHAPES[kind](m, n, k))
        )
        shape = PRODUCTS[kind](a.dequantize(), b.dequantize()).shape
        biases = list(cases(shape[1]))[number::4]
        for way, (dtype, bias) in itertools.product(WAYS, biases):
            with told(m, n, k, way, dtype), chosen(way):
                got = gemm(a, b, kind, out_dtype=dtype, bias=bias)
                assert got.dtype == dtype
                roundings = 1 if way == "reference" or dtype != torch.bfloat16 else 2
                check(got, a, b, kind, bias=bias, roundings=roundings)
        for way, dtype in zip(WAYS, (torch.float32, torch.bfloat16) * 2, strict=True):
            start = torch.randn(shape).to(dtype)
            out = start.clone()
            with told(m, n, k, way, dtype), chosen(way):
                assert gemm(a, b, kind, out=out, accumulate=True) is out
                check(out, a, b, kind, start=start)
                assert gemm(a, b, kind, out=out) is out
                check(out, a, b, kind, roundings=2)


@pytest.mark.every_layout
@pytest.mark.parametrize("kind", PRODUCTS)
def test_operands_of_any_two_layouts(kind: str) -> None:
    """And one in high precision: a scale of another layout is applied once."""
    # Of an odd number of elements that share bytes one operand has a zero more.
    rows, columns = SHAPES[kind](41, 25, 35)
    for number, (one, two) in enumerate(itertools.pairwise([*QUANTIZERS, "mxfp8"])):
        with told(one, two):
            a, b = QUANTIZERS[one](wide(*rows)), QUANTIZERS[two](wide(*columns, seed=1))
            for other in (b, wide(*columns, seed=number)):
                if _rotations_differ(a, other, kind):
                    with pytest.raises(UsageError, match="same rotation"):
                        gemm(a, other, kind)
                    continue
                check(gemm(a, other, kind, out_dtype=torch.float32), a, other, kind)


def _rotations_differ(a: Any, b: Any, kind: str) -> bool:
    """Whether two operands are rotated differently along the dimension that is summed over."""
    rotations = []
    for operand, columnwise in zip((a, b), DIRECTIONS[kind], strict=True):
        layout = getattr(operand, "grid_layout", None)
        rotation = None if layout is None else layout.rotation
        is_rotated = rotation is not None and rotation.turns(columnwise)
        rotations.append(rotation[:2] if is_rotated else None)
    return rotations[0] != rotations[1]


def test_rotations_with_other_signs_are_refused() -> None:
    """Or of another size: they do not cancel."""
    plain = Layout("E2M1", (1, 32), torch.float8_e8m0fnu, "floor", columnwise="transposed")
    x = wide(64, 64)
    for rotation in (Rotation(32, 0b1000, "both"), Rotation(16, 0b1001, "both")):
        a, b = (
            GridQuantizer(replace(plain, rotation=each))(x)
            for each in (Rotation(32, 0b1001, "both"), rotation)
        )
        for kind in PRODUCTS:
            with pytest.raises(UsageError, match=f"with signs 0x9 .* {rotation.size} with signs"):
                gemm(a, b, kind)


@EACH
def test_scales_far_apart_do_not_overflow(name: str) -> None:
    """No product of the two scales could hold them. Scales of eight bits do not hold them."""
    a, b = (QUANTIZERS[name](torch.full((16, 256), value)) for value in (1e-30, 1e30))
    got = gemm(a, b, out_dtype=torch.float32)
    layout = QUANTIZERS[name].layout
    fits = layout.second_level != "none" or layout.scale in (torch.float32, torch.float8_e8m0fnu)
    if fits and not layout.epsilon:
        # An element of four bits may be a quarter off.
        assert ((got - 256).abs() < (150 if layout.format.bits == 4 else 20)).all()
    factors = [q.dequantize() for q in (a, b)]
    torch.testing.assert_close(got, factors[0] @ factors[1].t(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_products_beyond_float32_are_those_of_the_decoded_values(backend: str) -> None:
    """Subnormal numbers, zeros and infinities that decoding gives are multiplied as IEEE float32
    has it."""
    for one, two in [(-140, 120), (120, -140), (-130, 0), (126, 0), (-70, -70)]:
        a, b = (
            QUANTIZERS["mxfp8"](
                wide(*shape, seed=seed, sigma=0.1) * 2.0 ** max(e, -120) * 2.0 ** min(e + 120, 0)
            )
            for seed, (shape, e) in enumerate(zip(((96, 64), (80, 64)), (one, two), strict=True))
        )
        with told(one, two), use_backend(backend):
            got = gemm(a, b, "fprop", out_dtype=torch.float32)
            expected = a.dequantize() @ b.dequantize().t()
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_nan_stays_in_its_row() -> None:
    x = wide(96, 64)
    x[7, 5] = torch.nan
    got = gemm(QUANTIZERS["mxfp8"](x), QUANTIZERS["mxfp8"](wide(80, 64)), out_dtype=torch.float32)
    assert torch.equal(got.isnan().all(1), torch.arange(96) == 7)


@pytest.mark.parametrize("name", ["mxfp8", "1x128", "rows", "tensor"])
def test_torch_autocast_does_not_reach_into_a_product(name: str) -> None:
    a, b = (QUANTIZERS[name](wide(96, 64, seed=seed) * 2.0**12) for seed in range(2))
    outside = [gemm(a, other, out_dtype=torch.float32) for other in (b, b.dequantize())]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            inside = [gemm(a, other, out_dtype=torch.float32) for other in (b, b.dequantize())]
        assert_same(inside, outside)


@EACH_OF_A_LAYER
def test_a_layer_takes_each_direction_for_its_product(name: str) -> None:
    """Output and gradients are the three products of what the quantizer holds."""
    for dtype, lead in (
        (torch.float32, (70,)),
        (torch.bfloat16, (3, 11)),
        (torch.float16, (2, 1, 4)),
        (torch.float32, ()),
        (torch.bfloat16, (2, 0)),
    ):
        with told(dtype, lead):
            sigma = 3.0 if lead == (70,) else 1.0
            layer = Linear(70, 33, dtype=dtype, recipe=OneQuantizer(row=name))
            with torch.no_grad():
                layer.weight.copy_(wide(33, 70, seed=11, sigma=sigma))
            x = wide(*lead, 70, dtype=dtype, sigma=sigma).requires_grad_()
            dy = wide(*lead, 33, dtype=dtype, seed=1, sigma=1.0)
            y = layer(x)
            y.backward(dy)
            assert y.shape == (*lead, 33)
            grads = x.grad, layer.weight.grad, layer.bias.grad
            assert {t.dtype for t in (y, *grads)} == {dtype}
            q, w, g = (
                quantizer(name)(t.detach().reshape(-1, t.shape[-1])) for t in (x, layer.weight, dy)
            )
            check(y, q, w, "fprop", bias=layer.bias, roundings=2)
            check(x.grad, g, w, "dgrad", roundings=2)
            check(layer.weight.grad, g, q, "wgrad", roundings=2)
            flat = dy.reshape(-1, 33)
            check(layer.bias.grad, torch.ones(1, len(flat)), flat, "dgrad")
            layout = q.grid_layout
            is_alike = layout.square or layout.element is E5M2
            if lead == (70,) and not is_alike and layout.rotation is None:
                # The other directions give something else: the comparisons above tell them apart.
                assert far(y, q, w, "fprop", directions=(True, False), bias=layer.bias)[0].any()
                assert far(layer.weight.grad, g, q, "wgrad", directions=(True, False))[0].any()


@EACH_OF_A_LAYER
def test_a_layer_saves_bytes_of_columns_alone(name: str) -> None:
    """And of what requires a gradient."""
    layout = QUANTIZERS[name].layout
    for x_needs, w_needs in itertools.product((False, True), repeat=2):
        layer = Linear(64, 96, bias=False, dtype=torch.bfloat16, recipe=OneQuantizer(row=name))
        layer.weight.requires_grad_(w_needs)
        x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=x_needs)
        kept: dict[int, torch.Tensor] = {}

        def pack(t: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[t.data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(x)
        needed = ((128, 64), w_needs), ((96, 64), x_needs)
        expected = [
            tuple(size)
            for shape, is_needed in needed
            if is_needed
            for size in (
                layout.data_shape(shape, True),
                layout.scale_shape(shape, True),
                layout.amax_shape(shape, True),
            )
            if size is not None
        ]
        found = [tuple(t.shape) for t in kept.values() if t.numel()]
        # One scale for the tensor may be kept as a scalar.
        assert sorted(f or (1, 1) for f in found) == sorted(e or (1, 1) for e in expected)
        dtypes = {torch.uint8, layout.stored_scale}
        if layout.second_level != "none":
            dtypes.add(torch.float32)
        assert {t.dtype for t in kept.values()} <= dtypes
        if x_needs or w_needs:
            y.sum().backward()
        assert (x.grad is not None, layer.weight.grad is not None) == (x_needs, w_needs)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pytest.fail, lambda t: t):
        assert not layer(x).requires_grad


def test_a_quantized_input_is_taken_by_its_values() -> None:
    x = wide(64, 70)
    for name in ("mxfp8", "1x128", "Float8Tensor"):
        layer, q = Linear(70, 33, recipe=OneQuantizer(row=name)), QUANTIZERS[name](x)
        assert_same(layer(q), layer(q.dequantize()))
        leaf, other = x.clone().requires_grad_(), q.dequantize().requires_grad_()
        layer(QUANTIZERS[name](leaf)).sum().backward()
        layer(other).sum().backward()
        assert_same(leaf.grad, other.grad)
