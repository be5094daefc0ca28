"""Products of dense matrices, in the dtype that the machine multiplies fast.

torch multiplies bfloat16 matrices slowly on a CPU without instructions for them. There operands are
converted to float32, which holds them exactly, and the result is rounded once.
``OTTAVA_CPU_PRODUCT`` (``bfloat16``, ``float32``) overrides torch's answer for the CPU.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from ottava.errors import BackendError
from ottava.kernels.backends import backend_for, backend_module
from ottava.kernels.table import define_product
from ottava.layout import Block
from ottava.torch_private import (
    WITH_AUTOCAST,
    any_autocast_enabled,
    constant_to_compiler,
    mkldnn_bf16_supported,
)

Tensor = torch.Tensor
#: Takes ``(a, b, scale_a, scale_b, bias, out_dtype)``, returns the product. Callers switch
#: torch.autocast off.
Multiply = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, torch.dtype], Tensor
]
#: ``(sums, scale_a, scale_b, bias, out)``, see :meth:`ottava.kernels.backends.Backend.epilogue32`.
Epilogue = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor], None]

#: The environment variable with the dtype in which bfloat16 operands are multiplied on a CPU.
VARIABLE = "OTTAVA_CPU_PRODUCT"
WHOLE: Block = (None, None)
_SUMS = torch.float32
_FLOAT32 = torch.finfo(_SUMS)
# None before the first product.
_bfloat16_is_fast: bool | None = None
# The number of a GPU -> its compute capability.
_capabilities: dict[int, int] = {}


# The result is a constant in compiled code, which cannot call the driver. It is a number, because
# the compiler of torch 2.11 cannot order constants that are tuples.
@constant_to_compiler
def capability_of_index(index: int) -> int:
    """The compute capability of the GPU with this number: 89 for 8.9."""
    if index not in _capabilities:
        major, minor = torch.cuda.get_device_capability(index)
        _capabilities[index] = 10 * major + minor
    return _capabilities[index]


def capability(tensor: Tensor) -> int:
    """The compute capability of the NVIDIA GPU that ``tensor`` is on: 89 for 8.9.

    0 for every other device.
    """
    if tensor.is_cuda and torch.version.hip is None:
        return capability_of_index(tensor.get_device())
    return 0


@constant_to_compiler
def multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices fast on this CPU.

    oneDNN then has a product for them. Otherwise torch's own loops multiply, which are many times
    slower than a product of float32. The first call decides for the process.

    Raises:
        BackendError: ``OTTAVA_CPU_PRODUCT`` is neither ``bfloat16`` nor ``float32``.
    """
    global _bfloat16_is_fast
    if _bfloat16_is_fast is None:
        name = os.environ.get(VARIABLE)
        if not name:
            _bfloat16_is_fast = mkldnn_bf16_supported()
        elif name in ("bfloat16", "float32"):
            _bfloat16_is_fast = name == "bfloat16"
        else:
            raise BackendError(
                f"{VARIABLE}={name!r} is no dtype of products",
                expected="one of bfloat16, float32",
                remedy=f"correct or unset {VARIABLE}",
            )
    return _bfloat16_is_fast


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which operands of ``dtype`` are multiplied on ``device``.

    It is float32 where that is faster, and otherwise ``dtype``.
    """
    if dtype is torch.bfloat16 and device.type == "cpu" and not multiplies_bfloat16():
        return torch.float32
    return dtype


def compute_dtype(device: torch.device, out_dtype: torch.dtype, exact: bool = True) -> torch.dtype:
    """The dtype in which decoded operands are multiplied for a result of ``out_dtype``.

    It is bfloat16 if that holds the operands (``exact``), is multiplied fast, and costs the result
    no precision, because the product gives float32 sums or the result is bfloat16. It is float32
    otherwise.
    """
    if not exact:
        return torch.float32
    if returns_float32(device):
        return torch.bfloat16
    narrow = out_dtype == torch.bfloat16 and backend_for(device.type) != "reference"
    if narrow and product_dtype(torch.bfloat16, device) == torch.bfloat16:
        return torch.bfloat16
    return torch.float32


def mm(a: Tensor, b: Tensor, *out_dtype: torch.dtype) -> Tensor:
    """``torch.mm`` without torch.autocast, in the dtype of the operands or in ``out_dtype``."""
    with without_autocast(a.device.type):
        return torch.mm(a, b, *out_dtype)


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Inside a ``with`` block torch.autocast is off for devices of this type."""
    if kind not in WITH_AUTOCAST:
        return nullcontext()
    # Compiled code always switches autocast off, because it runs the backward pass under the
    # autocast of the forward pass.
    if torch.compiler.is_compiling() or any_autocast_enabled():
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def returns_float32(device: torch.device) -> bool:
    """Whether torch's product of bfloat16 operands on ``device`` can return its float32 sums."""
    return device.type == "cuda" and torch.version.hip is None


def finish(
    sums: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """``sums * (scale_a * scale_b) + bias``, rounded once.

    Args:
        sums: contiguous float32 ``[M, N]``, which may be overwritten.
        scale_a, scale_b: float32 with one element.
        bias: ``[N]``.
        out_dtype: the dtype of the result.
        epilogue: the kernel, by default that of the backend for ``sums``.
    """
    if scale_a is None and scale_b is None and bias is None:
        return sums.to(out_dtype)
    if epilogue is None:
        epilogue = backend_module(sums.device.type).epilogue32
    out = sums
    if out_dtype is not _SUMS or not sums.is_cpu:
        out = torch.empty_like(sums, dtype=out_dtype)
    epilogue(sums, scale_a, scale_b, bias, out)
    return out


# -- the ways to multiply: functions of the arguments of Multiply --


def _bare(a: Tensor, b: Tensor, *_: object) -> Tensor:
    """The product alone, of operands in the dtype of the result."""
    return torch.mm(a, b)


def _biased(
    a: Tensor, b: Tensor, _: object, __: object, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """torch adds the bias to its float32 sums, which it rounds once. There are no scales."""
    assert bias is not None
    if bias.dtype is not a.dtype:
        bias = bias.to(a.dtype)
    result = torch.addmm(bias, a, b)
    if result.dtype is not out_dtype:
        result = result.to(out_dtype)
    return result


def _factored(
    epilogue: Epilogue,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """torch multiplies its float32 sums by the scales, too.

    It does so only if their product is a normal float32 number: torch refuses larger ones, and may
    flush smaller ones to 0. ``epilogue`` serves the others.
    """
    factor = math.prod([scale.item() for scale in (scale_a, scale_b) if scale is not None])
    if not _FLOAT32.tiny <= abs(factor) <= _FLOAT32.max:
        return _finished(epilogue, a, b, scale_a, scale_b, bias, out_dtype)
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=factor)
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=factor)


def _finished(
    epilogue: Epilogue,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``epilogue`` scales the sums in float32, adds the bias and rounds once."""
    if a.dtype is not _SUMS and returns_float32(a.device):
        sums = torch.mm(a, b, _SUMS)
    else:
        sums = torch.mm(a, b)
    if sums.dtype is not _SUMS:
        sums = sums.to(_SUMS)
    return finish(sums, scale_a, scale_b, bias, out_dtype, epilogue)


def product_for(
    dtype: torch.dtype,
    device: torch.device,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    scaled: bool,
) -> Multiply:
    """The function that multiplies operands of ``dtype`` on ``device``.

    Args:
        bias_dtype: the dtype of the bias; None without a bias.
        scaled: whether there is a scale.
    """
    epilogue = backend_module(device.type).epilogue32
    # All dtypes are bfloat16, so that torch can round its float32 sums to the result.
    narrow = (
        dtype is torch.bfloat16
        and out_dtype is torch.bfloat16
        and bias_dtype in (None, torch.bfloat16)
    )
    if scaled:
        if narrow and device.type == "cpu" and not returns_float32(device):
            return partial(_factored, epilogue)
        return partial(_finished, epilogue)
    if bias_dtype is None and dtype is out_dtype:
        return _bare
    if narrow or (bias_dtype is not None and dtype is _SUMS):
        return _biased
    return partial(_finished, epilogue)


def product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``a @ b * (scale_a * scale_b) + bias`` of dense operands, rounded once.

    Args:
        a: ``[M, K]``.
        b: ``[K, N]``.
        scale_a, scale_b: float32 with one element.
        bias: ``[N]``.
        out_dtype: the dtype of the result.
    """
    device, dtype = a.device, a.dtype
    scaled = scale_a is not None or scale_b is not None
    bias_dtype = None if bias is None else bias.dtype
    operand_dtype = product_dtype(dtype, device)
    # Sums in the operands' dtype would lose precision that the result has, or overflow in float16.
    # The reference rounds once.
    loses = (
        dtype is torch.float16 or dtype is not out_dtype or backend_for(device.type) == "reference"
    )
    if loses and not returns_float32(device):
        operand_dtype = _SUMS
    if operand_dtype is not dtype:
        a, b = a.to(operand_dtype), b.to(operand_dtype)
    multiply = product_for(operand_dtype, device, out_dtype, bias_dtype, scaled)
    with without_autocast(device.type):
        return multiply(a, b, scale_a, scale_b, bias, out_dtype)


#: :func:`product` as an operator.
scaled_mm = define_product(
    "scaled_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, ScalarType "
    "out_dtype) -> Tensor",
    product,
    lambda a, b, *_: (a[0], b[1], a[1]),
)
