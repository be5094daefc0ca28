"""Products of dense matrices, in the dtype that the machine multiplies fast.

A CPU without instructions for it has no fast product of bfloat16 in torch: operands go to float32
there, which holds them exactly, and the result is rounded once. ``OTTAVA_CPU_PRODUCT``
(``bfloat16``, ``float32``) says what to do instead of asking torch.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ottava.errors import BackendError
from ottava.kernels.backends import backend_for, backend_module
from ottava.kernels.checks import Maybe
from ottava.kernels.table import define_product
from ottava.layout import Block
from ottava.torch_private import (
    WITH_AUTOCAST,
    any_autocast_enabled,
    constant_to_compiler,
    mkldnn_bf16_supported,
)

Tensor = torch.Tensor
#: Says what to do instead of asking torch.
VARIABLE = "OTTAVA_CPU_PRODUCT"
_SUMS = torch.float32
_FLOAT32 = torch.finfo(_SUMS)
WHOLE: Block = (None, None)
# What torch (or the variable) answered, asked at the first product; None before.
_bfloat16_is_fast: bool | None = None
_capabilities: dict[int, int] = {}


@constant_to_compiler
def capability_of_index(index: int) -> int:
    """The compute capability of the GPU with this index, 89 for 8.9: a constant to compiled code,
    which cannot ask the driver, and a number, because the compiler of torch 2.11 cannot order such
    constants that are tuples."""
    if index not in _capabilities:
        major, minor = torch.cuda.get_device_capability(index)
        _capabilities[index] = 10 * major + minor
    return _capabilities[index]


def capability(tensor: Tensor) -> int:
    """The compute capability of the NVIDIA GPU that ``tensor`` is on, 89 for 8.9; 0 for every other
    device."""
    return (
        capability_of_index(tensor.get_device())
        if tensor.is_cuda and torch.version.hip is None
        else 0
    )


@constant_to_compiler
def multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices fast on this CPU, because oneDNN has such a
    product for it; else torch's own loops multiply, many times slower than a product of float32.
    Asked once.

    Raises:
        BackendError: ``OTTAVA_CPU_PRODUCT`` is neither ``bfloat16`` nor ``float32``.
    """
    global _bfloat16_is_fast
    if _bfloat16_is_fast is None:
        wanted = os.environ.get(VARIABLE)
        if wanted and wanted not in ("bfloat16", "float32"):
            what, expected = (
                f"{VARIABLE}={wanted!r} is no dtype of products",
                "one of bfloat16, float32",
            )
            raise BackendError(what, expected=expected, remedy=f"correct or unset {VARIABLE}")
        _bfloat16_is_fast = wanted == "bfloat16" if wanted else mkldnn_bf16_supported()
    return _bfloat16_is_fast


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What operands of ``dtype`` are multiplied in on ``device``: float32 where that is faster,
    else ``dtype``."""
    slow = dtype is torch.bfloat16 and device.type == "cpu" and not multiplies_bfloat16()
    return torch.float32 if slow else dtype


def compute_dtype(device: torch.device, out_dtype: torch.dtype, exact: bool = True) -> torch.dtype:
    """bfloat16 where it holds operands (``exact``), is fast, and the result loses nothing to it or
    is wanted in it."""
    wanted = out_dtype == torch.bfloat16 and backend_for(device.type) != "reference"
    fast = returns_float32(device) or (
        wanted and product_dtype(torch.bfloat16, device) == torch.bfloat16
    )
    return torch.bfloat16 if fast and exact else torch.float32


def mm(a: Tensor, b: Tensor, *out_dtype: torch.dtype) -> Tensor:
    """The product, in the dtype of its operands if none is given, whatever torch.autocast says."""
    with without_autocast(a.device.type):
        return torch.mm(a, b, *out_dtype)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Inside a ``with`` block operators compute in the dtypes of what they are given."""
    # Compiled code runs the backward pass under the autocast that the forward pass was under.
    if not (torch.compiler.is_compiling() or any_autocast_enabled()) or kind not in WITH_AUTOCAST:
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def returns_float32(device: torch.device) -> bool:
    """Whether torch's product of bfloat16 operands on ``device`` can give the float32 sums
    themselves."""
    return device.type == "cuda" and torch.version.hip is None


def finish(
    sums: Tensor,
    scale_a: Maybe,
    scale_b: Maybe,
    bias: Maybe,
    out_dtype: torch.dtype,
    epilogue: Any = None,
) -> Tensor:
    """``round(sums * (scale_a * scale_b) + bias)`` of contiguous float32 ``sums``, which are used
    up; rounded once."""
    if scale_a is None and scale_b is None and bias is None:
        return sums.to(out_dtype)
    out = sums if out_dtype is _SUMS and sums.is_cpu else torch.empty_like(sums, dtype=out_dtype)
    (epilogue or backend_module(sums.device.type).epilogue32)(sums, scale_a, scale_b, bias, out)
    return out


# What multiplies: of (epilogue, a, b, scale_a, scale_b, bias, out_dtype), where torch.autocast is
# off.


def _bare(_: Any, a: Tensor, b: Tensor, *__: Any) -> Tensor:
    return torch.mm(a, b)


def _biased(
    _: Any, a: Tensor, b: Tensor, scale_a: None, scale_b: None, bias: Tensor, dtype: torch.dtype
) -> Tensor:
    """The library adds the bias to its float32 sums, which it rounds once."""
    made = torch.addmm(bias if bias.dtype is a.dtype else bias.to(a.dtype), a, b)
    return made if made.dtype is dtype else made.to(dtype)


def _factored(
    epilogue: Any, a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, bias: Any, dtype: torch.dtype
) -> Tensor:
    """torch multiplies its float32 sums with a number, too, if that is a normal float32: it refuses
    larger ones, and may flush smaller ones to 0."""
    factor = math.prod([scale.item() for scale in (scale_a, scale_b) if scale is not None])
    if not _FLOAT32.tiny <= abs(factor) <= _FLOAT32.max:
        return _finished(epilogue, a, b, scale_a, scale_b, bias, dtype)
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=factor)
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=factor)


def _finished(
    epilogue: Any, a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, bias: Any, dtype: torch.dtype
) -> Tensor:
    wide = a.dtype is not _SUMS and returns_float32(a.device)
    sums = torch.mm(a, b, _SUMS) if wide else torch.mm(a, b)
    return finish(
        sums if sums.dtype is _SUMS else sums.to(_SUMS), scale_a, scale_b, bias, dtype, epilogue
    )


def product_for(
    dtype: torch.dtype,
    device: torch.device,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    scaled: bool,
) -> Callable[..., Tensor]:
    """What multiplies operands of ``dtype``, with a bias of another or none: of
    ``(a, b, scale_a, scale_b, bias, out_dtype)``, where torch.autocast is off."""
    narrow = dtype is out_dtype is torch.bfloat16 and bias_dtype in (None, torch.bfloat16)
    how: Any = (
        _factored if narrow and device.type == "cpu" and not returns_float32(device) else _finished
    )
    if not scaled and bias_dtype is None and dtype is out_dtype:
        how = _bare
    elif not scaled and (narrow or (bias_dtype is not None and dtype is _SUMS)):
        how = _biased
    return partial(how, backend_module(device.type).epilogue32)


def product(
    a: Tensor, b: Tensor, scale_a: Maybe, scale_b: Maybe, bias: Maybe, out_dtype: torch.dtype
) -> Tensor:
    """The product of dense operands, times both scales, plus the bias."""
    device, scaled = a.device, scale_a is not None or scale_b is not None
    compute_dtype = product_dtype(a.dtype, device)
    if not returns_float32(device) and (a.dtype is torch.float16 or a.dtype is not out_dtype):
        # Sums in the operands' dtype would lose what the result could hold: of float16 they
        # overflow.
        compute_dtype = _SUMS
    if compute_dtype is not a.dtype:
        a, b = a.to(compute_dtype), b.to(compute_dtype)
    multiply = product_for(
        compute_dtype, device, out_dtype, None if bias is None else bias.dtype, scaled
    )
    with without_autocast(device.type):
        return multiply(a, b, scale_a, scale_b, bias, out_dtype)


# Dense operands [M, K] and [K, N] whose values still lack a per-tensor factor: product, then both
# factors and the bias in float32, then one rounding to out_dtype.
scaled_mm = define_product(
    "scaled_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, ScalarType "
    "out_dtype) -> Tensor",
    product,
    lambda a, b, *_: (a[0], b[1], a[1]),
)
