"""Products of dense matrices, in the dtype that the machine multiplies fast.

A CPU without instructions for it has no fast product of bfloat16 in torch: operands go to float32 there, which holds
them exactly, and the result is rounded once. ``OTTAVA_CPU_PRODUCT`` (``bfloat16``, ``float32``) says what to do instead
of asking torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ottava.errors import BackendError
from ottava.kernels.backends import backend_module
from ottava.kernels.direct import is_direct
from ottava.kernels.table import define_product
from ottava.torch_private import constant_to_compiler, mkldnn_bf16_supported

Tensor = torch.Tensor

#: Says what to do instead of asking torch.
VARIABLE = "OTTAVA_CPU_PRODUCT"
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


def mm(a: Tensor, b: Tensor, *out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The product, in the dtype of its operands if none is given (with a bias always), whatever torch.autocast says."""
    kind = a.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return mm(a, b, *out_dtype, bias=bias)
    return torch.mm(a, b, *out_dtype) if bias is None else torch.addmm(bias, a, b)


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
        return mm(a, b, bias=bias.to(torch.float32)).to(out_dtype)
    if a.dtype != torch.float32 and returns_float32(a.device):
        if unscaled and bias is not None and bias.dtype == a.dtype == out_dtype:
            # The library adds it to its float32 sums, which it rounds once.
            return mm(a, b, bias=bias)
        return finish(mm(a, b, torch.float32), scale_a, scale_b, bias, out_dtype)
    sums = mm(a, b)
    if sums.dtype == out_dtype == torch.bfloat16:
        backend_module(a.device.type).epilogue(sums, scale_a, scale_b, bias)
        return sums
    return finish(sums.to(torch.float32), scale_a, scale_b, bias, out_dtype)


# Dense operands [M, K] and [K, N] whose values still lack a per-tensor factor: product, then both factors and the
# bias in float32, then one rounding to out_dtype. Where a CPU multiplies bfloat16 operands as such, a bfloat16 result
# that is scaled is rounded twice, because torch has no bfloat16 product that returns float32 there.
_scaled_mm = define_product(
    "scaled_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    product,
    lambda a, b, *_: (a[0], b[1], a[1]),
)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """:func:`ottava.kernels.scaled_mm` of what was checked, without its operator where nobody would see that."""
    call: Any = product if is_direct(a, b, scale_a, scale_b, bias) else _scaled_mm
    result: Tensor = call(a, b, scale_a, scale_b, bias, out_dtype)
    return result


# Products of operands that are made of MX blocks.

#: Data, the scales of its blocks, its format, whether blocks lie along columns, and None; or dense values, None, None,
#: False, and the scale that they are still to be multiplied with, if there is one.
Operand = tuple[Tensor, Tensor | None, torch.dtype | None, bool, Tensor | None]


def _decoded(
    values: Tensor, blocks: Tensor | None, fp8_dtype: torch.dtype | None, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    """A dense matrix as it is, one in blocks in ``dtype``."""
    if blocks is None:
        return values
    decoded = values.new_empty(values.shape, dtype=dtype)
    backend_module(values.device.type).mx_decode(values, blocks, fp8_dtype, columnwise, decoded)
    return decoded


def _mx_scaled_mm(a: Tensor, b: Tensor, blocks_a: Tensor | None, blocks_b: Tensor | None, *others: Any) -> Tensor:
    fp8_a, fp8_b, columnwise_a, columnwise_b, transpose_a, transpose_b, *finishing, compute_dtype, out_dtype = others
    scale_a, scale_b, bias = finishing
    left = _decoded(a, blocks_a, fp8_a, columnwise_a, compute_dtype)
    right = _decoded(b, blocks_b, fp8_b, columnwise_b, compute_dtype)
    return product(
        left.t() if transpose_a else left, right.t() if transpose_b else right, scale_a, scale_b, bias, out_dtype
    )


def _sizes(a: Any, b: Any, *others: Any) -> tuple[Any, Any, Any]:
    transpose_a, transpose_b = others[6:8]
    return a[1 if transpose_a else 0], b[0 if transpose_b else 1], a[0 if transpose_a else 1]


# Matrices of data with the scales of their blocks, or dense ones (no blocks) of compute_dtype with a factor that is
# still missing. Data are [rows, columns] as they are stored; `transpose` says which of them is taken transposed.
_operator = define_product(
    "mx_scaled_mm(Tensor a, Tensor b, Tensor? blocks_a, Tensor? blocks_b, ScalarType? fp8_a, ScalarType? fp8_b,"
    " bool columnwise_a, bool columnwise_b, bool transpose_a, bool transpose_b, Tensor? scale_a, Tensor? scale_b,"
    " Tensor? bias, ScalarType compute_dtype, ScalarType out_dtype) -> Tensor",
    _mx_scaled_mm,
    _sizes,
)


def mx_scaled_mm(
    left: Operand,
    right: Operand,
    transposes: tuple[bool, bool],
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of two operands, without its operator where nobody would see that."""
    (a, blocks_a, fp8_a, columnwise_a, scale_a), (b, blocks_b, fp8_b, columnwise_b, scale_b) = left, right
    call: Any = _mx_scaled_mm if is_direct(a, b, blocks_a, blocks_b, scale_a, scale_b, bias) else _operator
    fields = a, b, blocks_a, blocks_b, fp8_a, fp8_b, columnwise_a, columnwise_b
    result: Tensor = call(*fields, *transposes, scale_a, scale_b, bias, compute_dtype, out_dtype)
    return result
