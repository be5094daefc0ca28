"""Kernels: amax, scale, cast, transpose and decode, which check their arguments first.

- One scale for the tensor: :func:`amax`, :func:`scale_from_amax`, :func:`cast`,
  :func:`cast_transpose`, :func:`quantize`, :func:`decode`, :func:`transpose`.
- Delayed scaling: :func:`cast_amax`, :func:`update_scales`.
- Scales on the grid of a :class:`ottava.Layout`: :func:`grid_scales`, :func:`grid_quantize`,
  :func:`grid_quantize_levels`, :func:`grid_decode`.
- Seeds of stochastic rounding: :func:`draw_seed`, :func:`fixed_seed`.
- Many shards of weights in one call: :func:`grid_amax_sizes`, :func:`grid_multi_amax`,
  :func:`grid_multi_cast`.
- Backends: :func:`available_backends`, :func:`backend_for`, :func:`use_backend`.
- Checks: :data:`HIGH_PRECISION`, :func:`check_epsilon`, :func:`check_grid`,
  :func:`check_high_precision`.

High-precision tensors are float32, bfloat16 or float16, of any shape and any strides; a tensor
``[*leading, K]`` is seen as a matrix with ``K`` columns. Data, the bytes of elements, are uint8
tensors. NaN, infinities and zeros follow the numerics page of the docs. All functions but those for
many shards work under ``torch.compile``. An argument that is not as described raises a DTypeError,
ShapeError, DeviceError or OptionError.
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
    Tensor,
    Tensors,
    check_epsilon,
    check_grid,
    check_high_precision,
)
from ottava.kernels.for_layers import draw_seed, fixed_seed
from ottava.kernels.multi import grid_amax_sizes, grid_multi_amax, grid_multi_cast
from ottava.layout import Layout

# FP8 dtype -> the text of the layout with one scale for the tensor.
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
    "draw_seed",
    "fixed_seed",
    "grid_amax_sizes",
    "grid_decode",
    "grid_multi_amax",
    "grid_multi_cast",
    "grid_quantize",
    "grid_quantize_levels",
    "grid_scales",
    "quantize",
    "scale_from_amax",
    "transpose",
    "update_scales",
    "use_backend",
]


# -- one scale for the tensor --


def amax(x: Tensor) -> Tensor:
    """The largest magnitude as a float32 scalar on the device of ``x``.

    NaN is ignored. The amax of an empty tensor is 0.
    """
    check_high_precision(x)
    return table.amax(x)


def scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, epsilon: float = 0.0, force_pow_2: bool = False
) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` for every amax: float32, of the shape of ``amax``.

    ``scale = max / amax``, correctly rounded, and at most the largest finite float32. It is 1 where
    the amax is 0, infinite or NaN. ``scale_inv = 1 / scale``, correctly rounded.

    Args:
        amax: float32, of any shape.
        fp8_dtype: the format, whose largest value is ``max``.
        epsilon: the least amax; a smaller one is replaced by it.
        force_pow_2: whether the scale is rounded down to a power of two.
    """
    checks.check_tensor(amax, "amax", torch.float32)
    fp8_format(fp8_dtype)
    check_epsilon(epsilon)
    scale, scale_inv = table.scale_from_amax(amax, fp8_dtype, epsilon, bool(force_pow_2))
    return scale, scale_inv


def cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Data of ``float32(x) * scale``, of the shape of ``x``.

    Values are rounded to nearest, ties to even, and saturate. NaN becomes 0x7F. Zeros have a sign.
    """
    checks.check_cast(x, scale, fp8_dtype, False)
    data, _, _ = table.cast_amax(x, scale, None, None, fp8_dtype, True, False)
    return data


def cast_transpose(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """:func:`cast` of ``x [*leading, K]`` with its transpose ``[K, *leading]``, in one pass."""
    checks.check_cast(x, scale, fp8_dtype, True)
    data, transpose, _ = table.cast_amax(x, scale, None, None, fp8_dtype, True, True)
    return data, transpose


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float = 0.0,
    force_pow_2: bool = False,
    *,
    rowwise: bool = True,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantize with the scale of the tensor's own amax.

    Args:
        x: ``[*leading, K]``.
        fp8_dtype, epsilon, force_pow_2: as in :func:`scale_from_amax`.
        rowwise: whether data are returned.
        transposed: whether their transpose ``[K, *leading]`` is returned.

    Returns:
        ``(data, transpose, scale, scale_inv, amax)``, with an empty uint8 tensor for data and for a
        transpose that the caller does not ask for.
    """
    check_high_precision(x)
    fp8_format(fp8_dtype)
    check_epsilon(epsilon)
    if transposed:
        checks.check_matrix(x)
    data, transpose, scale, scale_inv, amax = table.quantize(
        x, fp8_dtype, epsilon, bool(force_pow_2), rowwise, transposed
    )
    return data, transpose, scale, scale_inv, amax


def transpose(data: Tensor) -> Tensor:
    """The contiguous transpose ``[K, *leading]`` of data ``[*leading, K]``."""
    checks.check_data(data)
    checks.check_matrix(data)
    return table.transpose(data)


def decode(
    data: Tensor, scale_inv: Tensor | None, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """``float32(element) * scale_inv``, rounded once to ``dtype``, of the shape of ``data``.

    Without ``scale_inv`` the values are those of the elements.
    """
    checks.check_data(data)
    if scale_inv is not None:
        checks.check_scalar(scale_inv, data, "scale_inv")
    fp8_format(fp8_dtype)
    checks.check_dtype(dtype, "cannot decode to")
    return table.grid_decode(data, scale_inv, _WHOLE[fp8_dtype], False, dtype)


# -- delayed scaling --


def cast_amax(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    *,
    saturated: Tensor | None = None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`cast` that also updates an amax and a counter, in one pass over ``x``.

    Args:
        amax: float32 with one element, which becomes ``max(amax, max|x|)`` in place.
        saturated: int64 with one element, to which the number of elements beyond the format's
            maximum is added. If there are any, a second pass counts them.
        transposed: whether the transpose is returned.

    Returns:
        ``(data, transpose, scale_inv)``, with an empty tensor for a transpose that the caller does
        not ask for.
    """
    checks.check_cast(x, scale, fp8_dtype, transposed)
    checks.check_scalar(amax, x, "amax")
    if saturated is not None:
        checks.check_scalar(saturated, x, "saturated", torch.int64)
    data, transpose, scale_inv = table.cast_amax(
        x, scale, amax, saturated, fp8_dtype, True, transposed
    )
    return data, transpose, scale_inv


def update_scales(
    scales: Tensors,
    histories: Tensors,
    maxima: Sequence[float],
    *,
    most_recent: bool = False,
    last: Tensor | None = None,
) -> None:
    """Compute the scales of the next step from the amaxes of past steps.

    The update is in place, for any number of tensors in one call. The first row of a history has
    the amaxes of the step that ends. A slot whose entry there is 0 saw no values, and stays as it
    is. For every other slot:

    - The amax is the largest of the column, or with ``most_recent`` the first entry. A NaN counts
      only in the step that saw it.
    - ``scale = maximum / amax``, correctly rounded, and at most the largest finite float32. The
      scale stays as it is unless the amax is finite and above 0.
    - The column moves up by one, its first entry goes to the end, and the new first entry is 0.

    Inside a backward pass nothing happens, because no step begins there.

    Args:
        scales: float32 ``[slots]`` each.
        histories: float32 ``[length, slots]`` each, of the same length.
        maxima: the value to which an amax is scaled, for each slot of all tensors.
        most_recent: whether the amax of the step that ends counts alone.
        last: float32 ``[all slots]``, which replaces the first rows of all histories, one after the
            other; for example amaxes that ranks have reduced.

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
    device, length = scales[0].device, _length(histories[0])
    for scale, history in zip(scales, histories, strict=True):
        checks.check_out(scale, (scale.numel(),), torch.float32, device, "scale")
        checks.check_out(history, (length, scale.numel()), torch.float32, device, "amax history")
    if last is not None:
        checks.check_out(last, (total,), torch.float32, device, "last")
    table.update_scales(
        list(scales), list(histories), [float(maximum) for maximum in maxima], most_recent, last
    )


def _length(history: Tensor) -> int:
    """The number of rows; -1, which fits no tensor, for a history that is no matrix."""
    if history.dim() != 2:
        return -1
    length = history.shape[0]
    if length == 0:
        raise ShapeError("a history has no rows", expected="at least one")
    return length


# -- scales on a grid --


def grid_scales(
    amax: Tensor, layout: Layout, dtype: torch.dtype = torch.float32
) -> tuple[Tensor | None, Tensor]:
    """``(scale, stored)`` for every amax, of the shape of ``amax``.

    ``scale`` multiplies elements, and ``stored`` is the scale that a tensor stores. In a layout
    with float32 scales both are as in :func:`scale_from_amax`, for values in ``dtype``.

    In a layout with E8M0 scales ``scale`` is None, and ``stored`` is the byte of an exponent. It is
    that of ``amax * float32(1 / max)``, rounded up; or, if the layout rounds to the floor, the
    exponent of ``amax`` less that of the largest power of two of the format. An amax of 0 gives 0,
    infinity 254, NaN 255, and every other amax at most 254.
    """
    checks.check_layout(layout)
    checks.check_dtype(dtype)
    checks.check_tensor(amax, "amax", torch.float32)
    scale, stored = table.grid_scales(amax, layout.text, dtype)
    if layout.stored_scale is not torch.float32:
        return None, stored
    return scale, stored


def grid_quantize(
    x: Tensor, layout: Layout, *, rowwise: bool = True, columnwise: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize for rows, columns or both, each from the values of ``x``.

    Returns:
        ``(rowwise data, rowwise scales, columnwise data, columnwise scales)``, of the shapes that
        :meth:`Layout.data_shape` and :meth:`Layout.scale_shape` give, with empty tensors for a
        direction that the caller does not ask for. The amax of a block ignores NaN.

    Raises:
        OptionError: neither direction is asked for; or the layout has a second level of scales or
            stochastic rounding, which :func:`grid_quantize_levels` serves.
    """
    _check_request(x, layout, rowwise, columnwise)
    if layout.second_level != "none" or layout.stochastic:
        raise OptionError(
            f"grid_quantize for {layout.text}",
            expected="a layout with one level of scales, and rounding to nearest",
            remedy="call grid_quantize_levels",
        )
    data, scales, column_data, column_scales = table.grid_quantize(
        x, layout.text, rowwise, columnwise
    )
    return data, scales, column_data, column_scales


def grid_quantize_levels(
    x: Tensor,
    layout: Layout,
    *,
    seed: Tensor | None = None,
    first_row: int = 0,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`grid_quantize` for layouts with a second level of scales or stochastic rounding, too.

    Args:
        seed: one int64 on the device of ``x``, for a layout with stochastic rounding alone. Equal
            seeds give equal data.
        first_row: the row of a larger matrix that is the first one of ``x``. Elements are then
            rounded at random as those of the larger matrix are.

    Returns:
        ``(data, scales, amaxes)`` of rows, then of columns. The amaxes of the second level have the
        shape of :meth:`Layout.amax_shape`, and are finite: an infinite one counts as the largest
        float32. They are empty without a second level.
    """
    _check_request(x, layout, rowwise, columnwise)
    if layout.stochastic != (seed is not None):
        raise OptionError(
            f"a seed is {'given' if layout.stochastic is False else 'missing'} for {layout.text}",
            expected="a seed for stochastic rounding, and for nothing else",
            remedy="draw_seed() draws one",
        )
    if seed is not None:
        checks.check_scalar(seed, x, "seed", torch.int64)
    results = table.grid_quantize_levels(x, seed, first_row, layout.text, rowwise, columnwise)
    data, scales, amax, column_data, column_scales, column_amax = results
    return data, scales, amax, column_data, column_scales, column_amax


def _check_request(x: Tensor, layout: Layout, rowwise: bool, columnwise: bool) -> None:
    checks.check_layout(layout)
    check_high_precision(x)
    if not (rowwise or columnwise):
        raise OptionError(
            "neither rowwise nor columnwise data are asked for", expected="at least one"
        )


def grid_decode(
    data: Tensor,
    scales: Tensor,
    layout: Layout,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """``float32(element) * scale_inv``, rounded once to ``dtype``, of the shape of ``data``.

    Values that overflow ``dtype`` become infinite. ``dtype`` may also be float64, which holds all
    values with E8M0 scales exactly.

    Elements that share a byte give twice as many values as the last dimension has bytes; an odd
    last one is followed by a 0. With ``amax`` of a second level it is ``(float32(element) * scale)
    * (amax / (bound * max))``, in float32, and without it ``float32(element) * scale`` alone.
    """
    check_grid(data, scales, layout, columnwise)
    if dtype is not torch.float64:
        checks.check_dtype(dtype, "cannot decode to")
    if amax is None:
        return table.grid_decode(data, scales, layout.text, columnwise, dtype)
    checks.check_amax(amax, data, layout, columnwise)
    return table.grid_decode_levels(data, scales, amax, layout.text, columnwise, dtype)
