"""What stands in for a GPU in a rehearsal, and for a second one."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.on_gpu.build import ROOT
from benchmarks.on_gpu.place import Gpu, Rehearsal
from ottava.kernels import use_backend


def stand_in() -> Rehearsal:
    """The reference in the place of the GPU's backend."""
    return Rehearsal(lambda: use_backend("reference"), "reference")


def grid() -> Rehearsal:
    """The CUDA backend with its kernels as loops, as core's tests have it.

    Raises:
        AssertionError, ImportError: it cannot be built.
    """
    path = ROOT / "tests" / "core" / "sequential_grid.py"
    spec = importlib.util.spec_from_file_location("sequential_grid", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = sys.modules.get("sequential_grid")
    if module is None:
        module = sys.modules["sequential_grid"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    module.backend()

    def serving() -> AbstractContextManager[Any]:
        return _serving(module)

    return Rehearsal(serving, "grid")


@contextlib.contextmanager
def _serving(module: Any) -> Iterator[None]:
    with module.serving_cpu():
        yield


def elsewhere(place: Gpu) -> Gpu | None:
    """Another GPU than the current one, to see that nothing depends on which is current; a loop in a rehearsal."""
    if place.rehearsal:
        try:
            return grid()
        except (AssertionError, ImportError, OSError) as error:
            print(f"The kernels as loops cannot be built here: {str(error)[:200]}")
            return None
    return Gpu(1) if torch.cuda.device_count() > 1 else None
