"""The product of elements on a CPU, by a plan.

A plan is made at the first product of two layouts and shapes: into which memory each side is
decoded, in which dtype, and what multiplies. The compiled module then decodes, multiplies and
finishes in one call of ``planned_product``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ottava.formats import FP8
from ottava.gemm import scratch as memory
from ottava.gemm.scaled import product_of
from ottava.kernels import backends
from ottava.kernels import products as dense
from ottava.kernels.backends import backend_for, backend_module
from ottava.kernels.compiled import DTYPE_CODES, known
from ottava.kernels.direct import is_direct
from ottava.layout import Layout
from ottava.tensors.operand import Side

Tensor = torch.Tensor
_is_compiling = torch.compiler.is_dynamo_compiling


class PlannedSide(NamedTuple):
    """One side, as the compiled module is told of it (``ProductPlan`` reads these by position).

    Attributes:
        element: the code of the element format.
        rows, columns: of the stored data.
        folded: whether scales are part of the decoded values.
        e8m0: whether scales are E8M0, else float32.
        block_rows, block_columns: of a stored block, 0 for all.
        address, dtype: of the memory for the decoded values; the dtype by its code.
        values: this memory, as torch multiplies it.
    """

    element: int
    rows: int
    columns: int
    folded: bool
    e8m0: bool
    block_rows: int
    block_columns: int
    address: int
    dtype: int
    values: Tensor


class Plan(NamedTuple):
    """What does not change between products of two layouts and shapes."""

    left: PlannedSide
    right: PlannedSide
    planned_product: Any  # of the compiled module
    native: Any  # its ProductPlan

    def multiply(self, a: Side, b: Side, bias: Tensor | None) -> Tensor | None:
        """``a · bᵀ`` plus the bias; None where the compiled module leaves it to Python."""
        return self.planned_product(  # type: ignore[no-any-return]
            self.native, a.values, a.scales, b.values, b.scales, bias
        )


def planned_mm(a: Side, b: Side, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """``round(a[M, K] · b[N, K]ᵀ + bias)`` on a CPU where nobody looks at operators; None for other
    sides."""
    left, right = a.values, b.values
    # The compiled module checks for the remaining observers (profiler, function modes).
    if not left.is_cpu or _is_compiling() or type(left) is not Tensor:
        return None
    bias_dtype = None if bias is None else bias.dtype
    key = (
        a.layout,
        left.shape,
        a.columnwise,
        b.layout,
        right.shape,
        b.columnwise,
        bias_dtype,
        out_dtype,
        # A plan does not outlive a change of the settings that it was made under.
        backends.changes,
    )
    plans = memory.scratch.plans
    if key not in plans:
        if not is_direct(left, right):
            return None
        if len(plans) >= memory.scratch.PLANS:
            plans.clear()
        with torch.inference_mode(False):
            plan = _plan(a, b, bias_dtype, out_dtype)
        plans[key] = plan
    plan = plans[key]
    return None if plan is None else plan.multiply(a, b, bias)


def _plan(a: Side, b: Side, bias_dtype: torch.dtype | None, out_dtype: torch.dtype) -> Plan | None:
    """The plan for sides like these; None where another product serves them."""
    device = a.values.device
    if backend_for(device.type) == "reference" or product_of(a, b) is not None:
        return None
    compute = dense.compute_dtype(device, out_dtype)
    left, right = _planned_side(0, a, compute), _planned_side(1, b, compute)
    if left is None or right is None:
        return None
    scaled = not (left.folded and right.folded)
    multiply = dense.product_for(compute, device, out_dtype, bias_dtype, scaled)
    # The module finishes float32 sums that scales multiply, or that are the result.
    finishes = compute is torch.float32 and (scaled or compute is out_dtype)
    native = backend_module(device.type).native
    native_plan = native.ProductPlan(
        left, right, multiply, out_dtype, DTYPE_CODES[out_dtype] if finishes else -1
    )
    return Plan(left, right, native.planned_product, native_plan)


def _planned_side(place: int, side: Side, compute: torch.dtype) -> PlannedSide | None:
    """None for a side that is too large, or whose scales neither fold into the values nor are one
    for the tensor."""
    layout, element, (e8m0, *_), _ = known(side.layout)
    out = memory.scratch.empty(place, side.values, compute)
    folded = folds(layout)
    per_tensor = layout.block == dense.WHOLE and layout.element in FP8
    if out.nbytes > memory.scratch.LARGEST or not (folded or per_tensor):
        return None
    outer_first = out.t() if side.is_turned() else out
    block_rows, block_columns = layout.stored_block(side.columnwise)
    return PlannedSide(
        element,
        *layout.stored_matrix(out.shape, side.columnwise),
        folded,
        e8m0,
        block_rows or 0,
        block_columns or 0,
        out.data_ptr(),
        DTYPE_CODES[compute],
        outer_first if place == 0 else outer_first.t(),
    )


def folds(layout: Layout) -> bool:
    """Whether scales are part of the decoded values: powers of two, of blocks."""
    return layout.rounding != "nearest" and layout.block != dense.WHOLE
