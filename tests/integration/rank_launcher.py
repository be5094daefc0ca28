"""Runs cases on ranks, all in one launch, so that what every rank imports is imported once.

Usage: rank_launcher.py FOLDER CASE.... A case is MODULE.FUNCTION of this folder, after ``2:`` or
``4:`` a function of a
mesh of so many ranks, else one of a folder, which starts ranks itself. Prints a line of JSON for
each: its name, its error ("" where there is none) and its CPU seconds, on ranks those of the first.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What FSDP2 asks the machine's name for.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from forked_ranks import Ranks, import_all
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from sampling import some

#: After which the ranks of all cases are killed.
SECONDS = some(900, 3600)


def function(case: str) -> Callable[[Any], Any]:
    module, name = case.partition(":")[2].rsplit(".", 1)
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return found


def report(case: str, error: str, seconds: float) -> None:
    print(json.dumps({"case": case, "error": error, "seconds": round(seconds, 2)}), flush=True)


def on_ranks(cases: list[str], world: int, folder: Path) -> None:
    """The cases one after the other on the same ranks; on new ones after one that failed, as others
    wait for it."""
    folder.mkdir()
    while cases:
        done = folder / f"done-{len(cases)}"

        def job(mesh: DeviceMesh, cases: list[str] = cases, done: Path = done) -> None:
            for case in cases:
                began = time.process_time()
                # Garbage would take part in reductions until it is collected, on each rank at
                # another time.
                gc.collect()
                function(case)(mesh)
                dist.barrier()
                if dist.get_rank() == 0:
                    with done.open("a") as file:
                        file.write(f"{time.process_time() - began}\n")

        error = ""
        try:
            Ranks(job, world, folder).succeed(SECONDS)
        except AssertionError as raised:
            error = str(raised)
        for seconds in done.read_text().split() if done.exists() else ():
            report(cases[0], "", float(seconds))
            cases = cases[1:]
        if cases:
            report(cases[0], error or "the ranks did not end", 0.0)
            cases = cases[1:]


def by_itself(case: str, folder: Path) -> None:
    folder.mkdir()
    began, error = os.times(), ""
    try:
        function(case)(folder)
    except Exception:
        error = traceback.format_exc()
    report(case, error, sum(os.times()[:4]) - sum(began[:4]))


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import_all()
    for case in cases:
        function(case)
    # Forks do not copy what is not looked at, and do not look at it each time.
    gc.collect()
    gc.freeze()
    for number, (world, group) in enumerate(
        itertools.groupby(cases, lambda case: case.partition(":")[0])
    ):
        if world:
            on_ranks(list(group), int(world), folder / str(number))
            continue
        for case in group:
            by_itself(case, folder / case.rpartition(".")[2])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
