"""The compiled CPU backend.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``,
``portable``) forces one. Kernels use as many threads as ``torch.get_num_threads()`` says.
"""

import functools
import os
from typing import Any

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.kernels.checks import Tensor
from ottava.kernels.compiled import Compiled, known
from ottava.kernels.direct import QUESTIONS

_threads = torch.get_num_threads
try:
    if _wanted_isa := os.environ.get("OTTAVA_ISA"):
        _cpu.set_isa(_wanted_isa)
except ValueError:
    _what, _isas = (
        f"OTTAVA_ISA={_wanted_isa!r} is not an instruction set of this machine",
        _cpu.available_isas(),
    )
    raise BackendError(
        _what, expected=f"one of {', '.join(_isas)}", remedy="correct or unset OTTAVA_ISA"
    ) from None

# The module's functions that take tensors read them through this table of torch's C functions. In
# a torch without the table they decline every tensor and leave it to Python.
_cpu.connect(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), QUESTIONS)


class _CPU(Compiled):
    native = _cpu

    def place(self, x: Tensor) -> tuple[int, ...]:
        return (_threads(),)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def plan(text: str) -> Any:
        """The description of a layout that the module takes; it is made once for each layout."""
        layout, code, rule, sides = known(text)
        return _cpu.GridPlan(code, *rule, layout.finite_as == "input", *sides)


#: The kernels, as methods with the names of the table.
BACKEND = _CPU()
