"""Recipes with layouts that nothing first-party has conform, and work with everything that goes by
a recipe's name: commands, files, fake quantization.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.cli.main import app
from ottava_testing import check_recipe
from tests.comparing import assert_same
from tests.published import published
from tests.testing import strange_layouts

RECIPES: Any = list(strange_layouts.SPECS)
NAMES = [recipe.name for recipe in RECIPES]
PLUGIN = """
from ottava import hookimpl
from tests.testing import strange_layouts

@hookimpl
def ottava_recipes():
    return list(strange_layouts.SPECS.values())
"""


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The recipes, as a package has them."""
    with published(tmp_path_factory.mktemp("package"), "strange-plugin", strange_plugin=PLUGIN):
        yield


def run(*arguments: Any) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def model(recipe: str, *, primary: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layers = [ottava.nn.Linear(*sizes, recipe=recipe) for sizes in ((72, 40), (40, 72))]
        return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("recipe", "kit"),
    [
        (strange_layouts.Int8Blocks, "quick"),
        *(pytest.param(recipe, "whole", marks=pytest.mark.slow) for recipe in RECIPES),
    ],
)
def test_the_kit_passes(recipe: Any, kit: str) -> None:
    spec = strange_layouts.SPECS[recipe]
    report = check_recipe(recipe(), spec=spec, skip_slow=kit == "quick")
    assert report.ok, str(report)
    passed = {result.name for result in report.results if result.outcome == "passed"}
    assert passed >= {"fake-quantization"}
    if kit == "whole":
        assert passed >= {"fsdp2", "fsdp2-quantized-weights", "sharded-master-weights", "compile"}


@pytest.mark.parametrize("name", NAMES)
def test_files_are_exported_to_them_and_back(name: str, tmp_path: Path) -> None:
    paths = [tmp_path / file for file in ("high", "quantized", "back")]
    checkpoint.save_model(model(name, primary=False), paths[0])
    run("export", paths[0], paths[1], "--recipe", name, "--columnwise")
    run("export", paths[1], paths[2], "--recipe", "fp32")
    net, other = model(name), model(name, seed=1)
    assert checkpoint.load_model(other, paths[1]) == ([], [])
    for mine, theirs in zip(other, net, strict=True):
        assert_same(mine.bias.detach(), theirs.bias.detach())
        assert_same(mine.weight.inner_list(), theirs.weight.inner_list())
    values = safetensors.torch.load_file(paths[2])
    for number, layer in enumerate(net):
        assert_same(values[f"{number}.weight"], layer.weight.detach().dequantize())
