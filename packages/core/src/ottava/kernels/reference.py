"""The oracle: every kernel in plain PyTorch, on any device. What the functions do, the table of kernels says."""

from __future__ import annotations

import torch

from ottava.formats import fp8_format
from ottava.kernels.reference_data import bits_of, encode
from ottava.kernels.reference_multi import (  # noqa: F401  (and those on many tensors)
    multi_amax,
    multi_cast,
    mx_multi_amax,
    mx_multi_cast,
)
from ottava.kernels.reference_mx import (  # noqa: F401  (the backend's kernels on MX blocks)
    mx_decode,
    mx_quantize,
    mx_scale_from_amax,
)

Tensor = torch.Tensor
_FLOAT32_MAX = torch.finfo(torch.float32).max


def _largest(x: Tensor) -> Tensor:
    """max |x| as a float32 scalar; NaN is ignored, an empty or all-NaN tensor has 0."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    magnitude = x.to(torch.float32).abs()
    return torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude).amax()


def _cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """``cast(float32(x) * scale)`` as data of the same shape."""
    return encode(x.to(torch.float32) * scale.reshape(()), fp8_format(fp8_dtype)).view(x.shape)


def _inverse(scale: Tensor) -> Tensor:
    # torch.div of two tensors is correctly rounded; a Python scalar numerator would become a reciprocal.
    return torch.div(torch.ones_like(scale), scale)


def _write(out: Tensor | None, value: Tensor) -> None:
    if out is not None:
        out.copy_(value)


def amax(x: Tensor, out: Tensor) -> None:
    out.copy_(_largest(x))


def scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, scale: Tensor, scale_inv: Tensor
) -> None:
    fmt = fp8_format(fp8_dtype)
    a = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    usable = a.isfinite() & (a != 0)
    made = torch.div(torch.full_like(a, fmt.max), torch.where(usable, a, torch.ones_like(a)))
    made = torch.where(usable, made, torch.ones_like(a))
    made = torch.where(made.isinf(), torch.full_like(a, _FLOAT32_MAX), made)
    if force_pow_2:
        # Clearing the mantissa floors to a power of two.
        made = (bits_of(made) & -0x800000).view(torch.float32)
    scale.copy_(made)
    scale_inv.copy_(_inverse(made))


def cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, data: Tensor) -> None:
    data.copy_(_cast(x, scale, fp8_dtype))


def transpose(data: Tensor, out: Tensor) -> None:
    out.copy_(data.movedim(-1, 0))


def cast_transpose(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, data: Tensor, transpose: Tensor) -> None:
    data.copy_(_cast(x, scale, fp8_dtype))
    transpose.copy_(data.movedim(-1, 0))


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    data: Tensor | None,
    transpose: Tensor | None,
    scale: Tensor | None,
    scale_inv: Tensor,
    amax: Tensor | None,
) -> None:
    seen = _largest(x)
    factor = torch.empty_like(seen)
    scale_from_amax(seen, fp8_dtype, epsilon, force_pow_2, factor, scale_inv)
    made = _cast(x, factor, fp8_dtype)
    _write(data, made)
    if transpose is not None:
        transpose.copy_(made.movedim(-1, 0))
    _write(scale, factor)
    _write(amax, seen)


def cast_amax(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    saturated: Tensor | None,
    fp8_dtype: torch.dtype,
    data: Tensor | None,
    transpose: Tensor | None,
    scale_inv: Tensor,
) -> None:
    factor = scale.reshape(()).clone()
    made = _cast(x, factor, fp8_dtype)
    if amax is not None:
        amax.copy_(torch.maximum(amax, _largest(x).reshape(amax.shape)))
    if saturated is not None:
        beyond = (x.to(torch.float32) * factor).abs() > fp8_format(fp8_dtype).max
        saturated.add_(beyond.sum())
    _write(data, made)
    if transpose is not None:
        transpose.copy_(made.movedim(-1, 0))
    scale_inv.copy_(_inverse(factor))


def update_scales(
    scales: list[Tensor], histories: list[Tensor], maxima: list[float], most_recent: bool, last: Tensor | None
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


def decode(data: Tensor, scale_inv: Tensor | None, fp8_dtype: torch.dtype, out: Tensor) -> None:
    values = data.contiguous().view(fp8_dtype).to(torch.float32)
    out.copy_(values if scale_inv is None else values * scale_inv.reshape(()))


def epilogue(acc: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> None:
    """In place: ``acc = round(float32(acc) * (scale_a * scale_b) + float32(bias))``."""
    values = acc.to(torch.float32)
    scales = [s.to(torch.float32) for s in (scale_a, scale_b) if s is not None]
    if scales:
        values = values * (scales[0] * scales[1] if len(scales) == 2 else scales[0])
    if bias is not None:
        values = values + bias.to(torch.float32)
    acc.copy_(values)
