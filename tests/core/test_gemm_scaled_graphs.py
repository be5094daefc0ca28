"""Products on FP8 hardware in compiled graphs, without memory, counted, without a look at a value,
and in a layer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from comparing import assert_same
from scaled_gemm import E4M3, KINDS, ROUNDING, SHAPES, Recorded, Strict, coded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ottava
from ottava.gemm import LayerProduct, gemm, operators, planned, side_of
from ottava.gemm import scaled as gemm_scaled
from ottava.kernels import products
from ottava.tensors import Float8Tensor, Float8TensorStorage, columnwise_layout
from tests.choosing import scaled_products


def as_tensor(made: Float8TensorStorage) -> Float8Tensor:
    return Float8Tensor(
        dtype=torch.bfloat16,
        data=made._data,
        fp8_dtype=E4M3,
        fp8_scale_inv=made._scale_inv,
        data_transpose=made._transpose,
    )


@pytest.mark.parametrize("layout", ["transpose", "shared"])
def test_compiled_products_equal_eager_ones(library: Recorded, layout: Any) -> None:
    """One graph of every kind of product, with sizes that fit and sizes that do not."""
    with columnwise_layout(layout), scaled_products():
        cases = [(kind, sizes) for kind in KINDS for sizes in ((32, 48, 64), (17, 5, 9))]
        pairs: list[Any] = [
            [as_tensor(coded(shape, E4M3, 1e-3, i)) for i, shape in enumerate(SHAPES[kind](*sizes))]
            for kind, sizes in cases
        ]
        biases = [
            torch.randn(gemm(*pair, kind).shape[1])
            for pair, (kind, _) in zip(pairs, cases, strict=True)
        ]

        def products(pairs: Any, biases: Any) -> list[torch.Tensor]:
            given = zip(pairs, biases, cases, strict=True)
            return [gemm(*pair, kind, bias=bias) for pair, bias, (kind, _) in given]

        torch._dynamo.reset()
        compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
        assert_same(compiled(pairs, biases), products(pairs, biases), note=cases)


def test_a_devices_capability_is_a_constant_of_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_capabilities", {0: 90})

    def choose(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if products.capability_of_index(0) >= 89 else x - 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(choose, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)) == 1
    assert products.capability(torch.zeros(1)) == 0
    assert not gemm_scaled.multiplies_fp8(torch.zeros(1))


def test_tensors_without_memory(strict: Strict) -> None:
    with FakeTensorMode():
        a, b = (
            Float8TensorStorage(
                data=torch.empty(shape, dtype=torch.uint8),
                fp8_scale_inv=torch.ones(()),
                fp8_dtype=E4M3,
                dtype=torch.bfloat16,
            )
            for shape in ((2, 3, 32), (5, 32))
        )
        got = gemm(a, b, "fprop")
    assert got.shape == (6, 5)
    assert got.dtype == torch.bfloat16
    assert not strict.calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(16, 32, 48), (17, 5, 9)])
def test_operations_are_counted(library: Recorded, kind: Any, sizes: tuple[int, int, int]) -> None:
    """Those of the product, not of its padding."""
    a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(SHAPES[kind](*sizes)))
    left, right = side_of(a, kind == "wgrad"), side_of(b, kind != "fprop")
    fields = left[0], right[0], *left[1:4], *right[1:4]  # type: ignore[index]
    for product in (
        lambda: gemm(a, b, kind),
        lambda: torch.ops.ottava.fp8_mm(*fields, None, torch.bfloat16, True),
    ):
        with scaled_products(), FlopCounterMode(display=False) as counter:
            product()
        assert counter.get_total_flops() == 2 * sizes[0] * sizes[1] * sizes[2]


class NoLook(TorchDispatchMode):
    """Refuses whatever would make a device wait for the host to look at a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in (
            "_local_scalar_dense",
            "item",
            "equal",
            "nonzero",
            "is_nonzero",
            "masked_select",
        ), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_is_looked_at(strict: Strict, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    # The mode is to see what the operator is made of.
    monkeypatch.setattr(operators, "is_direct", lambda *tensors: True)
    for sizes in ((32, 48, 64), (17, 5, 9)):
        a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(SHAPES[kind](*sizes)))
        with NoLook():
            gemm(a, b, kind)
            gemm(a, b, kind, out=torch.zeros(gemm(a, b, kind).shape), accumulate=True)
            gemm(a, b, kind, bias=torch.zeros(gemm(a, b, kind).shape[1]))
    with pytest.raises(AssertionError), NoLook():
        torch.ones(()).item()


@pytest.mark.parametrize("sizes", [(32, 48, 64), (21, 19, 35)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_training_step(
    library: Recorded, recipe: Any, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Both paths are within the stated bound of the same sums: one rounding here, two there."""
    m, n, k = sizes
    torch.manual_seed(0)
    layer = ottava.nn.Linear(k, n, recipe=recipe, dtype=dtype)
    x0, dy = torch.randn(m, k, dtype=dtype), torch.randn(m, n, dtype=dtype)

    def step() -> list[torch.Tensor]:
        layer.zero_grad()
        x = x0.clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]  # type: ignore[list-item]

    decoded = step()
    assert library.count == 0
    with columnwise_layout("transpose"), scaled_products():
        scaled = step()
    assert library.count == 3
    u = ROUNDING[dtype]
    # The first of the two roundings is before the bias.
    sums = [float(layer.bias.detach().abs().max()), 0, 0, 0]
    for mine, theirs, more in zip(scaled, decoded, sums, strict=True):
        size = theirs.double().abs()
        near = (u + (1 + u) ** 2 - 1) * (size + more) + 1e-5 * size.max()
        assert ((mine.double() - theirs.double()).abs() <= near).all()
    assert torch.equal(scaled[3], decoded[3])


def test_a_layer_chooses_what_multiplies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two layouts and hardware; once more where a setting has changed."""
    choices: list[Any] = []
    choose = planned.product_of
    monkeypatch.setattr(
        planned, "product_of", lambda *sides: choices.append(sides) or choose(*sides)
    )
    a, b = (coded(shape, E4M3, 1.0, i) for i, shape in enumerate(((16, 32), (48, 32))))
    multiply = LayerProduct("fprop", torch.bfloat16)
    with scaled_products():
        scaled = [multiply(a, b) for _ in range(3)]
    assert len(choices) == 1
    decoded = [multiply(a, b) for _ in range(2)]
    assert len(choices) == 2
    assert torch.equal(scaled[0], scaled[2])
    torch.testing.assert_close(scaled[0], decoded[1])
