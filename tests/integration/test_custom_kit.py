"""Mixed recipes pass the conformance kit as well, and their files are read by processes that made none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import forking

from ottava import checkpoint
from ottava_custom import CustomRecipe, by_direction, by_layer, by_tensor
from ottava_testing import check_recipe

FACTORIES = {
    "MX forward": by_direction("mxfp8", "current"),
    "MX backward": by_direction("current", "mxfp8"),
    "blocks of 128 forward, rows backward": by_direction("blockwise", "rowwise"),
    "rows forward, blocks of 128 backward": by_direction("rowwise", "blockwise"),
    "identity forward": by_direction("identity", "mxfp8"),
    "delayed and a hybrid": by_tensor("delayed", weight=by_direction("current", "mxfp8")),
    "by layer": by_layer({"layer": "mxfp8"}, "identity"),
}


@pytest.mark.parametrize("name", FACTORIES)
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
