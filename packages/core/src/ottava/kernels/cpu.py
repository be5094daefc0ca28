"""The compiled CPU backend: :mod:`ottava._cpu` takes raw pointers; this module makes them, of contiguous tensors.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``, ``portable``) forces one.
Thread counts follow ``torch.get_num_threads()``. What the functions do, the table of kernels says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.formats import fp8_format
from ottava.kernels.addresses import (
    DTYPE_CODES,
    Buffers,
    cast_jobs,
    dense,
    matrix,
    mx_amax_jobs,
    mx_cast_jobs,
    pointer,
    slots,
    sources,
)
from ottava.kernels.reference_mx import mx_decode_exact

Tensor = torch.Tensor
_threads = torch.get_num_threads


def _apply_isa_from_environment() -> None:
    wanted = os.environ.get("OTTAVA_ISA")
    if not wanted:
        return
    try:
        _cpu.set_isa(wanted)
    except ValueError:
        raise BackendError(
            f"OTTAVA_ISA={wanted!r} is not an instruction set of this machine",
            expected=f"one of {', '.join(_cpu.available_isas())}",
            remedy="correct or unset OTTAVA_ISA",
        ) from None


_apply_isa_from_environment()


def isa() -> str:
    """The instruction set that the kernels use."""
    return _cpu.isa()


def amax(x: Tensor, out: Tensor) -> None:
    x = x.contiguous()
    _cpu.amax(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), out.data_ptr(), _threads())


def scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, scale: Tensor, scale_inv: Tensor
) -> None:
    amax, largest = amax.contiguous(), fp8_format(fp8_dtype).max
    results = scale.data_ptr(), scale_inv.data_ptr()
    _cpu.scale_from_amax(amax.data_ptr(), amax.numel(), largest, epsilon, force_pow_2, *results)


def cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, data: Tensor) -> None:
    x, code = x.contiguous(), fp8_format(fp8_dtype).code
    _cpu.cast(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), scale.data_ptr(), data.data_ptr(), code, _threads())


def cast_transpose(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, data: Tensor, transpose: Tensor) -> None:
    x, code = x.contiguous(), fp8_format(fp8_dtype).code
    _cpu.cast_transpose(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        scale.data_ptr(),
        data.data_ptr(),
        transpose.data_ptr(),
        code,
        _threads(),
    )


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    data: Tensor | None,
    transpose: Tensor | None,
    scale: Tensor | None,
    scale_inv: Tensor,
    amax: Tensor | None,
) -> None:
    x = x.contiguous()
    # The kernel writes the scalars that nobody wants too.
    scale = torch.empty_like(scale_inv) if scale is None else scale
    amax = torch.empty_like(scale_inv) if amax is None else amax
    scalars = amax.data_ptr(), scale.data_ptr(), scale_inv.data_ptr()
    code = fp8_format(fp8_dtype).code
    _cpu.quantize(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        epsilon,
        force_pow_2,
        *scalars,
        pointer(data),
        pointer(transpose),
        code,
        _threads(),
    )


def cast_amax(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    saturated: Tensor | None,
    fp8_dtype: torch.dtype,
    data: Tensor | None,
    transpose: Tensor | None,
    scale_inv: Tensor,
) -> None:
    x = x.contiguous()
    # The kernel writes all the same.
    data = torch.empty_like(x, dtype=torch.uint8) if data is None else data
    amax = torch.empty_like(scale_inv) if amax is None else amax
    scalars = scale.data_ptr(), amax.data_ptr(), pointer(saturated), scale_inv.data_ptr()
    code = fp8_format(fp8_dtype).code
    _cpu.cast_amax(
        x.data_ptr(), DTYPE_CODES[x.dtype], *matrix(x), *scalars, data.data_ptr(), pointer(transpose), code, _threads()
    )


def transpose(data: Tensor, out: Tensor) -> None:
    data = data.contiguous()
    _cpu.transpose(data.data_ptr(), *matrix(data), out.data_ptr(), _threads())


def decode(data: Tensor, scale_inv: Tensor | None, fp8_dtype: torch.dtype, out: Tensor) -> None:
    data, code = data.contiguous(), fp8_format(fp8_dtype).code
    to = out.data_ptr(), DTYPE_CODES[out.dtype]
    _cpu.decode(data.data_ptr(), code, data.numel(), pointer(scale_inv), *to, _threads())


def update_scales(
    scales: list[Tensor], histories: list[Tensor], maxima: list[float], most_recent: bool, last: Tensor | None
) -> None:
    _cpu.update_scales(slots(scales, histories), histories[0].shape[0], maxima, most_recent, pointer(last))


def mx_scale_from_amax(amax: Tensor, fp8_dtype: torch.dtype, floor: bool, out: Tensor) -> None:
    amax, code = amax.contiguous(), fp8_format(fp8_dtype).code
    _cpu.mx_scale_from_amax(amax.data_ptr(), amax.numel(), code, floor, out.data_ptr(), _threads())


def mx_quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    two_dimensional: bool,
    floor: bool,
    row: Tensor | None,
    row_scales: Tensor | None,
    column: Tensor | None,
    column_scales: Tensor | None,
) -> None:
    x, code = x.contiguous(), fp8_format(fp8_dtype).code
    results = pointer(row), pointer(row_scales), pointer(column), pointer(column_scales)
    _cpu.mx_quantize(x.data_ptr(), DTYPE_CODES[x.dtype], *matrix(x), code, two_dimensional, floor, *results, _threads())


def mx_decode(data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, columnwise: bool, out: Tensor) -> None:
    if out.dtype is torch.float64:
        out.copy_(mx_decode_exact(data, scales, fp8_dtype, columnwise))
        return
    data, scales, code = data.contiguous(), scales.contiguous(), fp8_format(fp8_dtype).code
    to = out.data_ptr(), DTYPE_CODES[out.dtype]
    _cpu.mx_decode(data.data_ptr(), scales.data_ptr(), code, *matrix(data), columnwise, *to, _threads())


def epilogue(acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> None:
    """In place on a contiguous bfloat16 ``acc``: apply both scales and the bias in float32, round once."""
    a, b = (None if scale is None else scale.to(torch.float32) for scale in (scale_a, scale_b))
    bias = None if bias is None else bias.contiguous()
    dtype = 0 if bias is None else DTYPE_CODES[bias.dtype]
    _cpu.epilogue(acc.data_ptr(), *matrix(acc), pointer(a), pointer(b), pointer(bias), dtype, _threads())


# On many tensors: one call for all of them.


def multi_amax(xs: Sequence[Tensor], dtypes: Sequence[torch.dtype], out: Tensor) -> None:
    held = dense(xs)
    _cpu.multi_amax(sources(held, dtypes), out.data_ptr(), _threads())


def multi_cast(
    xs: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    scales: Tensor,
    fp8_dtypes: Sequence[torch.dtype],
    outs: Sequence[Tensor],
) -> None:
    held, scales = dense(xs), scales.contiguous()
    _cpu.multi_cast(cast_jobs(held, dtypes, fp8_dtypes, outs), scales.data_ptr(), _threads())


def mx_multi_amax(
    xs: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    two_dimensional: Sequence[bool],
    out: Tensor,
) -> None:
    held = dense(xs)
    jobs = mx_amax_jobs(held, dtypes, shapes, starts, two_dimensional)
    _cpu.mx_multi_amax(jobs, out.data_ptr(), out.numel(), _threads())


def mx_multi_cast(
    xs: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int]],
    starts: Sequence[int],
    fp8_dtypes: Sequence[torch.dtype],
    rowwise: Sequence[Buffers | None],
    columnwise: Sequence[Buffers | None],
) -> None:
    held = dense(xs)
    _cpu.mx_multi_cast(mx_cast_jobs(held, dtypes, shapes, starts, fp8_dtypes, rowwise, columnwise), _threads())
