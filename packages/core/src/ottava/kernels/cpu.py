"""The compiled CPU backend.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``, ``portable``) forces one.
Thread counts follow ``torch.get_num_threads()``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.formats import element_format, fp8_format
from ottava.kernels import reference
from ottava.kernels.checks import Tensor, Tensors
from ottava.kernels.compiled import DTYPE_CODES, Compiled, matrix
from ottava.layout import Block, Layout, as_matrix_shape

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

    def quantize_any(self, x: Tensor, layout: Layout, out: Sequence[Tensor | None]) -> None:
        if not x.numel():
            reference.grid_quantize(x, layout.text, out)
            return
        x = x.contiguous()
        rows, columns = (_side(layout, side, *out[2 * side : 2 * side + 2]) for side in (False, True))
        largest = torch.finfo(x.dtype if layout.finite_as == "input" else torch.float32).max
        rule = layout.scale is not torch.float32, layout.rounding == "floor", layout.epsilon, largest
        source = x.data_ptr(), DTYPE_CODES[x.dtype], *as_matrix_shape(x.shape), element_format(layout.element).code
        _cpu.grid_quantize(*source, *rule, rows, columns, _threads())

    def decode_any(self, data: Tensor, scales: Tensor, layout: Layout, columnwise: bool, out: Tensor) -> None:
        source = data.data_ptr(), element_format(layout.element).code, *layout.stored_matrix(data.shape, columnwise)
        of = scales.data_ptr(), layout.scale is not torch.float32, *_block(layout.stored_block(columnwise))
        _cpu.grid_decode(*source, *of, out.data_ptr(), DTYPE_CODES[out.dtype], _threads())

    def cast(self, x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, out: Tensor) -> None:
        x, fmt = x.contiguous(), fp8_format(fp8_dtype).code
        _cpu.cast(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), scale.data_ptr(), out.data_ptr(), fmt, _threads())

    def cast_transpose(self, x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, out: Tensors) -> None:
        x, fmt = x.contiguous(), fp8_format(fp8_dtype).code
        source = x.data_ptr(), DTYPE_CODES[x.dtype], *matrix(x)
        _cpu.cast_transpose(*source, scale.data_ptr(), out[0].data_ptr(), out[1].data_ptr(), fmt, _threads())


def _block(block: Block) -> tuple[int, int]:
    """Rows and columns, 0 for all."""
    return block[0] or 0, block[1] or 0


def _side(layout: Layout, columnwise: bool, data: Tensor | None, scales: Tensor | None) -> tuple[Any, ...]:
    """What the module is told of one direction; nothing of one that is not wanted."""
    if data is None or scales is None:
        return ()
    blocks = *_block(layout.block_of(columnwise)), *_block(layout.block_of(columnwise, shared=True))
    return *blocks, columnwise and layout.transposed, data.data_ptr(), scales.data_ptr()


#: The kernels, by the names of the table.
BACKEND = _CPU()
