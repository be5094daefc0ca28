"""Products of dense matrices, in the dtype that the machine multiplies fast.

A CPU without instructions for it has no fast product of bfloat16 in torch: operands go to float32 there, which holds
them exactly, and the result is rounded once. ``OTTAVA_CPU_PRODUCT`` (``bfloat16``, ``float32``) says what to do instead
of asking torch.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ottava.errors import BackendError
from ottava.formats import FP8
from ottava.kernels.backends import backend_module
from ottava.kernels.direct import is_direct
from ottava.kernels.reference import elements_of, spread
from ottava.kernels.table import define_product
from ottava.layout import Block, Layout
from ottava.torch_private import constant_to_compiler, mkldnn_bf16_supported

Tensor = torch.Tensor

#: Says what to do instead of asking torch.
VARIABLE = "OTTAVA_CPU_PRODUCT"
_FLOAT32 = torch.finfo(torch.float32)
_NAMES = {"bfloat16": True, "float32": False}

# What torch (or the variable) answered, asked at the first product; None before.
_bfloat16_is_fast: bool | None = None
_capabilities: dict[int, int] = {}


@constant_to_compiler
def capability_of_index(index: int) -> int:
    """The compute capability of the GPU with this index, a constant to compiled code: 89 for 8.9.

    The compiler cannot trace a question to the driver. A number, because that of torch 2.11 cannot order such
    constants that are tuples.
    """
    found = _capabilities.get(index)
    if found is None:
        major, minor = torch.cuda.get_device_capability(index)
        found = _capabilities[index] = 10 * major + minor
    return found


def capability(tensor: torch.Tensor) -> int:
    """The compute capability of the NVIDIA GPU that ``tensor`` is on, 89 for 8.9; 0 for every other device."""
    if not tensor.is_cuda or torch.version.hip is not None:
        return 0
    return capability_of_index(tensor.get_device())


@constant_to_compiler
def multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices fast on this CPU.

    Asked once, of :data:`~ottava.torch_private.mkldnn_bf16_supported`: whether oneDNN has a product of bfloat16 for
    this processor. Where it has none, torch's own loops multiply, many times slower than a product of float32.

    Raises:
        BackendError: ``OTTAVA_CPU_PRODUCT`` is neither ``bfloat16`` nor ``float32``.
    """
    global _bfloat16_is_fast
    if _bfloat16_is_fast is None:
        wanted = os.environ.get(VARIABLE)
        if not wanted:
            _bfloat16_is_fast = mkldnn_bf16_supported()
        elif wanted in _NAMES:
            _bfloat16_is_fast = _NAMES[wanted]
        else:
            raise BackendError(
                f"{VARIABLE}={wanted!r} is no dtype of products",
                expected=f"one of {', '.join(_NAMES)}",
                remedy=f"correct or unset {VARIABLE}",
            )
    return _bfloat16_is_fast


@contextmanager
def cpu_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside a ``with`` block CPUs multiply bfloat16 operands as such or in float32, whatever the machine has."""
    global _bfloat16_is_fast
    before, _bfloat16_is_fast = _bfloat16_is_fast, dtype == torch.bfloat16
    try:
        yield
    finally:
        _bfloat16_is_fast = before


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What operands of ``dtype`` are multiplied in on ``device``: float32 where that is faster, else ``dtype``."""
    slow = dtype is torch.bfloat16 and device.type == "cpu" and not multiplies_bfloat16()
    return torch.float32 if slow else dtype


def mm(a: Tensor, b: Tensor, *out_dtype: torch.dtype) -> Tensor:
    """The product, in the dtype of its operands if none is given, whatever torch.autocast says."""
    with without_autocast(a.device.type):
        return torch.mm(a, b, *out_dtype)


def _addmm(bias: Tensor | None, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """``factor * a @ b + bias`` in the dtype of the operands and of the bias, of sums that are rounded once."""
    with without_autocast(a.device.type):
        if bias is not None:
            return torch.addmm(bias, a, b, alpha=factor)
        nothing = a.new_empty(()).expand(a.shape[0], b.shape[1])
        return torch.addmm(nothing, a, b, beta=0, alpha=factor)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Inside a ``with`` block operators compute in the dtypes of what they are given."""
    # Compiled code runs the backward pass under the autocast that the forward pass was under.
    active = torch.amp.is_autocast_available(kind) and (
        torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)
    )
    return torch.autocast(kind, enabled=False) if active else nullcontext()


def returns_float32(device: torch.device) -> bool:
    """Whether torch's product of bfloat16 operands on ``device`` can give the float32 sums themselves."""
    return device.type == "cuda" and torch.version.hip is None


def finish(
    sums: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``round(sums * (scale_a * scale_b) + bias)`` of contiguous float32 ``sums``, which are used up; rounded once."""
    if scale_a is None and scale_b is None and bias is None:
        return sums.to(out_dtype)
    epilogue = getattr(backend_module(sums.device.type), "epilogue32", None)
    if epilogue is not None:
        out = torch.empty_like(sums, dtype=out_dtype)
        epilogue(sums, scale_a, scale_b, bias, out)
        return out
    scales = [scale for scale in (scale_a, scale_b) if scale is not None]
    if scales:
        sums.mul_(scales[0] if len(scales) == 1 else scales[0] * scales[1])
    if bias is not None:
        sums.add_(bias.to(torch.float32))
    return sums.to(out_dtype)


def product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of dense operands, times both scales, plus the bias."""
    compute_dtype = product_dtype(a.dtype, a.device)
    if not returns_float32(a.device) and (a.dtype is torch.float16 or a.dtype is not out_dtype):
        # Sums in the operands' dtype would lose what the result could hold: of float16 they overflow.
        compute_dtype = torch.float32
    if compute_dtype is not a.dtype:
        a, b = a.to(compute_dtype), b.to(compute_dtype)
    unscaled = scale_a is None and scale_b is None
    if unscaled and bias is None and a.dtype == out_dtype:
        return mm(a, b)
    if unscaled and bias is not None and a.dtype == torch.float32:
        return _addmm(bias.to(torch.float32), a, b).to(out_dtype)
    # The library adds such a bias to its float32 sums, which it rounds once.
    narrow = a.dtype is out_dtype is torch.bfloat16 and (bias is None or bias.dtype is torch.bfloat16)
    wide = a.dtype != torch.float32 and returns_float32(a.device)
    if narrow and unscaled:
        return _addmm(bias, a, b)
    if narrow and not wide and a.device.type == "cpu":
        # torch multiplies its float32 sums with a number, too, if that is a normal float32: it refuses larger ones, and
        # may flush smaller ones to 0.
        factor = math.prod(scale.item() for scale in (scale_a, scale_b) if scale is not None)
        if _FLOAT32.tiny <= abs(factor) <= _FLOAT32.max:
            return _addmm(bias, a, b, factor)
    sums = mm(a, b, torch.float32) if wide else mm(a, b).to(torch.float32)
    return finish(sums, scale_a, scale_b, bias, out_dtype)


# Dense operands [M, K] and [K, N] whose values still lack a per-tensor factor: product, then both factors and the
# bias in float32, then one rounding to out_dtype.
scaled_mm = define_product(
    "scaled_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    product,
    lambda a, b, *_: (a[0], b[1], a[1]),
)


# Products of operands that are decoded first.


class Operand(NamedTuple):
    """A matrix ``[rows, columns]`` as a product takes it.

    Attributes:
        values: high precision, or the bytes of elements; of columnwise data that a layout transposes, the transpose.
        scales: of the elements, on a grid; of high precision a scalar that it is still to be multiplied with, or None.
        layout: the text of the layout of elements; empty for high precision.
        columnwise: whether these are columnwise data of it.
    """

    values: Tensor
    scales: Tensor | None = None
    layout: str = ""
    columnwise: bool = False


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


class _Factors(NamedTuple):
    """Scales that a product still lacks: those of a dense operand, on a grid over it."""

    scales: Tensor
    block: Block

    def turned(self) -> _Factors:
        return _Factors(self.scales.t(), (self.block[1], self.block[0]))


class _Dense(NamedTuple):
    """A dense operand in the order of its matrix, and what it lacks: a scalar, or scales that are no powers of two."""

    values: Tensor
    scale: Tensor | None = None
    factors: _Factors | None = None

    def turned(self) -> _Dense:
        return _Dense(self.values.t(), self.scale, self.factors and self.factors.turned())


def _decoded(side: int, operand: Operand, dtype: torch.dtype) -> _Dense:
    """Values without what would round them."""
    values, scales, text, columnwise = operand
    if not text or scales is None:
        return _Dense(values, scales)
    layout = Layout.of(text)
    whole, turned = layout.block == (None, None), columnwise and layout.transposed
    if whole and not values.is_contiguous() and values.t().is_contiguous():
        return _decoded(side, operand._replace(values=values.t()), dtype).turned()
    out, backend = _scratch.empty(side, values, dtype), backend_module(values.device.type)
    if layout.rounding != "nearest" and not whole:
        backend.grid_decode(values, scales, text, columnwise, out)
        dense = _Dense(out)
    else:
        if layout.element in FP8:
            backend.decode(values, None, layout.element, out)
        else:
            out.copy_(elements_of(values, layout.element))
        dense = _Dense(out, scales) if whole else _Dense(out, None, _Factors(scales, layout.stored_block(columnwise)))
    return dense.turned() if turned else dense


def _decoded_mm(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    *fields, transpose_a, transpose_b, bias, compute_dtype, out_dtype = others
    left = _decoded(0, Operand(a, *fields[:3]), compute_dtype)
    right = _decoded(1, Operand(b, *fields[3:]), compute_dtype)
    left, right = left.turned() if transpose_a else left, right.turned() if transpose_b else right
    if left.factors is None and right.factors is None:
        return product(left.values, right.values, left.scale, right.scale, bias, out_dtype)
    sums = _sums_of_blocks(left.values, left.factors, right.values, right.factors)
    return finish(sums, left.scale, right.scale, bias, out_dtype)


def _sums_of_blocks(a: Tensor, of_a: _Factors | None, b: Tensor, of_b: _Factors | None) -> Tensor:
    """``[M, N]`` in float32: of each block of the summed dimension the partial sum, times the scales of its rows and
    columns, which are applied in float32."""
    rows, inner, columns = *a.shape, b.shape[1]
    if not inner:
        return a.new_zeros((rows, columns), dtype=torch.float32)
    # One factor for each row and block, and for each block and column.
    lefts = None if of_a is None else spread(of_a.scales, (of_a.block[0], 1), (rows, of_a.scales.shape[1]))
    rights = None if of_b is None else spread(of_b.scales, (1, of_b.block[1]), (of_b.scales.shape[0], columns))
    ends = (None if of_a is None else of_a.block[1]), (None if of_b is None else of_b.block[0])
    sides = ends[0] or inner, ends[1] or inner
    step, sums = math.gcd(*sides), None
    for start in range(0, inner, step):
        span = slice(start, min(start + step, inner))
        partial = _wide_mm(a[:, span], b[span], once=ends == (None, None))
        if lefts is not None:
            partial.mul_(lefts[:, start // sides[0]].unsqueeze(1))
        if rights is not None:
            partial.mul_(rights[start // sides[1]])
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


def _sizes(a: Any, b: Any, *others: Any) -> tuple[Any, Any, Any]:
    transposes = others[6:8]
    turned = [text and columnwise and Layout.of(text).transposed for text, columnwise in (others[1:3], others[4:6])]
    flip_a, flip_b = (transpose != bool(turn) for transpose, turn in zip(transposes, turned, strict=True))
    return a[1 if flip_a else 0], b[0 if flip_b else 1], a[0 if flip_a else 1]


# The fields of two operands, dense ones of compute_dtype; `transpose` says which of them is taken transposed.
_operator = define_product(
    "decoded_mm(Tensor a, Tensor b, Tensor? scales_a, str layout_a, bool columnwise_a, Tensor? scales_b, str layout_b,"
    " bool columnwise_b, bool transpose_a, bool transpose_b, Tensor? bias, ScalarType compute_dtype,"
    " ScalarType out_dtype) -> Tensor",
    _decoded_mm,
    _sizes,
)


def decoded_mm(
    a: Operand,
    b: Operand,
    transposes: tuple[bool, bool],
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of two operands, by the operator or by what stands behind it where nobody would see the operator."""
    tensors = a.values, b.values, a.scales, b.scales, bias
    call: Any = _decoded_mm if is_direct(*tensors) else _operator
    result: Tensor = call(a.values, b.values, *a[1:], *b[1:], *transposes, bias, compute_dtype, out_dtype)
    return result
