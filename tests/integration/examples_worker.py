"""Runs command lines of the examples one after the other in one process group, on the ranks that torchrun started.

Usage: examples_worker.py EXAMPLES LINES. LINES is a file with one command line a line: the name of an example and its
arguments. Prints a line with ``## `` and the command line before each.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, sys.argv[1])
    dist.init_process_group("gloo")
    for line in Path(sys.argv[2]).read_text().splitlines():
        if dist.get_rank() == 0:
            print(f"## {line}", flush=True)
        name, *arguments = line.split()
        importlib.import_module(name).main(arguments)
        # A model that is gone on one rank and not yet on another would take part in the other's collectives.
        gc.collect()
    dist.barrier()


if __name__ == "__main__":
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort (a group that is still referenced).
    os._exit(code)
