"""Ranks are killed, in steps and while they write checkpoints, and the training ends as if they had not been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).with_name("kill_launcher.py")


def launch(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", str(LAUNCHER), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("kind", ["zero-delayed", "primary-delayed"])
def test_killed_over_and_over(kind: str, tmp_path: Path) -> None:
    """Losses, weights, optimizer and recipe state are the same; what latest_checkpoint gives is whole each time."""
    assert launch(str(tmp_path), "killed", "1", kind) == f"killed {kind} 20 times\n"


def test_saved_by_four_ranks_loaded_by_two_and_by_one(tmp_path: Path) -> None:
    """Codes, scales, master weights, moments and recipe state, byte for byte."""
    kinds = ["zero-delayed", "zero-mxfp8", "primary-delayed", "primary-mxfp8", "gathered-delayed"]
    assert launch(str(tmp_path), "resharded", "0", *kinds).splitlines() == [f"resharded {kind}" for kind in kinds]
