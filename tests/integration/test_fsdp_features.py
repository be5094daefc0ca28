"""Models of every recipe under FSDP2, used in every way that FSDP2 can be used, equal one process bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("fsdp_features_worker.py")
# The cases of one launch share its start-up.
LAUNCHES = [
    (2, "training world_of_one collectives mixed_precision meta_device refused refused_masters unusual_loops"),
    (2, "compiled clipping accumulation explicit evaluation recomputation recomputed_in_blocks under_torch_autocast"),
    (2, "frozen tied saving copying third_party fp8_primary sharded_masters"),
    (4, "hybrid training fp8_primary sharded_masters resharded_to_fewer"),
]


@pytest.mark.parametrize(("world", "cases"), LAUNCHES, ids=["basics", "running", "keeping", "four"])
def test_ranks_train_as_one_process(world: int, cases: str, tmp_path: Path) -> None:
    """Losses, weights, scales and histories; the names of the cases are those of the worker's functions."""
    command = [sys.executable, "-W", "ignore", str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store"), *cases.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
