"""``fuse_wgrad_accumulation``: gradients of weights that are added to ``main_grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import Rows
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError, UsageError
from ottava.nn import Linear


def layers(
    recipe: Any, dtype: torch.dtype = torch.bfloat16, primary: bool = False
) -> tuple[Linear, Linear]:
    """A layer whose gradient goes to main_grad, and its twin."""
    made = []
    for fused in (True, False):
        torch.manual_seed(0)
        with ottava.quantized_model_init(recipe or Rows(), enabled=primary):
            made.append(Linear(8, 4, dtype=dtype, recipe=recipe, fuse_wgrad_accumulation=fused))
    made[0].weight.main_grad = torch.zeros(4, 8)
    return made[0], made[1]


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_microbatches_are_added_in_the_precision_of_main_grad(
    dtype: torch.dtype, primary: bool
) -> None:
    fused, plain = layers(Rows(), dtype, primary)
    total = torch.zeros(4, 8, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
        dy = torch.randn(2, 3, 4, dtype=dtype)
        fused(x).backward(dy)
        dx, x.grad = x.grad, None
        quantizer = Rows().make_quantizer(None)
        qx, qdy = quantizer(x.detach().reshape(-1, 8)), quantizer(dy.reshape(-1, 4))
        total += qdy.dequantize(torch.float64).t() @ qx.dequantize(torch.float64)
        plain(x).backward(dy)
        assert torch.equal(dx, x.grad)
    assert fused.weight.grad is None
    assert torch.equal(fused.bias.grad, plain.bias.grad)
    assert fused.weight.main_grad.dtype == torch.float32
    # Float32 throughout: bfloat16 sums would be off by far more.
    torch.testing.assert_close(fused.weight.main_grad.double(), total, rtol=1e-5, atol=1e-5)


def test_sum_into_bfloat16_is_rounded_once() -> None:
    fused, plain = layers(Rows(), torch.float32)
    before = torch.randn(4, 8).bfloat16()
    fused.weight.main_grad = before.clone()
    x = torch.randn(5, 8)
    fused(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(fused.weight.main_grad, (before.float() + plain.weight.grad).bfloat16())


@pytest.mark.parametrize("recipe", [None, Rows()])
def test_high_precision_adds_as_well(recipe: Any) -> None:
    fused, plain = layers(recipe)
    x = torch.randn(5, 8).bfloat16()
    with ottava.autocast(enabled=False):
        for _ in range(2):
            fused(x).sum().backward()
        plain(x).sum().backward()
    assert fused.weight.grad is None
    assert torch.equal(fused.weight.main_grad, 2 * plain.weight.grad.float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_adds_once(reentrant: bool) -> None:
    fused, plain = layers(Rows(), torch.float32)
    x = torch.randn(5, 8, requires_grad=True)
    checkpoint(fused, x, use_reentrant=reentrant).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad)


def test_the_weight_is_told() -> None:
    fused, _ = layers(Rows())
    fused.weight.grad_added_to_main_grad = False
    y = fused(torch.randn(2, 8).bfloat16())
    assert fused.weight.grad_added_to_main_grad is False
    y.sum().backward()
    assert fused.weight.grad_added_to_main_grad is True


def test_nothing_is_needed_without_a_gradient() -> None:
    fused, plain = layers(Rows())
    del fused.weight.main_grad
    x = torch.randn(2, 8).bfloat16()
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))
    fused.weight.requires_grad_(False)
    fused(x).sum().backward()
    assert fused.weight.grad is None
    assert fused.bias.grad is not None


@pytest.mark.parametrize(
    ("main_grad", "error"),
    [
        (None, UsageError),
        ([0.0], DTypeError),
        (torch.zeros(4, 8, dtype=torch.int32), DTypeError),
        (torch.zeros(8, 4), ShapeError),
        (torch.zeros(4, 8, device="meta"), DeviceError),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_main_grad_that_does_not_fit_is_refused(
    main_grad: Any, error: Any, enabled: bool
) -> None:
    fused, _ = layers(Rows())
    fused.name = "up"
    fused.weight.main_grad = main_grad
    with (
        ottava.autocast(enabled=enabled),
        pytest.raises(error, match="main_grad of the weight of Linear 'up'"),
    ):
        fused(torch.randn(2, 8).bfloat16())


def test_it_can_be_turned_on_after_conversion() -> None:
    model = ottava.convert(torch.nn.Sequential(torch.nn.Linear(8, 4)), Rows())
    model[0].fuse_wgrad_accumulation = True
    model[0].weight.main_grad = torch.zeros(4, 8)
    model(torch.randn(2, 8)).sum().backward()
    assert model[0].weight.grad is None
    assert model[0].weight.main_grad.abs().sum() > 0


def test_it_compiles() -> None:
    # What other tests of the process compiled counts against the limit of recompilations.
    torch._dynamo.reset()
    fused, plain = layers(Rows(), torch.float32)
    x = torch.randn(5, 8)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(x).sum().backward()
    plain(x).sum().backward()
    assert fused.weight.grad is None
    torch.testing.assert_close(fused.weight.main_grad, 2 * plain.weight.grad)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("primary", [False, True])
def test_high_precision_leaves_grad_alone(primary: bool, compiled: bool) -> None:
    fused, _ = layers(Rows(), torch.float32, primary)
    fused.bind(None)
    x = torch.randn(5, 8)
    torch.compiler.reset()
    run = torch.compile(fused, fullgraph=True, backend="aot_eager") if compiled else fused
    run(x).sum().backward()
    assert fused.weight.grad is None
    torch.testing.assert_close(fused.weight.main_grad, x.sum(0).expand(4, 8))


def test_a_flag_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError, match="fuse_wgrad_accumulation is 'yes'"):
        Linear(8, 4, fuse_wgrad_accumulation="yes")  # type: ignore[arg-type]
