"""The CUDA kernels on MX blocks, and the last step of a product."""

from __future__ import annotations

import torch

from ottava.formats import fp8_format, mx_scale_shapes
from ottava.kernels.cuda_memory import DTYPE_CODES, matrix, place, pointer
from ottava.kernels.cuda_native import _cuda
from ottava.kernels.reference_mx import mx_decode_exact

_CODES, _FLOATS = torch.uint8, torch.float32
_ABSENT = (0, 0)

Tensor = torch.Tensor


def mx_scale_from_amax(amax: Tensor, fp8_dtype: torch.dtype, floor: bool) -> Tensor:
    """E8M0 codes of amaxes."""
    amax = amax.contiguous()
    codes = torch.empty(amax.shape, dtype=_CODES, device=amax.device)
    code = fp8_format(fp8_dtype).code
    _cuda.mx_scale_from_amax(amax.data_ptr(), amax.numel(), code, floor, codes.data_ptr(), *place(amax))
    return codes


def _pair(buffers: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    return _ABSENT if buffers is None else (buffers[0].data_ptr(), buffers[1].data_ptr())


def mx_quantize_out(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: tuple[Tensor, Tensor] | None,
    columnwise: tuple[Tensor, Tensor] | None,
    two_dimensional: bool,
    floor: bool,
) -> None:
    """:func:`mx_quantize` into the codes and scales of the directions wanted."""
    x = x.contiguous()
    _cuda.mx_quantize(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *matrix(x),
        fp8_format(fp8_dtype).code,
        two_dimensional,
        floor,
        _pair(rowwise),
        _pair(columnwise),
        *place(x),
    )


def mx_quantize(
    x: Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, two_dimensional: bool, floor: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales along rows and columns, in one pass over ``x``."""
    results: list[Tensor] = []
    for wanted, scale_shape in zip((rowwise, columnwise), mx_scale_shapes(x.shape), strict=True):
        for shape in (x.shape, scale_shape):
            results.append(torch.empty(shape if wanted else (0,), dtype=_CODES, device=x.device))
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


def mx_decode_out(data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, out: Tensor, columnwise: bool) -> None:
    """:func:`mx_decode` into ``out``."""
    data, scales = data.contiguous(), scales.contiguous()
    _cuda.mx_decode(
        data.data_ptr(),
        scales.data_ptr(),
        fp8_format(fp8_dtype).code,
        *matrix(data),
        columnwise,
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        *place(data),
    )


def mx_decode(data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, dtype: torch.dtype, columnwise: bool) -> Tensor:
    """``element * 2^(scale - 127)``, rounded to ``dtype``."""
    if dtype == torch.float64:
        return mx_decode_exact(data, scales, fp8_dtype, columnwise)
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    mx_decode_out(data, scales, fp8_dtype, out, columnwise)
    return out


def _last(scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> tuple[int, int, int, int]:
    """Addresses of what is to be applied; scales are float32, and ``bias`` is contiguous."""
    return pointer(scale_a), pointer(scale_b), pointer(bias), 0 if bias is None else DTYPE_CODES[bias.dtype]


def _scalar(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.detach().to(_FLOATS)


def epilogue(acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> None:
    """In place on a contiguous bfloat16 ``acc``: apply both scales and the bias in float32, round once."""
    scale_a, scale_b, bias = _scalar(scale_a), _scalar(scale_b), None if bias is None else bias.contiguous()
    _cuda.epilogue(acc.data_ptr(), *matrix(acc), _last(scale_a, scale_b, bias), *place(acc))


def epilogue32(acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """``acc * (scale_a * scale_b) + bias`` of a contiguous float32 ``acc`` in float32, rounded once, into ``out``.

    ``out`` is contiguous, of the same shape, and float32, bfloat16 or float16; ``bias`` has one element for each column
    and is of one of them too.
    """
    scale_a, scale_b, bias = _scalar(scale_a), _scalar(scale_b), None if bias is None else bias.contiguous()
    last = _last(scale_a, scale_b, bias)
    _cuda.epilogue32(acc.data_ptr(), *matrix(acc), last, out.data_ptr(), DTYPE_CODES[out.dtype], *place(acc))
