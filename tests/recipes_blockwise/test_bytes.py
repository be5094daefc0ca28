"""The layouts of the roles, their bytes, and the names that blockwise tensors have for them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ottava
from ottava import Layout
from ottava.debug import fake_quantize
from ottava.formats import Format
from ottava_blockwise import (
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from tests import arrays
from tests.comparing import assert_same
from tests.samples import DTYPES, special, wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = {1: (1, 128), 2: (128, 128)}
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


def inner(q: Any) -> list[Any]:
    return [getattr(q, name) for name in INNER]


def layout(element: torch.dtype, dim: int, *, pow_2: bool = True, epsilon: float = 0.0) -> Layout:
    return Layout(
        element,
        BLOCKS[dim],
        rounding="floor" if pow_2 else "nearest",
        epsilon=epsilon,
        columnwise="transposed",
        finite_as="input",
    )


OTHER = Float8BlockScaling(
    fp8_format=Format.HYBRID,
    force_pow_2_scales=False,
    amax_epsilon=1e-4,
    x_block_scaling_dim=2,
    w_block_scaling_dim=1,
    grad_block_scaling_dim=1,
)
EXACT: dict[str, Any] = {"pow_2": False, "epsilon": 1e-4}


@pytest.mark.parametrize(
    ("recipe", "role", "expected"),
    [
        (Float8BlockScaling(), "input", layout(E4M3, 1)),
        (Float8BlockScaling(), "weight", layout(E4M3, 2)),
        (Float8BlockScaling(), "output", layout(E4M3, 1)),
        (Float8BlockScaling(), "grad_output", layout(E4M3, 1)),
        (Float8BlockScaling(Format.E5M2), "weight", layout(E5M2, 2)),
        (OTHER, "input", layout(E4M3, 2, **EXACT)),
        (OTHER, "weight", layout(E4M3, 1, **EXACT)),
        (OTHER, "grad_output", layout(E5M2, 1, **EXACT)),
    ],
)
def test_the_layout_of_each_role(recipe: Any, role: str, expected: Layout) -> None:
    quantizer = recipe.quantizer(role)
    assert type(quantizer) is Float8BlockQuantizer
    assert quantizer.layout == expected
    for shape, dtype in itertools.product([(130, 140), (2, 3, 5), (0, 7)], DTYPES):
        x = wide(*shape, dtype=dtype)
        assert_same(inner(quantizer(x)), list(arrays.quantize(x, expected)))
    for _, x in special(torch.bfloat16):
        assert_same(inner(quantizer(x)), list(arrays.quantize(x, expected)))


def test_defaults_and_spec() -> None:
    recipe = ottava.get_recipe("blockwise")
    assert recipe == Float8BlockScaling(Format.E4M3, True, 0.0, 1, 2, 1)
    assert Float8BlockQuantizer(E4M3) == Float8BlockQuantizer(
        E4M3, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2
    )
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "blockwise")
    assert (spec.block_size, spec.formats, spec.stateful) == ((1, 128), ("E4M3", "E5M2"), False)
    assert spec.fake_quant_formats == ("BLOCKWISEE4M3", "BLOCKWISEE5M2")


@pytest.mark.parametrize(("dim", "scales"), [(1, [(200, 3), (300, 2)]), (2, [(2, 3), (3, 2)])])
def test_tensors_have_names_for_their_parts_and_options(dim: int, scales: Any) -> None:
    for internal, cls in ((False, Float8BlockwiseQTensor), (True, Float8BlockwiseQTensorStorage)):
        quantizer = Float8BlockQuantizer(E5M2, block_scaling_dim=dim)
        quantizer.internal = internal
        q = quantizer(wide(4, 50, 300, dtype=torch.bfloat16))
        assert type(q) is cls
        assert (q.dtype, q._fp8_dtype) == (torch.bfloat16, E5M2)
        assert (q._block_scaling_dim, q._pow_2_scales) == (dim, True)
        shapes = [tuple(t.shape) for t in inner(q)]
        assert shapes == [(4, 50, 300), scales[0], (300, 4, 50), scales[1]]
        names = [name.removeprefix("_") for name in INNER]
        made = cls(
            **dict(zip(names, inner(q), strict=True)),
            dtype=torch.bfloat16,
            fp8_dtype=E5M2,
            block_scaling_dim=dim,
            pow_2_scales=True,
        )
        assert_same(made.dequantize(), q.dequantize())
        assert made.rowwise_serves_columnwise is (dim == 2)


@pytest.mark.parametrize(("name", "element"), [("BLOCKWISEE4M3", E4M3), ("BLOCKWISEE5M2", E5M2)])
def test_fake_quantization_is_that_of_blocks_along_rows(name: str, element: Any) -> None:
    expected = layout(element, 1)
    for shape, dtype in itertools.product([(), (0, 3), (1,), (33, 260), (2, 5, 130)], DTYPES):
        x = wide(*shape, dtype=dtype, sigma=1.0).requires_grad_()
        got, data = fake_quantize(x, name), arrays.quantize(x, expected)
        assert_same(got, arrays.decode(*data[:2], expected, columnwise=False, dtype=dtype))
        got.sum().backward()
        assert_same(x.grad, torch.ones_like(x))
    recipe = Float8BlockScaling(force_pow_2_scales=False, amax_epsilon=0.5)
    fake = recipe.fake_quantizer(name)
    assert fake.layout == layout(element, 1, pow_2=False, epsilon=0.5)
    assert recipe.fake_quantizer("FP8E4M3") is None
