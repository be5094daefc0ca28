"""The layouts of the roles, their bytes, and quantizers that subclass that of current scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava import Layout
from ottava.formats import Format
from ottava.tensors import Float8Tensor, Float8TensorStorage
from ottava_current import Float8CurrentScaling, Float8CurrentScalingQuantizer
from tests import arrays
from tests.comparing import assert_same
from tests.layout_recipes import assert_fake_quantizes
from tests.samples import DTYPES, special, wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def layout(element: torch.dtype, *, pow_2: bool = False, epsilon: float = 0.0) -> Layout:
    rounding = "floor" if pow_2 else "nearest"
    return Layout(element, (None, None), rounding=rounding, epsilon=epsilon, columnwise="same")


OTHER = Float8CurrentScaling(Format.E4M3, force_pow_2_scales=True, amax_epsilon=0.25)


@pytest.mark.parametrize(
    ("recipe", "role", "expected"),
    [
        (Float8CurrentScaling(), "input", layout(E4M3)),
        (Float8CurrentScaling(), "weight", layout(E4M3)),
        (Float8CurrentScaling(), "grad_output", layout(E5M2)),
        (Float8CurrentScaling(Format.E5M2), "weight", layout(E5M2)),
        (OTHER, "input", layout(E4M3, pow_2=True, epsilon=0.25)),
        (OTHER, "grad_output", layout(E4M3, pow_2=True, epsilon=0.25)),
    ],
)
def test_the_layout_of_each_role(recipe: Any, role: str, expected: Layout) -> None:
    quantizer = recipe.quantizer(role)
    assert type(quantizer) is Float8CurrentScalingQuantizer
    assert quantizer.layout == expected
    samples = [wide(*s, dtype=d) for s in ((33, 70), (2, 3, 5), (0, 7), ()) for d in DTYPES]
    samples += [x for dtype in DTYPES for _, x in special(dtype)]
    for number, x in enumerate(samples):
        quantizer.internal = number % 2 == 1
        q, (data, scale_inv, *_) = quantizer(x), arrays.quantize(x, expected)
        assert type(q) is (Float8TensorStorage if quantizer.internal else Float8Tensor)
        assert_same([q._data, q._scale_inv], [data, scale_inv.view(1)])
        assert q._transpose is None
        assert q._fp8_dtype == expected.element


def test_defaults_and_spec() -> None:
    recipe = ottava.get_recipe("current")
    assert recipe == Float8CurrentScaling(Format.HYBRID, False, 0.0, False)
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "current")
    assert (spec.block_size, spec.formats, spec.stateful) == (None, ("E4M3", "E5M2"), False)
    assert spec.fake_quant_formats == ("FP8E4M3", "FP8E5M2")
    # Weights are equal on all ranks.
    recipe = Float8CurrentScaling(with_amax_reduction=True)
    roles = ("input", "weight", "grad_output")
    assert [recipe.quantizer(role).with_amax_reduction for role in roles] == [True, False, True]
    by_name, by_object = (
        Float8CurrentScalingQuantizer(E4M3, device=device)
        for device in ("cpu", torch.device("cpu"))
    )
    assert by_name == by_object
    reduced = Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    assert by_name.is_alike(reduced)
    choices = [quantizer.contract.rowwise for quantizer in (by_name, reduced)]
    assert [choice.amax.ranks for choice in choices] == ["this", "group"]
    assert Float8CurrentScalingQuantizer(E4M3, device="meta").make_empty((2,)).is_meta


@pytest.mark.parametrize(("name", "element"), [("FP8E4M3", E4M3), ("FP8E5M2", E5M2)])
def test_fake_quantization(name: str, element: Any) -> None:
    assert_fake_quantizes(name, layout(element))
    assert OTHER.fake_quantizer(name).layout == layout(element, pow_2=True, epsilon=0.25)
    assert OTHER.fake_quantizer("MXFP8E4M3") is None


class Doubling(Float8CurrentScalingQuantizer):
    """A quantizer in TransformerEngine's form, which calls that of its base."""

    def quantize_impl(self, tensor):  # type: ignore[no-untyped-def, override]
        return super().quantize_impl(2 * tensor)


class Keywords:
    """What a class beside the quantizers brings."""

    def quantize_impl(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
        return Float8CurrentScalingQuantizer.quantize_impl(self, 2 * tensor, **options)


class Mixed(Keywords, Float8CurrentScalingQuantizer):  # type: ignore[misc]
    """The function of one base, the rest of another."""


@pytest.mark.parametrize("kind", [Doubling, Mixed])
def test_a_quantize_impl_that_takes_a_tensor_alone(kind: Any) -> None:
    for dtype in DTYPES:
        x = wide(5, 7, dtype=dtype, sigma=1.0)
        q = kind(E4M3)(x)
        assert q.dtype == dtype
        assert_same(q.dequantize(), Float8CurrentScalingQuantizer(E4M3)(2 * x).dequantize())


def test_a_quantize_impl_and_options_that_are_set_later_are_noticed_by_a_layer() -> None:
    recipe, own = Float8CurrentScaling(), Doubling(E4M3)
    layer, x = ottava.nn.Linear(64, 32, bias=False, recipe=recipe), torch.randn(4, 64)
    plain = layer(x)
    recipe.set_quantizer_factory(lambda role: own if role.tensor_type == "input" else None)
    layer.bind(recipe)
    assert_same(layer(x), 2 * plain)
    own.fp8_dtype = E5M2
    layer.bind(recipe)
    narrow = layer(x)
    assert not torch.equal(narrow, 2 * plain)
    torch.testing.assert_close(narrow, 2 * plain, rtol=0.2, atol=0.5)
