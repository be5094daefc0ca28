"""Kernels: amax, scale, cast, transpose, decode and the scaled product, with checks before anything runs.

Every function takes float32, bfloat16 or float16 tensors of any shape and any strides, and works under
``torch.compile``. Data, the bytes of elements, are uint8 tensors. NaN, infinities and zeros follow the numerics page of
the docs.

MX blocks are 32 elements that share a power of two, along rows, along columns, or both. A tensor ``[*leading, K]`` is
seen as a matrix of ``M`` rows. Data keep the tensor's shape, in both directions; scales are uint8 bytes of E8M0,
unpadded: ``[M, ceil(K / 32)]`` along rows, ``[ceil(M / 32), K]`` along columns. Blocks at ragged edges are smaller.
Source of the formats: OCP Microscaling Formats Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.kernels import products as _products
from ottava.kernels import table as _table
from ottava.kernels.backends import available_backends, backend_for, use_backend
from ottava.kernels.checks import (
    HIGH_PRECISION,
    check_bias,
    check_device,
    check_dtype,
    check_epsilon,
    check_high_precision,
    check_out,
    check_scalar,
)
from ottava.kernels.multi import multi_amax, multi_cast, mx_amax_sizes, mx_multi_amax, mx_multi_cast

__all__ = [
    "HIGH_PRECISION",
    "amax",
    "available_backends",
    "backend_for",
    "cast",
    "cast_amax",
    "cast_transpose",
    "check_epsilon",
    "check_high_precision",
    "check_scale_rounding",
    "decode",
    "multi_amax",
    "multi_cast",
    "mx_amax_sizes",
    "mx_decode",
    "mx_multi_amax",
    "mx_multi_cast",
    "mx_quantize",
    "mx_scale_from_amax",
    "quantize",
    "scale_from_amax",
    "scaled_mm",
    "transpose",
    "update_scales",
    "use_backend",
]


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude as a float32 scalar on the device of ``x``; NaN is ignored, an empty tensor has 0."""
    return _table.amax.checked(x)  # type: ignore[no-any-return]


def scale_from_amax(
    amax: torch.Tensor, fp8_dtype: torch.dtype, epsilon: float = 0.0, force_pow_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(scale, scale_inv)`` for every amax, float32, same shape.

    An amax below ``epsilon`` counts as ``epsilon``. ``scale = max / amax``, correctly rounded; 1 where that amax is 0,
    infinite or NaN; at most the largest finite float32; with ``force_pow_2`` floored to a power of two. ``scale_inv``
    is the correctly rounded ``1/scale``.
    """
    return _table.scale_from_amax.checked(amax, fp8_dtype, epsilon, bool(force_pow_2))  # type: ignore[no-any-return]


def cast(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Data of ``cast(float32(x) * scale)``: to nearest even, saturating, NaN to 0x7F, sign of zero kept."""
    return _table.cast.checked(x, scale, fp8_dtype)  # type: ignore[no-any-return]


def cast_transpose(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cast` of ``x [*leading, K]`` with its transpose ``[K, *leading]``, in one pass."""
    return _table.cast_transpose.checked(x, scale, fp8_dtype)  # type: ignore[no-any-return]


def quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float = 0.0,
    force_pow_2: bool = False,
    *,
    rowwise: bool = True,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """amax, scale, cast and (if asked) transpose: ``(data, transpose, scale, scale_inv, amax)``.

    What is not asked for comes back as an empty uint8 tensor.
    """
    return _table.quantize.checked(x, fp8_dtype, epsilon, bool(force_pow_2), rowwise, transposed)  # type: ignore[no-any-return]


def cast_amax(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    saturated: torch.Tensor | None = None,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`cast` with a known scale that records, all in one pass over ``x``: ``(data, transpose, scale_inv)``.

    Args:
        amax: float32 with one element, raised in place to the largest magnitude of ``x`` (``max(amax, max|x|)``).
        saturated: int64 with one element, raised by the number of elements beyond the format's maximum; they are
            counted in a second pass, which is made only when there are any.
        transposed: whether the transpose is wanted; an empty tensor comes back otherwise.
    """
    check_scalar(amax, x, "amax")
    return _table.cast_amax.checked(x, scale, amax, saturated, fp8_dtype, True, transposed)  # type: ignore[no-any-return]


def update_scales(
    scales: Sequence[torch.Tensor],
    histories: Sequence[torch.Tensor],
    maxima: Sequence[float],
    *,
    most_recent: bool = False,
    last: torch.Tensor | None = None,
) -> None:
    """The scales of the next step from the amaxes of past ones, in place, for any number of tensors in one call.

    Where the first row of a history is not 0: the amax is the largest of the column (``most_recent``: its first entry),
    the column moves up by one with that entry at its end, its first entry becomes 0, and
    ``scale = maximum / amax``, correctly rounded, at most the largest finite float32, if the amax is finite and > 0. A
    NaN counts in the step that saw it, and then no more. Inside a backward pass nothing happens: no step begins there.

    Args:
        scales: float32 ``[slots]`` each.
        histories: float32 ``[length, slots]`` each, one length for all.
        maxima: what an amax is scaled to, one number for each slot of all tensors.
        last: float32 ``[all slots]``, to be taken for the first rows, one after the other (reduced ones, say).

    Raises:
        ShapeError, DTypeError, DeviceError: the tensors do not fit together.
    """
    total = sum(scale.numel() for scale in scales)
    if len(scales) != len(histories) or len(maxima) != total:
        raise ShapeError(
            f"{len(scales)} scales with {total} slots, {len(histories)} histories, {len(maxima)} maxima",
            expected="as many histories as scales, and a maximum for each slot",
        )
    if not scales:
        return
    device, length = scales[0].device, histories[0].shape[0] if histories[0].dim() == 2 else -1
    if length == 0:
        raise ShapeError("a history has no rows", expected="at least one")
    for scale, history in zip(scales, histories, strict=True):
        slots = scale.numel()
        check_out(scale, (slots,), torch.float32, device, "scale")
        check_out(history, (length, slots), torch.float32, device, "amax history")
    if last is not None:
        check_out(last, (total,), torch.float32, device, "last")
    _table.update_scales(list(scales), list(histories), [float(maximum) for maximum in maxima], most_recent, last)


def transpose(data: torch.Tensor) -> torch.Tensor:
    """Data ``[*leading, K]`` to a contiguous ``[K, *leading]``."""
    return _table.transpose.checked(data)  # type: ignore[no-any-return]


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """``float32(element) * scale_inv`` rounded once to ``dtype``; without ``scale_inv`` the bare element values."""
    return _table.decode.checked(data, scale_inv, fp8_dtype, dtype)  # type: ignore[no-any-return]


def check_scale_rounding(scale_rounding: str) -> None:
    """Raises OptionError unless ``scale_rounding`` is ``"up"`` or ``"floor"``."""
    if scale_rounding not in ("up", "floor"):
        raise OptionError(f"scale_rounding is {scale_rounding!r}", expected="'up' or 'floor'")


def mx_scale_from_amax(amax: torch.Tensor, fp8_dtype: torch.dtype, scale_rounding: str = "up") -> torch.Tensor:
    """The E8M0 byte of each amax, uint8 of the same shape.

    ``"up"``: ``amax * float32(1 / max)`` with its exponent rounded up. ``"floor"``: the exponent of ``amax`` less the
    format's largest (8 for E4M3, 15 for E5M2). In both: 0 gives 0, infinity 254, NaN 255, and nothing else
    more than 254.
    """
    check_scale_rounding(scale_rounding)
    return _table.mx_scale_from_amax.checked(amax, fp8_dtype, scale_rounding == "floor")  # type: ignore[no-any-return]


def mx_quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    two_dimensional: bool = False,
    scale_rounding: str = "up",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize along rows, columns or both, each from ``x`` itself, in one pass over it.

    Args:
        two_dimensional: one scale for 32 rows and columns, so that both directions hold the same values.
        scale_rounding: see :func:`mx_scale_from_amax`. The amax of a block ignores NaN.

    Returns:
        ``(rowwise data, rowwise scales, columnwise data, columnwise scales)``; empty tensors for a direction that is
        not asked for. Columnwise data are not transposed.
    """
    check_scale_rounding(scale_rounding)
    floor = scale_rounding == "floor"
    return _table.mx_quantize.checked(x, fp8_dtype, two_dimensional, floor, rowwise, columnwise)  # type: ignore[no-any-return]


def mx_decode(
    data: torch.Tensor,
    scales: torch.Tensor,
    fp8_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
) -> torch.Tensor:
    """``element * 2^(scale - 127)``, rounded once to ``dtype``; what overflows it is infinite.

    ``dtype`` may be float64 besides, which holds all values exactly.
    """
    return _table.mx_decode.checked(data, scales, fp8_dtype, columnwise, dtype)  # type: ignore[no-any-return]


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``round(a[M, K] @ b[K, N] * (scale_a * scale_b) + bias)``; scales are float32 scalars or None."""
    for operand, what in ((a, "a"), (b, "b")):
        check_high_precision(operand, what)
        if operand.dim() != 2:
            raise ShapeError(f"{what} has shape {tuple(operand.shape)}", expected="a matrix")
    if a.dtype != b.dtype:
        raise DTypeError(f"a has dtype {a.dtype}, b {b.dtype}", expected="one dtype")
    if a.shape[1] != b.shape[0]:
        raise ShapeError(f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}", expected="[M, K] and [K, N]")
    check_device(b, a.device, "b")
    for scale, what in ((scale_a, "scale_a"), (scale_b, "scale_b")):
        if scale is not None:
            check_scalar(scale, a, what)
    if bias is not None:
        check_bias(bias, b.shape[1], a.device)
    check_dtype(out_dtype, "result dtype")
    result: torch.Tensor = _products.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype)
    return result
