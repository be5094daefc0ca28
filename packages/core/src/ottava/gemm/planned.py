"""The products of a layer's plan, each decided at its first call that nobody observes.

On hardware that multiplies FP8 elements the decision is which product takes them. On a CPU it is
into which memory each side is decoded, in which dtype, and what multiplies; the compiled module
then decodes, multiplies and finishes in one call of ``planned_product``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ottava.formats import FP8
from ottava.gemm import scratch as memory
from ottava.gemm.decoded import folds
from ottava.gemm.dispatch import BY_COLUMN, GemmType, check_rotations, has_own_product, multiply
from ottava.gemm.operand import Matrix, side_of
from ottava.gemm.scaled import product_of
from ottava.kernels import backends
from ottava.kernels import products as dense
from ottava.kernels.backends import backend_for
from ottava.kernels.compiled import DTYPE_CODES, is_native, native_layout
from ottava.kernels.direct import is_direct
from ottava.kernels.for_layers import compiled_cpu
from ottava.tensors.operand import Operand, Side
from ottava.tensors.storage import QuantizedTensorStorage

Tensor = torch.Tensor
Multiply = Callable[[Side, Side, Tensor | None], Tensor | None]
_is_compiling = torch.compiler.is_dynamo_compiling


class PlannedSide(NamedTuple):
    """One side, as the compiled module's ``ProductPlan`` reads it.

    Attributes:
        element: the code of the element format.
        height, width: of the stored data.
        folded: whether scales are part of the decoded values.
        e8m0: whether scales are E8M0, else float32.
        block_rows, block_columns: of a stored block, 0 for all.
        address, dtype: of the memory for the decoded values; the dtype by its code.
        values: this memory, as torch multiplies it.
    """

    element: int
    height: int
    width: int
    folded: bool
    e8m0: bool
    block_rows: int
    block_columns: int
    address: int
    dtype: int
    values: Tensor


class LayerProduct:
    """One of the three products of a layer, decided at its first call that nobody observes.

    A layer makes it for operands of the same shapes. It decides anew where these come in other
    layouts, or where a setting has changed.

    Args:
        gemm_type: ``fprop``, ``dgrad`` or ``wgrad``.
        out_dtype: of the result.
        accumulates: whether the result is added to a tensor, so that the product stays float32
            until the sum.
        use_split_accumulator: False allows fast accumulation where the hardware has it.
    """

    __slots__ = (
        "_a_by_column",
        "_b_by_column",
        "_changes",
        "_dtype",
        "_gemm_type",
        "_layouts",
        "_multiply",
        "_out_dtype",
        "_split",
    )

    def __init__(
        self,
        gemm_type: GemmType,
        out_dtype: torch.dtype,
        *,
        accumulates: bool = False,
        use_split_accumulator: bool = True,
    ) -> None:
        self._gemm_type: GemmType = gemm_type
        self._a_by_column, self._b_by_column = BY_COLUMN[gemm_type]
        self._out_dtype = out_dtype
        self._dtype = torch.float32 if accumulates else out_dtype
        self._split = use_split_accumulator
        # The decision, and the layouts and settings that it holds for.
        self._multiply: Multiply | None = None
        self._layouts: tuple[str, str] | None = None
        self._changes = -1

    def __call__(
        self, a: Matrix, b: Matrix, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The product ``[outer of a, outer of b]`` plus ``bias``; added to ``out``, if there is
        one."""
        # Compiled autograd traces the backward pass of a plan that was made in eager mode.
        if not _is_compiling():
            left = self._side(a, self._a_by_column)
            right = self._side(b, self._b_by_column)
            if left is not None and right is not None:
                result = self._planned(left, right, bias)
                if result is not None:
                    return result if out is None else out.add_(result)
        return multiply(
            a, b, self._gemm_type, self._out_dtype, bias, out, out is not None, self._split
        )

    @staticmethod
    def _side(x: Matrix, by_column: bool) -> Side | None:
        if isinstance(x, Operand):
            return x.columns if by_column else x.rows
        if isinstance(x, QuantizedTensorStorage) and not has_own_product(x):
            return side_of(x, by_column)
        return None

    def _planned(self, left: Side, right: Side, bias: Tensor | None) -> Tensor | None:
        """The product as it was decided; None if :func:`multiply` has to compute it."""
        if self._changes != backends.changes or self._layouts != (left.layout, right.layout):
            # Nothing is decided while dispatch is observed. A decided product checks that itself.
            if not is_direct(left.values, right.values):
                return None
            self._decide(left, right, bias)
        if self._multiply is None:
            return None
        return self._multiply(left, right, bias)

    def _decide(self, left: Side, right: Side, bias: Tensor | None) -> None:
        self._multiply = self._decision(left, right, bias)
        self._layouts, self._changes = (left.layout, right.layout), backends.changes

    def _decision(self, left: Side, right: Side, bias: Tensor | None) -> Multiply | None:
        # A product that is decided here does not pass :func:`multiply`, which checks the others.
        check_rotations(left, right, self._gemm_type)
        product = product_of(left, right)
        if product is not None:
            return partial(_hardware_product, product, self._dtype, not self._split)
        bias_dtype = None if bias is None else bias.dtype
        plan = _decoding_plan(left, right, bias_dtype, self._dtype)
        return None if plan is None else plan.multiply


def _hardware_product(
    product: Callable[..., Tensor],
    dtype: torch.dtype,
    fast: bool,
    left: Side,
    right: Side,
    bias: Tensor | None,
) -> Tensor:
    return product(left, right, bias, dtype, fast)


class DecodingPlan(NamedTuple):
    """A product of the CPU: the compiled module decodes both sides, multiplies and finishes."""

    planned_product: Callable[..., Tensor | None]
    native: object  # the compiled module's ProductPlan

    def multiply(self, a: Side, b: Side, bias: Tensor | None) -> Tensor | None:
        """``a · bᵀ`` plus the bias; None where the compiled module leaves it to Python: in another
        thread, or where dispatch is observed."""
        return self.planned_product(self.native, a.values, a.scales, b.values, b.scales, bias)


def _decoding_plan(
    a: Side, b: Side, bias_dtype: torch.dtype | None, out_dtype: torch.dtype
) -> DecodingPlan | None:
    """The plan for sides like these; None where another product serves them."""
    device = a.values.device
    if device.type != "cpu":
        return None
    backend_for("cpu")  # chooses the backend, if no kernel has chosen it yet
    cpu = compiled_cpu()
    if cpu is None:
        return None
    compute = dense.compute_dtype(device, out_dtype)
    left, right = _planned_side(0, a, compute), _planned_side(1, b, compute)
    if left is None or right is None:
        return None
    scaled = not (left.folded and right.folded)
    product = dense.product_for(compute, device, out_dtype, bias_dtype, scaled)
    # The module itself applies scales and bias to float32 sums, and converts them to the dtype of
    # the result. Without a scale that is left to apply, ``product`` makes results of other dtypes.
    finishes = compute is torch.float32 and (scaled or compute is out_dtype)
    plan = cpu.native.ProductPlan(
        left, right, product, out_dtype, DTYPE_CODES[out_dtype] if finishes else -1
    )
    return DecodingPlan(cpu.native.planned_product, plan)


def _planned_side(place: int, side: Side, compute: torch.dtype) -> PlannedSide | None:
    """How the compiled module decodes a side.

    None for a side that is too large, for a layout that the module does not know, for scales of
    blocks that are no powers of two, and for one scale of a tensor whose elements are not FP8.
    """
    layout, element, rule, _ = native_layout(side.layout)
    if not is_native(layout):
        return None
    out = memory.scratch.empty(place, side.values, 1, compute)
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
        rule.e8m0,
        block_rows or 0,
        block_columns or 0,
        out.data_ptr(),
        DTYPE_CODES[compute],
        outer_first if place == 0 else outer_first.t(),
    )
