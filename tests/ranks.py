"""Cases that run on several ranks, functions of a module that take the device mesh: all of a list
in one launch."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ottava_testing import CheckFailed, launch


def failures(module: str, names: list[str], world: int = 2) -> dict[str, str | None]:
    """What went wrong in each case, or None."""
    told = launch.run_on_ranks(
        "tests.ranks:run", [f"{module}.{name}" for name in names], world, seconds=400
    )
    return {name: told[f"{module}.{name}"] for name in names}


def run(name: str, mesh: Any, folder: Path) -> None:
    """One case on this rank."""
    module, _, function = name.rpartition(".")
    try:
        getattr(importlib.import_module(module), function)(mesh)
    except Exception as error:
        raise CheckFailed(f"rank {mesh.get_rank()}:\n{traceback.format_exc()}") from error


class Counted:
    """Counts the all-reduces of a block, while it runs."""

    count = 0

    def __enter__(self) -> Counted:
        self.original = dist.all_reduce

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self.original(*args, **kwargs)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self.original
