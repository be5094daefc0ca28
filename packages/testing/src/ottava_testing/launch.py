"""Starts the ranks of the checks on several processes.

All such checks of a subject share one launch. A helper process forks the ranks; it has imported
what they need, and lives as long as this process.
"""

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
# The key in Subject.results under which the outcomes are.
_KEY = "ranks"


def outcome(subject: Subject, name: str) -> str | None:
    """The failure message of the check ``name``, or None if it passed.

    The first call for a subject runs all such checks that apply to it.

    Raises:
        CheckFailed: another process cannot make the recipe.
    """
    outcomes: dict[str, str | None] = subject.results.setdefault(_KEY, {})
    if name not in outcomes:
        shared = {name, *(subject.check_names or RANK_BODIES)} - outcomes.keys()
        names = [
            each
            for each in RANK_BODIES
            if each in shared and CHECKS[each].why_not(subject.spec) is None
        ]
        source = pickle.dumps(subject.source())

        def prepare(folder: Path) -> None:
            (folder / "source.pickle").write_bytes(source)
            _save_weight(subject, folder)

        outcomes |= run_on_ranks("ottava_testing.checks.ranks:run", names, prepare=prepare)
    return outcomes[name]


def _save_weight(subject: Subject, folder: Path) -> None:
    """Save a quantized weight and its values, which a rank is to load."""
    if subject.spec.quantized_weights:
        weight = subject.weight(wide(48, 40))
        # A weight that cannot be pickled fails a check that runs in this process.
        with contextlib.suppress(Exception):
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
        has_ended, log, reports = _launch(body, names, world, prepare, seconds)
        passed_names = [
            name
            for name in names
            if len(reports.get(name, {})) == world and not any(reports[name].values())
        ]
        outcomes.update(dict.fromkeys(passed_names))
        names = [name for name in names if name not in passed_names]
        if names:
            failure = names.pop(0)
            messages = [text for text in reports.get(failure, {}).values() if text]
            if messages:
                outcomes[failure] = messages[0]
            elif has_ended:
                outcomes[failure] = f"{failure}: a process ended without a result\n{log[-2000:]}"
            else:
                outcomes[failure] = (
                    f"{failure}: the processes did not end in {seconds:.0f} s: do the ranks wait "
                    f"for each other?"
                )
    return outcomes


def _launch(
    body: str, names: list[str], world: int, prepare: Callable[[Path], None], seconds: float
) -> tuple[bool, str, dict[str, dict[int, str]]]:
    """Whether the ranks of one launch ended in time, what they printed, and their reports."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        request = {
            "body": body,
            "names": names,
            "world": world,
            "path": sys.path,
            "environment": os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"},
        }
        (folder / "request.json").write_text(json.dumps(request))
        prepare(folder)
        has_ended, log = _launcher().launch(folder, seconds)
        return has_ended, log, _reports(folder, world)


class _Launcher:
    """The process that forks ranks; it imports once, for all launches, what every rank needs."""

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
            # An interrupt of this process does not reach the new one, which ends when its standard
            # input is closed.
            start_new_session=True,
        )
        self.owner = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether it runs, and was started by this process and not by one this was forked from."""
        return self.owner == os.getpid() and self.process.poll() is None

    def launch(self, folder: Path, seconds: float) -> tuple[bool, str]:
        """Run the request in a folder.

        Returns:
            Whether the ranks ended within ``seconds``, and what they printed.
        """
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
                # The group that is killed is a session of its own, with the ranks alone in it.
                if answers and answers[0]:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(int(answers[0]), signal.SIGKILL)
                self.close()
        log = folder / "log"
        log_text = log.read_text(errors="replace") if log.exists() else ""
        self.errors.seek(0)
        return None not in answers, log_text + self.errors.read().decode(errors="replace")

    def _answer(self, seconds: float) -> str | None:
        """A line of the process: empty if it has ended, None if none came within ``seconds``."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline().decode().strip() if ready else None

    def close(self) -> None:
        """End the process; closing its standard input tells it to."""
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
    """The process that forks ranks; it is started if none runs."""
    if not _launchers or not _launchers[-1].usable:
        _launchers[:] = [_Launcher()]
        atexit.register(_launchers[-1].close)
    return _launchers[-1]


def _reports(folder: Path, world: int) -> dict[str, dict[int, str]]:
    """The failure message of each rank by name, "" where it passed, in the order of their times."""
    entries: list[tuple[float, int, dict[str, Any]]] = []
    for rank in range(world):
        file = folder / f"rank-{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            entry: dict[str, Any] = json.loads(line)
            entries.append((entry["at"], rank, entry))
    reports: dict[str, dict[int, str]] = {}
    for _, rank, entry in sorted(entries, key=lambda timed: timed[:2]):
        reports.setdefault(entry["name"], {})[rank] = entry["failure"]
    return reports
