"""Times imports in fresh processes."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.timing import interleaved

_CODES = {
    "import torch": "import torch",
    "import torch, ottava": "import torch, ottava",
    "import ottava": "import ottava",
    "import ottava; ottava.convert": "import ottava; ottava.convert",
}


def measure(rounds: int) -> list[dict[str, object]]:
    """One row for each import; the ratio is to importing torch alone."""
    runs = {
        name: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for name, code in _CODES.items()
    }
    seconds = interleaved(runs, rounds=rounds, warmup=1)
    return [
        {
            "import": name,
            "milliseconds": 1e3 * value,
            "times torch": value / seconds["import torch"],
        }
        for name, value in seconds.items()
    ]
