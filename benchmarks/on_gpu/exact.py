"""Kernels in float64, by the definitions of the formats alone: nothing of ottava computes here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.on_gpu.inputs import Tensor, Tensors

_EMPTY, _ONE = torch.empty(0, dtype=torch.uint8), torch.ones(())


def finite(fp8: torch.dtype) -> Tensor:
    """The values of the codes 0, 1, ..., as far as they are finite, in float64: they ascend."""
    values = torch.arange(128, dtype=torch.uint8).view(fp8).double()
    return values[values.isfinite()]


def _product(x: Tensor, factor: Tensor) -> Tensor:
    """Of float32's, or narrower ones, as float32 rounds it: float64 holds the product exactly."""
    return (x.double() * factor.double()).float().double()


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """A quotient of float32's: rounded to float64 and then to float32, it is rounded as the exact one is."""
    return (a.double() / b.double()).float()


def _amax(x: Tensor) -> Tensor:
    return x.double().abs().max().float() if x.numel() else torch.zeros(())


def _cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Codes: the nearest value, to even between two, and the largest one beyond it."""
    values, ladder = _product(x, scale), finite(fp8_dtype)
    size = values.abs().clamp(max=float(ladder[-1])).contiguous()
    above = torch.searchsorted(ladder, size)
    below = (above - 1).clamp(min=0)
    up, down = ladder[above] - size, size - ladder[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code + 128 * values.signbit()).to(torch.uint8)


def _cast_amax(x: Any, scale: Any, amax: Any, fp8_dtype: Any, saturated: Any, transposed: bool) -> Tensors:
    amax.copy_(torch.maximum(amax, _amax(x)))
    if saturated is not None:
        saturated += (_product(x, scale).abs() > finite(fp8_dtype)[-1]).sum()
    data = _cast(x, scale, fp8_dtype)
    return [data, data.t() if transposed else _EMPTY, _quotient(_ONE, scale)]


def _quantize(x: Any, fp8_dtype: Any, epsilon: float, force_pow_2: bool, rowwise: bool, transposed: bool) -> Tensors:
    scale = _quotient(finite(fp8_dtype)[-1], _amax(x).clamp(min=epsilon))
    scale = torch.exp2(torch.frexp(scale).exponent - 1.0) if force_pow_2 else scale
    data = _cast(x, scale, fp8_dtype)
    return [data if rowwise else _EMPTY, data.t() if transposed else _EMPTY, scale, _quotient(_ONE, scale), _amax(x)]


def _mx_quantize(
    x: Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, two_dimensional: bool, scale_rounding: str
) -> Tensors:
    (m, k), limit, made = x.shape, finite(fp8_dtype)[-1], []
    for along_rows, asked in ((True, rowwise), (False, columnwise)):
        down, across = (32 if two_dimensional or along_rows is own else 1 for own in (False, True))
        padded = pad(x.double().abs(), (0, -k % across, 0, -m % down))
        largest = padded.view(-(-m // down), down, -(-k // across), across).amax((1, 3))
        mantissa, exponent = torch.frexp(_product(largest, (1.0 / limit).float()))
        exponent = exponent - (mantissa == 0.5).int()
        if scale_rounding == "floor":
            exponent = torch.frexp(largest).exponent - torch.frexp(limit).exponent
        code = torch.where(largest == 0, 0, (exponent + 127).clamp(0, 254)).to(torch.uint8)
        # The scale of a square is held once for each of its rows, or columns.
        rows, columns = code.repeat_interleave(down, 0)[:m], code.repeat_interleave(across, 1)[:, :k]
        scales = torch.exp2(127 - rows.repeat_interleave(across, 1)[:, :k].double())
        made += [_cast(x, scales, fp8_dtype), rows if along_rows else columns] if asked else [_EMPTY, _EMPTY]
    return made


def _mx_decode(data: Tensor, scales: Tensor, fp8_dtype: Any, dtype: torch.dtype, columnwise: bool) -> Tensor:
    spread = scales.repeat_interleave(32, int(not columnwise))[: data.shape[0], : data.shape[1]].double()
    return (data.view(fp8_dtype).double() * torch.where(spread == 255, torch.nan, torch.exp2(spread - 127))).to(dtype)


def _multi_cast(xs: Any, dtypes: Any, scales: Any, fp8_dtypes: Any, outs: Any) -> None:
    for x, dtype, scale, fp8, out in zip(xs, dtypes, scales, fp8_dtypes, outs, strict=True):
        out.copy_(_cast(x.to(dtype), scale, fp8))


def _update_scales(scales: Any, histories: Any, maxima: Any, most_recent: bool, last: None) -> None:
    limits = torch.tensor(maxima).split([scale.numel() for scale in scales])
    for scale, history, limit in zip(scales, histories, limits, strict=True):
        scale.copy_(_quotient(limit, history[0] if most_recent else history.amax(0)))
        history.copy_(history.roll(-1, 0))
        history[0] = 0


#: Kernel -> what has its arguments, its results and its writes into arguments, for finite inputs.
EXACT: dict[str, Callable[..., Any]] = {
    "amax": _amax,
    "cast": _cast,
    "cast_amax": _cast_amax,
    "cast_transpose": lambda **a: [_cast(**a), _cast(**a).t()],
    "decode": lambda data, scale_inv, fp8_dtype, dtype: _product(
        data.view(fp8_dtype), _ONE if scale_inv is None else scale_inv
    ).to(dtype),
    "multi_amax": lambda xs, dtypes: torch.stack([_amax(x.to(dtype)) for x, dtype in zip(xs, dtypes, strict=True)]),
    "multi_cast": _multi_cast,
    "mx_decode": _mx_decode,
    "mx_quantize": _mx_quantize,
    "quantize": _quantize,
    "transpose": lambda data: data.t(),
    "update_scales": _update_scales,
}
