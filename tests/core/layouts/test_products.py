"""Products read each operand along the dimension that they sum over, and layers do, too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ottava
from ottava import QuantizedTensorStorage
from ottava.gemm import gemm
from ottava.kernels.backends import use_backend
from ottava.nn import Linear
from tests import arrays
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    E5M2,
    EACH,
    LAYOUTS,
    QUANTIZERS,
    OneQuantizer,
    quantizer,
)
from tests.samples import wide

KINDS = ("fprop", "dgrad", "wgrad")
#: Whether an operand is read along its columns.
COLUMNWISE = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def shapes(kind: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]


def decoded(q: QuantizedTensorStorage | torch.Tensor, columnwise: bool) -> torch.Tensor:
    """The float64 matrix that one direction of an operand stands for."""
    if not isinstance(q, QuantizedTensorStorage):
        return q.detach().double()
    layout = q.grid_layout
    side = columnwise and not layout.one_buffer
    data, scales = q.for_usage(side)
    if not scales.dim():
        scales = scales.view(1, 1)
    values = arrays.decode(data, scales, layout, columnwise=side, dtype=torch.float64)
    return values.t() if side and layout.transposed else values


def exact(kind: str, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the product in float64."""
    left, right = (decoded(q, side) for q, side in zip((a, b), COLUMNWISE[kind], strict=True))
    return {"fprop": (left, right.t()), "dgrad": (left, right), "wgrad": (left.t(), right)}[kind]


def assert_close(
    got: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """``left @ right + bias`` up to sums in float32 and two roundings to the dtype."""
    assert is_close(got, left, right, bias)


def is_close(
    got: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> bool:
    product = left @ right
    total = product if bias is None else product + bias.detach().double()
    info = torch.finfo(got.dtype)
    bound = info.eps * (product.abs() + total.abs()) + 2 * info.smallest_normal * info.eps
    bound += (left.shape[1] + 2) * 2.0**-23 * (left.abs() @ right.abs() + total.abs())
    return bool(((got.detach().double().reshape(total.shape) - total).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_a_product_is_that_of_the_decoded_operands(name: str, kind: str) -> None:
    for number, (m, n, k) in enumerate([(70, 33, 140), (1, 1, 1), (0, 5, 9), (4, 0, 9), (4, 5, 0)]):
        a, b = (
            QUANTIZERS[name](wide(*shape, seed=seed, sigma=1.0))
            for seed, shape in enumerate(shapes(kind, m, n, k))
        )
        left, right = exact(kind, a, b)
        bias = torch.randn(right.shape[1]) if number % 2 == 0 else None
        for backend, dtype in itertools.product(
            ("cpu", "reference"), (torch.float32, torch.bfloat16, torch.float16)
        ):
            with told(m, n, k, backend, dtype), use_backend(backend):
                got = gemm(a, b, kind, out_dtype=dtype, bias=bias)
                assert got.dtype == dtype
                assert_close(got, left, right, bias)
        out = torch.ones(left.shape[0], right.shape[1])
        assert gemm(a, b, kind, out=out, accumulate=True) is out
        assert_close(out, left, right, torch.ones(right.shape[1]))


@EACH
def test_leading_dimensions_are_rows(name: str) -> None:
    x, weight = wide(2, 3, 40), QUANTIZERS[name](wide(24, 40, seed=1))
    stack, matrix = QUANTIZERS[name](x), QUANTIZERS[name](x.view(6, 40))
    assert_same(gemm(stack, weight, "fprop"), gemm(matrix, weight, "fprop"))
    assert_same(gemm(stack, matrix, "wgrad"), gemm(matrix, matrix, "wgrad"))


@pytest.mark.parametrize("kind", KINDS)
def test_operands_of_any_two_layouts(kind: str) -> None:
    """And one in high precision: a scale of another layout is applied once."""
    rows, columns = shapes(kind, 40, 24, 36)
    for number, (one, two) in enumerate(itertools.pairwise([*QUANTIZERS, "mxfp8"])):
        with told(one, two):
            a, b = QUANTIZERS[one](wide(*rows)), QUANTIZERS[two](wide(*columns, seed=1))
            assert_close(gemm(a, b, kind, out_dtype=torch.float32), *exact(kind, a, b))
            plain = wide(*columns, seed=number)
            assert_close(gemm(a, plain, kind, out_dtype=torch.float32), *exact(kind, a, plain))


@EACH
def test_scales_far_apart_do_not_overflow(name: str) -> None:
    """No product of the two scales could hold them."""
    a, b = (QUANTIZERS[name](torch.full((16, 256), value)) for value in (1e-30, 1e30))
    got = gemm(a, b, out_dtype=torch.float32)
    if not QUANTIZERS[name].layout.epsilon:
        assert ((got - 256).abs() < 20).all()
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


@EACH
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
            held = [
                quantizer(name)(t.detach().reshape(-1, t.shape[-1])) for t in (x, layer.weight, dy)
            ]
            assert_close(y, *exact("fprop", held[0], held[1]), layer.bias)
            assert_close(x.grad, *exact("dgrad", held[2], held[1]))
            assert_close(layer.weight.grad, *exact("wgrad", held[2], held[0]))
            flat = dy.reshape(-1, 33).double()
            assert_close(layer.bias.grad, torch.ones(1, len(flat)).double(), flat)
            layout = held[0].grid_layout
            if lead == (70,) and not layout.square and layout.element is not E5M2:
                # The other directions give something else: the comparisons above tell them apart.
                rows, columns = (decoded(held[0], side) for side in (False, True))
                assert not is_close(y, columns, decoded(held[1], False).t(), layer.bias)
                assert not is_close(layer.weight.grad, decoded(held[2], True).t(), rows)


def test_the_backward_pass_quantizes_the_original_and_not_the_rows() -> None:
    """The first element of each row of blocks flushes the others to 0 along the row, but not along
    columns."""
    x = torch.full((32, 32), 2.0**-10)
    x[:, 0] = 2.0**10
    layer = Linear(32, 1, bias=False, recipe=OneQuantizer(row="mxfp8"))
    torch.nn.init.ones_(layer.weight)
    y = layer(x)
    assert_same(y, torch.full((32, 1), 2.0**10))
    y.backward(torch.ones(32, 1))
    expected = torch.full((1, 32), 32 * 2.0**-10)
    expected[0, 0] = 32 * 2.0**10
    assert_same(layer.weight.grad, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layer_saves_bytes_of_columns_alone(name: str) -> None:
    """And of what requires a gradient."""
    layout = LAYOUTS[name]
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
            for size in (layout.data_shape(shape, True), layout.scale_shape(shape, True))
        ]
        found = [tuple(t.shape) for t in kept.values() if t.numel()]
        # One scale for the tensor may be kept as a scalar.
        assert sorted(f or (1, 1) for f in found) == sorted(expected)
        assert {t.dtype for t in kept.values()} <= {torch.uint8, layout.stored_scale}
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


def test_a_region_overrides_with_any_layout() -> None:
    layer, x = Linear(70, 33, recipe=OneQuantizer(row="mxfp8")), wide(8, 70)
    for name in QUANTIZERS:
        with ottava.autocast(OneQuantizer(row=name)):
            inside = layer(x)
        assert_close(
            inside, *exact("fprop", QUANTIZERS[name](x), QUANTIZERS[name](layer.weight)), layer.bias
        )
