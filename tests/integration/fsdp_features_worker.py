"""One rank of test_fsdp_features.py: trains under FSDP2 in many ways and compares with one process, bit for bit.

Usage: fsdp_features_worker.py RANK WORLD STORE CASE ..., on gloo and the CPU. A CASE is a function of
fsdp_running_cases.py or fsdp_keeping_cases.py.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, os.path.dirname(__file__))

import fsdp_keeping_cases
import fsdp_running_cases


def main() -> int:
    rank, world, store, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, store=dist.FileStore(store, world), timeout=timedelta(seconds=240)
    )
    mesh = init_device_mesh("cpu", (world,))
    failed = 0
    for name in names:
        case = getattr(fsdp_running_cases, name, None) or getattr(fsdp_keeping_cases, name)
        error = ""
        try:
            case(mesh)
        except Exception:
            error = f"rank {rank}, {name}:\n{traceback.format_exc()}"
            print(error, flush=True)
        errors: list[Any] = [None] * world
        dist.all_gather_object(errors, error)
        failed += any(errors)
    dist.barrier()
    return failed


if __name__ == "__main__":
    try:
        code = min(main(), 1)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort (a group that is still referenced).
    os._exit(code)
