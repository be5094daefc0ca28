"""The layouts of the roles, their bytes, and the names that blockwise tensors have for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava import Layout
from ottava.formats import Format
from ottava_blockwise import (
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from tests.layout_recipes import assert_fake_quantizes, assert_made_of, assert_quantizes_by
from tests.samples import wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = {1: (1, 128), 2: (128, 128)}


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
    assert type(recipe.quantizer(role)) is Float8BlockQuantizer
    assert_quantizes_by(recipe.quantizer(role), expected)


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
    shapes = {
        "rowwise_data": (4, 50, 300),
        "rowwise_scale_inv": scales[0],
        "columnwise_data": (300, 4, 50),
        "columnwise_scale_inv": scales[1],
    }
    options = {"fp8_dtype": E5M2, "block_scaling_dim": dim, "pow_2_scales": True}
    for internal, cls in ((False, Float8BlockwiseQTensor), (True, Float8BlockwiseQTensorStorage)):
        quantizer = Float8BlockQuantizer(E5M2, block_scaling_dim=dim)
        quantizer.internal = internal
        q: Any = quantizer(wide(4, 50, 300, dtype=torch.bfloat16))
        assert (q.dtype, {name: getattr(q, f"_{name}") for name in options}) == (
            torch.bfloat16,
            options,
        )
        made = assert_made_of(q, cls, shapes, **options)
        assert made.grid_layout == layout(E5M2, dim)
        assert made.rowwise_serves_columnwise is (dim == 2)


@pytest.mark.parametrize(("name", "element"), [("BLOCKWISEE4M3", E4M3), ("BLOCKWISEE5M2", E5M2)])
def test_fake_quantization_is_that_of_blocks_along_rows(name: str, element: Any) -> None:
    assert_fake_quantizes(name, layout(element, 1))
    recipe = Float8BlockScaling(force_pow_2_scales=False, amax_epsilon=0.5)
    expected = layout(element, 1, pow_2=False, epsilon=0.5)
    assert recipe.fake_quantizer(name).layout == expected
    assert recipe.fake_quantizer("FP8E4M3") is None
