"""Products, layers, their training, compiled code and files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.gemm import gemm
from ottava.nn import Linear
from ottava_blockwise import Float8BlockQuantizer, Float8BlockScaling, Float8BlockwiseQTensor
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
from tests.recipes_blockwise.kinds import DIMS, RECIPES, blocks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("pow_2", [True, False])
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_products_are_as_exact_as_float32s(kind: str, pow_2: bool) -> None:
    for dims, dtype in itertools.product(((1, 2), (1, 1), (2, 2)), (torch.float32, torch.bfloat16)):
        quantizers = [
            Float8BlockQuantizer(fp8, block_scaling_dim=dim, force_pow_2_scales=pow_2)
            for fp8, dim in zip((E4M3, E5M2), dims, strict=True)
        ]
        check_product(kind, quantizers, [DIMS[dim] for dim in dims], True, dtype, sigma=1.5)


def test_scales_far_apart_do_not_overflow_in_products() -> None:
    """Powers of two that no product of the scales could hold."""
    for pow_2 in (True, False):
        quantizer = Float8BlockQuantizer(E4M3, block_scaling_dim=1, force_pow_2_scales=pow_2)
        a, b = torch.full((16, 256), 1e-30), torch.full((8, 256), 1e30)
        a[:, 128:], b[:, 128:] = 1e30, 1e-30
        y = gemm(quantizer(a), quantizer(b), "fprop", out_dtype=torch.float32)
        assert ((y - 256).abs() < 20).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_a_layers_output_and_gradients_are_the_products(name: str, dtype: torch.dtype) -> None:
    check_layer(RECIPES[name], blocks(RECIPES[name]), True, dtype)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_added_to_main_grad_and_weights_kept_between_microbatches(name: str) -> None:
    check_main_grad(RECIPES[name])
    check_microbatches(RECIPES[name])


@pytest.mark.parametrize(
    "name", ["no powers of two", pytest.param("default", marks=pytest.mark.slow)]
)
def test_a_compiled_layer_has_the_bytes_of_eager(name: str) -> None:
    check_compiled(RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_training_follows_bf16(name: str) -> None:
    check_training(lambda net: ottava.convert(net, RECIPES[name]))


def test_what_a_layer_keeps_for_the_backward_pass_is_bytes_of_columns() -> None:
    layer = layer_of(Float8BlockScaling(), bias=False)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(wide(256, 300, dtype=torch.bfloat16).requires_grad_())
    assert sorted(tuple(t.shape) for t in kept if t is not None and t.dtype == torch.uint8) == [
        (300, 140),
        (300, 256),
    ]
    assert not any(t.dtype == torch.bfloat16 for t in kept if t is not None and t.numel() > 300)


@pytest.mark.parametrize("name", ["default", "rows alone"])
def test_weights_that_are_kept_quantized(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    with ottava.quantized_model_init(recipe):
        layer = Linear(300, 140, dtype=torch.bfloat16, recipe=recipe)
    assert isinstance(layer.weight, Float8BlockwiseQTensor)
    x = wide(64, 300, dtype=torch.bfloat16, sigma=1.0).requires_grad_()
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
    for columnwise in (False, True):
        assert_same(other.weight.for_usage(columnwise), layer.weight.for_usage(columnwise))
    assert torch.equal(other(x), layer(x))
