"""What ``ottava.distributed`` does for tensors and layers, found by name on first use."""

import importlib
from types import ModuleType


def above(module: str) -> ModuleType:
    """A module of :mod:`ottava.distributed`: FSDP2 and optimizers ask tensors in programs that
    import ``ottava`` alone.

    Here, and nowhere else in core, a module is found upwards, by its name on first use.
    """
    return importlib.import_module(f"ottava.distributed.{module}")
