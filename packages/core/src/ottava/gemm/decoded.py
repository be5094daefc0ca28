"""Products of operands that are decoded and multiplied as dense matrices: what there is for any layout, anywhere."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch

from ottava.gemm.operand import Operand, define
from ottava.kernels.backends import backend_module
from ottava.kernels.products import finish, mm, product, product_dtype, returns_float32
from ottava.kernels.reference import spread
from ottava.layout import Block, Layout

Tensor = torch.Tensor
_WHOLE: Block = (None, None)


class _Scratch(threading.local):
    """Memory that decoded operands take turns in: fresh memory for each costs page faults, a third of a small layer."""

    # A larger operand gets memory of its own, since its product takes much longer than the page faults.
    LARGEST = 32 << 20

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def empty(self, side: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for one of the two operands of a product on a CPU, until the next product of this thread."""
        size = like.numel() * dtype.itemsize
        if like.device.type != "cpu" or size > self.LARGEST:
            return like.new_empty(like.shape, dtype=dtype)
        if self.buffers[side].numel() < size:
            with torch.inference_mode(False):
                self.buffers[side] = torch.empty(size, dtype=torch.uint8)
        return self.buffers[side][:size].view(dtype).view(like.shape)


_scratch = _Scratch()


class _Rows(NamedTuple):
    """A dense operand ``[outer, reduced]``, and what it lacks: None, or a scale for each block. Those of blocks that
    are not the whole are no powers of two."""

    values: Tensor
    scales: Tensor | None
    block: Block = _WHOLE


def _decoded(side: int, operand: Operand, dtype: torch.dtype) -> _Rows:
    """Values without what would round them."""
    values, scales, text, columnwise = operand[:4]
    if not text or scales is None:
        return _Rows(operand.rows(), scales)
    layout = Layout.of(text)
    whole, turned = layout.block == _WHOLE, columnwise and not layout.transposed
    if whole and not values.is_contiguous() and values.t().is_contiguous():
        values, turned = values.t(), not turned
    out, backend = _scratch.empty(side, values, dtype), backend_module(values.device.type)
    folded = layout.rounding != "nearest" and not whole
    backend.grid_decode(values, scales if folded else None, text, columnwise, out)
    rows = out.t() if turned else out
    if whole or folded:
        return _Rows(rows, None if folded else scales)
    return _Rows(rows, scales.t() if turned else scales, layout.block)


def _sums_of_blocks(a: _Rows, b: _Rows) -> Tensor:
    """``[M, N]`` in float32: of each block of the summed dimension the partial sum, times the scales of its rows and
    columns, which are applied in float32."""
    inner, turned = a.values.shape[1], b.values.t()
    if not inner:
        return a.values.new_zeros((len(a.values), len(b.values)), dtype=torch.float32)
    # One factor for each row and block.
    lefts, rights = (
        None
        if x.scales is None or x.block == _WHOLE
        else spread(x.scales, (x.block[0], 1), (len(x.values), x.scales.shape[1]))
        for x in (a, b)
    )
    # What has one scale along the summed dimension asks for no partial sums.
    step, sums = math.gcd(a.block[1] or 0, b.block[1] or 0) or inner, None
    for start in range(0, inner, step):
        span = slice(start, start + step)
        partial = _wide_mm(a.values[:, span], turned[span], once=a.block[1] is b.block[1] is None)
        if lefts is not None:
            partial.mul_(lefts[:, start // (a.block[1] or inner)].unsqueeze(1))
        if rights is not None:
            partial.mul_(rights[:, start // (b.block[1] or inner)])
        sums = partial if sums is None else sums.add_(partial)
    assert sums is not None
    return sums


def _wide_mm(a: Tensor, b: Tensor, once: bool) -> Tensor:
    """The product in float32, by which blocks are summed. Where it is ``once`` that scales are applied, a CPU's fast
    product rounds to bfloat16 before: operands are bfloat16 if the result is going to be."""
    if a.dtype is torch.bfloat16 and returns_float32(a.device):
        return mm(a, b, torch.float32)
    if once and product_dtype(a.dtype, a.device) is torch.bfloat16:
        return mm(a, b).to(torch.float32)
    return mm(a.to(torch.float32), b.to(torch.float32))


def _multiply(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, compute_dtype: torch.dtype
) -> Tensor:
    left, right = _decoded(0, a, compute_dtype), _decoded(1, b, compute_dtype)
    if left.block == right.block == _WHOLE:
        return product(left.values, right.values.t(), left.scales, right.scales, bias, out_dtype)
    scale_a, scale_b = (x.scales if x.block == _WHOLE else None for x in (left, right))
    return finish(_sums_of_blocks(left, right), scale_a, scale_b, bias, out_dtype)


#: ``round(a[M, K] · b[N, K]ᵀ + bias)`` of ``(a, b, bias, out_dtype, compute_dtype)``: elements are decoded to the last,
#: and operands without scales are of it.
decoded_mm = define("decoded_mm", "ScalarType compute_dtype", _multiply)
