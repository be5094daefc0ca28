"""Products of operands that are decoded and multiplied as dense matrices: what there is for any layout, anywhere."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ottava.gemm.operand import Operand, define
from ottava.gemm.scaled import product_of
from ottava.kernels import backends
from ottava.kernels.backends import backend_for, backend_module
from ottava.kernels.compiled import DTYPE_CODES
from ottava.kernels.direct import is_direct
from ottava.kernels.products import WHOLE, Rows, compute_dtype, product, product_for, product_of_blocks
from ottava.layout import Layout
from ottava.torch_private import any_autocast_enabled

Tensor = torch.Tensor


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
    """What does not change between products of operands like these, whose layouts and shapes are the same: of each the
    function that decodes it, what that is told before and after the scales, whether these are part of the values, and
    the values; what multiplies these. Nothing where the products are not :func:`planned_mm`'s."""
    device = a.values.device
    if backend_for(device.type) == "reference" or product_of(a, b) is not None:
        return ()
    compute, sides, scaled = compute_dtype(device, out_dtype), [], False
    for side, operand in enumerate((a, b)):
        out, rows, whole, folded = _memory(side, operand, compute)
        known = backend_module(device.type).decoder(out.shape, operand.layout, operand.columnwise, folded)
        if known is None or out.nbytes > _scratch.LARGEST or not (whole or folded):
            return ()
        decode, between, rest = known
        rest += out.data_ptr(), DTYPE_CODES[compute]
        sides.append((decode, between, rest, folded, rows.t() if side else rows))
        scaled |= whole
    return *sides, product_for(compute, device, out_dtype, bias_dtype, scaled)


def planned_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """:data:`decoded_mm` on a CPU where nobody looks on, of elements; None for any others."""
    left, right = a.values, b.values
    if not left.is_cpu or not is_direct(left, a.scales, right, b.scales, bias) or any_autocast_enabled():
        return None
    of_bias, plans = None if bias is None else bias.dtype, _scratch.plans
    # A plan does not outlive a change of the settings that it was made under.
    key = a.layout, left.shape, a.columnwise, b.layout, right.shape, b.columnwise, of_bias, out_dtype, backends.changes
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= _scratch.PLANS:
            plans.clear()
        with torch.inference_mode(False):
            plan = plans[key] = _plan(a, b, of_bias, out_dtype)
    if not plan:
        return None
    threads, values, factors = torch.get_num_threads(), [], []
    of_left, of_right, multiply = plan
    for (decode, between, rest, folded, rows), operand in ((of_left, a), (of_right, b)):
        data, scales = operand.values.contiguous(), operand.scales.contiguous()  # type: ignore[union-attr]
        decode(data.data_ptr(), *between, scales.data_ptr() if folded else 0, *rest, threads)
        values.append(rows)
        factors.append(None if folded else scales)
    return multiply(*values, *factors, bias, out_dtype)  # type: ignore[no-any-return]
