"""Hundred steps of sharded training equal hundred steps in one process, to the last bit of losses, codes and scales."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("long_training_worker.py")
CASES = [
    # The optimizer of examples/zero.py on ranges that end inside rows and blocks.
    ("zero", 2),
    ("zero", 4),
    # Weights that are quantized when they are gathered and FP8-primary ones, resharded after the forward pass or not;
    # and how many bytes are gathered.
    ("fsdp", 2),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the worker printed, and its errors."""
    arguments = [str(argument) for case in CASES for argument in case]
    command = [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path_factory.mktemp("long")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.stdout, done.stderr[-6000:]


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_equals_one_process(case: str, ranks: int, finished: tuple[str, str]) -> None:
    assert f"{case} on {ranks} ranks" in finished[0].splitlines(), finished[1]
