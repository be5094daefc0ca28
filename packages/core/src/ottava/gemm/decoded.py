"""The product of any two sides on any device: both are decoded, and their values multiplied.

Scales that are powers of two become part of the values, exactly. One scale for the tensor
multiplies the float32 sums. Other scales of blocks multiply the partial sums of the blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ottava.gemm import scratch as memory
from ottava.gemm.operators import define
from ottava.kernels import products as dense
from ottava.kernels.backends import backend_module
from ottava.kernels.reference import second_factor, spread
from ottava.kernels.scales import scale_values
from ottava.layout import SCALES, Block, Layout
from ottava.tensors.operand import Side

Tensor = torch.Tensor
# Of bfloat16.
_SIGNIFICANT_BITS = 8


class Decoded(NamedTuple):
    """Values ``[outer, reduced]``, and the scales that they still lack: None, or one for each
    block."""

    values: Tensor
    scales: Tensor | None
    block: Block = dense.WHOLE


def folds(layout: Layout) -> bool:
    """Whether scales of blocks are part of the decoded values: powers of two, and those whose
    products with elements bfloat16 holds."""
    if layout.block == dense.WHOLE:
        return False
    number = SCALES[layout.scale].number
    if layout.has_powers_of_two or number is None:
        return layout.has_powers_of_two
    return layout.format.significant_bits + number.significant_bits <= _SIGNIFICANT_BITS


def _decoded(place: int, side: Side, dtype: torch.dtype) -> Decoded:
    """The values of a side: decoded into ``dtype``, which holds them exactly, if it is
    quantized."""
    if not side.is_quantized() or side.scales is None:
        return Decoded(side.outer_first(), side.scales)
    layout = Layout.of(side.layout)
    folded = folds(layout)
    out = memory.scratch.empty(place, side.values, layout.elements_per_byte, dtype)
    backend_module(out.device.type).grid_decode(
        side.values, side.scales if folded else None, side.layout, side.columnwise, out
    )
    turned = side.is_turned()
    values = out.t() if turned else out
    if folded:
        return _with_second_level(values, side.amax, layout)
    scales = scale_values(side.scales, layout).to(torch.float32)
    if side.amax is not None:
        scales = scales * second_factor(side.amax, layout, side.columnwise)
    return Decoded(values, scales.t() if turned else scales, layout.block)


def _with_second_level(values: Tensor, amax: Tensor | None, layout: Layout) -> Decoded:
    """Values that have the scales of their blocks, and lack those of the second level, if there is
    one."""
    if amax is None:
        return Decoded(values, None)
    factor = second_factor(amax, layout, False)
    if layout.second_level == "tensor":
        return Decoded(values, factor.reshape(1, 1))
    return Decoded(values, factor, (1, None))


def _multiply(
    a: Side, b: Side, bias: Tensor | None, out_dtype: torch.dtype, compute: torch.dtype
) -> Tensor:
    left, right = _decoded(0, a, compute), _decoded(1, b, compute)
    # Of an odd number of elements that share bytes one side has a zero more.
    inner = min(left.values.shape[1], right.values.shape[1])
    left, right = _cut(left, inner), _cut(right, inner)
    if left.block == right.block == dense.WHOLE:
        return dense.product(
            left.values, right.values.t(), left.scales, right.scales, bias, out_dtype
        )
    return _product_of_blocks(left, right, bias, out_dtype)


def _cut(operand: Decoded, inner: int) -> Decoded:
    """The operand with ``inner`` elements in the summed dimension."""
    if operand.values.shape[1] == inner:
        return operand
    return operand._replace(values=operand.values[:, :inner])


#: ``round(a[M, K] · b[N, K]ᵀ + bias)`` of ``(a, b, bias, out_dtype, compute_dtype)``. Elements are
#: decoded to ``compute_dtype``, which is the dtype of sides in high precision.
decoded_mm = define("decoded_mm", "ScalarType compute_dtype", _multiply)


def _product_of_blocks(
    a: Decoded, b: Decoded, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``a · bᵀ`` plus the bias, ``[M, N]`` in ``out_dtype``.

    The summed dimension is cut where the blocks of either operand end. Each partial sum is
    multiplied in float32 by the product of the two scales of its row and its column: one scale
    after the other could overflow where the result is finite.
    """
    inner, turned = a.values.shape[1], b.values.t()
    left_scales, right_scales = _scales_of_rows(a), _scales_of_rows(b)
    # One scale along the summed dimension needs no partial sums.
    step = math.gcd(a.block[1] or 0, b.block[1] or 0) or inner or 1
    once = a.block[1] is b.block[1] is None
    sums = None
    for start in range(0, inner, step):
        span = slice(start, start + step)
        part = _wide_mm(a.values[:, span], turned[span], once)
        left = left_scales[:, start // (a.block[1] or inner)]
        right = right_scales[:, start // (b.block[1] or inner)]
        part.mul_(torch.outer(left, right))
        sums = part if sums is None else sums.add_(part)
    if sums is None:
        sums = turned.new_zeros((len(a.values), len(b.values)), dtype=torch.float32)
    return dense.finish(sums, None, None, bias, out_dtype)


def _scales_of_rows(operand: Decoded) -> Tensor:
    """The float32 scale of each row for each block of columns, ``[outer, blocks]``; 1 for an
    operand without scales."""
    rows = len(operand.values)
    if operand.scales is None:
        return operand.values.new_ones((1, 1), dtype=torch.float32).expand(rows, 1)
    if operand.block == dense.WHOLE:
        return operand.scales.reshape(1, 1).expand(rows, 1)
    return spread(operand.scales, (operand.block[0], 1), (rows, operand.scales.shape[1]))


def _wide_mm(a: Tensor, b: Tensor, once: bool) -> Tensor:
    """The product of two spans in float32.

    If scales are applied only ``once``, a CPU with a fast product of bfloat16 rounds to bfloat16
    before: operands are bfloat16 only for a bfloat16 result.
    """
    if a.dtype is torch.bfloat16 and dense.returns_float32(a.device):
        return dense.mm(a, b, torch.float32)
    if once and dense.product_dtype(a.dtype, a.device) is torch.bfloat16:
        return dense.mm(a, b).to(torch.float32)
    return dense.mm(a.to(torch.float32), b.to(torch.float32))
