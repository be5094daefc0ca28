"""FSDP2 on two gloo processes: weights are gathered as codes and scales, and training equals one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.mark.parametrize("case", ["train", "alone", "master", "refused", "recomputed"])
def test_two_processes(case: str, tmp_path: Path) -> None:
    """``train``: losses and bytes equal one process, whatever is resharded; the other cases are in the worker."""
    command = [sys.executable, "-W", "ignore", str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
