"""Products, layers, their training, compiled code and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.gemm import gemm
from ottava.nn import Linear
from ottava_rowwise import Float8RowwiseQuantizer, Float8RowwiseScaling, Float8RowwiseTensor
from tests.choosing import cpu_products
from tests.comparing import assert_same
from tests.grids import (
    E4M3,
    E5M2,
    check_compiled,
    check_layer,
    check_main_grad,
    check_microbatches,
    check_product,
    check_training,
    inner,
    layer_of,
    wide,
)
from tests.recipes_rowwise.kinds import BLOCKS, RECIPES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("pow_2", [True, False])
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_products_are_as_exact_as_float32s(kind: str, pow_2: bool) -> None:
    quantizers = [Float8RowwiseQuantizer(fp8, force_pow_2_scales=pow_2) for fp8 in (E4M3, E5M2)]
    for dtype, fast in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        # A fast product of bfloat16 rounds before scales are applied, too; powers of two are part
        # of the operands.
        with cpu_products(torch.bfloat16 if fast else torch.float32):
            check_product(
                kind,
                quantizers,
                [BLOCKS["input"]] * 2,
                False,
                dtype,
                1.5,
                2 if fast and not pow_2 else 1,
            )


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_a_fast_product_of_bfloat16_serves_them(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result in float32 is not rounded before, so that its operands are float32."""
    plain, seen = torch.mm, []

    def mm(a: torch.Tensor, b: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append((a.dtype, b.dtype))
        return plain(a, b, *more)

    monkeypatch.setattr(torch, "mm", mm)
    q = Float8RowwiseQuantizer(E4M3)(wide(48, 48, sigma=1.0))
    with cpu_products(torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            gemm(q, q, kind, out_dtype=dtype)
            assert seen.pop() == (dtype, dtype)
    assert not seen


def test_scales_far_apart_do_not_overflow_in_products() -> None:
    for pow_2 in (True, False):
        quantizer = Float8RowwiseQuantizer(E4M3, force_pow_2_scales=pow_2)
        y = gemm(
            quantizer(torch.full((16, 256), 1e-30)),
            quantizer(torch.full((8, 256), 1e30)),
            out_dtype=torch.float32,
        )
        assert ((y - 256).abs() < 20).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_a_layers_output_and_gradients_are_the_products(name: str, dtype: torch.dtype) -> None:
    recipe = RECIPES[name]
    check_layer(recipe, BLOCKS, False, dtype, recipe.wgrad_high_precision)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_added_to_main_grad_and_weights_kept_between_microbatches(name: str) -> None:
    check_main_grad(RECIPES[name])
    check_microbatches(RECIPES[name])


@pytest.mark.parametrize("name", ["default", "wgrad in high precision"])
def test_a_compiled_layer_has_the_bytes_of_eager(name: str) -> None:
    check_compiled(RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_training_follows_bf16(name: str) -> None:
    check_training(lambda net: ottava.convert(net, RECIPES[name]))


def test_wgrad_in_high_precision_is_the_product_of_the_values() -> None:
    layer = layer_of(RECIPES["wgrad in high precision"])
    x, dy = (
        wide(64, 300, dtype=torch.bfloat16, sigma=1.0),
        wide(64, 140, seed=1, dtype=torch.bfloat16, sigma=1.0),
    )
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert [t.data_ptr() for t in kept if t.dtype == torch.bfloat16 and t.numel()] == [x.data_ptr()]
    y.backward(dy)
    assert torch.equal(layer.weight.grad, gemm(dy, x, "wgrad"))
    # The weight alone needs a gradient, or the input alone, or neither.
    assert torch.equal(layer(x), y)
    layer.weight.requires_grad_(False)
    own = x.clone().requires_grad_()
    layer(own).backward(dy)
    assert torch.equal(own.grad, _input_grad(RECIPES["default"], x, dy))
    # What a backward pass would read may not be written to before it.
    layer.weight.requires_grad_(True)
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def _input_grad(recipe: Float8RowwiseScaling, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    layer, own = layer_of(recipe), x.clone().requires_grad_()
    layer(own).backward(dy)
    assert own.grad is not None
    return own.grad


def test_the_input_is_cast_before_it_is_kept_under_autocast() -> None:
    layer = layer_of(RECIPES["wgrad in high precision"], dtype=torch.float32)
    x, dy = wide(64, 300, sigma=1.0), wide(64, 140, seed=1, dtype=torch.bfloat16, sigma=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.backward(dy)
    assert torch.equal(layer.weight.grad, gemm(dy, x.bfloat16(), "wgrad").float())


@pytest.mark.parametrize("name", ["default", "wgrad in high precision"])
def test_weights_that_are_kept_quantized(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    with ottava.quantized_model_init(recipe):
        layer = Linear(300, 140, dtype=torch.bfloat16, recipe=recipe)
    assert isinstance(layer.weight, Float8RowwiseTensor)
    x = wide(64, 300, dtype=torch.bfloat16, sigma=1.0)
    plain = Linear(300, 140, dtype=torch.bfloat16, recipe=recipe)
    with torch.no_grad():
        plain.weight.copy_(layer.weight.get_high_precision_init_val())
        plain.bias.copy_(layer.bias)
    for own in (layer, plain):
        own(x).square().mean().backward()
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    # A step, and what a file holds of it.
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    checkpoint.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    loaded = checkpoint.load_file(tmp_path / "layer.safetensors")
    assert_same(inner(loaded["weight"]), inner(layer.weight))
    checkpoint.save_sharded(layer.state_dict(), tmp_path / "sharded")
    with ottava.quantized_model_init(recipe):
        other = Linear(300, 140, dtype=torch.bfloat16, recipe=recipe)
    checkpoint.load_sharded(other.state_dict(), tmp_path / "sharded")
    assert_same(inner(other.weight), inner(layer.weight))


def test_large_inputs_give_finite_results_where_weights_are_small() -> None:
    x, weight = torch.randn(32, 64) * 1e37, torch.randn(16, 64) * 1e-6
    layer = ottava.nn.Linear(64, 16, bias=False, recipe="rowwise")
    with torch.no_grad():
        layer.weight.copy_(weight)
    expected = x.double() @ weight.double().t()
    error = (layer(x).double() - expected).norm() / expected.norm()
    assert error < 0.05  # of two E4M3 operands
