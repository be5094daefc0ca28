"""The layouts of the roles, their bytes, and the names that rowwise tensors have for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava import Layout
from ottava.formats import Format
from ottava.gemm import gemm
from ottava.nn import Linear
from ottava_rowwise import Float8RowwiseQuantizer, Float8RowwiseScaling, Float8RowwiseTensor
from tests.choosing import cpu_products
from tests.comparing import assert_same
from tests.layout_recipes import assert_fake_quantizes, assert_made_of, assert_quantizes_by
from tests.samples import wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OTHER = Float8RowwiseScaling(Format.HYBRID, force_pow_2_scales=True, amax_epsilon=1e-4)
IN_HIGH_PRECISION = Float8RowwiseScaling(wgrad_high_precision=True)


@pytest.mark.parametrize(
    ("recipe", "role", "expected"),
    [
        (Float8RowwiseScaling(), "input", Layout(E4M3, (1, None))),
        (Float8RowwiseScaling(), "weight", Layout(E4M3, (1, None))),
        (Float8RowwiseScaling(), "grad_output", Layout(E4M3, (1, None))),
        (Float8RowwiseScaling(Format.E5M2), "weight", Layout(E5M2, (1, None))),
        (OTHER, "input", Layout(E4M3, (1, None), rounding="floor", epsilon=1e-4)),
        (OTHER, "grad_output", Layout(E5M2, (1, None), rounding="floor", epsilon=1e-4)),
    ],
)
def test_the_layout_of_each_role(recipe: Any, role: str, expected: Layout) -> None:
    assert type(recipe.quantizer(role)) is Float8RowwiseQuantizer
    assert_quantizes_by(recipe.quantizer(role), expected)


def test_defaults_spec_and_explanation() -> None:
    recipe = ottava.get_recipe("rowwise")
    assert recipe == Float8RowwiseScaling(Format.E4M3, False, 0.0, False)
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "rowwise")
    assert (spec.block_size, spec.formats, spec.stateful) == ((1, None), ("E4M3", "E5M2"), False)
    assert spec.fake_quant_formats == ("ROWWISEE4M3", "ROWWISEE5M2")
    for role in ("input", "grad_output"):
        assert IN_HIGH_PRECISION.explain(role).rowwise == "rowwise E4M3"
        assert IN_HIGH_PRECISION.explain(role).columnwise == "high precision"
    assert IN_HIGH_PRECISION.explain("weight").columnwise == "rowwise E4M3"
    assert recipe.explain("input").columnwise == "rowwise E4M3"


def test_tensors_have_names_for_their_parts() -> None:
    q: Any = Float8RowwiseQuantizer(E5M2)(wide(4, 50, 300, dtype=torch.bfloat16))
    assert (q.dtype, q._fp8_dtype) == (torch.bfloat16, E5M2)
    shapes = {
        "rowwise_data": (4, 50, 300),
        "rowwise_scale_inv": (200, 1),
        "columnwise_data": (4, 50, 300),
        "columnwise_scale_inv": (1, 300),
    }
    assert_made_of(q, Float8RowwiseTensor, shapes, layout=q.grid_layout)


@pytest.mark.parametrize(("name", "element"), [("ROWWISEE4M3", E4M3), ("ROWWISEE5M2", E5M2)])
def test_fake_quantization_is_that_of_rows(name: str, element: Any) -> None:
    assert_fake_quantizes(name, Layout(element, (1, None)))
    assert OTHER.fake_quantizer(name).force_pow_2_scales
    assert OTHER.fake_quantizer("FP8E4M3") is None


# -- wgrad in high precision --


def layer(recipe: Any, dtype: torch.dtype = torch.bfloat16) -> Linear:
    torch.manual_seed(0)
    return Linear(300, 140, dtype=dtype, recipe=recipe)


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return wide(64, 300, dtype=dtype, sigma=1.0), wide(64, 140, seed=1, dtype=dtype, sigma=1.0)


def test_wgrad_in_high_precision_is_the_product_of_the_values() -> None:
    (x, dy), own = operands(), layer(IN_HIGH_PRECISION)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = own(x)
    assert [t.data_ptr() for t in kept if t.dtype == torch.bfloat16 and t.numel()] == [x.data_ptr()]
    y.backward(dy)
    assert_same(own.weight.grad, gemm(dy, x, "wgrad"))
    # The input alone needs a gradient: that of the default.
    own.weight.requires_grad_(False)
    grads = []
    for module in (own, layer(Float8RowwiseScaling())):
        leaf = x.clone().requires_grad_()
        module(leaf).backward(dy)
        grads.append(leaf.grad)
    assert_same(*grads)
    # What a backward pass would read may not be written to before it.
    own.weight.requires_grad_(True)
    y = own(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_the_input_is_cast_before_it_is_kept_under_autocast() -> None:
    own, x, dy = layer(IN_HIGH_PRECISION, torch.float32), operands(torch.float32)[0], operands()[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = own(x)
    y.backward(dy)
    assert_same(own.weight.grad, gemm(dy, x.bfloat16(), "wgrad").float())


def test_large_inputs_give_finite_results_where_weights_are_small() -> None:
    own, x = Linear(64, 16, bias=False, recipe="rowwise"), torch.randn(32, 64) * 1e37
    torch.nn.init.normal_(own.weight, std=1e-6)
    expected = x.double() @ own.weight.double().t()
    # Of two E4M3 operands.
    for dtype in (torch.float32, torch.bfloat16):
        with cpu_products(dtype):
            assert (own(x).double() - expected).norm() < 0.05 * expected.norm()
