"""The CUDA kernels on MX blocks, and the last step of a product.

What decoding finds out about a matrix stays on the device: :func:`mx_decode_flagged` leaves it in a flag, for
:func:`mx_exact_lines` to look at (see :mod:`ottava.kernels.mx_ops`).
"""

from __future__ import annotations

import torch

from ottava.formats import fp8_format, mx_scale_shapes
from ottava.kernels.cuda_memory import DTYPE_CODES, matrix, place, pointer
from ottava.kernels.cuda_native import _cuda
from ottava.kernels.reference_mx import mx_decode_exact

_CODES, _FLOATS = torch.uint8, torch.float32
_ABSENT = (0, 0)

Tensor = torch.Tensor
#: Values, the scales of their blocks, the format of the values, and whether blocks lie along columns. Dense values have
#: None for scales and format.
Operand = tuple[Tensor, Tensor | None, torch.dtype | None, bool]


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


def _decode(
    data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, out: Tensor, columnwise: bool, flag: Tensor | None
) -> None:
    data, scales = data.contiguous(), scales.contiguous()
    _cuda.mx_decode(
        data.data_ptr(),
        scales.data_ptr(),
        fp8_format(fp8_dtype).code,
        *matrix(data),
        columnwise,
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        pointer(flag),
        *place(data),
    )


def mx_decode_out(data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, out: Tensor, columnwise: bool) -> None:
    """:func:`mx_decode` into ``out``. What others return besides is the flag of :func:`mx_decode_flagged`."""
    _decode(data, scales, fp8_dtype, out, columnwise, None)


def mx_decode_flagged(
    codes: Tensor, scales: Tensor, fp8_dtype: torch.dtype, out: Tensor, columnwise: bool, flag: Tensor
) -> None:
    """:func:`mx_decode_out` that raises bits of ``flag``, an int32 tensor with one element, and never clears any.

    1: an element other than zero came out as a finite value that is no normal float32. 2: a scale is a code from 1 to
    63 or from 191 to 255.
    """
    _decode(codes, scales, fp8_dtype, out, columnwise, flag)


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


def _operand(operand: Operand, transpose: bool) -> tuple[int, int, int, bool, bool]:
    values, scales, fp8_dtype, columnwise = operand
    code = DTYPE_CODES[values.dtype] if fp8_dtype is None else fp8_format(fp8_dtype).code
    return values.data_ptr(), pointer(scales), code, columnwise, transpose


def mx_exact_lines(
    result: Tensor,
    a: Operand,
    b: Operand,
    transpose_a: bool,
    transpose_b: bool,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    flags: Tensor,
) -> None:
    """The lines of ``result`` that :func:`mx_decode_flagged` has found values for, again, in float64.

    Which they are and what the arguments mean says :mod:`ottava.kernels.mx_ops`. All tensors are contiguous.
    """
    rows, columns = result.shape
    _cuda.mx_exact_lines(
        result.data_ptr(),
        DTYPE_CODES[result.dtype],
        rows,
        columns,
        a[0].shape[0 if transpose_a else 1],
        _operand(a, transpose_a),
        _operand(b, transpose_b),
        _last(scale_a, scale_b, bias),
        flags.data_ptr(),
        *place(result),
    )
