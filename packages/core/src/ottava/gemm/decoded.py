"""Products of operands that are decoded and multiplied as dense matrices: what there is for any layout, anywhere."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from ottava.formats import FP8
from ottava.gemm.operand import Operand, define
from ottava.gemm.scaled import product_of
from ottava.kernels import backends
from ottava.kernels.backends import backend_for, backend_module
from ottava.kernels.compiled import DTYPE_CODES, known
from ottava.kernels.direct import is_direct
from ottava.kernels.products import WHOLE, Rows, compute_dtype, product, product_for, product_of_blocks
from ottava.layout import Layout

Tensor = torch.Tensor
_is_compiling = torch.compiler.is_dynamo_compiling


class _Scratch(threading.local):
    """Memory that decoded operands take turns in: fresh memory for each costs page faults, a third of a small layer."""

    # A larger operand gets memory of its own, since its product takes much longer than the page faults.
    LARGEST = 32 << 20
    # Of sizes that are always others, as those of texts, there would be more and more.
    PLANS = 1024

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self.plans: dict[Any, tuple[Any, ...]] = {}

    def empty(self, side: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for one of the two operands of a product on a CPU, until the next product of this thread."""
        size = like.numel() * dtype.itemsize
        if like.device.type != "cpu" or size > self.LARGEST:
            return like.new_empty(like.shape, dtype=dtype)
        if self.buffers[side].numel() < size:
            # Plans have views of the memory that is given up.
            self.plans.clear()
            with torch.inference_mode(False):
                self.buffers[side] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.buffers[side][:size].view(dtype).view(like.shape)


_scratch = _Scratch()


def _memory(side: int, operand: Operand, dtype: torch.dtype) -> tuple[Tensor, Tensor, bool, bool]:
    """Memory for the values of an operand, the same as ``[outer, reduced]``, whether one scale is for all of them, and
    whether scales are part of them, because they are powers of two."""
    layout, out = Layout.of(operand.layout), _scratch.empty(side, operand.values, dtype)
    whole = layout.block == WHOLE
    return out, (out.t() if operand.is_turned() else out), whole, layout.rounding != "nearest" and not whole


def _decoded(side: int, operand: Operand, dtype: torch.dtype) -> Rows:
    """Values without what would round them."""
    values, scales, text, columnwise = operand[:4]
    if not text or scales is None:
        return Rows(operand.rows(), scales)
    out, rows, whole, folded = _memory(side, operand, dtype)
    backend_module(values.device.type).grid_decode(values, scales if folded else None, text, columnwise, out)
    if folded:
        return Rows(rows, None)
    return Rows(rows, scales.t() if operand.is_turned() and not whole else scales, Layout.of(text).block)


def _multiply(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, compute: torch.dtype) -> Tensor:
    left, right = _decoded(0, a, compute), _decoded(1, b, compute)
    if left.block == right.block == WHOLE:
        return product(left.values, right.values.t(), left.scales, right.scales, bias, out_dtype)
    return product_of_blocks(left, right, bias, out_dtype)


#: ``round(a[M, K] · b[N, K]ᵀ + bias)`` of ``(a, b, bias, out_dtype, compute_dtype)``: elements are decoded to the last,
#: and operands without scales are of it.
decoded_mm = define("decoded_mm", "ScalarType compute_dtype", _multiply)


def _plan(a: Operand, b: Operand, bias_dtype: torch.dtype | None, out_dtype: torch.dtype) -> tuple[Any, ...]:
    """What does not change between products of operands like these, whose layouts and shapes are the same: of each what
    the compiled module is told to decode it, with the values; and the module's function of ``(values, scales, values,
    scales, bias)``. Nothing where the products are not :func:`planned_mm`'s."""
    device = a.values.device
    if backend_for(device.type) == "reference" or product_of(a, b) is not None:
        return ()
    compute, sides, scaled = compute_dtype(device, out_dtype), [], False
    for side, operand in enumerate((a, b)):
        out, rows, whole, folded = _memory(side, operand, compute)
        layout, code, (e8m0, *_), _ = known(operand.layout)
        if out.nbytes > _scratch.LARGEST or not (folded or (whole and layout.element in FP8)):
            return ()
        block = [size or 0 for size in layout.stored_block(operand.columnwise)]
        sizes = layout.stored_matrix(out.shape, operand.columnwise)
        to = out.data_ptr(), DTYPE_CODES[compute], rows.t() if side else rows
        sides.append((code, *sizes, folded, e8m0, *block, *to))
        scaled |= whole
    multiply, native = product_for(compute, device, out_dtype, bias_dtype, scaled), backend_module(device.type).native
    # Sums in float32 that scales multiply are the module's own to finish.
    finished = DTYPE_CODES[out_dtype] if scaled and compute is torch.float32 else -1
    return *sides, partial(native.planned_product, native.ProductPlan(*sides, multiply, out_dtype, finished))


def planned_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """:data:`decoded_mm` on a CPU where nobody looks on, of elements; None for any others."""
    left, right = a.values, b.values
    # Of the others that look on the compiled module asks itself.
    if not left.is_cpu or _is_compiling() or type(left) is not Tensor:
        return None
    of_bias, plans = None if bias is None else bias.dtype, _scratch.plans
    # A plan does not outlive a change of the settings that it was made under.
    key = a.layout, left.shape, a.columnwise, b.layout, right.shape, b.columnwise, of_bias, out_dtype, backends.changes
    plan = plans.get(key)
    if plan is None:
        if not is_direct(left):
            return None
        if len(plans) >= _scratch.PLANS:
            plans.clear()
        with torch.inference_mode(False):
            plan = plans[key] = _plan(a, b, of_bias, out_dtype)
    return plan[2](left, a.scales, right, b.scales, bias) if plan else None
