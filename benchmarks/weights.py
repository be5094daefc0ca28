"""How much memory an export and a load of a model of 2 GB hold beside the model.

`python -m benchmarks.weights` writes benchmarks/weights.json and the table of
docs/weights-in-and-out.md. It takes a minute, and 5 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown, with_part

FOLDER = Path(__file__).parent
RESULTS, PAGE = FOLDER / "weights.json", FOLDER.parent / "docs" / "weights-in-and-out.md"
NAME = "weights"
_SIDE, _LAYERS = 8192, 16
_SHARD = 256 << 20
_MIB = 1 << 20
_FORMAT = "mxfp8-quantized"


def model(device: str = "cpu") -> Any:
    """Sixteen layers of 128 MiB in BF16."""
    import torch

    with torch.device(device):
        layers = [
            torch.nn.Linear(_SIDE, _SIDE, bias=False, dtype=torch.bfloat16) for _ in range(_LAYERS)
        ]
    return torch.nn.Sequential(*layers)


def anonymous() -> int:
    """Bytes of this process that belong to no file: what is mapped can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the system does not tell RssAnon")


def peak_of(function: Callable[[], object]) -> int:
    """The most memory, in bytes, that the process has while a function runs."""
    peak, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    function()
    done.set()
    thread.join()
    return max(peak[0], anonymous())


def measure_export(folder: str) -> int:
    """Memory beside the model while it is exported."""
    from ottava_integrations import export_model

    made = model()
    before = anonymous()
    target = Path(folder) / "out"
    return peak_of(lambda: export_model(made, target, _FORMAT, max_shard_size=_SHARD)) - before


def measure_load(folder: str) -> int:
    """Memory beside the loaded model while a model on the meta device is loaded."""
    from ottava_integrations import load_quantized

    made = model("meta")
    peak = peak_of(lambda: load_quantized(made, Path(folder) / "out"))
    return peak - anonymous()


def _measured(step: str, folder: str) -> int:
    """A step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.weights", "--step", step, "--folder", folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Measure, and write the results and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", choices=["export", "load"])
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    if arguments.step:
        step = {"export": measure_export, "load": measure_load}[arguments.step]
        print(step(arguments.folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"step": step, "model": _SIDE * _SIDE * 2 * _LAYERS // _MIB, "shard": _SHARD // _MIB}
            | {"beside": _measured(step, folder) // _MIB}
            for step in ("export", "load")
        ]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table = markdown(
        [
            {
                "step": row["step"],
                "model in BF16 (MiB)": row["model"],
                "file (MiB)": row["shard"],
                "memory beside the model (MiB)": row["beside"],
            }
            for row in rows
        ]
    )
    PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), NAME, table), encoding="utf-8")


if __name__ == "__main__":
    main()
