"""Each kernel declared once: schema, shape function (fake) and eager implementation by backend.

The operators live in the ``torch.library`` namespace ``ottava``, so that ``torch.compile(fullgraph=True)`` sees
through them. They are defined with the low-level ``Library`` interface, whose calls cost a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ottava.kernels.backends import backend_module
from ottava.kernels.direct import is_direct

LIBRARY = torch.library.Library("ottava", "DEF")
Tensor = torch.Tensor


def kernel(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define ``ottava::name`` whose implementation is the function ``name`` of the backend of its first tensor.

    Returns:
        What calls it: the operator, or the backend's function itself where nobody would see the operator.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)

    def by_backend(x: Tensor, *args: Any) -> Any:
        return getattr(backend_module(x.device.type), name)(x, *args)

    LIBRARY.impl(name, by_backend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ottava::{name}", fake, lib=LIBRARY)
    operator: Any = getattr(torch.ops.ottava, name)
    # The first argument is a tensor always; these are the others.
    tensors = [place for place, given in enumerate(operator.default._schema.arguments) if "Tensor" in str(given.type)]
    others = tensors[1:]

    def call(x: Tensor, *args: Any) -> Any:
        direct = is_direct(x, *(args[place - 1] for place in others)) if others else is_direct(x)
        return by_backend(x, *args) if direct else operator(x, *args)

    return call


def _scalar_like(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _codes_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


def _transposed_like(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[-1], *x.shape[:-1]), dtype=torch.uint8)


def _fake_quantize(
    x: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, rowwise: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    absent = x.new_empty((0,), dtype=torch.uint8)
    return (
        _codes_like(x) if rowwise else absent,
        _transposed_like(x) if transposed else x.new_empty((0,), dtype=torch.uint8),
        _scalar_like(x),
        _scalar_like(x),
        _scalar_like(x),
    )


amax = kernel("amax(Tensor x) -> Tensor", _scalar_like)
scale_from_amax = kernel(
    "scale_from_amax(Tensor amax, ScalarType fp8_dtype, float epsilon, bool force_pow_2) -> (Tensor, Tensor)",
    lambda amax, *_: tuple(amax.new_empty(amax.shape, dtype=torch.float32) for _ in range(2)),
)
cast = kernel("cast(Tensor x, Tensor scale, ScalarType fp8_dtype) -> Tensor", lambda x, *_: _codes_like(x))
cast_transpose = kernel(
    "cast_transpose(Tensor x, Tensor scale, ScalarType fp8_dtype) -> (Tensor, Tensor)",
    lambda x, *_: (_codes_like(x), _transposed_like(x)),
)
quantize = kernel(
    "quantize(Tensor x, ScalarType fp8_dtype, float epsilon, bool force_pow_2, bool rowwise, bool transposed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_quantize,
)
cast_amax = kernel(
    "cast_amax(Tensor x, Tensor scale, Tensor(a!) amax, Tensor(b!)? saturated, ScalarType fp8_dtype, bool transposed)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, scale, amax, saturated, fp8_dtype, transposed: (
        _codes_like(x),
        _transposed_like(x) if transposed else x.new_empty((0,), dtype=torch.uint8),
        _scalar_like(x),
    ),
)
transpose = kernel("transpose(Tensor data) -> Tensor", _transposed_like)
decode = kernel(
    "decode(Tensor data, Tensor? scale_inv, ScalarType fp8_dtype, ScalarType dtype) -> Tensor",
    lambda data, scale_inv, fp8_dtype, dtype: data.new_empty(data.shape, dtype=dtype),
)


LIBRARY.define(
    "update_scales(Tensor(a!)[] scales, Tensor(b!)[] histories, float[] maxima, bool most_recent, Tensor? last) -> ()"
)


def _update_scales(scales: list[Tensor], *rest: Any) -> None:
    # No step begins in a backward pass. Compiled code cannot tell, and is run again there by activation checkpointing.
    if scales and torch._C._current_graph_task_id() == -1:
        backend_module(scales[0].device.type).update_scales(scales, *rest)


LIBRARY.impl("update_scales", _update_scales, "CompositeExplicitAutograd")
torch.library.register_fake("ottava::update_scales", lambda *_: None, lib=LIBRARY)


def update_scales(
    scales: list[Tensor], histories: list[Tensor], maxima: list[float], most_recent: bool, last: Tensor | None
) -> None:
    """As what :func:`kernel` returns."""
    direct = is_direct(*scales, *histories, last)
    (_update_scales if direct else torch.ops.ottava.update_scales)(scales, histories, maxima, most_recent, last)


def _mm(a: Tensor, b: Tensor, *out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The product, in the dtype of its operands if none is given (with a bias always), whatever torch.autocast says."""
    kind = a.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return _mm(a, b, *out_dtype, bias=bias)
    return torch.mm(a, b, *out_dtype) if bias is None else torch.addmm(bias, a, b)


def returns_float32(device: torch.device) -> bool:
    """Whether torch's product of bfloat16 operands on ``device`` can give the float32 sums themselves."""
    return device.type == "cuda" and torch.version.hip is None


def finish(
    sums: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``round(sums * (scale_a * scale_b) + bias)`` of contiguous float32 ``sums``, rounded once."""
    if scale_a is None and scale_b is None and bias is None:
        return sums.to(out_dtype)
    epilogue = getattr(backend_module(sums.device.type), "epilogue32", None)
    if epilogue is not None:
        out = torch.empty_like(sums, dtype=out_dtype)
        epilogue(sums, scale_a, scale_b, bias, out)
        return out
    scales = [scale for scale in (scale_a, scale_b) if scale is not None]
    if scales:
        sums = sums * (scales[0] if len(scales) == 1 else scales[0] * scales[1])
    if bias is not None:
        sums = sums + bias.to(torch.float32)
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
    bare = scale_a is None and scale_b is None and bias is None
    if bare and a.dtype == out_dtype:
        return _mm(a, b)
    if a.dtype != torch.float32 and returns_float32(a.device):
        if scale_a is None and scale_b is None and bias is not None and bias.dtype == a.dtype == out_dtype:
            # The library adds it to its float32 sums, which it rounds once.
            return _mm(a, b, bias=bias)
        return finish(_mm(a, b, torch.float32), scale_a, scale_b, bias, out_dtype)
    sums = _mm(a, b)
    if sums.dtype == out_dtype == torch.bfloat16:
        backend_module(a.device.type).epilogue(sums, scale_a, scale_b, bias)
        return sums
    return finish(sums.to(torch.float32), scale_a, scale_b, bias, out_dtype)


# Dense operands [M, K] and [K, N] whose values still lack a per-tensor factor: product, then both factors and the
# bias in float32, then one rounding to out_dtype. On CPU bfloat16 operands with a bfloat16 result round twice, because
# torch has no bfloat16 product that returns float32 there.
LIBRARY.define(
    "scaled_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor"
)
LIBRARY.impl("scaled_mm", product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "ottava::scaled_mm",
    lambda a, b, scale_a, scale_b, bias, out_dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype),
    lib=LIBRARY,
)


@register_flop_formula(torch.ops.ottava.scaled_mm)
def _scaled_mm_flops(a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    """Two operations for each multiply-add, as torch counts its own products."""
    return int(2 * a_shape[0] * a_shape[1] * b_shape[1])
