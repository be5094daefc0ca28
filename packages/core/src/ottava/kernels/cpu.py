"""The compiled CPU backend: :mod:`ottava._cpu` takes raw pointers; this module allocates and checks contiguity.

The instruction set is chosen at run time; ``OTTAVA_ISA`` (``avx512``, ``avx2``, ``neon``, ``portable``) forces one.
Thread counts follow ``torch.get_num_threads()``.
"""

from __future__ import annotations

import os

import torch

from ottava import _cpu
from ottava.errors import BackendError
from ottava.formats import fp8_format, mx_scale_shapes
from ottava.kernels.addresses import DTYPE_CODES, matrix, pointer
from ottava.kernels.cpu_multi import (  # noqa: F401  (the backend's kernels on many tensors)
    multi_amax,
    multi_cast,
    mx_multi_amax,
    mx_multi_cast,
)
from ottava.kernels.reference_mx import mx_decode_exact


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


def _transposed_shape(x: torch.Tensor) -> tuple[int, ...]:
    return (x.shape[-1], *x.shape[:-1])


def _scalar(scale: torch.Tensor) -> torch.Tensor:
    return scale.detach().to(torch.float32).contiguous()


def amax_out(x: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`amax` into a float32 scalar."""
    x = x.contiguous()
    _cpu.amax(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), out.data_ptr(), torch.get_num_threads())


def amax(x: torch.Tensor) -> torch.Tensor:
    """max |x|, NaN ignored."""
    out = torch.empty((), dtype=torch.float32)
    amax_out(x, out)
    return out


def scale_from_amax(
    amax: torch.Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and scale_inv for each amax."""
    amax = amax.to(torch.float32).contiguous()
    scale, scale_inv = torch.empty_like(amax), torch.empty_like(amax)
    fp8_max = fp8_format(fp8_dtype).max
    _cpu.scale_from_amax(
        amax.data_ptr(), amax.numel(), fp8_max, epsilon, force_pow_2, scale.data_ptr(), scale_inv.data_ptr()
    )
    return scale, scale_inv


def cast_out(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`cast` into ``out``."""
    x, scale = x.contiguous(), _scalar(scale)
    code = fp8_format(fp8_dtype).code
    threads = torch.get_num_threads()
    _cpu.cast(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), scale.data_ptr(), out.data_ptr(), code, threads)


def cast(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Codes of ``x * scale``."""
    out = torch.empty(x.shape, dtype=torch.uint8)
    cast_out(x, scale, fp8_dtype, out)
    return out


def cast_transpose(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and their transpose, in one pass over ``x``."""
    x, scale = x.contiguous(), _scalar(scale)
    out = torch.empty(x.shape, dtype=torch.uint8)
    out_t = torch.empty(_transposed_shape(x), dtype=torch.uint8)
    _cpu.cast_transpose(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        scale.data_ptr(),
        out.data_ptr(),
        out_t.data_ptr(),
        fp8_format(fp8_dtype).code,
        torch.get_num_threads(),
    )
    return out, out_t


def quantize_out(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    data: torch.Tensor | None,
    transpose: torch.Tensor | None,
    scale: torch.Tensor | None,
    scale_inv: torch.Tensor,
    amax: torch.Tensor | None,
) -> None:
    """:func:`quantize` into existing buffers; all but ``scale_inv`` may be None."""
    x = x.contiguous()
    # The kernel writes the scalars that nobody wants too.
    scale = torch.empty_like(scale_inv) if scale is None else scale
    amax = torch.empty_like(scale_inv) if amax is None else amax
    _cpu.quantize(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        epsilon,
        force_pow_2,
        amax.data_ptr(),
        scale.data_ptr(),
        scale_inv.data_ptr(),
        pointer(data),
        pointer(transpose),
        fp8_format(fp8_dtype).code,
        torch.get_num_threads(),
    )


def quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    rowwise: bool,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """amax, scale, cast and transpose: ``(data, transpose, scale, scale_inv, amax)``."""
    data = torch.empty(x.shape if rowwise else (0,), dtype=torch.uint8)
    out_t = torch.empty(_transposed_shape(x) if transposed else (0,), dtype=torch.uint8)
    scale, scale_inv, seen = (torch.empty((), dtype=torch.float32) for _ in range(3))
    quantize_out(
        x,
        fp8_dtype,
        epsilon,
        force_pow_2,
        data if rowwise else None,
        out_t if transposed else None,
        scale,
        scale_inv,
        seen,
    )
    return data, out_t, scale, scale_inv, seen


def cast_amax_out(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    saturated: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    data: torch.Tensor | None,
    transpose: torch.Tensor | None,
    scale_inv: torch.Tensor,
) -> None:
    """:func:`cast_amax` into existing buffers; None for what is not wanted."""
    x = x.contiguous()
    # The kernel writes all the same.
    data = torch.empty_like(x, dtype=torch.uint8) if data is None else data
    amax = torch.empty_like(scale_inv) if amax is None else amax
    _cpu.cast_amax(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        scale.data_ptr(),
        amax.data_ptr(),
        pointer(saturated),
        scale_inv.data_ptr(),
        data.data_ptr(),
        pointer(transpose),
        fp8_format(fp8_dtype).code,
        torch.get_num_threads(),
    )


def cast_amax(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    saturated: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, their transpose and scale_inv, in one pass that also raises ``amax``."""
    out = torch.empty(x.shape, dtype=torch.uint8)
    out_t = torch.empty(_transposed_shape(x) if transposed else (0,), dtype=torch.uint8)
    scale_inv = torch.empty((), dtype=torch.float32)
    cast_amax_out(x, scale, amax, saturated, fp8_dtype, out, out_t if transposed else None, scale_inv)
    return out, out_t, scale_inv


def update_scales(
    scales: list[torch.Tensor],
    histories: list[torch.Tensor],
    maxima: list[float],
    most_recent: bool,
    last: torch.Tensor | None,
) -> None:
    """Every slot of every tensor in one call."""
    slots = [
        (scale.data_ptr(), history.data_ptr(), scale.numel()) for scale, history in zip(scales, histories, strict=True)
    ]
    if slots:
        _cpu.update_scales(slots, histories[0].shape[0], maxima, most_recent, pointer(last))


def transpose_out(data: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`transpose` into ``out``."""
    data = data.contiguous()
    _cpu.transpose(data.data_ptr(), *matrix(data), out.data_ptr(), torch.get_num_threads())


def transpose(data: torch.Tensor) -> torch.Tensor:
    """``[*leading, K]`` to ``[K, *leading]``."""
    out = torch.empty(_transposed_shape(data), dtype=torch.uint8)
    transpose_out(data, out)
    return out


def decode_out(data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`decode` into ``out``, whose dtype says what to round to."""
    data = data.contiguous()
    factor = None if scale_inv is None else _scalar(scale_inv)
    _cpu.decode(
        data.data_ptr(),
        fp8_format(fp8_dtype).code,
        data.numel(),
        pointer(factor),
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        torch.get_num_threads(),
    )


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """``float32(q) * scale_inv`` rounded to ``dtype``."""
    out = torch.empty(data.shape, dtype=dtype)
    decode_out(data, scale_inv, fp8_dtype, out)
    return out


def mx_scale_from_amax(amax: torch.Tensor, fp8_dtype: torch.dtype, floor: bool) -> torch.Tensor:
    """E8M0 codes of amaxes."""
    amax = amax.contiguous()
    codes = torch.empty(amax.shape, dtype=torch.uint8)
    code, threads = fp8_format(fp8_dtype).code, torch.get_num_threads()
    _cpu.mx_scale_from_amax(amax.data_ptr(), amax.numel(), code, floor, codes.data_ptr(), threads)
    return codes


def mx_quantize_out(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: tuple[torch.Tensor, torch.Tensor] | None,
    columnwise: tuple[torch.Tensor, torch.Tensor] | None,
    two_dimensional: bool,
    floor: bool,
) -> None:
    """:func:`mx_quantize` into the codes and scales of the directions wanted."""
    x = x.contiguous()
    row_codes, row_scales = rowwise or (None, None)
    column_codes, column_scales = columnwise or (None, None)
    _cpu.mx_quantize(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        fp8_format(fp8_dtype).code,
        two_dimensional,
        floor,
        pointer(row_codes),
        pointer(row_scales),
        pointer(column_codes),
        pointer(column_scales),
        torch.get_num_threads(),
    )


def mx_quantize(
    x: torch.Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, two_dimensional: bool, floor: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales along rows and columns, in one pass over ``x``."""
    results: list[torch.Tensor] = []
    for wanted, scale_shape in zip((rowwise, columnwise), mx_scale_shapes(x.shape), strict=True):
        results += [torch.empty(shape if wanted else (0,), dtype=torch.uint8) for shape in (x.shape, scale_shape)]
    row, row_scales, column, column_scales = results
    mx_quantize_out(
        x,
        fp8_dtype,
        (row, row_scales) if rowwise else None,
        (column, column_scales) if columnwise else None,
        two_dimensional,
        floor,
    )
    return row, row_scales, column, column_scales


def mx_decode_out(
    data: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype, out: torch.Tensor, columnwise: bool
) -> None:
    """:func:`mx_decode` into ``out``."""
    data, scales = data.contiguous(), scales.contiguous()
    _cpu.mx_decode(
        data.data_ptr(),
        scales.data_ptr(),
        fp8_format(fp8_dtype).code,
        *matrix(data),
        columnwise,
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        torch.get_num_threads(),
    )


def mx_decode(
    data: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype, columnwise: bool
) -> torch.Tensor:
    """``element * 2^(scale - 127)``, rounded to ``dtype``."""
    if dtype == torch.float64:
        return mx_decode_exact(data, scales, fp8_dtype, columnwise)
    out = torch.empty(data.shape, dtype=dtype)
    mx_decode_out(data, scales, fp8_dtype, out, columnwise)
    return out


def epilogue(
    acc: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    """In place on a contiguous bfloat16 ``acc``: apply both scales and the bias in float32, round once."""
    a, b = (None if s is None else _scalar(s) for s in (scale_a, scale_b))
    bias = None if bias is None else bias.detach().contiguous()
    _cpu.epilogue(
        acc.data_ptr(),
        *matrix(acc),
        pointer(a),
        pointer(b),
        pointer(bias),
        0 if bias is None else DTYPE_CODES[bias.dtype],
        torch.get_num_threads(),
    )
