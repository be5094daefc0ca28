"""Mixed recipes pass the conformance kit, and keep wgrad in high precision where they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from ottava.gemm import gemm
from ottava_custom import CustomRecipe, by_direction, by_layer, by_tensor, mirror
from ottava_testing import check_recipe

FACTORIES = {
    "delayed and a hybrid": by_tensor("delayed", weight=by_direction("current", "mxfp8")),
    "MX forward": by_direction("mxfp8", "current"),
    "MX backward": by_direction("current", "mxfp8"),
    "rows forward, blocks of 128 backward": by_direction("rowwise", "blockwise"),
    "identity forward": by_direction("identity", "mxfp8"),
    "four bits, rotated backward": by_direction("mx", "nvfp4"),
    "by layer": by_layer({"layer": "mxfp8"}, "identity"),
}
# Otherwise the promises are those of eight bits.
PROMISES = {"four bits, rotated backward": {"relative_error": 0.2, "shows_nan": False}}
NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in FACTORIES]


@pytest.mark.parametrize("name", [next(iter(FACTORIES)), *NAMES[1:]])
def test_a_mixed_recipe_conforms(name: str) -> None:
    recipe = CustomRecipe(FACTORIES[name])
    report = check_recipe(recipe, skip_slow=True, promises=PROMISES.get(name))
    assert report.ok, str(report)


KEPT = mirror("rowwise", wgrad_high_precision=True)


def gradient(recipe: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The gradient of a weight, and the operands of the product that it is."""
    torch.manual_seed(0)
    operands = {
        "grad_output": torch.randn(64, 48).bfloat16(),
        "input": torch.randn(64, 96).bfloat16(),
    }
    layer: Any = ottava.nn.Linear(96, 48, dtype=torch.bfloat16, recipe=recipe)
    layer(operands["input"]).backward(operands["grad_output"])
    return layer.weight.grad, operands


@pytest.mark.parametrize(
    ("factory", "kept"),
    [
        (KEPT, {"input", "grad_output"}),
        (by_tensor(KEPT, weight="current"), {"input", "grad_output"}),
        (by_direction("current", KEPT), {"input", "grad_output"}),
        (by_tensor("current", input=KEPT), {"input"}),
        (by_tensor("current", grad_output=KEPT), {"grad_output"}),
        (mirror("rowwise"), set()),
    ],
    ids=["all", "all but the weight", "a hybrid", "input", "grad_output", "none"],
)
def test_wgrad_takes_each_operand_as_its_recipe_says(factory: Any, kept: set[str]) -> None:
    recipe = CustomRecipe(factory)
    found, operands = gradient(recipe)
    read = [x if name in kept else recipe.quantizer(name)(x) for name, x in operands.items()]
    assert torch.equal(found, gemm(*read, "wgrad"))
    exact = torch.equal(found, gemm(operands["grad_output"], operands["input"], "wgrad"))
    assert exact is (len(kept) == 2)
