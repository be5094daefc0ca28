"""Ranks as forks of one process that has imported everything, so that they start at once.

That process runs nothing that would start threads, and has no process group itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ottava


def import_all() -> None:
    """What every rank would import for itself: FSDP's hooks, planners, kernels and recipes."""
    for name in ("torch._dynamo", "ottava.checkpoint.storage", "ottava.kernels.cpu"):
        importlib.import_module(name)
    for spec in ottava.list_recipes():
        ottava.get_recipe(spec.name)


def _run(job: Callable[[DeviceMesh], Any], rank: int, world: int, store: Path) -> None:
    code = 1
    try:
        warnings.simplefilter("ignore")
        dist.init_process_group(
            "gloo", rank=rank, world_size=world, store=dist.FileStore(str(store), world)
        )
        job(init_device_mesh("cpu", (world,)))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort (a group that is still
    # referenced).
    os._exit(code)


def alone(job: Callable[[], Any], folder: Path) -> None:
    """Run ``job()`` in a fork without a process group, so that this process starts no threads."""
    log = folder / "log-alone"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            warnings.simplefilter("ignore")
            job()
            code = 0
        except BaseException:
            log.write_text(traceback.format_exc())
        os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise AssertionError(log.read_text() if log.exists() else "killed")


class Ranks:
    """Processes that run ``job(mesh)``, started at once.

    Args:
        folder: for the store, and for what the ranks print.

    Attributes:
        alive: process ids by rank.
        codes: exit codes of those that have ended; minus the signal where one was killed.
    """

    def __init__(self, job: Callable[[DeviceMesh], Any], world: int, folder: Path) -> None:
        self.folder, self.number = folder, len(list(folder.glob("store-*")))
        store = folder / f"store-{self.number}"
        self.alive: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                log = os.open(self._log(rank), os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                _run(job, rank, world, store)
            self.alive[rank] = pid

    def _log(self, rank: int) -> Path:
        return self.folder / f"log-{self.number}-{rank}"

    def printed(self, rank: int) -> str:
        """What a rank has printed, and its errors."""
        return self._log(rank).read_text()

    def poll(self) -> None:
        """Note the ranks that have ended, and how."""
        for rank, pid in list(self.alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.alive[rank]
                self.codes[rank] = os.waitstatus_to_exitcode(status)

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Wait until something holds, at most so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            if until():
                return True
            time.sleep(0.002)
        return False

    def kill(self, rank: int) -> None:
        """Kill one of the own processes, if it has not ended."""
        self.poll()
        if rank in self.alive:
            os.kill(self.alive[rank], signal.SIGKILL)
            self.wait(10, lambda: rank not in self.alive)

    def end(self, grace: float) -> None:
        """Let those that are alive end by themselves for a while, then kill them."""
        self.wait(grace, lambda: not self.alive)
        for rank in list(self.alive):
            self.kill(rank)

    def succeed(self, seconds: float) -> None:
        """Wait until all have ended without an error."""
        # One that failed leaves the others waiting for it.
        self.wait(seconds, lambda: not self.alive or any(self.codes.values()))
        self.end(1)
        if any(self.codes.values()):
            printed = (
                f"rank {rank}, exit code {code}:\n{self.printed(rank)[-4000:]}"
                for rank, code in self.codes.items()
            )
            raise AssertionError("\n".join(printed))
