"""``fuse_wgrad_accumulation``: gradients of weights that are added to ``main_grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError, UsageError
from ottava.nn import Linear

BF16, F32 = torch.bfloat16, torch.float32


def layers(recipe: Any, dtype: torch.dtype = F32, primary: bool = False) -> tuple[Any, Any]:
    """A layer whose gradient goes to main_grad, and its twin."""
    pair: list[Any] = []
    for fused in (True, False):
        torch.manual_seed(0)
        with ottava.quantized_model_init(recipe, enabled=primary):
            layer = Linear(8, 4, dtype=dtype, recipe=recipe, fuse_wgrad_accumulation=fused)
        pair.append(layer)
    pair[0].weight.main_grad = torch.zeros(4, 8)
    pair[0].weight.grad_added_to_main_grad = False
    return pair[0], pair[1]


@pytest.mark.parametrize("primary", [False, True])
def test_microbatches_are_added_in_the_precision_of_main_grad(recipe: Any, primary: bool) -> None:
    """Float32 throughout: bfloat16 sums would be off by far more."""
    fused, plain = layers(recipe, BF16, primary)
    total = torch.zeros(4, 8, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(2, 3, 8, dtype=BF16, requires_grad=True)
        dy = torch.randn(2, 3, 4, dtype=BF16)
        fused(x).backward(dy)
        dx, x.grad = x.grad, None
        qx = recipe.quantizer("input")(x.detach().reshape(-1, 8)).dequantize(torch.float64)
        qdy = recipe.quantizer("grad_output")(dy.reshape(-1, 4)).dequantize(torch.float64)
        total += qdy.t() @ qx
        plain(x).backward(dy)
        assert torch.equal(dx, x.grad)
    assert fused.weight.grad is None
    assert fused.weight.grad_added_to_main_grad is True
    assert torch.equal(fused.bias.grad, plain.bias.grad)
    assert fused.weight.main_grad.dtype == F32
    torch.testing.assert_close(fused.weight.main_grad.double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_high_precision_adds_what_torch_computes(recipe: Any, bound: bool, primary: bool) -> None:
    fused, _ = layers(recipe, primary=primary)
    if not bound:
        fused.bind(None)
    x = torch.randn(5, 8)
    with ottava.autocast(enabled=False):
        for _ in range(2):
            fused(x).sum().backward()
    assert fused.weight.grad is None
    torch.testing.assert_close(fused.weight.main_grad, 2 * x.sum(0).expand(4, 8))


def test_a_sum_into_bfloat16_is_rounded_once(recipe: Any) -> None:
    fused, plain = layers(recipe)
    before, x = torch.randn(4, 8).bfloat16(), torch.randn(5, 8)
    fused.weight.main_grad = before.clone()
    fused(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(fused.weight.main_grad, (before.float() + plain.weight.grad).bfloat16())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_adds_once(recipe: Any, reentrant: bool) -> None:
    fused, plain = layers(recipe)
    x = torch.randn(5, 8, requires_grad=True)
    checkpoint(fused, x, use_reentrant=reentrant).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad)


@pytest.mark.xdist_group("compiler")
def test_compiled_code_adds_under_a_recipe_and_without(recipe: Any) -> None:
    torch._dynamo.reset()
    fused, plain = layers(recipe)
    del fused.weight.grad_added_to_main_grad
    x = torch.randn(5, 8)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    for _ in range(2):
        compiled(x).sum().backward()
    plain(x).sum().backward()
    assert fused.weight.grad is None
    torch.testing.assert_close(fused.weight.main_grad, 2 * plain.weight.grad)
    fused.bind(None)
    fused.weight.main_grad.zero_()
    compiled(x).sum().backward()
    torch.testing.assert_close(fused.weight.main_grad, x.sum(0).expand(4, 8))


def test_nothing_is_needed_without_a_gradient_or_before_it_is_turned_on(recipe: Any) -> None:
    fused, plain = layers(recipe, BF16)
    del fused.weight.main_grad
    x = torch.randn(2, 8, dtype=BF16)
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))
    fused.weight.requires_grad_(False)
    fused(x).sum().backward()
    assert fused.weight.grad is None
    assert fused.bias.grad is not None
    plain(x)
    plain.fuse_wgrad_accumulation = True
    fused.weight.requires_grad_(True)
    for layer in (plain, fused):
        layer.weight.main_grad = torch.zeros(4, 8)
        layer(x).sum().backward()
    assert plain.weight.grad is None
    assert torch.equal(plain.weight.main_grad, fused.weight.main_grad)


WRONG: list[tuple[Any, type[Exception]]] = [
    (None, UsageError),
    ([0.0], DTypeError),
    (torch.zeros(4, 8, dtype=torch.int32), DTypeError),
    (torch.zeros(8, 4), ShapeError),
    (torch.zeros(4, 8, device="meta"), DeviceError),
]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_main_grad_that_does_not_fit_is_refused(recipe: Any, enabled: bool) -> None:
    fused, _ = layers(recipe)
    fused.name = "up"
    for main_grad, error in WRONG:
        fused.weight.main_grad = main_grad
        with (
            ottava.autocast(enabled=enabled),
            pytest.raises(error, match="main_grad of the weight of Linear 'up'"),
        ):
            fused(torch.randn(2, 8))
    with pytest.raises(OptionError, match="fuse_wgrad_accumulation is 'yes'"):
        Linear(8, 4, fuse_wgrad_accumulation="yes")  # type: ignore[arg-type]
