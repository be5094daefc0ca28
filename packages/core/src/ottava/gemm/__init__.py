"""One function for the three GEMMs of a linear layer: operands in, high precision out.

How a quantized tensor becomes a matrix is its own affair (``grid_operand`` for elements with
scales, else ``gemm_operand``); a user-defined quantizer's ``qgemm`` takes over where there is one.
Hardware that multiplies FP8 has products of its own; anywhere else operands of any layout are
decoded, on a CPU by a plan.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Literal

import torch

from ottava.errors import DeviceError, OptionError, ShapeError
from ottava.formats import FP8
from ottava.gemm.scaled import Operand, define, operand_of, product_of
from ottava.kernels import backends, check_high_precision
from ottava.kernels import products as dense
from ottava.kernels.backends import backend_for, backend_module
from ottava.kernels.checks import check_dtype, check_fits
from ottava.kernels.compiled import DTYPE_CODES, known
from ottava.kernels.direct import is_direct
from ottava.kernels.table import rounded
from ottava.layout import Layout, as_matrix_shape
from ottava.tensors.storage import QuantizedTensorStorage

__all__ = ["GemmType", "Operand", "as_matrix", "gemm", "multiply"]

Tensor = torch.Tensor
GemmType = Literal["fprop", "dgrad", "wgrad"]
# A tensor in high precision, or a quantized one.
_Matrix = Tensor | QuantizedTensorStorage

# GEMM -> whether the rows of a are what is summed over, and whether those of b are: their
# columnwise usage.
_GEMMS: dict[str, tuple[bool, bool]] = {
    "fprop": (False, False),
    "dgrad": (False, True),
    "wgrad": (True, True),
}
_is_compiling = torch.compiler.is_dynamo_compiling


def gemm(
    a: _Matrix,
    b: _Matrix,
    gemm_type: GemmType = "fprop",
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
) -> Tensor:
    """The product for ``gemm_type``, in ``out_dtype``.

    ``fprop``: ``a = input [*, K]``, ``b = weight [N, K]`` gives ``[M, N]``. ``dgrad``:
    ``a = grad_output [*, N]``,
    ``b = weight`` gives ``[M, K]``. ``wgrad``: ``a = grad_output``, ``b = input`` gives ``[N, K]``.
    Accumulation is in float32; the product of the scales is applied in float32 before the rounding
    to ``out_dtype``: one for the tensor or for each row to the sums, one for each block to the
    block's partial sums. On CPUs with a fast product of bfloat16 a bfloat16 result with a float32
    bias is rounded before both, too (see the numerics page). Scales that are powers of two are part
    of the operands' values. Hardware that multiplies FP8 is given the data; elsewhere it is
    decoded, exactly in float32's normal range; products of what lies beyond follow IEEE float32.

    Args:
        bias: ``[N]``, added in float32.
        out: write the result here (any high-precision dtype); with ``accumulate`` add to what it
            holds.
        use_split_accumulator: False allows fast accumulation where the hardware has it.

    Raises:
        OptionError: unknown ``gemm_type``, or ``accumulate`` without ``out``.
        ShapeError, DTypeError, DeviceError: operands that do not fit together.
    """
    if not isinstance(gemm_type, str) or gemm_type not in _GEMMS:
        raise OptionError(f"gemm_type is {gemm_type!r}", expected="fprop, dgrad or wgrad")
    if accumulate and out is None:
        raise OptionError(
            "accumulate=True without out",
            expected="the tensor to add to",
            remedy="pass out=main_grad",
        )
    sizes: list[int] = []
    for name, x, summed in zip("ab", (a, b), _GEMMS[gemm_type], strict=True):
        if not isinstance(x, QuantizedTensorStorage):
            check_high_precision(x, f"operand {name}")
        if not (size := tuple(x.size())):
            raise ShapeError(f"operand {name} has no dimensions", expected="at least one")
        sizes += reversed(as_matrix_shape(size)) if summed else as_matrix_shape(size)
    rows, inner, columns, reduced = sizes
    if a.device != b.device:
        raise DeviceError(f"operands on {a.device} and {b.device}", expected="one device")
    if inner != reduced:
        what = (
            f"{gemm_type} of {tuple(a.size())} and {tuple(b.size())}: reduced dimensions "
            f"{inner} and {reduced}"
        )
        raise ShapeError(what, expected="equal ones")
    if bias is not None:
        check_fits(bias, (columns,), a.device, "bias")
        bias = bias.detach()
    if out is not None:
        check_fits(out, (rows, columns), a.device, "out")
    check_dtype(out_dtype if out is None else out.dtype, "result dtype")
    return multiply(a, b, gemm_type, out_dtype, bias, out, accumulate, use_split_accumulator)


def _scale_of(x: _Matrix) -> Tensor | None:
    """The scale of an operand that has one. The view is made here, where the compiler sees it."""
    scalar = getattr(x, "_scalar", None)
    return getattr(x, "_scale_inv", None) if scalar is None else scalar.view(1)


def multiply(
    a: _Matrix,
    b: _Matrix,
    gemm_type: GemmType,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
) -> Tensor:
    """:func:`gemm` for those whose operands fit together: nothing is checked, and ``bias`` needs no
    gradient."""
    by_column = _GEMMS[gemm_type]
    result_dtype = out_dtype if out is None else out.dtype
    for x in (a, b):
        owner = getattr(x, "_quantizer", None)
        if owner is not None and owner.custom:
            scales = _scale_of(a), _scale_of(b)
            with dense.without_autocast(a.device.type):
                made = owner.qgemm(
                    a, b, None, result_dtype, *scales, bias, out, accumulate, gemm_type, a, b
                )
            return rounded(made) if out is None else made
    # Adding into out must round once: the product stays float32 until the sum.
    dtype = torch.float32 if accumulate else result_dtype
    left, right, result = _on_grid(a, by_column[0]), _on_grid(b, by_column[1]), None
    if left is not None and right is not None:
        result = planned_mm(left, right, bias, dtype)
    if result is None:
        left, right = left and left.read(), right and right.read()
        if left and right and (of_elements := product_of(left, right)) is not None:
            result = of_elements(left, right, bias, dtype, not use_split_accumulator)
    if result is None:
        exact = all(
            isinstance(x, QuantizedTensorStorage) or x.dtype == torch.bfloat16 for x in (a, b)
        )
        compute = dense.compute_dtype(a.device, dtype, exact)
        left, right = (
            left or _dense(a, by_column[0], compute),
            right or _dense(b, by_column[1], compute),
        )
        result = decoded_mm(left, right, bias, dtype, compute)
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _on_grid(x: _Matrix, columnwise: bool) -> Operand | None:
    """Elements with scales, if it is a storage that has such; rows perhaps unread."""
    if not isinstance(x, QuantizedTensorStorage):
        return None
    unread = None if columnwise else x._unread
    found = x.grid_operand(columnwise=columnwise) if unread is None else (unread, unread)
    if found is None:
        return None
    text = (columnwise and x.column_layout_text) or x.layout_text
    return operand_of((*found, text, columnwise, x))


def _dense(x: _Matrix, columnwise: bool, dtype: torch.dtype) -> Operand:
    """Values in ``dtype``."""
    if not isinstance(x, QuantizedTensorStorage):
        return Operand(as_matrix(x.detach()).to(dtype), columnwise=columnwise)
    values, scale = x.gemm_operand(columnwise=columnwise, dtype=dtype)
    return Operand(
        values, None if scale is None else scale.to(torch.float32), columnwise=columnwise
    )


def as_matrix(x: Tensor) -> Tensor:
    """``[*leading, K]`` as ``[rows, K]``; K may be 0, for which ``reshape(-1, K)`` has no
    answer."""
    return x if x.dim() == 2 else x.reshape(as_matrix_shape(x.shape))


class _Scratch(threading.local):
    """Memory that decoded operands take turns in: fresh memory for each costs page faults, a third
    of a small layer."""

    # A larger operand gets memory of its own, since its product takes much longer than the page
    # faults.
    LARGEST = 32 << 20
    # Of sizes that are always others, as those of texts, there would be more and more.
    PLANS = 1024

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self.plans: dict[Any, tuple[Any, ...]] = {}

    def empty(self, side: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for one of the two operands of a product on a CPU, until the next product of this
        thread."""
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
    """Memory for the values of an operand, the same as ``[outer, reduced]``, whether one scale is
    for all of them, and whether scales are part of them, because they are powers of two."""
    layout, out = Layout.of(operand.layout), _scratch.empty(side, operand.values, dtype)
    whole = layout.block == dense.WHOLE
    return (
        out,
        (out.t() if operand.is_turned() else out),
        whole,
        layout.rounding != "nearest" and not whole,
    )


def _decoded(side: int, operand: Operand, dtype: torch.dtype) -> dense.Rows:
    """Values without what would round them."""
    values, scales, text, columnwise = operand[:4]
    if not text or scales is None:
        return dense.Rows(operand.rows(), scales)
    out, rows, _, folded = _memory(side, operand, dtype)
    backend_module(values.device.type).grid_decode(
        values, scales if folded else None, text, columnwise, out
    )
    if folded:
        return dense.Rows(rows, None)
    return dense.Rows(rows, scales.t() if operand.is_turned() else scales, Layout.of(text).block)


def _multiply(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, compute: torch.dtype
) -> Tensor:
    # Compiled code comes here without having asked.
    if a.layout and b.layout and (planned := planned_mm(a, b, bias, out_dtype)) is not None:
        return planned
    left, right = _decoded(0, a, compute), _decoded(1, b, compute)
    if left.block == right.block == dense.WHOLE:
        return dense.product(
            left.values, right.values.t(), left.scales, right.scales, bias, out_dtype
        )
    return dense.product_of_blocks(left, right, bias, out_dtype)


#: ``round(a[M, K] · b[N, K]ᵀ + bias)`` of ``(a, b, bias, out_dtype, compute_dtype)``: elements are
#: decoded to the last, and operands without scales are of it.
decoded_mm = define("decoded_mm", "ScalarType compute_dtype", _multiply)


def _plan(
    a: Operand, b: Operand, bias_dtype: torch.dtype | None, out_dtype: torch.dtype
) -> tuple[Any, ...]:
    """What does not change between products of operands like these, whose layouts and shapes are
    the same: of each what the compiled module is told to decode it, with the values; and the
    module's function of ``(values, scales, values, scales, bias)``. Nothing where the products are
    not :func:`planned_mm`'s."""
    device = a.values.device
    if backend_for(device.type) == "reference" or product_of(a, b) is not None:
        return ()
    compute, sides, scaled = dense.compute_dtype(device, out_dtype), [], False
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
    native = backend_module(device.type).native
    multiply = dense.product_for(compute, device, out_dtype, bias_dtype, scaled)
    # Sums in float32 that scales multiply, or that are the result, are the module's own to finish.
    finished = (
        DTYPE_CODES[out_dtype]
        if compute is torch.float32 and (scaled or compute is out_dtype)
        else -1
    )
    return *sides, partial(
        native.planned_product, native.ProductPlan(*sides, multiply, out_dtype, finished)
    )


def planned_mm(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor | None:
    """:data:`decoded_mm` on a CPU where nobody looks on, of elements; None for any others."""
    left, right = a.values, b.values
    # Of the others that look on the compiled module asks itself.
    if not left.is_cpu or _is_compiling() or (type(left) is not Tensor and left is not a.scales):
        return None
    of_bias, plans = None if bias is None else bias.dtype, _scratch.plans
    # A plan does not outlive a change of the settings that it was made under.
    key = (
        a.layout,
        left.shape,
        a.columnwise,
        b.layout,
        right.shape,
        b.columnwise,
        of_bias,
        out_dtype,
        backends.changes,
    )
    plan = plans.get(key)
    if plan is None:
        if not is_direct(left, right):
            return None
        if len(plans) >= _scratch.PLANS:
            plans.clear()
        with torch.inference_mode(False):
            plan = plans[key] = _plan(a, b, of_bias, out_dtype)
    return plan[2](left, a.scales, right, b.scales, bias) if plan else None
