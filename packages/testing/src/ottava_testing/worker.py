"""The process that forks the ranks of the checks on several processes.

It imports once what takes long, and then receives requests. It forks the ranks of each request,
waits for them, and answers ``ended`` or ``late``. A rank writes one line for each name, and ends at
the first that fails.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from ottava.recipes import registry

# Seconds that the other ranks have to fail by themselves, once one has failed.
_GRACE = 3.0


def import_from(name: str, file: str) -> None:
    """Import a module by its name, or, if that fails, from ``file`` under that name."""
    try:
        importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _rank(rank: int, request: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ottava_testing.compare import CheckFailed, describe

    warnings.simplefilter("ignore")
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    folder, world = Path(request["folder"]), int(request["world"])
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world,))
    module, _, function = request["body"].partition(":")
    with (folder / f"rank-{rank}.jsonl").open("w") as reports:
        for name in request["names"]:
            failure = ""
            try:
                torch.manual_seed(0)
                # Layers that are garbage still take part in reductions, and each rank would collect
                # them at another time.
                gc.collect()
                getattr(importlib.import_module(module), function)(name, mesh, folder)
                dist.barrier()
            except CheckFailed as error:
                failure = str(error)
            except Exception as error:
                traceback.print_exc()
                failure = f"{name}, on rank {rank} of {world}: {describe(error)}"
            # All processes share this clock. The rank that failed first has the cause, and the
            # others fail because they lose it.
            entry = {"name": name, "failure": failure, "at": time.monotonic()}
            reports.write(json.dumps(entry) + "\n")
            reports.flush()
            if failure:
                raise SystemExit(1)


def _fork(rank: int, request: dict[str, Any]) -> int:
    """The process id of a new rank, which has the environment and the path of the request."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(Path(request["folder"]) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        # Packages may have been installed since this process was started.
        registry.reload()
        _rank(rank, request)
        code = 0
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # This exit skips the interpreter's finalization, during which gloo's threads can abort.
    os._exit(code)


def _run(request: dict[str, Any]) -> str:
    """Fork the ranks of a request and wait for them; how they ended."""
    late = time.monotonic() + float(request["seconds"])
    deadline = late
    alive = {_fork(rank, request) for rank in range(int(request["world"]))}
    while alive and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            continue
        alive.discard(pid)
        if status:
            # The other ranks may fail by themselves. Those that wait for this one are killed.
            deadline = min(deadline, time.monotonic() + _GRACE)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return "late" if alive and deadline == late else "ended"


def serve(connection: Connection) -> NoReturn:
    """Answer requests until the other end of the connection is closed."""
    try:
        # An interrupt does not reach a session of its own, and it can be killed with the ranks.
        os.setsid()
        # In a fork of pytest these would write to what pytest captures.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        import_modules()
        # Garbage collection in the forks ignores frozen objects, so their memory is not copied.
        gc.freeze()
        while True:
            connection.send(_run(connection.recv()))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def import_modules() -> None:
    """Import what every rank needs.

    The modules that fully_shard imports take longer to import than the checks to run. None of them
    starts threads, so forking afterwards is safe.
    """
    for name in ("torch._dynamo", "torch.distributed.fsdp", "ottava_testing.checks.ranks"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
