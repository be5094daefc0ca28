"""The oracle: every kernel in plain PyTorch, on any device, written for clarity."""

from __future__ import annotations

import torch

from ottava.formats import fp8_format
from ottava.kernels.reference_codes import bits_of, encode
from ottava.kernels.reference_multi import (  # noqa: F401  (and those on many tensors)
    multi_amax,
    multi_cast,
    mx_multi_amax,
    mx_multi_cast,
)
from ottava.kernels.reference_mx import (  # noqa: F401  (the backend's kernels on MX blocks)
    mx_decode,
    mx_decode_out,
    mx_quantize,
    mx_quantize_out,
    mx_scale_from_amax,
)

_FLOAT32_MAX = torch.finfo(torch.float32).max


def amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| as a float32 scalar; NaN is ignored, an empty or all-NaN tensor has 0."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    magnitude = x.to(torch.float32).abs()
    return torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude).amax()


# A name that no parameter hides.
_amax = amax


def scale_from_amax(
    amax: torch.Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and its correctly rounded reciprocal, any shape of amaxes."""
    fmt = fp8_format(fp8_dtype)
    a = amax.to(torch.float32)
    a = torch.where(a < epsilon, torch.full_like(a, epsilon), a)
    usable = a.isfinite() & (a != 0)
    # torch.div of two tensors is correctly rounded; a Python scalar numerator would become a reciprocal.
    scale = torch.div(torch.full_like(a, fmt.max), torch.where(usable, a, torch.ones_like(a)))
    scale = torch.where(usable, scale, torch.ones_like(a))
    scale = torch.where(scale.isinf(), torch.full_like(a, _FLOAT32_MAX), scale)
    if force_pow_2:
        # Clearing the mantissa floors to a power of two.
        scale = (bits_of(scale) & -0x800000).view(torch.float32)
    return scale, torch.div(torch.ones_like(scale), scale)


def cast(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """``cast(float32(x) * scale)`` as codes of the same shape."""
    return encode(x.to(torch.float32) * scale.to(torch.float32), fp8_format(fp8_dtype)).view(x.shape)


def transpose(data: torch.Tensor) -> torch.Tensor:
    """``[*leading, K]`` to a contiguous ``[K, *leading]``."""
    return data.movedim(-1, 0).contiguous()


def cast_transpose(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and their transpose."""
    data = cast(x, scale, fp8_dtype)
    return data, transpose(data)


def quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    rowwise: bool,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """amax, scale, cast and transpose: ``(data, transpose, scale, scale_inv, amax)``."""
    seen = amax(x)
    scale, scale_inv = scale_from_amax(seen, fp8_dtype, epsilon, force_pow_2)
    data = cast(x, scale, fp8_dtype)
    absent = data.new_empty(0)
    return data if rowwise else absent, transpose(data) if transposed else absent, scale, scale_inv, seen


def cast_amax(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    saturated: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes with a known scale, their transpose and scale_inv; raises ``amax`` and counts what was clamped."""
    factor = scale.reshape(()).clone()
    data = cast(x, factor, fp8_dtype)
    amax.copy_(torch.maximum(amax, _amax(x).reshape(amax.shape)))
    if saturated is not None:
        beyond = (x.to(torch.float32) * factor).abs() > fp8_format(fp8_dtype).max
        saturated.add_(beyond.sum())
    return data, transpose(data) if transposed else data.new_empty(0), torch.div(torch.ones_like(factor), factor)


def update_scales(
    scales: list[torch.Tensor],
    histories: list[torch.Tensor],
    maxima: list[float],
    most_recent: bool,
    last: torch.Tensor | None,
) -> None:
    """Every slot of every tensor. A slot whose first row is 0 saw nothing, and stays as it is."""
    done = 0
    for scale, history in zip(scales, histories, strict=True):
        slots = slice(done, done + scale.numel())
        seen = history[0].clone() if last is None else last[slots]
        maximum = torch.tensor(maxima[slots], dtype=torch.float32, device=scale.device)
        done += scale.numel()
        older = torch.where(history.isnan(), torch.zeros_like(history), history)[1:]
        amax = seen
        if not most_recent and len(older):
            # A NaN counts in the step that saw it, and then no more.
            amax = torch.maximum(seen, older.amax(0))
        rolled = torch.cat([history[1:], seen.unsqueeze(0)])
        rolled[0] = 0.0
        quotient = torch.div(maximum, torch.where(amax > 0, amax, torch.ones_like(amax)))
        quotient = torch.where(quotient.isinf(), torch.full_like(quotient, _FLOAT32_MAX), quotient)
        usable = amax.isfinite() & (amax > 0)
        moves = seen != 0
        scale.copy_(torch.where(moves & usable, quotient, scale))
        history.copy_(torch.where(moves, rolled, history))


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """``float32(q) * scale_inv``, rounded once to ``dtype``."""
    values = data.contiguous().view(fp8_dtype).to(torch.float32)
    if scale_inv is not None:
        values = values * scale_inv.to(torch.float32)
    return values.to(dtype)


def epilogue(
    acc: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    """In place: ``acc = round(float32(acc) * (scale_a * scale_b) + float32(bias))``."""
    values = acc.to(torch.float32)
    scales = [s.to(torch.float32) for s in (scale_a, scale_b) if s is not None]
    if scales:
        product = scales[0] * scales[1] if len(scales) == 2 else scales[0]
        values = values * product
    if bias is not None:
        values = values + bias.to(torch.float32)
    acc.copy_(values)


def amax_out(x: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`amax` into ``out``."""
    out.copy_(amax(x))


def cast_out(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`cast` into ``out``."""
    out.copy_(cast(x, scale, fp8_dtype))


def quantize_out(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    data: torch.Tensor | None,
    transpose: torch.Tensor | None,
    scale: torch.Tensor | None,
    scale_inv: torch.Tensor,
    amax: torch.Tensor | None,
) -> None:
    """:func:`quantize` into existing buffers; None for what is not wanted."""
    results = quantize(x, fp8_dtype, epsilon, force_pow_2, data is not None, transpose is not None)
    for out, result in zip((data, transpose, scale, scale_inv, amax), results, strict=True):
        if out is not None:
            out.copy_(result)


def transpose_out(data: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`transpose` into ``out``."""
    out.copy_(transpose(data))


def decode_out(data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`decode` into ``out``."""
    out.copy_(decode(data, scale_inv, fp8_dtype, out.dtype))
