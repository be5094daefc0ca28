"""Kernels: amax, scale, cast, transpose and decode, with checks before anything runs.

Every function takes float32, bfloat16 or float16 tensors of any shape and any strides, and works
under ``torch.compile``. Data, the bytes of elements, are uint8 tensors. NaN, infinities and zeros
follow the numerics page of the docs.

What a tensor's scales stand for, its :class:`ottava.Layout` says: ``grid_quantize`` and the like
serve all of them. A tensor ``[*leading, K]`` is seen as a matrix of ``M`` rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.errors import OptionError, ShapeError
from ottava.formats import FP8, fp8_format
from ottava.kernels import checks, for_layers, table
from ottava.kernels.backends import available_backends, backend_for, use_backend
from ottava.kernels.checks import (
    HIGH_PRECISION,
    Maybe,
    Tensor,
    check_epsilon,
    check_grid,
    check_high_precision,
)
from ottava.kernels.multi import grid_amax_sizes, grid_multi_amax, grid_multi_cast
from ottava.layout import Layout

_Tensors = Sequence[Tensor]
# The texts of the layouts with one scale for the tensor.
_WHOLE = {dtype: Layout(dtype, (None, None)).text for dtype in FP8}

__all__ = [
    "HIGH_PRECISION",
    "amax",
    "available_backends",
    "backend_for",
    "cast",
    "cast_amax",
    "cast_transpose",
    "check_epsilon",
    "check_grid",
    "check_high_precision",
    "decode",
    "grid_amax_sizes",
    "grid_decode",
    "grid_multi_amax",
    "grid_multi_cast",
    "grid_quantize",
    "grid_scales",
    "quantize",
    "scale_from_amax",
    "transpose",
    "update_scales",
    "use_backend",
]


def amax(x: Tensor) -> Tensor:
    """The largest magnitude as a float32 scalar on the device of ``x``; NaN is ignored, an empty
    tensor has 0."""
    check_high_precision(x)
    return table.amax(x)  # type: ignore[no-any-return]


def scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, epsilon: float = 0.0, force_pow_2: bool = False
) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` for every amax, float32, same shape.

    An amax below ``epsilon`` counts as ``epsilon``. ``scale = max / amax``, correctly rounded; 1
    where that amax is 0, infinite or NaN; at most the largest finite float32; with ``force_pow_2``
    floored to a power of two. ``scale_inv`` is the correctly rounded ``1/scale``.
    """
    checks.check_tensor(amax, "amax", torch.float32)
    fp8_format(fp8_dtype)
    check_epsilon(epsilon)
    return table.scale_from_amax(amax, fp8_dtype, epsilon, bool(force_pow_2))  # type: ignore[no-any-return]


def cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Data of ``cast(float32(x) * scale)``: to nearest even, saturating, NaN to 0x7F, sign of zero
    kept."""
    checks.check_cast(x, scale, fp8_dtype, False)
    return table.cast_amax(x, scale, None, None, fp8_dtype, True, False)[0]  # type: ignore[no-any-return]


def cast_transpose(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """:func:`cast` of ``x [*leading, K]`` with its transpose ``[K, *leading]``, in one pass."""
    checks.check_cast(x, scale, fp8_dtype, True)
    return table.cast_amax(x, scale, None, None, fp8_dtype, True, True)[:2]  # type: ignore[no-any-return]


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float = 0.0,
    force_pow_2: bool = False,
    *,
    rowwise: bool = True,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """amax, scale, cast and (if asked) transpose: ``(data, transpose, scale, scale_inv, amax)``.

    What is not asked for comes back as an empty uint8 tensor.
    """
    check_high_precision(x)
    fp8_format(fp8_dtype)
    check_epsilon(epsilon)
    if transposed:
        checks.check_matrix(x)
    return table.quantize(x, fp8_dtype, epsilon, bool(force_pow_2), rowwise, transposed)  # type: ignore[no-any-return]


def cast_amax(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    *,
    saturated: Maybe = None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`cast` with a known scale that records, all in one pass over ``x``:
    ``(data, transpose, scale_inv)``.

    Args:
        amax: float32 with one element, raised in place to the largest magnitude of ``x``
            (``max(amax, max|x|)``).
        saturated: int64 with one element, raised by the number of elements beyond the format's
            maximum; they are counted in a second pass, which is made only when there are any.
        transposed: whether the transpose is wanted; an empty tensor comes back otherwise.
    """
    checks.check_cast(x, scale, fp8_dtype, transposed)
    checks.check_scalar(amax, x, "amax")
    if saturated is not None:
        checks.check_scalar(saturated, x, "saturated", torch.int64)
    return table.cast_amax(x, scale, amax, saturated, fp8_dtype, True, transposed)  # type: ignore[no-any-return]


def update_scales(
    scales: _Tensors,
    histories: _Tensors,
    maxima: Sequence[float],
    *,
    most_recent: bool = False,
    last: Maybe = None,
) -> None:
    """The scales of the next step from the amaxes of past ones, in place, for any number of tensors
    in one call.

    Where the first row of a history is not 0: the amax is the largest of the column
    (``most_recent``: its first entry), the column moves up by one with that entry at its end, its
    first entry becomes 0, and ``scale = maximum / amax``, correctly rounded, at most the largest
    finite float32, if the amax is finite and > 0. A NaN counts in the step that saw it, and then no
    more. Inside a backward pass nothing happens: no step begins there.

    Args:
        scales: float32 ``[slots]`` each.
        histories: float32 ``[length, slots]`` each, one length for all.
        maxima: what an amax is scaled to, one number for each slot of all tensors.
        last: float32 ``[all slots]``, to be taken for the first rows, one after the other (reduced
            ones, say).

    Raises:
        ShapeError, DTypeError, DeviceError: the tensors do not fit together.
    """
    if last is None and for_layers.update_slots(scales, histories, maxima, most_recent, False):
        return
    total = sum(scale.numel() for scale in scales)
    if len(scales) != len(histories) or len(maxima) != total:
        raise ShapeError(
            f"{len(scales)} scales with {total} slots, {len(histories)} histories, {len(maxima)} "
            f"maxima",
            expected="as many histories as scales, and a maximum for each slot",
        )
    if not scales:
        return
    device, length = scales[0].device, histories[0].shape[0] if histories[0].dim() == 2 else -1
    if length == 0:
        raise ShapeError("a history has no rows", expected="at least one")
    for scale, history in zip(scales, histories, strict=True):
        checks.check_out(scale, (scale.numel(),), torch.float32, device, "scale")
        checks.check_out(history, (length, scale.numel()), torch.float32, device, "amax history")
    if last is not None:
        checks.check_out(last, (total,), torch.float32, device, "last")
    table.update_scales(
        list(scales), list(histories), [float(maximum) for maximum in maxima], most_recent, last
    )


def transpose(data: Tensor) -> Tensor:
    """Data ``[*leading, K]`` to a contiguous ``[K, *leading]``."""
    checks.check_data(data)
    checks.check_matrix(data)
    return table.transpose(data)  # type: ignore[no-any-return]


def decode(data: Tensor, scale_inv: Maybe, fp8_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """``float32(element) * scale_inv`` rounded once to ``dtype``; without ``scale_inv`` the bare
    element values."""
    checks.check_data(data)
    if scale_inv is not None:
        checks.check_scalar(scale_inv, data, "scale_inv")
    fp8_format(fp8_dtype)
    checks.check_dtype(dtype, "cannot decode to")
    return table.grid_decode(data, scale_inv, _WHOLE[fp8_dtype], False, dtype)  # type: ignore[no-any-return]


def grid_scales(
    amax: Tensor, layout: Layout, dtype: torch.dtype = torch.float32
) -> tuple[Maybe, Tensor]:
    """Of every amax what elements are multiplied by, and what is stored of it, of the same shape.

    float32 scales: ``(scale, scale_inv)`` as of :func:`scale_from_amax`, for values in ``dtype``.
    E8M0: None, and the byte: of ``amax * float32(1 / max)`` with its exponent rounded up, or, where
    the layout rounds to the floor, of the exponent of ``amax`` less that of the largest power of
    two of the format; 0 gives 0, infinity 254, NaN 255, and nothing else more than 254.
    """
    checks.check_layout(layout)
    checks.check_dtype(dtype)
    checks.check_tensor(amax, "amax", torch.float32)
    scale, stored = table.grid_scales(amax, layout.text, dtype)
    return (scale if layout.stored_scale is torch.float32 else None), stored


def grid_quantize(
    x: Tensor, layout: Layout, *, rowwise: bool = True, columnwise: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize for rows, columns or both, each from ``x`` itself.

    Returns:
        ``(rowwise data, rowwise scales, columnwise data, columnwise scales)``, of the shapes that
        :meth:`Layout.data_shape` and :meth:`Layout.scale_shape` give; empty tensors for what is not
        asked for. The amax of a block ignores NaN.
    """
    checks.check_layout(layout)
    check_high_precision(x)
    if not (rowwise or columnwise):
        raise OptionError(
            "neither rowwise nor columnwise data are asked for", expected="at least one"
        )
    return table.grid_quantize(x, layout.text, rowwise, columnwise)  # type: ignore[no-any-return]


def grid_decode(
    data: Tensor, scales: Tensor, layout: Layout, dtype: torch.dtype, *, columnwise: bool = False
) -> Tensor:
    """``float32(element) * scale_inv``, rounded once to ``dtype``, of the data's shape; what
    overflows it is infinite.

    ``dtype`` may be float64 besides, which holds the values of E8M0 scales exactly.
    """
    check_grid(data, scales, layout, columnwise)
    if dtype is not torch.float64:
        checks.check_dtype(dtype, "cannot decode to")
    return table.grid_decode(data, scales, layout.text, columnwise, dtype)  # type: ignore[no-any-return]
