"""The CUDA backend: :mod:`ottava._cuda` takes raw addresses and a stream; this module gets them of tensors.

Everything is queued on the current stream of the tensors' device. Nothing waits for the GPU, and nothing but scratch
memory is allocated, so that calls can be captured in a CUDA graph. What is made contiguous here may be freed once the
kernels are queued: its memory is used again on the same stream. The addresses of many tensors travel with the launch:
nothing is copied to the device for them. What the functions do, the table of kernels says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
from ottava.kernels.cuda_native import _cuda
from ottava.kernels.reference_mx import mx_decode_exact
from ottava.torch_private import raw_stream

Tensor = torch.Tensor
_FLOATS, _SCRATCH = torch.float32, _cuda.scratch_floats


def place(x: Tensor) -> tuple[int, int]:
    """The number of the device of ``x`` and the address of its current stream."""
    device = x.get_device()
    return device, raw_stream(device)


def amax(x: Tensor, out: Tensor) -> None:
    x = x.contiguous()
    scratch = torch.empty(_SCRATCH, dtype=_FLOATS, device=x.device)
    _cuda.amax(x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), scratch.data_ptr(), out.data_ptr(), *place(x))


def scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, scale: Tensor, scale_inv: Tensor
) -> None:
    amax, largest = amax.contiguous(), fp8_format(fp8_dtype).max
    results = scale.data_ptr(), scale_inv.data_ptr()
    _cuda.scale_from_amax(amax.data_ptr(), amax.numel(), largest, epsilon, force_pow_2, *results, *place(amax))


def cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, data: Tensor) -> None:
    cast_amax(x, scale, None, None, fp8_dtype, data, None, None)


def cast_transpose(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, data: Tensor, transpose: Tensor) -> None:
    cast_amax(x, scale, None, None, fp8_dtype, data, transpose, None)


def cast_amax(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    saturated: Tensor | None,
    fp8_dtype: torch.dtype,
    data: Tensor | None,
    transpose: Tensor | None,
    scale_inv: Tensor | None,
) -> None:
    x, code = x.contiguous(), fp8_format(fp8_dtype).code
    scalars = scale.data_ptr(), pointer(amax), pointer(saturated), pointer(scale_inv)
    _cuda.cast(
        x.data_ptr(), DTYPE_CODES[x.dtype], *matrix(x), *scalars, pointer(data), pointer(transpose), code, *place(x)
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
    """In two launches."""
    x, code = x.contiguous(), fp8_format(fp8_dtype).code
    scratch = torch.empty(_SCRATCH, dtype=_FLOATS, device=x.device)
    scalars = scratch.data_ptr(), pointer(amax), pointer(scale), scale_inv.data_ptr()
    _cuda.quantize(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        epsilon,
        force_pow_2,
        *scalars,
        pointer(data),
        pointer(transpose),
        code,
        *place(x),
    )


def transpose(data: Tensor, out: Tensor) -> None:
    data = data.contiguous()
    _cuda.transpose(data.data_ptr(), *matrix(data), out.data_ptr(), *place(data))


def decode(data: Tensor, scale_inv: Tensor | None, fp8_dtype: torch.dtype, out: Tensor) -> None:
    data, code = data.contiguous(), fp8_format(fp8_dtype).code
    to = out.data_ptr(), DTYPE_CODES[out.dtype]
    _cuda.decode(data.data_ptr(), code, data.numel(), pointer(scale_inv), *to, *place(data))


def update_scales(
    scales: list[Tensor], histories: list[Tensor], maxima: list[float], most_recent: bool, last: Tensor | None
) -> None:
    """In one launch for thousands of slots."""
    rest = histories[0].shape[0], maxima, most_recent, pointer(last)
    _cuda.update_scales(slots(scales, histories), *rest, *place(scales[0]))


def mx_scale_from_amax(amax: Tensor, fp8_dtype: torch.dtype, floor: bool, out: Tensor) -> None:
    amax, code = amax.contiguous(), fp8_format(fp8_dtype).code
    _cuda.mx_scale_from_amax(amax.data_ptr(), amax.numel(), code, floor, out.data_ptr(), *place(amax))


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
    pairs = (pointer(row), pointer(row_scales)), (pointer(column), pointer(column_scales))
    _cuda.mx_quantize(x.data_ptr(), DTYPE_CODES[x.dtype], *matrix(x), code, two_dimensional, floor, *pairs, *place(x))


def mx_decode(data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, columnwise: bool, out: Tensor) -> None:
    if out.dtype is torch.float64:
        out.copy_(mx_decode_exact(data, scales, fp8_dtype, columnwise))
        return
    data, scales, code = data.contiguous(), scales.contiguous(), fp8_format(fp8_dtype).code
    to = out.data_ptr(), DTYPE_CODES[out.dtype]
    _cuda.mx_decode(data.data_ptr(), scales.data_ptr(), code, *matrix(data), columnwise, *to, *place(data))


def _last(scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> tuple[int, int, int, int]:
    """Addresses of what is to be applied; scales are float32, and ``bias`` is contiguous."""
    return pointer(scale_a), pointer(scale_b), pointer(bias), 0 if bias is None else DTYPE_CODES[bias.dtype]


def epilogue(acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> None:
    """In place on a contiguous bfloat16 ``acc``: apply both scales and the bias in float32, round once."""
    scale_a, scale_b = (None if scale is None else scale.to(_FLOATS) for scale in (scale_a, scale_b))
    bias = None if bias is None else bias.contiguous()
    _cuda.epilogue(acc.data_ptr(), *matrix(acc), _last(scale_a, scale_b, bias), *place(acc))


def epilogue32(acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """``acc * (scale_a * scale_b) + bias`` of a contiguous float32 ``acc`` in float32, rounded once, into ``out``.

    ``out`` is contiguous, of the same shape, and float32, bfloat16 or float16; ``bias`` has one element for each column
    and is of one of them too.
    """
    scale_a, scale_b = (None if scale is None else scale.to(_FLOATS) for scale in (scale_a, scale_b))
    bias = None if bias is None else bias.contiguous()
    last = _last(scale_a, scale_b, bias)
    _cuda.epilogue32(acc.data_ptr(), *matrix(acc), last, out.data_ptr(), DTYPE_CODES[out.dtype], *place(acc))


# On many tensors: one launch for hundreds.


def multi_amax(xs: Sequence[Tensor], dtypes: Sequence[torch.dtype], out: Tensor) -> None:
    held = dense(xs)
    _cuda.multi_amax(sources(held, dtypes), out.data_ptr(), *place(out))


def multi_cast(
    xs: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    scales: Tensor,
    fp8_dtypes: Sequence[torch.dtype],
    outs: Sequence[Tensor],
) -> None:
    held, scales = dense(xs), scales.contiguous()
    _cuda.multi_cast(cast_jobs(held, dtypes, fp8_dtypes, outs), scales.data_ptr(), *place(scales))


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
    _cuda.mx_multi_amax(jobs, out.data_ptr(), out.numel(), *place(out))


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
    _cuda.mx_multi_cast(mx_cast_jobs(held, dtypes, shapes, starts, fp8_dtypes, rowwise, columnwise), *place(held[0]))
