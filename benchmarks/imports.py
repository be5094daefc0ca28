"""Times imports in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from benchmarks.timing import Row, Timing, ready

_CODES = (
    "import torch",
    "import torch, ottava",
    "import ottava",
    "import ottava; ottava.convert",
)


def timings() -> list[Timing]:
    """One row, with an alternative for each import."""
    commands = {code: [sys.executable, "-c", code] for code in _CODES}
    runs = {
        code: ready(partial(subprocess.run, command, check=True))
        for code, command in commands.items()
    }
    return [Timing("imports", runs)]


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds of each import, and their ratio to importing torch alone."""
    seconds = rows[0]["seconds"]
    return [
        {
            "import": name,
            "milliseconds": 1e3 * value,
            "times torch": value / seconds["import torch"],
        }
        for name, value in seconds.items()
    ]
