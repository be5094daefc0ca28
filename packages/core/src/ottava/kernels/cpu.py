"""The compiled CPU backend.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``,
``portable``) forces one. Kernels use ``torch.get_num_threads()`` threads.
"""

import functools
import os

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.kernels import reference
from ottava.kernels.checks import Outputs, Tensor
from ottava.kernels.compiled import DTYPE_CODES, Compiled, is_native, native_layout, pointers
from ottava.kernels.direct import QUESTIONS
from ottava.kernels.levels import decodes_levels, native_levels, quantizes_levels
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

    # -- layouts with small elements, two levels of scales, rotation or choices --

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def levels_plan(text: str) -> _cpu.LevelsPlan:
        """The module's description of such a layout, which is made once for each layout."""
        return _cpu.LevelsPlan(native_levels(Layout.of(text)))

    def grid_quantize_levels(
        self, x: Tensor, seed: Tensor | None, first_row: int, text: str, out: Outputs
    ) -> None:
        if not x.numel() or not quantizes_levels(Layout.of(text)):
            reference.grid_quantize_levels(x, seed, first_row, text, out)
            return
        x = x.contiguous()
        key = 0 if seed is None else int(seed) & _SEED_MASK
        self.native.levels_quantize(
            self.levels_plan(text),
            x.data_ptr(),
            DTYPE_CODES[x.dtype],
            *as_matrix_shape(x.shape),
            key,
            first_row,
            pointers(*out[:3]),
            pointers(*out[3:]),
            _threads(),
        )

    def grid_decode_levels(
        self,
        data: Tensor,
        scales: Tensor | None,
        amax: Tensor | None,
        text: str,
        columnwise: bool,
        out: Tensor,
    ) -> None:
        layout = Layout.of(text)
        if out.dtype is torch.float64 or not decodes_levels(layout):
            reference.grid_decode_levels(data, scales, amax, text, columnwise, out)
            return
        # The copies live until the kernel has run.
        data = data.contiguous()
        scales = None if scales is None else scales.contiguous()
        amax = None if amax is None else amax.contiguous()
        scales_address, amax_address = pointers(scales, amax)
        block_rows, block_columns = layout.stored_block(columnwise)
        self.native.levels_decode(
            self.levels_plan(text),
            data.data_ptr(),
            *layout.stored_matrix(data.shape, columnwise),
            scales_address,
            block_rows or 0,
            block_columns or 0,
            amax_address,
            columnwise and not layout.transposed,
            out.data_ptr(),
            DTYPE_CODES[out.dtype],
            _threads(),
        )


#: The backend.
BACKEND = CPUBackend()
