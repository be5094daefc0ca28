"""The demo at its defaults: every recipe ends close to BF16. Minutes long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# How far the validation loss may be from BF16's, relatively.
BOUND = 0.01
RECIPES = {"blockwise", "current", "custom", "delayed", "mxfp8", "rowwise"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_recipe_follows_bf16(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", "from ottava.cli.main import app; app()"]
    subprocess.run(
        [*command, "demo", "--seed", str(seed), "--out", str(tmp_path)], check=True, timeout=900
    )
    runs = {
        run["name"]: run["validation"]
        for run in json.loads((tmp_path / "results.json").read_text())["runs"]
    }
    assert {"bf16", *RECIPES} <= set(runs)
    for name in runs:
        assert abs(runs[name] / runs["bf16"] - 1) < BOUND, name
