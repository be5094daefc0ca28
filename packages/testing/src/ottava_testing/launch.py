"""Starts ranks: one launch for all checks of a subject, by a process that stays while this one
lives."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ottava_testing.compare import plain, wide
from ottava_testing.subject import Subject
from ottava_testing.table import CHECKS, RANK_BODIES

#: Processes in a group.
WORLD = 2
#: Seconds after which the processes are killed.
TIMEOUT = float(os.environ.get("OTTAVA_TESTING_TIMEOUT", "180"))
# Nothing said means that it ended without a word.
_KEY = "ranks"


def outcome(subject: Subject, name: str) -> str | None:
    """What is wrong by the check ``name``, or None. The first question runs all such checks that
    apply.

    Raises:
        CheckFailed: another process cannot make the recipe.
    """
    known: dict[str, str | None] = subject.kept.setdefault(_KEY, {})
    if name not in known:
        wanted = subject.wanted or RANK_BODIES
        names = [
            n
            for n in RANK_BODIES
            if n in (name, *wanted) and CHECKS[n].why_not(subject.spec) is None
        ]
        source = pickle.dumps(subject.source())

        def prepare(folder: Path) -> None:
            (folder / "source.pickle").write_bytes(source)
            _save_weight(subject, folder)

        known |= run_on_ranks(
            "ottava_testing.checks.ranks:run", [n for n in names if n not in known], prepare=prepare
        )
    return known[name]


def _save_weight(subject: Subject, folder: Path) -> None:
    """What a rank is to load."""
    if subject.spec.quantized_weights:
        weight = subject.weight(wide(48, 40))
        with contextlib.suppress(Exception):  # a check in this process says so
            torch.save(weight, folder / "weight.pt")
        torch.save(plain(weight), folder / "values.pt")


def run_on_ranks(
    body: str,
    names: list[str],
    world: int = WORLD,
    *,
    prepare: Callable[[Path], None] = lambda folder: None,
    seconds: float = TIMEOUT,
) -> dict[str, str | None]:
    """Call ``body``, a ``"module:function"`` of a name, the device mesh and a folder, for each name
    on every rank.

    The names share a launch up to the first that fails, which leaves ranks waiting for each other;
    those after it share the next one.

    Args:
        prepare: fills the folder, before each launch.
        seconds: after which a launch is killed.

    Returns:
        What is wrong, or None, by name.
    """
    known: dict[str, str | None] = {}
    while names:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
            request = {
                "body": body,
                "names": names,
                "world": world,
                "path": sys.path,
                "environment": environment,
            }
            (folder / "request.json").write_text(json.dumps(request))
            prepare(folder)
            ended, printed = _launcher().launch(folder, seconds)
            told = _told(folder, world)
        finished = [n for n in names if len(told.get(n, {})) == world and not any(told[n].values())]
        known.update(dict.fromkeys(finished))
        names = [n for n in names if n not in finished]
        if names:
            failed = names.pop(0)
            known[failed] = next(
                (text for text in told.get(failed, {}).values() if text), None
            ) or (
                f"{failed}: the processes did not end in {seconds:.0f} s: do the ranks wait for "
                f"each other?"
                if not ended
                else f"{failed}: a process ended without a result\n{printed[-2000:]}"
            )
    return known


class _Launcher:
    """The process that forks ranks: it has imported what every rank needs, once for all
    launches."""

    def __init__(self) -> None:
        path = os.pathsep.join(
            [entry for entry in sys.path if entry] + [os.environ.get("PYTHONPATH", "")]
        )
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ottava_testing.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
            # What interrupts this process does not reach it: it ends with its standard input.
            start_new_session=True,
        )
        self.owner = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether it runs and this process, not one that it was forked from, started it."""
        return self.owner == os.getpid() and self.process.poll() is None

    def launch(self, folder: Path, seconds: float) -> tuple[bool, str]:
        """Run the request in a folder: whether it ended in time, and what it printed."""
        answers: list[str | None] = []
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{folder}\n".encode())
            self.process.stdin.flush()
            answers = [self._answer(seconds)]
            if answers[0]:
                answers.append(self._answer(seconds))
        except BrokenPipeError:
            pass
        finally:
            if len(answers) < 2 or not answers[1]:
                # Its own session: the ranks are in it and nothing else.
                if answers and answers[0]:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(int(answers[0]), signal.SIGKILL)
                self.close()
        log = folder / "log"
        printed = log.read_text(errors="replace") if log.exists() else ""
        self.errors.seek(0)
        return None not in answers, printed + self.errors.read().decode(errors="replace")

    def _answer(self, seconds: float) -> str | None:
        """A line, nothing where the process is gone, or None where there is no answer in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline().decode().strip() if ready else None

    def close(self) -> None:
        """End the process, which has nothing to do."""
        if self.owner != os.getpid():
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_launchers: list[_Launcher] = []


def _launcher() -> _Launcher:
    """The process that forks ranks, started where there is none."""
    if not _launchers or not _launchers[-1].usable:
        _launchers[:] = [_Launcher()]
        atexit.register(_launchers[-1].close)
    return _launchers[-1]


def _told(folder: Path, world: int) -> dict[str, dict[int, str]]:
    """What each rank said of each name, the first to say something first: "" where it passed."""
    said: list[tuple[float, int, dict[str, Any]]] = []
    for rank in range(world):
        file = folder / f"rank-{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            entry: dict[str, Any] = json.loads(line)
            said.append((entry["at"], rank, entry))
    told: dict[str, dict[int, str]] = {}
    for _, rank, entry in sorted(said, key=lambda one: one[:2]):
        told.setdefault(entry["name"], {})[rank] = entry["failure"]
    return told
