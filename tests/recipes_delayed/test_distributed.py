"""Two and four gloo processes: the scales of one process that saw all the data, in one all-reduce a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("reduce_worker.py")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
