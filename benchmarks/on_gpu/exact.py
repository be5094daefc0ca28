"""Kernels in float64 from the definitions of the formats, without any computation by ottava."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from benchmarks.on_gpu.runner import Tensor, Tensors
from ottava import Layout

F32, U8 = torch.float32, torch.uint8
_EMPTY, _ONE = torch.empty(0, dtype=torch.uint8), torch.ones(())


def finite(fp8: torch.dtype) -> Tensor:
    """The finite values of the bytes 0, 1, ... in float64, which ascend."""
    values = torch.arange(128, dtype=torch.uint8).view(fp8).double()
    return values[values.isfinite()]


def _float32(operation: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """The correctly rounded float32 result of a multiplication or division.

    A product of float32 numbers is exact in float64, and rounding a quotient to float64 first does
    not change the float32 result.
    """
    return operation(*(x.double() for x in operands)).float()


def _amax(x: Tensor) -> Tensor:
    return x.double().abs().max().float() if x.numel() else torch.zeros(())


def _cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Data of the nearest values, ties to even; larger values become the largest one."""
    values, ladder = _float32(torch.mul, x, scale).double(), finite(fp8_dtype)
    size, ties = (
        values.abs().clamp(max=float(ladder[-1])).contiguous(),
        (ladder[1:] + ladder[:-1]) / 2,
    )
    code = torch.searchsorted(ties, size)  # of the lower one at a tie
    code += (code % 2 == 1) & torch.isin(size, ties)
    return (code + 128 * values.signbit()).to(torch.uint8)


def _per_tensor(
    x: Tensor,
    fp8_dtype: torch.dtype,
    scale: Any = None,
    rowwise: bool = True,
    transposed: bool = True,
    **own: Any,
) -> Tensors:
    """Data, their transpose, the scale, its inverse and the amax.

    Without a ``scale`` it is computed from the amax.
    """
    largest, limit, amax, saturated = (
        _amax(x),
        finite(fp8_dtype)[-1],
        own.get("amax"),
        own.get("saturated"),
    )
    if amax is not None:
        amax.copy_(torch.maximum(amax, largest))
    if saturated is not None:
        saturated += (_float32(torch.mul, x, scale).abs() > limit).sum()
    if scale is None:
        scale = _float32(torch.div, limit, largest.clamp(min=own["epsilon"]))
        scale = torch.exp2(torch.frexp(scale).exponent - 1.0) if own["force_pow_2"] else scale
    data = _cast(x, scale, fp8_dtype)
    codes = [data if rowwise else _EMPTY, data.t() if transposed else _EMPTY]
    return [*codes, scale, _float32(torch.div, _ONE, scale), largest]


def _of_amax(largest: Tensor, layout: Layout) -> Tensors:
    """The factors of elements, and the scales to store."""
    limit = _limit(layout.element)
    if layout.scale == F32:
        scale = _float32(torch.div, limit, largest.clamp(min=layout.epsilon))
        scale = (
            torch.exp2(torch.frexp(scale).exponent - 1.0) if layout.rounding == "floor" else scale
        )
        return [scale, _float32(torch.div, _ONE, scale)]
    mantissa, exponent = torch.frexp(_float32(torch.mul, largest, (1.0 / limit).float()))
    exponent = exponent - (mantissa == 0.5).int()
    if layout.rounding == "floor":
        exponent = torch.frexp(largest).exponent - torch.frexp(limit).exponent
    code = torch.where(largest == 0, 0, (exponent + 127).clamp(0, 254))
    return [torch.exp2(127 - code.double()), code.to(U8)]


def _limit(element: torch.dtype) -> Tensor:
    return (
        torch.tensor(127.0, dtype=torch.float64) if element == torch.int8 else finite(element)[-1]
    )


def _repeat(each: Tensor, times: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Each entry repeated over a rectangle; rectangles are cut where the shape ends."""
    return each.repeat_interleave(times[0], 0).repeat_interleave(times[1], 1)[
        : shape[0], : shape[1]
    ]


def _along_rows(x: Tensor, layout: Layout) -> Tensors:
    """Rowwise data and scales; a scale that blocks share is stored once for each of them."""
    (m, k), block = x.shape, [own or size for own, size in zip(layout.block, x.shape, strict=True)]
    down, across = layout.shared or block
    padded = torch.nn.functional.pad(x.double().abs(), (0, -k % across, 0, -m % down))
    largest = padded.view(-(-m // down), down, -(-k // across), across).amax((1, 3))
    times, grid = (down // block[0], across // block[1]), (-(-m // block[0]), -(-k // block[1]))
    scale, stored = (_repeat(each, times, grid) for each in _of_amax(largest, layout))
    scale = _repeat(scale, block, x.shape)
    if layout.element == torch.int8:
        return [
            _float32(torch.mul, x, scale).round().clamp(-127, 127).to(torch.int8).view(U8),
            stored,
        ]
    return [_cast(x, scale, layout.element), stored]


def _grid_quantize(x: Tensor, layout: Layout, rowwise: bool, columnwise: bool) -> Tensors:
    """Quantize along rows and columns; columns are the rows of the transpose."""
    rows = _along_rows(x, layout) if rowwise else [_EMPTY] * 2
    columns = _along_rows(x.t(), layout) if columnwise else [_EMPTY] * 2
    return [
        *rows,
        *(columns if layout.transposed or not columnwise else [each.t() for each in columns]),
    ]


def _grid_decode(
    data: Tensor, scales: Tensor, layout: Layout, dtype: torch.dtype, columnwise: bool
) -> Tensor:
    block = layout.stored_block(columnwise)
    spread = _repeat(
        scales, [own or size for own, size in zip(block, data.shape, strict=True)], data.shape
    )
    values = data.view(layout.element)
    if layout.element == torch.int8:  # whose smallest stands for NaN
        values = torch.where(values == -128, torch.nan, values.float())
    if layout.scale == F32:
        return _float32(torch.mul, values, spread).to(dtype)
    powers = torch.where(spread == 255, torch.nan, torch.exp2(spread.double() - 127))
    return (values.double() * powers).to(dtype)


def _update_scales(scales: Any, histories: Any, maxima: Any, most_recent: bool, last: None) -> None:
    limits = torch.tensor(maxima).split([scale.numel() for scale in scales])
    for scale, history, limit in zip(scales, histories, limits, strict=True):
        scale.copy_(_float32(torch.div, limit, history[0] if most_recent else history.amax(0)))
        history.copy_(history.roll(-1, 0))
        history[0] = 0


#: Kernel -> a function with the same arguments, results and writes into arguments, for finite
#: inputs.
EXACT: dict[str, Callable[..., Any]] = {
    "amax": _amax,
    "cast": _cast,
    "cast_amax": lambda **a: itemgetter(0, 1, 3)(_per_tensor(**a)),
    "cast_transpose": lambda **a: _per_tensor(**a)[:2],
    "decode": lambda data, scale_inv, fp8_dtype, dtype: _float32(
        torch.mul, data.view(fp8_dtype), _ONE if scale_inv is None else scale_inv
    ).to(dtype),
    "grid_decode": _grid_decode,
    "grid_quantize": _grid_quantize,
    "quantize": _per_tensor,
    "transpose": lambda data: data.t(),
    "update_scales": _update_scales,
}
