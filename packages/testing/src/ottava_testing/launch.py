"""Starts the ranks of the checks on several processes.

All such checks of a subject share one launch. A helper process forks the ranks; it has imported
what they need, and lives as long as this process. It is itself a fork of this process if that is
safe, and else a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ottava_testing import worker

#: Processes in a group.
WORLD = 2
#: Seconds after which the processes are killed.
TIMEOUT = float(os.environ.get("OTTAVA_TESTING_TIMEOUT", "180"))


def run_on_ranks(
    body: str,
    names: list[str],
    world: int = WORLD,
    *,
    prepare: Callable[[Path], None] = lambda folder: None,
    seconds: float = TIMEOUT,
) -> dict[str, str | None]:
    """Call a function for each name on every rank.

    The names share one launch up to the first that fails, because a failure leaves ranks waiting
    for each other. The names after it share the next launch.

    Args:
        body: the function as ``"module:function"``; its arguments are the name, the device mesh and
            a folder.
        names: the names to call it with.
        world: number of ranks.
        prepare: fills the folder before each launch.
        seconds: the time after which a launch is killed.

    Returns:
        The failure message by name, None where it passed.
    """
    outcomes: dict[str, str | None] = {}
    while names:
        end, log, reports = _launch(body, names, world, prepare, seconds)
        names = list(names)
        while names and reports.get(names[0], []) == [""] * world:
            outcomes[names.pop(0)] = None
        if not names:
            break
        failure = names.pop(0)
        message = next((text for text in reports.get(failure, []) if text), None)
        if message is None and end == "late":
            message = (
                f"{failure}: the processes did not end in {seconds:.0f} s: do the ranks wait for "
                f"each other?"
            )
        outcomes[failure] = message or f"{failure}: a process ended without a result\n{log[-2000:]}"
    return outcomes


def _launch(
    body: str, names: list[str], world: int, prepare: Callable[[Path], None], seconds: float
) -> tuple[str, str, dict[str, list[str]]]:
    """How one launch ended, what its processes printed, and the reports of the ranks by name."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        request = {
            "folder": path,
            "body": body,
            "names": names,
            "world": world,
            "seconds": seconds,
            "path": sys.path,
            "environment": os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"},
        }
        prepare(folder)
        end = start_server().answer(request)
        log = folder / "log"
        return end, log.read_text(errors="replace") if log.exists() else "", _reports(folder)


def _reports(folder: Path) -> dict[str, list[str]]:
    """The failure messages of the ranks by name, "" where one passed, the first to fail first."""
    entries: list[dict[str, Any]] = []
    for file in folder.glob("rank-*.jsonl"):
        entries += [json.loads(line) for line in file.read_text().splitlines()]
    reports: dict[str, list[str]] = {}
    for entry in sorted(entries, key=lambda entry: entry["at"]):
        reports.setdefault(entry["name"], []).append(entry["failure"])
    return reports


def may_fork() -> bool:
    """Whether ranks can be descendants of a fork of this process.

    Locks of other threads would stay locked in the fork. Where there is an accelerator, autograd
    has threads, and refuses to run in a fork.
    """
    import torch

    is_alone = sys.platform == "linux" and threading.active_count() == 1
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_alone and not has_group and not torch.accelerator.is_available()


class Server:
    """The process that forks ranks; it imports once, for all launches, what every rank needs."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.connection, theirs = Pipe()
        if may_fork():
            worker.import_modules()
            with warnings.catch_warnings():
                # Python counts the idle threads of torch's kernels, which forks do not use.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                self.connection.close()
                worker.serve(theirs)
        else:
            self.pid = _new_process(theirs)
        theirs.close()
        atexit.register(self.kill)

    @property
    def usable(self) -> bool:
        """Whether it runs, and was started by this process and not by one this was forked from."""
        with contextlib.suppress(ChildProcessError):
            return self.owner == os.getpid() and os.waitpid(self.pid, os.WNOHANG)[0] == 0
        return False

    def answer(self, request: dict[str, Any]) -> str:
        """Wait for the end of the ranks of a request.

        Returns:
            ``"ended"``, ``"late"`` if they had to be killed, or ``""`` if the server is gone.
        """
        end = ""
        try:
            self.connection.send(request)
            end = self.connection.recv()
        except (EOFError, OSError):
            pass
        finally:
            if not end:
                self.kill()
        return end

    def kill(self) -> None:
        """Kill the process and its ranks, unless another process owns it."""
        if self.owner != os.getpid():
            return
        is_running = self.usable
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if is_running:
            # It may not have a group of its own yet.
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _new_process(connection: Connection) -> int:
    path = [*filter(None, sys.path), os.environ.get("PYTHONPATH", "")]
    number = connection.fileno()
    os.set_inheritable(number, True)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "ottava_testing.worker", str(number)],
        os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "ignore"},
    )


_servers: list[Server] = []


def start_server() -> Server:
    """The process that forks ranks; it is started if none runs."""
    if not _servers or not _servers[-1].usable:
        _servers[:] = [Server()]
    return _servers[-1]
