"""The compiled CPU backend.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``,
``portable``) forces one. Kernels use ``torch.get_num_threads()`` threads.
"""

import functools
import os
from typing import Any

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.kernels.checks import Tensor
from ottava.kernels.compiled import DTYPE_CODES, Compiled, is_native, native_layout
from ottava.kernels.direct import QUESTIONS
from ottava.layout import Layout, as_matrix_shape

_threads = torch.get_num_threads
_SEED_MASK = 2**64 - 1


def _force_isa(name: str) -> None:
    try:
        _cpu.set_isa(name)
    except ValueError:
        raise BackendError(
            f"OTTAVA_ISA={name!r} is not an instruction set of this machine",
            expected=f"one of {', '.join(_cpu.available_isas())}",
            remedy="correct or unset OTTAVA_ISA",
        ) from None


if os.environ.get("OTTAVA_ISA"):
    _force_isa(os.environ["OTTAVA_ISA"])

# The module reads tensors through this table of torch's C functions. In a torch without the table
# it declines every tensor, and Python takes them.
_cpu.connect(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), QUESTIONS)


class CPUBackend(Compiled):
    """The kernels of ``_cpu``, whose last argument is the number of threads."""

    native = _cpu

    def place(self, x: Tensor) -> tuple[int, ...]:
        return (_threads(),)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def plan(text: str) -> _cpu.GridPlan | None:
        """The module's description of a layout, which is made once for each layout.

        None for a layout that the module does not know.
        """
        if not is_native(Layout.of(text)):
            return None
        layout, element, rule, (rows, columns) = native_layout(text)
        return _cpu.GridPlan(element, *rule, layout.finite_as == "input", rows, columns)

    def quantize_levels(
        self,
        x: Tensor,
        seed: Tensor | None,
        first_row: int,
        plan: Any,
        results: tuple[list[int], list[int]],
    ) -> None:
        key = 0 if seed is None else int(seed) & _SEED_MASK
        source = x.data_ptr(), DTYPE_CODES[x.dtype], *as_matrix_shape(x.shape)
        self.native.levels_quantize(plan, *source, key, first_row, *results, _threads())


#: The backend.
BACKEND = CPUBackend()
