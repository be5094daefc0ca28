"""The operators on MX blocks, and the product of operands that are made of them.

A block's values are exact in bfloat16 and float32 as long as they are normal there. Products of what lies beyond follow
from what it is decoded to: infinities, subnormal numbers or zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ottava.formats import mx_scale_shapes
from ottava.kernels.backends import backend_module
from ottava.kernels.direct import is_direct
from ottava.kernels.ops import LIBRARY, kernel
from ottava.kernels.products import product

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


def _decoded(
    values: Tensor, blocks: Tensor | None, fp8_dtype: torch.dtype | None, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    """A dense matrix as it is, one in blocks in ``dtype``."""
    if blocks is None:
        return values
    decoded = values.new_empty(values.shape, dtype=dtype)
    backend_module(values.device.type).mx_decode_out(values, blocks, fp8_dtype, decoded, columnwise)
    return decoded


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
    left = _decoded(a, blocks_a, fp8_a, columnwise_a, compute_dtype)
    right = _decoded(b, blocks_b, fp8_b, columnwise_b, compute_dtype)
    left, right = left.t() if transpose_a else left, right.t() if transpose_b else right
    return product(left, right, scale_a, scale_b, bias, out_dtype)


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
