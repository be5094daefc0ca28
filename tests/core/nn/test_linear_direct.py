"""``Linear`` takes short ways where nothing follows and nobody looks: what is seen and computed
stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import ottava
from ottava.errors import UsageError
from ottava.nn import Linear
from ottava.tensors import columnwise_layout

LAYOUTS = pytest.mark.parametrize("layout", ["shared", "transpose"])


@LAYOUTS
@pytest.mark.parametrize("lead", [(4,), (2, 3), (0,), ()])
def test_without_gradients_the_output_is_the_same(
    recipe: Any, layout: Any, lead: tuple[int, ...]
) -> None:
    layer, x = Linear(16, 8, recipe=recipe), torch.randn(*lead, 16)
    with columnwise_layout(layout):
        expected = layer(x)
        assert expected.requires_grad
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                made = layer(x)
            assert torch.equal(made, expected)
            assert not made.requires_grad
            assert not made._is_view()


@LAYOUTS
def test_gradients_of_some_only(recipe: Any, layout: Any) -> None:
    """Whatever needs a gradient gets the one that it gets when all do."""
    values = torch.randn(4, 16)

    def gradients(*needed: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layer, x = Linear(16, 8, recipe=recipe), values.clone()
        tensors = {"x": x, "weight": layer.weight, "bias": layer.bias}
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in needed)
        with columnwise_layout(layout):
            layer(x).square().sum().backward()
        assert all(
            (tensor.grad is not None) == (name in needed) for name, tensor in tensors.items()
        )
        return {name: tensors[name].grad for name in needed}  # type: ignore[misc]

    every = gradients("x", "weight", "bias")
    for needed in (("x",), ("weight",), ("bias",), ("x", "bias")):
        for name, gradient in gradients(*needed).items():
            assert torch.equal(gradient, every[name])


@pytest.mark.parametrize("gradients", [False, True])
def test_fake_tensors(recipe: Any, gradients: bool) -> None:
    with FakeTensorMode(), torch.set_grad_enabled(gradients):
        made = Linear(16, 8, recipe=recipe)(torch.randn(4, 16))
    assert type(made) is FakeTensor
    assert made.shape == (4, 8)


def test_a_graph_holds_the_operators(recipe: Any) -> None:
    layer, x = Linear(16, 8, recipe=recipe), torch.randn(4, 16)
    with torch.no_grad():
        traced = make_fx(layer)(x)
        assert sum("ottava." in str(node.target) for node in traced.graph.nodes) >= 3
        # What was looked up while the graph was made is no constant of it.
        other = torch.randn(4, 16)
        assert torch.equal(traced(other), layer(other))


@pytest.mark.parametrize("gradients", [False, True])
def test_transforms_are_refused(recipe: Any, gradients: bool) -> None:
    layer, x = Linear(16, 8, recipe=recipe), torch.randn(4, 16)
    with torch.set_grad_enabled(gradients):
        with pytest.raises(UsageError, match=r"vmap, a transform of torch\.func"):
            torch.func.vmap(layer)(torch.randn(3, 4, 16))
        with forward_ad.dual_level(), pytest.raises(UsageError, match="forward-mode"):
            layer(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("gradients", [False, True])
def test_autocast_says_the_dtype(recipe: Any, gradients: bool) -> None:
    layer, x = Linear(16, 8, recipe=recipe), torch.randn(4, 16)
    with torch.set_grad_enabled(gradients):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False):
                assert layer(x).dtype == torch.float32
        # Of another device.
        with (
            torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else torch.no_grad()
        ):
            assert layer(x).dtype == torch.float32


def test_saved_tensors_pass_through_hooks(recipe: Any) -> None:
    layer, x = Linear(16, 8, recipe=recipe), torch.randn(4, 16, requires_grad=True)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place]):
        y = layer(x)
    assert any(tensor.dtype == torch.uint8 for tensor in packed)
    y.square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_mistakes_are_still_named(recipe: Any) -> None:
    layer = Linear(16, 8, recipe=recipe)
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            with pytest.raises(ottava.errors.DTypeError, match="layout"):
                layer(torch.randn(4, 16).to_sparse())
            with pytest.raises(
                ottava.errors.DTypeError, match=r"input of Linear has dtype torch\.int64"
            ):
                layer(torch.ones(4, 16, dtype=torch.int64))
            with pytest.raises(ottava.errors.DTypeError, match="one dtype"):
                layer(torch.randn(4, 16).bfloat16())
            with pytest.raises(ottava.errors.ShapeError, match="last dimension of 16"):
                layer(torch.randn(4, 15))
            with pytest.raises(ottava.errors.DeviceError, match="one device"):
                layer(torch.randn(4, 16, device="meta"))
            with pytest.raises(ottava.errors.DTypeError, match="input of Linear is a list"):
                layer([1.0])
    layer.weight.data = layer.weight.data.double()
    with pytest.raises(
        ottava.errors.DTypeError, match=r"weight of Linear has dtype torch\.float64"
    ):
        layer(torch.randn(4, 16))
