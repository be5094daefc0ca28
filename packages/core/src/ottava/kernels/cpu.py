"""The compiled CPU backend.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``, ``portable``) forces one.
Thread counts follow ``torch.get_num_threads()``.
"""

from __future__ import annotations

import os

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.formats import fp8_format
from ottava.kernels.checks import Tensor, Tensors
from ottava.kernels.compiled import DTYPE_CODES, Compiled, matrix

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
    cast_and_record = staticmethod(_cpu.cast_amax)
    writes_all = True

    def stream(self, x: Tensor) -> tuple[int, ...]:
        return ()

    def place(self, x: Tensor) -> tuple[int, ...]:
        return (_threads(),)

    def cast(self, x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, out: Tensor) -> None:
        x, fmt = x.contiguous(), fp8_format(fp8_dtype).code
        _cpu.cast(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), scale.data_ptr(), out.data_ptr(), fmt, _threads())

    def cast_transpose(self, x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, out: Tensors) -> None:
        x, fmt = x.contiguous(), fp8_format(fp8_dtype).code
        source = x.data_ptr(), DTYPE_CODES[x.dtype], *matrix(x)
        _cpu.cast_transpose(*source, scale.data_ptr(), out[0].data_ptr(), out[1].data_ptr(), fmt, _threads())


#: The kernels, by the names of the table.
BACKEND = _CPU()
