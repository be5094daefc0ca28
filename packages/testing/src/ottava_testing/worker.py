"""The ranks of the checks on several processes: ``python -m ottava_testing.worker FOLDER``.

This process imports what takes long, forks the ranks and waits for them; it has no process group itself. A rank writes
one line for each check, and ends at the first that fails.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

# How long a rank may take to fail as another one did, once that has ended.
_GRACE = 3.0


def _import(name: str, file: str) -> None:
    """Import a module by its name, or else from its file under that name."""
    try:
        importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _rank(rank: int, world: int, folder: Path, names: list[str]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ottava_testing.checks.ranks import RANK_BODIES
    from ottava_testing.compare import CheckFailed
    from ottava_testing.runner import describe
    from ottava_testing.subject import Subject
    from ottava_testing.table import list_checks

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=60))
    promises = {check.name: check.promise for check in list_checks()}
    with (folder / f"rank-{rank}.jsonl").open("w") as told:
        for name in names:
            failure = ""
            try:
                source: Any = pickle.loads((folder / "source.pickle").read_bytes())
                for module, file in source.modules:
                    _import(module, file)
                torch.manual_seed(0)
                subject = Subject.of_source(source)
                RANK_BODIES[name](subject, init_device_mesh("cpu", (world,)), folder)
                dist.barrier()
            except CheckFailed as error:
                failure = str(error)
            except Exception as error:
                traceback.print_exc()
                failure = f"{name} ({promises[name]}), on rank {rank} of {world}: {describe(error)}"
            # One clock for all processes: the rank that failed first says why, the others lost it.
            told.write(json.dumps({"name": name, "failure": failure, "at": time.monotonic()}) + "\n")
            told.flush()
            if failure:
                raise SystemExit(1)


def _fork(rank: int, world: int, folder: Path, names: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _rank(rank, world, folder, names)
        code = 0
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort.
    os._exit(code)


def main(folder: Path) -> int:
    """Run the ranks that a request asks for; 0 where all ended well."""
    request = json.loads((folder / "request.json").read_text())
    sys.path[:] = request["path"]
    # What fully_shard imports takes longer than what is checked; threads are started by none of it.
    for name in ("torch._dynamo", "torch.distributed.fsdp", "ottava_testing.checks.ranks"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    world = int(request["world"])
    alive = {_fork(rank, world, folder, request["names"]) for rank in range(world)}
    failed, deadline = False, float("inf")
    while alive and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            continue
        alive.discard(pid)
        if status:
            # The others may fail by themselves; if they wait for it, they are ended.
            failed, deadline = True, time.monotonic() + _GRACE
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
