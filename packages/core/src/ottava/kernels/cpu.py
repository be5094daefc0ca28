"""The compiled CPU backend.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``, ``portable``) forces one.
Thread counts follow ``torch.get_num_threads()``.
"""

from __future__ import annotations

import os

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.kernels.checks import Tensor
from ottava.kernels.compiled import Compiled

_threads = torch.get_num_threads

try:
    if _wanted_isa := os.environ.get("OTTAVA_ISA"):
        _cpu.set_isa(_wanted_isa)
except ValueError:
    raise BackendError(
        f"OTTAVA_ISA={_wanted_isa!r} is not an instruction set of this machine",
        expected=f"one of {', '.join(_cpu.available_isas())}",
        remedy="correct or unset OTTAVA_ISA",
    ) from None


def isa() -> str:
    """The instruction set that the kernels use."""
    return _cpu.isa()


class _CPU(Compiled):
    native = _cpu

    def stream(self, x: Tensor) -> tuple[int, ...]:
        return ()

    def place(self, x: Tensor) -> tuple[int, ...]:
        return (_threads(),)


#: The kernels, by the names of the table.
BACKEND = _CPU()
