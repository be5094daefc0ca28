"""Starts the ranks for the checks on several processes: one launch for all checks of a subject."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ottava_testing.compare import plain, wide
from ottava_testing.subject import Subject

#: Processes in a group.
WORLD = 2
#: Seconds after which the processes are killed.
TIMEOUT = float(os.environ.get("OTTAVA_TESTING_TIMEOUT", "180"))
# Nothing said means that it ended without a word.
_KEY = "ranks"


def outcome(subject: Subject, name: str) -> str | None:
    """What is wrong by the check ``name``, or None. The first question runs all such checks that apply.

    Raises:
        CheckFailed: another process cannot make the recipe.
    """
    known: dict[str, str | None] = subject.kept.setdefault(_KEY, {})
    if name not in known:
        from ottava_testing.checks.ranks import RANK_BODIES
        from ottava_testing.table import list_checks

        checks = {check.name: check for check in list_checks()}
        wanted = subject.wanted or RANK_BODIES
        names = [n for n in RANK_BODIES if n in (name, *wanted) and checks[n].why_not(subject.spec) is None]
        names = [n for n in names if n not in known]
        _run(subject, names, known)
    return known[name]


def _run(subject: Subject, names: list[str], known: dict[str, str | None]) -> None:
    """Launch until every name has an outcome: ranks end at the first failure, which leaves the others waiting."""
    source = pickle.dumps(subject.source())
    while names:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "source.pickle").write_bytes(source)
            (folder / "request.json").write_text(json.dumps({"names": names, "world": WORLD, "path": sys.path}))
            _prepare(subject, folder)
            ended, printed = _launch(folder)
            told = _told(folder)
        finished = [n for n in names if len(told.get(n, {})) == WORLD and not any(told[n].values())]
        known.update(dict.fromkeys(finished))
        names = [n for n in names if n not in finished]
        if names:
            failed = names.pop(0)
            known[failed] = next((text for text in told.get(failed, {}).values() if text), None) or (
                f"{failed}: the processes did not end in {TIMEOUT:.0f} s: do the ranks wait for each other?"
                if not ended
                else f"{failed}: a process ended without a result\n{printed[-2000:]}"
            )


def _prepare(subject: Subject, folder: Path) -> None:
    """What a rank is to load."""
    if subject.spec.quantized_weights:
        weight = subject.weight(wide(48, 40))
        with contextlib.suppress(Exception):  # a check in this process says so
            torch.save(weight, folder / "weight.pt")
        torch.save(plain(weight), folder / "values.pt")


def _launch(folder: Path) -> tuple[bool, str]:
    """Run the worker: whether it ended in time, and what it printed."""
    path = os.pathsep.join([entry for entry in sys.path if entry] + [os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    log = folder / "log"
    with log.open("wb") as file:
        worker = subprocess.Popen(
            [sys.executable, "-m", "ottava_testing.worker", str(folder)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            worker.wait(TIMEOUT)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            # Its own session: the ranks are in it and nothing else.
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    return ended, log.read_text(errors="replace")


def _told(folder: Path) -> dict[str, dict[int, str]]:
    """What each rank said of each check, the first to say something first: "" where it passed."""
    said: list[tuple[float, int, dict[str, Any]]] = []
    for rank in range(WORLD):
        file = folder / f"rank-{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else []:
            entry: dict[str, Any] = json.loads(line)
            said.append((entry["at"], rank, entry))
    told: dict[str, dict[int, str]] = {}
    for _, rank, entry in sorted(said, key=lambda one: one[:2]):
        told.setdefault(entry["name"], {})[rank] = entry["failure"]
    return told
