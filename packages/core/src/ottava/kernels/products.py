"""Products of dense matrices, in the dtype that the machine multiplies fast.

A CPU without instructions for it has no fast product of bfloat16 in torch: operands go to float32 there, which holds
them exactly, and the result is rounded once. ``OTTAVA_CPU_PRODUCT`` (``bfloat16``, ``float32``) says what to do instead
of asking torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ottava.errors import BackendError
from ottava.kernels.backends import backend_module
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
        if wanted and wanted not in _NAMES:
            raise BackendError(
                f"{VARIABLE}={wanted!r} is no dtype of products",
                expected=f"one of {', '.join(_NAMES)}",
                remedy=f"correct or unset {VARIABLE}",
            )
        _bfloat16_is_fast = _NAMES[wanted] if wanted else mkldnn_bf16_supported()
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
