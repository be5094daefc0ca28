"""Ranks are killed, in steps and while they write checkpoints, and the training ends as if they had
not been.

As a program, it forks the ranks itself: ``test_killed_training.py FOLDER``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from ottava.checkpoint import files, is_complete, latest_checkpoint, save_step
from ottava_integrations import read_state
from tests.integration.sharded_training import Training, gathered

WORLD, STEPS = 2, 12
#: Where a rank kills itself: the rank, and before or after which call.
POINTS = [
    (0, "write after 1"),
    (1, "all_reduce after 3"),
    (0, "fsync after 1"),
    (0, "rename after 1"),
    (0, "rename after 3"),
]


def arm(point: str) -> None:
    """Have this process kill itself at a point: ``rename after 2`` is when the second rename is
    done."""
    name, moment, number = point.split()
    calls: Counter[str] = Counter()

    def around(module: Any, function: str, half: bool = False) -> None:
        original = getattr(module, function)

        def called(*args: Any, **options: Any) -> Any:
            calls["before"] += 1
            if (moment, calls["before"]) == ("before", int(number)):
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **options)
            calls["after"] += 1
            if (moment, calls["after"]) == ("after", int(number)):
                if half:
                    # Half of the file has come to the disk.
                    os.truncate(args[1], os.path.getsize(args[1]) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(module, function, called)

    if name == "write":
        around(files, "serialize_file", half=True)
    else:
        around(dist if name == "all_reduce" else os, name)


def log(path: Path, text: str) -> None:
    """One write, which the system keeps when the process is killed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def train(folder: Path, rank: int, point: str | None) -> None:
    """Train to the end, from the latest checkpoint on."""
    training = Training("delayed", 1, init_device_mesh("cpu", (WORLD,)))
    if latest := latest_checkpoint(folder / "run"):
        training.resume(latest)
    if point is not None:
        arm(point)
    while training.steps < STEPS:
        loss = training.step()
        log(folder / f"losses-{rank}", f"{training.steps} {loss.hex()}")
        if training.steps % 2 == 0:
            save_step(training.state(), folder / "run", training.steps, keep=2)
            log(folder / "saved", str(training.steps))
    torch.save(gathered(training.state()), folder / f"state-{rank}")


def rank_process(folder: Path, rank: int, store: Path, point: str | None, quiet: bool) -> None:
    code = 1
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", rank=rank, world_size=WORLD, store=dist.FileStore(str(store), WORLD)
        )
        train(folder, rank, point)
        dist.barrier()
        code = 0
    except BaseException:
        # A rank whose peer is killed may fail.
        if not quiet:
            traceback.print_exc()
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort.
    os._exit(code)


def life(folder: Path, number: int, victim: int = -1, point: str | None = None) -> dict[int, int]:
    """Fork all ranks and wait for them, or until one was killed; the exit codes."""
    children = {}
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            store = folder / f"store-{number}"
            rank_process(folder, rank, store, point if rank == victim else None, victim >= 0)
        children[child] = rank
    codes = {}
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        if status:
            # The others would wait for it; some fail before, some are killed.
            time.sleep(0.02 * number)
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes


def losses(folder: Path, rank: int) -> dict[str, str]:
    """Losses by step; steps that were done more than once gave the same each time."""
    found: dict[str, str] = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(step, loss) == loss, (rank, line)
    assert len(found) == STEPS
    return found


def main(top: Path) -> None:
    plain, often = top / "plain", top / "often"
    plain.mkdir()
    often.mkdir()
    assert life(plain, 0) == {0: 0, 1: 0}
    known = 0
    for number, (victim, point) in enumerate(POINTS):
        codes = life(often, number, victim, point)
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
    assert life(often, len(POINTS)) == {0: 0, 1: 0}
    names = [sorted(path.name for path in (folder / "run").iterdir()) for folder in (plain, often)]
    assert names[0] == names[1]
    for rank in range(WORLD):
        assert losses(often, rank) == losses(plain, rank)
        states = [torch.load(folder / f"state-{rank}") for folder in (plain, often)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), name


def test_a_training_whose_ranks_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    # Imported before the forks, once for all of them.
    import torch._dynamo

    main(Path(sys.argv[1]))
