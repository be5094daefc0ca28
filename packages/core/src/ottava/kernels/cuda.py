"""The CUDA backend: :mod:`ottava._cuda` takes raw addresses and a stream; this module allocates and checks contiguity.

Everything is queued on the current stream of the tensors' device. Nothing waits for the GPU, and nothing but results
and scratch memory is allocated, so that calls can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from ottava.formats import fp8_format
from ottava.kernels.cuda_memory import DTYPE_CODES, matrix, place, pointer
from ottava.kernels.cuda_multi import (  # noqa: F401  (the backend's kernels on many tensors)
    multi_amax,
    multi_cast,
    mx_multi_amax,
    mx_multi_cast,
    update_scales,
)
from ottava.kernels.cuda_mx import (  # noqa: F401  (the backend's kernels on MX blocks, and after products)
    epilogue,
    epilogue32,
    mx_decode,
    mx_decode_out,
    mx_quantize,
    mx_quantize_out,
    mx_scale_from_amax,
)
from ottava.kernels.cuda_native import _cuda

_CODES, _FLOATS = torch.uint8, torch.float32
_SCRATCH = _cuda.scratch_floats


def _transposed_shape(x: torch.Tensor) -> tuple[int, ...]:
    return (x.shape[-1], *x.shape[:-1])


def amax_out(x: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`amax` into a float32 scalar."""
    x = x.contiguous()
    scratch = torch.empty(_SCRATCH, dtype=_FLOATS, device=x.device)
    _cuda.amax(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), scratch.data_ptr(), out.data_ptr(), *place(x))


def amax(x: torch.Tensor) -> torch.Tensor:
    """max |x|, NaN ignored."""
    out = torch.empty((), dtype=_FLOATS, device=x.device)
    amax_out(x, out)
    return out


def scale_from_amax(
    amax: torch.Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and scale_inv for each amax."""
    amax = amax.to(_FLOATS).contiguous()
    scale, scale_inv = torch.empty_like(amax), torch.empty_like(amax)
    fp8_max = fp8_format(fp8_dtype).max
    _cuda.scale_from_amax(
        amax.data_ptr(),
        amax.numel(),
        fp8_max,
        epsilon,
        force_pow_2,
        scale.data_ptr(),
        scale_inv.data_ptr(),
        *place(amax),
    )
    return scale, scale_inv


def _cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    fp8_dtype: torch.dtype,
    out: torch.Tensor | None,
    out_t: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    saturated: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
) -> None:
    _cuda.cast(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        scale.data_ptr(),
        pointer(amax),
        pointer(saturated),
        pointer(scale_inv),
        pointer(out),
        pointer(out_t),
        fp8_format(fp8_dtype).code,
        *place(x),
    )


def cast_out(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`cast` into ``out``."""
    _cast(x.contiguous(), scale, fp8_dtype, out)


def cast(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Codes of ``x * scale``."""
    out = torch.empty_like(x, dtype=_CODES, memory_format=torch.contiguous_format)
    cast_out(x, scale, fp8_dtype, out)
    return out


def cast_transpose(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and their transpose, in one pass over ``x``."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=_CODES, memory_format=torch.contiguous_format)
    out_t = torch.empty(_transposed_shape(x), dtype=_CODES, device=x.device)
    _cast(x, scale, fp8_dtype, out, out_t)
    return out, out_t


def cast_amax(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    saturated: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, their transpose and scale_inv, in one pass that also raises ``amax``."""
    x, device = x.contiguous(), x.device
    out = torch.empty(x.shape, dtype=_CODES, device=device)
    out_t = torch.empty(_transposed_shape(x) if transposed else (0,), dtype=_CODES, device=device)
    scale_inv = torch.empty((), dtype=_FLOATS, device=device)
    _cast(x, scale, fp8_dtype, out, out_t if transposed else None, amax, saturated, scale_inv)
    return out, out_t, scale_inv


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
    """:func:`cast_amax` into existing buffers; what is None is left out."""
    _cast(x.contiguous(), scale, fp8_dtype, data, transpose, amax, saturated, scale_inv)


def _quantize(
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
    x = x.contiguous()
    scratch = torch.empty(_SCRATCH, dtype=_FLOATS, device=x.device)
    _cuda.quantize(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        epsilon,
        force_pow_2,
        scratch.data_ptr(),
        pointer(amax),
        pointer(scale),
        scale_inv.data_ptr(),
        pointer(data),
        pointer(transpose),
        fp8_format(fp8_dtype).code,
        *place(x),
    )


quantize_out = _quantize


def quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    rowwise: bool,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """amax, scale, cast and transpose: ``(data, transpose, scale, scale_inv, amax)``, in two launches."""
    device = x.device
    data = torch.empty(x.shape if rowwise else (0,), dtype=_CODES, device=device)
    out_t = torch.empty(_transposed_shape(x) if transposed else (0,), dtype=_CODES, device=device)
    scale, scale_inv, seen = (torch.empty((), dtype=_FLOATS, device=device) for _ in range(3))
    _quantize(
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


def transpose_out(data: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`transpose` into ``out``."""
    data = data.contiguous()
    _cuda.transpose(data.data_ptr(), *matrix(data), out.data_ptr(), *place(data))


def transpose(data: torch.Tensor) -> torch.Tensor:
    """``[*leading, K]`` to ``[K, *leading]``."""
    out = torch.empty(_transposed_shape(data), dtype=_CODES, device=data.device)
    transpose_out(data, out)
    return out


def decode_out(data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`decode` into ``out``, whose dtype says what to round to."""
    data = data.contiguous()
    code = fp8_format(fp8_dtype).code
    _cuda.decode(
        data.data_ptr(),
        code,
        data.numel(),
        pointer(scale_inv),
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        *place(data),
    )


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """``float32(q) * scale_inv`` rounded to ``dtype``."""
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    decode_out(data, scale_inv, fp8_dtype, out)
    return out
