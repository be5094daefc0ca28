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
from ottava.kernels.backends import backend_module
from ottava.kernels.direct import is_direct
from ottava.kernels.table import define_product
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
        values: high precision, or the bytes of FP8 elements.
        fp8_dtype: the format of the elements; None for high precision.
        blocks: E8M0 scales of MX blocks, if the elements have such.
        columnwise: whether these blocks lie along the columns.
        scale: a float32 factor that the values are still to be multiplied with.
    """

    values: Tensor
    fp8_dtype: torch.dtype | None = None
    blocks: Tensor | None = None
    columnwise: bool = False
    scale: Tensor | None = None


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


def _decoded(side: int, operand: Operand, dtype: torch.dtype) -> Tensor:
    values, fp8_dtype, blocks, columnwise, _ = operand
    if fp8_dtype is None:
        return values
    if not values.is_contiguous() and values.t().is_contiguous() and blocks is None:
        return _decoded(side, operand._replace(values=values.t()), dtype).t()
    out, backend = _scratch.empty(side, values, dtype), backend_module(values.device.type)
    if blocks is None:
        backend.decode(values, None, fp8_dtype, out)
    else:
        backend.mx_decode(values, blocks, fp8_dtype, columnwise, out)
    return out


def _decoded_mm(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    *fields, transpose_a, transpose_b, bias, compute_dtype, out_dtype = others
    operands = Operand(a, *fields[:4]), Operand(b, *fields[4:])
    left, right = (_decoded(side, operand, compute_dtype) for side, operand in enumerate(operands))
    left, right = left.t() if transpose_a else left, right.t() if transpose_b else right
    return product(left, right, operands[0].scale, operands[1].scale, bias, out_dtype)


def _sizes(a: Any, b: Any, *others: Any) -> tuple[Any, Any, Any]:
    transpose_a, transpose_b = others[8:10]
    return a[1 if transpose_a else 0], b[0 if transpose_b else 1], a[0 if transpose_a else 1]


# The fields of two operands, dense ones of compute_dtype; `transpose` says which of them is taken transposed.
_operator = define_product(
    "decoded_mm(Tensor a, Tensor b, ScalarType? fp8_a, Tensor? blocks_a, bool columnwise_a, Tensor? scale_a,"
    " ScalarType? fp8_b, Tensor? blocks_b, bool columnwise_b, Tensor? scale_b, bool transpose_a, bool transpose_b,"
    " Tensor? bias, ScalarType compute_dtype, ScalarType out_dtype) -> Tensor",
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
    call: Any = _decoded_mm if is_direct(a.values, b.values, a.blocks, b.blocks, a.scale, b.scale, bias) else _operator
    result: Tensor = call(a.values, b.values, *a[1:], *b[1:], *transposes, bias, compute_dtype, out_dtype)
    return result
