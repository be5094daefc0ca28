"""The ranks of the checks on several processes: ``python -m ottava_testing.worker``.

This process imports what takes long, once, and then reads the folders of requests, a line for each.
For each it forks a process of its own session, which forks the ranks and waits for them; neither
has a process group itself. A rank writes one line for each name, and ends at the first that fails.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
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


def import_from(name: str, file: str) -> None:
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


def _rank(rank: int, folder: Path, request: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ottava_testing.compare import CheckFailed, describe

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = int(request["world"])
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world,))
    module, _, function = request["body"].partition(":")
    with (folder / f"rank-{rank}.jsonl").open("w") as told:
        for name in request["names"]:
            failure = ""
            try:
                torch.manual_seed(0)
                # Layers that are garbage would take part in reductions, on each rank until another
                # time.
                gc.collect()
                getattr(importlib.import_module(module), function)(name, mesh, folder)
                dist.barrier()
            except CheckFailed as error:
                failure = str(error)
            except Exception as error:
                traceback.print_exc()
                failure = f"{name}, on rank {rank} of {world}: {describe(error)}"
            # One clock for all processes: the rank that failed first says why, the others lost it.
            told.write(
                json.dumps({"name": name, "failure": failure, "at": time.monotonic()}) + "\n"
            )
            told.flush()
            if failure:
                raise SystemExit(1)


def _ended(work: Any, *arguments: Any) -> int:
    """The exit code of a process that does nothing but this."""
    code = 1
    try:
        code = int(work(*arguments) or 0)
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _launch(folder: Path) -> int:
    """Fork the ranks that a request asks for and wait for them; 0 where all ended well."""
    request = json.loads((folder / "request.json").read_text())
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    alive: set[int] = set()
    for rank in range(int(request["world"])):
        pid = os.fork()
        if not pid:
            # Without the interpreter's finalization, which gloo's threads can abort.
            os._exit(_ended(_rank, rank, folder, request))
        alive.add(pid)
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


def _lead(folder: Path) -> int:
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return _launch(folder)


def main() -> None:
    """Answer each request with the process id of its session's leader, and with a line when that
    has ended."""
    answers = os.fdopen(os.dup(1), "w")
    # What anything prints is no answer.
    os.dup2(2, 1)
    # What fully_shard imports takes longer than what is checked; threads are started by none of it.
    for name in ("torch._dynamo", "torch.distributed.fsdp", "ottava_testing.checks.ranks"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # Forks look at nothing of it when they collect garbage, and so do not copy it.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(_ended(_lead, Path(line.rstrip("\n"))))
        print(pid, file=answers, flush=True)
        os.waitpid(pid, 0)
        print("ended", file=answers, flush=True)


if __name__ == "__main__":
    main()
