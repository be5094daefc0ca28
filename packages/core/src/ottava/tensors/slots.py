"""What ``ottava.distributed`` does for tensors, found by name on first use."""

import importlib
from typing import Any


def above(module: str) -> Any:
    """A module of :mod:`ottava.distributed`: ``"hooks"`` or the ``"rules"`` for shards.

    It stands above ``tensors``, and FSDP2 and optimizers ask tensors in programs that import ``ottava`` alone: here,
    and nowhere else in core, a module is found upwards, by its name on first use.
    """
    return importlib.import_module(f"ottava.distributed.{module}")
