"""What ``ottava.distributed`` does for tensors, found by name on first use.

Imports go down the list of rooms, and ``distributed`` stands above ``tensors``. FSDP2 asks a quantized tensor for its
hooks, though, and an optimizer writes to shards, in programs that import ``ottava`` alone. Here, and nowhere else in
core, a module is found upwards.
"""

import importlib
from typing import Any


def above(module: str) -> Any:
    """A module of :mod:`ottava.distributed`: ``"hooks"``, ``"fsdp2"``, the ``"rules"`` for shards, or one rule."""
    return importlib.import_module(f"ottava.distributed.{module}")
