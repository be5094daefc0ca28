"""The operators on MX blocks, and the product of operands that are made of them.

A block's values are exact in bfloat16 and float32 as long as they are normal there; a scale can put them beyond. The
decoding says when it did, and the lines of the product that such values enter are computed once more in float64, which
holds every value and every product exactly.

A backend for which looking at the answer would stop the device offers two functions that keep it there. All tensors are
contiguous and on one device.

``mx_decode_flagged(codes, scales, fp8_dtype, out, columnwise, flag)``
    ``mx_decode_out`` that returns nothing and raises bits of ``flag``, an int32 tensor with one element: 1 if an
    element other than zero came out as a finite value that is no normal float32 (its exact value is below 2^-126 or
    above the largest float32), 2 if a scale is a code from 1 to 63 or from 191 to 255. It never clears a bit.

``mx_exact_lines(result, a, b, transpose_a, transpose_b, scale_a, scale_b, bias, flags)``
    Computes parts of ``result [M, N]`` again, in place, in float64.

    - ``result``: float32, bfloat16 or float16.
    - ``a``, ``b``: ``(values, blocks, fp8_dtype, columnwise)`` each. A matrix in blocks has uint8 codes ``[rows,
      columns]`` for values and uint8 scales for blocks, ``[rows, ceil(columns / 32)]`` or with ``columnwise``
      ``[ceil(rows / 32), columns]``; its element is ``code * 2^(scale - 127)``, NaN where the scale is 255. A dense one
      has values of bfloat16, float16 or float32 ``[rows, columns]``, None for blocks and format, and False.
    - ``transpose_a``, ``transpose_b``: whether the matrix is taken transposed; then they are ``[M, K]`` and ``[K, N]``.
    - ``scale_a``, ``scale_b``: float32 with one element, or None; what a dense matrix is still to be multiplied with.
    - ``bias``: ``[N]`` of float32, bfloat16 or float16, or None.
    - ``flags``: int32 ``[2]``, what ``mx_decode_flagged`` raised for ``a`` and for ``b``; 0 for a dense matrix.

    If there is a scale: all of ``result`` if any bit of either flag is set. If there is none: where bit 1 of
    ``flags[0]`` is set, the rows ``m`` for which some ``a[m, k]``, and where bit 1 of ``flags[1]`` is set, the columns
    ``n`` for which some ``b[k, n]``, is finite, not zero, and in magnitude below 2^-126 or above the largest float32.
    Everything else stays as it is. An element is ``sum(a[m, k] * b[k, n])``, times ``scale_a``, times ``scale_b``, plus
    ``bias[n]``, each in float64, rounded to float32 and from there to the dtype of ``result``. The order of the sum is
    free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ottava.formats import mx_scale_shapes
from ottava.kernels.backends import backend_module
from ottava.kernels.direct import is_direct
from ottava.kernels.ops import LIBRARY, kernel
from ottava.kernels.products import product
from ottava.kernels.reference_mx import beyond_range, mx_decode_exact

Tensor = torch.Tensor
#: Codes, the scales of their blocks, format, and whether blocks lie along columns; or dense values with None for these.
Operand = tuple[Tensor, Tensor | None, torch.dtype | None, bool]


def _fake_mx_quantize(
    x: Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = []
    for wanted, scales in zip((rowwise, columnwise), mx_scale_shapes(x.shape), strict=True):
        made += [x.new_empty(shape if wanted else (0,), dtype=torch.uint8) for shape in (x.shape, scales)]
    return made[0], made[1], made[2], made[3]


mx_scale_from_amax = kernel(
    "mx_scale_from_amax(Tensor amax, ScalarType fp8_dtype, bool floor) -> Tensor",
    lambda amax, *_: amax.new_empty(amax.shape, dtype=torch.uint8),
)
mx_quantize = kernel(
    "mx_quantize(Tensor x, ScalarType fp8_dtype, bool rowwise, bool columnwise, bool two_dimensional, bool floor)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_mx_quantize,
)
mx_decode = kernel(
    "mx_decode(Tensor data, Tensor scales, ScalarType fp8_dtype, ScalarType dtype, bool columnwise) -> Tensor",
    lambda data, scales, fp8_dtype, dtype, columnwise: data.new_empty(data.shape, dtype=dtype),
)


def _exact(values: Tensor, scales: Tensor | None, fp8_dtype: torch.dtype | None, columnwise: bool) -> Tensor:
    if scales is None or fp8_dtype is None:
        return values.to(torch.float64)
    return mx_decode_exact(values, scales, fp8_dtype, columnwise)


def _far(blocks: Tensor | None) -> bool:
    """Whether a scale other than that of zeros is below 2^-63 or above 2^63."""
    return blocks is not None and bool((((blocks > 0) & (blocks < 64)) | (blocks > 190)).any())


def _mx_scaled_mm(
    a: Tensor,
    b: Tensor,
    blocks_a: Tensor | None,
    blocks_b: Tensor | None,
    fp8_a: torch.dtype | None,
    fp8_b: torch.dtype | None,
    columnwise_a: bool,
    columnwise_b: bool,
    transpose_a: bool,
    transpose_b: bool,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    operands = ((a, blocks_a, fp8_a, columnwise_a), (b, blocks_b, fp8_b, columnwise_b))
    transposes = transpose_a, transpose_b
    rest = scale_a, scale_b, bias
    backend = backend_module(a.device.type)
    if hasattr(backend, "mx_exact_lines"):
        return _flagged_product(backend, operands, transposes, rest, compute_dtype, out_dtype)
    dense, beyond = [], []
    for values, blocks, fp8_dtype, columnwise in operands:
        if blocks is None:
            dense.append(values)
            beyond.append(False)
            continue
        decoded = values.new_empty(values.shape, dtype=compute_dtype)
        beyond.append(backend.mx_decode_out(values, blocks, fp8_dtype, decoded, columnwise))
        dense.append(decoded)
    left, right = _taken(dense, transposes)
    result = product(left, right, *rest, out_dtype)
    # Before its scale is applied, a product must not leave the range of float32: if it may, it is computed again.
    scaled = scale_a is not None or scale_b is not None
    if scaled and (any(beyond) or _far(blocks_a) or _far(blocks_b)):
        beyond = [True, False]
    if any(beyond):
        exact_lines(result, operands, transposes, *rest, beyond)
    return result


def _taken(matrices: Sequence[Tensor], transposes: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Both matrices as the product takes them."""
    left, right = (m.t() if transpose else m for m, transpose in zip(matrices, transposes, strict=True))
    return left, right


def exact_lines(
    result: Tensor,
    operands: tuple[Operand, Operand],
    transposes: tuple[bool, bool],
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    beyond: Sequence[bool],
) -> None:
    """Lines of ``result`` again, in float64: those that values beyond float32's range enter.

    With a scale all of them, if ``beyond[0]``.
    """
    left, right = _taken([_exact(*operand) for operand in operands], transposes)
    scaled = scale_a is not None or scale_b is not None
    for outer, flag in enumerate(beyond):
        if not flag:
            continue
        matrix = (left, right)[outer]
        size = matrix.shape[outer]
        lines = matrix.new_ones(size, dtype=torch.bool) if scaled else beyond_range(matrix).any(1 - outer)
        part = (left[lines] @ right) if outer == 0 else (left @ right[:, lines])
        for scale in (scale_a, scale_b):
            part = part if scale is None else part * scale.to(torch.float64)
        if bias is not None:
            part = part + (bias if outer == 0 else bias[lines]).to(torch.float64)
        # Through float32, as a product is in any case.
        result[(lines,) if outer == 0 else (slice(None), lines)] = part.to(torch.float32).to(result.dtype)


def _flagged_product(
    backend: Any,
    operands: tuple[Operand, Operand],
    transposes: tuple[bool, bool],
    rest: tuple[Tensor | None, Tensor | None, Tensor | None],
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """The same, when what the decoding found stays on the device."""
    flags = operands[0][0].new_zeros(2, dtype=torch.int32)
    plain: list[Operand] = []
    dense = []
    for (values, blocks, fp8_dtype, columnwise), flag in zip(operands, flags.unbind(), strict=True):
        if blocks is None:
            plain.append((values.contiguous(), None, None, False))
            dense.append(values)
            continue
        codes, scales = values.contiguous(), blocks.contiguous()
        decoded = torch.empty_like(codes, dtype=compute_dtype)
        backend.mx_decode_flagged(codes, scales, fp8_dtype, decoded, columnwise, flag)
        plain.append((codes, scales, fp8_dtype, columnwise))
        dense.append(decoded)
    scale_a, scale_b, bias = rest
    result = product(*_taken(dense, transposes), *rest, out_dtype)
    bias = None if bias is None else bias.contiguous()
    backend.mx_exact_lines(result, plain[0], plain[1], *transposes, scale_a, scale_b, bias, flags)
    return result


# Matrices of codes with the scales of their blocks, or dense ones (no blocks) of compute_dtype with a factor that is
# still missing. Codes are [rows, columns] as they are stored; `transpose` says which of them is taken transposed.
LIBRARY.define(
    "mx_scaled_mm(Tensor a, Tensor b, Tensor? blocks_a, Tensor? blocks_b, ScalarType? fp8_a, ScalarType? fp8_b,"
    " bool columnwise_a, bool columnwise_b, bool transpose_a, bool transpose_b, Tensor? scale_a, Tensor? scale_b,"
    " Tensor? bias, ScalarType compute_dtype, ScalarType out_dtype) -> Tensor"
)
LIBRARY.impl("mx_scaled_mm", _mx_scaled_mm, "CompositeExplicitAutograd")


def _sizes(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> tuple[Any, Any, Any]:
    """Rows, columns and the reduced size of a product."""
    return a[1 if transpose_a else 0], b[0 if transpose_b else 1], a[0 if transpose_a else 1]


def _fake_mx_scaled_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    transpose_a, transpose_b, out_dtype = rest[6], rest[7], rest[-1]
    return a.new_empty(_sizes(a.shape, b.shape, transpose_a, transpose_b)[:2], dtype=out_dtype)


torch.library.register_fake("ottava::mx_scaled_mm", _fake_mx_scaled_mm, lib=LIBRARY)


def mx_scaled_mm(
    operands: tuple[Operand, Operand],
    transposes: tuple[bool, bool],
    rest: tuple[Tensor | None, Tensor | None, Tensor | None],
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of two operands, by the operator or by what stands behind it where nobody would see the operator.

    ``rest`` are the scales that dense operands are still to be multiplied with, and the bias.
    """
    (a, blocks_a, fp8_a, columnwise_a), (b, blocks_b, fp8_b, columnwise_b) = operands
    scale_a, scale_b, bias = rest
    call: Any = torch.ops.ottava.mx_scaled_mm
    if is_direct(a, b, blocks_a, blocks_b, scale_a, scale_b, bias):
        call = _mx_scaled_mm
    fields = a, b, blocks_a, blocks_b, fp8_a, fp8_b, columnwise_a, columnwise_b
    result: Tensor = call(*fields, *transposes, *rest, compute_dtype, out_dtype)
    return result


@register_flop_formula(torch.ops.ottava.mx_scaled_mm)
def _mx_scaled_mm_flops(a_shape: Any, b_shape: Any, *rest: Any, **__: Any) -> int:
    """Two operations for each multiply-add."""
    rows, columns, inner = _sizes(a_shape, b_shape, rest[6], rest[7])
    return int(2 * rows * columns * inner)
