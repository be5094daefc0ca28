"""Ranks are killed, in steps and while they write checkpoints, and the training ends as if they had
not been."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ottava.checkpoint import files, is_complete, latest_checkpoint, save_step
from ottava_integrations import read_state
from tests import ranks
from tests.integration.sharded_training import Training, whole

WORLD, STEPS = 2, 10
#: What a rank calls, by name.
PLACES: dict[str, tuple[Any, str]] = {
    "write": (files, "serialize_file"),
    "all_reduce": (dist, "all_reduce"),
    "rename": (os, "rename"),
}
#: The rank that kills itself, and after which call.
POINTS = [(0, "write 1"), (1, "all_reduce 3"), (0, "rename 1"), (0, "rename 3")]


def arm(point: str) -> None:
    """Have this process kill itself after a call: ``rename 2`` is when the second rename is
    done."""
    name, number = point.split()
    calls: Counter[str] = Counter()
    module, function = PLACES[name]
    original = getattr(module, function)

    def called(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        calls[name] += 1
        if calls[name] == int(number):
            if name == "write":
                # Half of the file has come to the disk.
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, function, called)


def log(path: Path, text: str) -> None:
    """One write, which the system keeps when the process is killed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def train(mesh: DeviceMesh, folder: Path, victim: int = -1, point: str = "") -> None:
    """Train to the end, from the latest checkpoint on; the victim does not get that far."""
    rank = mesh.get_rank()
    training = Training("delayed", 1, mesh)
    if latest := latest_checkpoint(folder / "run"):
        training.resume(latest)
    if rank == victim:
        arm(point)
    while training.steps < STEPS:
        loss = training.step()
        log(folder / f"losses-{rank}", f"{training.steps} {loss.hex()}")
        if training.steps % 2 == 0:
            save_step(training.state(), folder / "run", training.steps, keep=2)
            log(folder / "saved", str(training.steps))
    torch.save(whole(training.state()), folder / f"state-{rank}")


def losses(folder: Path, rank: int) -> dict[str, str]:
    """Losses by step; steps that were done more than once gave the same each time."""
    found: dict[str, str] = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(step, loss) == loss, (rank, line)
    assert len(found) == STEPS
    return found


def test_a_training_whose_ranks_are_killed(tmp_path: Path) -> None:
    plain, often = tmp_path / "plain", tmp_path / "often"
    plain.mkdir()
    often.mkdir()
    ranks.run(train, WORLD, folder=plain)
    known = 0
    for victim, point in POINTS:
        codes = ranks.exit_codes(train, WORLD, folder=often, victim=victim, point=point)
        assert codes[victim] == -signal.SIGKILL, (point, codes)
        latest, saved = latest_checkpoint(often / "run"), often / "saved"
        step = 0
        if latest is not None:
            assert is_complete(latest)
            # Every byte is read and checked.
            assert len(read_state(latest)[0]) > 10
            step = int(latest.name.removeprefix("step-"))
        # What a rank was told is saved is saved.
        told = saved.read_text().split() if saved.exists() else ["0"]
        assert step >= max(known, *map(int, told)), point
        known = step
    assert 0 < known < STEPS - 2
    ranks.run(train, WORLD, folder=often)
    names = [sorted(path.name for path in (folder / "run").iterdir()) for folder in (plain, often)]
    assert names[0] == names[1]
    for rank in range(WORLD):
        assert losses(often, rank) == losses(plain, rank)
        states = [torch.load(folder / f"state-{rank}") for folder in (plain, often)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), name
