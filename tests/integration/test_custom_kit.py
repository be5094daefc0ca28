"""Mixed recipes pass the conformance kit as well, and their files are read by processes that made
none."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import forking

import ottava
from ottava import checkpoint
from ottava.gemm import gemm
from ottava_custom import CustomRecipe, by_direction, by_layer, by_tensor, mirror
from ottava_testing import check_recipe
from tests.combinations import slow

FACTORIES = {
    "MX forward": by_direction("mxfp8", "current"),
    "MX backward": by_direction("current", "mxfp8"),
    "blocks of 128 forward, rows backward": by_direction("blockwise", "rowwise"),
    "rows forward, blocks of 128 backward": by_direction("rowwise", "blockwise"),
    "identity forward": by_direction("identity", "mxfp8"),
    "delayed and a hybrid": by_tensor("delayed", weight=by_direction("current", "mxfp8")),
    "by layer": by_layer({"layer": "mxfp8"}, "identity"),
}


NOT_SLOW = ("blocks of 128 forward, rows backward", "delayed and a hybrid")


@pytest.mark.parametrize(
    "name", [*NOT_SLOW, *slow(*(name for name in FACTORIES if name not in NOT_SLOW))]
)
def test_a_mixed_recipe_conforms(name: str) -> None:
    report = check_recipe(CustomRecipe(FACTORIES[name]), skip_slow=True)
    assert report.ok, str(report)


READ = """
import sys
from ottava import checkpoint
print(checkpoint.load_file(sys.argv[1])["w"].dequantize().double().sum().item())
"""


def test_a_process_that_imported_nothing_reads_a_file(tmp_path: Path) -> None:
    made: Any = by_direction("mxfp8", "current")("weight")
    tensor = made(torch.randn(64, 32))
    checkpoint.save_file({"w": tensor}, tmp_path / "w.safetensors")
    done = forking.python(READ, tmp_path / "w.safetensors")
    assert done.stdout.strip() == str(tensor.dequantize().double().sum().item()), done.stderr


def test_wgrad_is_in_high_precision_where_the_recipes_of_both_operands_say_so() -> None:
    kept = mirror("rowwise", wgrad_high_precision=True)
    factories = {
        "both": kept,
        "all but the weight": by_tensor(kept, weight="current"),
        "neither": mirror("rowwise"),
    }
    factories |= {
        "one": by_tensor("current", input=kept),
        "one, with a state": by_tensor(kept, input="delayed"),
    }
    x, dy = torch.randn(64, 96).bfloat16(), torch.randn(64, 48).bfloat16()
    for name, factory in factories.items():
        layer = ottava.nn.Linear(96, 48, dtype=torch.bfloat16, recipe=CustomRecipe(factory))
        layer(x).backward(dy)
        exact = torch.equal(layer.weight.grad, gemm(dy, x, "wgrad"))
        assert exact is (name in ("both", "all but the weight")), name


HYBRIDS_IN_A_FILE = """
default:
  rowwise: current
  columnwise: {recipe: rowwise, wgrad_high_precision: true}
layers:
  - {match: "*", weight: current}
"""


@pytest.mark.parametrize("way", ["by direction", "in a file"])
def test_hybrids_keep_wgrad_in_high_precision(way: str, tmp_path: Path) -> None:
    """Where the recipe of their columns says so; all else is what it is without."""
    (tmp_path / "hybrids.yaml").write_text(HYBRIDS_IN_A_FILE)
    kept = by_direction("current", mirror("rowwise", wgrad_high_precision=True))
    recipe = (
        CustomRecipe(kept)
        if way == "by direction"
        else CustomRecipe.from_file(tmp_path / "hybrids.yaml")
    )
    without = CustomRecipe(by_tensor(by_direction("current", "rowwise"), grad_output="rowwise"))
    x, dy = torch.randn(64, 96).bfloat16(), torch.randn(64, 48).bfloat16()
    layers = [
        ottava.nn.Linear(96, 48, dtype=torch.bfloat16, recipe=recipe)
        for recipe in (recipe, without)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    y, plain = (layer(x) for layer in layers)
    assert torch.equal(y, plain)
    y.backward(dy)
    plain.backward(dy)
    assert torch.equal(layers[0].weight.grad, gemm(dy, x, "wgrad"))
    assert not torch.equal(layers[1].weight.grad, gemm(dy, x, "wgrad"))


def test_wgrad_takes_each_operand_as_its_own_recipe_says() -> None:
    kept = mirror("rowwise", wgrad_high_precision=True)
    x, dy = torch.randn(64, 96).bfloat16(), torch.randn(64, 48).bfloat16()
    for kept_one in ("input", "grad_output"):
        recipe = CustomRecipe(by_tensor("current", **{kept_one: kept}))
        layer = ottava.nn.Linear(96, 48, dtype=torch.bfloat16, recipe=recipe)
        layer(x).backward(dy)
        values = {"input": x, "grad_output": dy}
        operands = {
            name: t if name == kept_one else recipe.quantizer(name)(t) for name, t in values.items()
        }
        assert torch.equal(
            layer.weight.grad, gemm(operands["grad_output"], operands["input"], "wgrad")
        ), kept_one
        assert recipe.explain(kept_one).columnwise == "high precision"


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_a_layer_of_several_recipes_is_copied_as_a_whole(way: Any) -> None:
    layer = ottava.nn.Linear(32, 32, recipe=CustomRecipe(by_tensor("current", weight="delayed")))
    for _ in range(2):
        with ottava.autocast():
            layer(torch.randn(4, 32)).sum().backward()
    state, made = layer.recipe_state, way(layer).recipe_state
    assert made.step is None
    assert made.delayed is not state.delayed
    assert made.serving["weight"] is made.delayed
    assert torch.equal(made.delayed.scale, state.delayed.scale)
    assert made.is_of(layer.recipe)
