"""Kernels: amax, scale, cast, transpose, decode and the scaled product, with checks before anything runs.

Every function takes float32, bfloat16 or float16 tensors of any shape and any strides, and works under
``torch.compile``. Codes are uint8 tensors. NaN, infinities and zeros follow the numerics page of the docs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.formats import fp8_format
from ottava.kernels import ops as _ops  # noqa: F401  (defines torch.ops.ottava)
from ottava.kernels.backends import available_backends, backend_for, backend_module, use_backend

__all__ = [
    "HIGH_PRECISION",
    "amax",
    "amax_out",
    "available_backends",
    "backend_for",
    "cast",
    "cast_amax",
    "cast_out",
    "cast_transpose",
    "check_epsilon",
    "check_high_precision",
    "decode",
    "decode_out",
    "quantize",
    "quantize_out",
    "scale_from_amax",
    "scaled_mm",
    "transpose",
    "transpose_out",
    "update_scales",
    "use_backend",
]

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


def check_high_precision(x: torch.Tensor, what: str = "input") -> None:
    """Refuse what cannot be quantized.

    Raises:
        DTypeError: not a strided tensor of float32, bfloat16 or float16.
    """
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"{what} is a {type(x).__name__}", expected="a torch.Tensor", remedy="pass a tensor")
    if x.dtype not in HIGH_PRECISION:
        raise DTypeError(
            f"{what} has dtype {x.dtype}",
            expected="torch.float32, torch.bfloat16 or torch.float16",
            remedy="convert it first, for example with .to(torch.bfloat16)",
        )
    # Dynamo refuses to read the layout inside a backward; a graph's operators check it again.
    if not torch.compiler.is_compiling() and x.layout != torch.strided:
        raise DTypeError(
            f"{what} has layout {x.layout}",
            expected="a dense (strided) tensor",
            remedy="call .to_dense() first",
        )


def _check_scalar(scale: torch.Tensor, x: torch.Tensor, what: str) -> None:
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        raise DTypeError(f"{what} is not a float32 tensor", expected="a float32 tensor with one element")
    check_high_precision(scale, what)
    if scale.numel() != 1:
        raise ShapeError(f"{what} has shape {tuple(scale.shape)}", expected="one element")
    _check_device(scale, x.device, what)


def _check_counter(counter: torch.Tensor, x: torch.Tensor) -> None:
    if not isinstance(counter, torch.Tensor) or counter.dtype != torch.int64:
        raise DTypeError("saturated is not an int64 tensor", expected="an int64 tensor with one element")
    if counter.numel() != 1:
        raise ShapeError(f"saturated has shape {tuple(counter.shape)}", expected="one element")
    _check_device(counter, x.device, "saturated")


def _check_codes(data: torch.Tensor) -> None:
    if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8:
        raise DTypeError(
            f"codes are {getattr(data, 'dtype', type(data).__name__)}",
            expected="torch.uint8",
            remedy="view a float8 tensor with .view(torch.uint8)",
        )


def _check_matrix(x: torch.Tensor) -> None:
    if x.dim() == 0:
        raise ShapeError("a 0-dimensional tensor has no transpose", expected="at least one dimension")


def check_epsilon(epsilon: float) -> None:
    """Raises OptionError unless ``epsilon`` is a finite number >= 0."""
    if isinstance(epsilon, bool) or not (isinstance(epsilon, (int, float)) and 0.0 <= epsilon < float("inf")):
        raise OptionError(f"amax epsilon is {epsilon!r}", expected="a finite number >= 0")


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude as a float32 scalar on the device of ``x``; NaN is ignored, an empty tensor has 0."""
    check_high_precision(x)
    result: torch.Tensor = torch.ops.ottava.amax(x)
    return result


def scale_from_amax(
    amax: torch.Tensor, fp8_dtype: torch.dtype, epsilon: float = 0.0, force_pow_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(scale, scale_inv)`` for every amax, float32, same shape.

    An amax below ``epsilon`` counts as ``epsilon``. ``scale = max / amax``, correctly rounded; 1 where that amax is 0,
    infinite or NaN; at most the largest
    finite float32; with ``force_pow_2`` floored to a power of two. ``scale_inv`` is the correctly rounded ``1/scale``.
    """
    fp8_format(fp8_dtype)
    check_epsilon(epsilon)
    if not isinstance(amax, torch.Tensor) or amax.dtype != torch.float32:
        raise DTypeError("amax is not a float32 tensor", expected="a float32 tensor")
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ottava.scale_from_amax(
        amax, fp8_dtype, float(epsilon), bool(force_pow_2)
    )
    return result


def cast(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Codes of ``cast(float32(x) * scale)``: to nearest even, saturating, NaN to 0x7F, sign of zero kept."""
    check_high_precision(x)
    fp8_format(fp8_dtype)
    _check_scalar(scale, x, "scale")
    result: torch.Tensor = torch.ops.ottava.cast(x, scale, fp8_dtype)
    return result


def cast_transpose(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cast` of ``x [*leading, K]`` with its transpose ``[K, *leading]``, in one pass."""
    check_high_precision(x)
    fp8_format(fp8_dtype)
    _check_scalar(scale, x, "scale")
    _check_matrix(x)
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ottava.cast_transpose(x, scale, fp8_dtype)
    return result


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
    check_high_precision(x)
    fp8_format(fp8_dtype)
    check_epsilon(epsilon)
    if transposed:
        _check_matrix(x)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.ottava.quantize(
        x, fp8_dtype, float(epsilon), bool(force_pow_2), rowwise, transposed
    )
    return result


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
    check_high_precision(x)
    fp8_format(fp8_dtype)
    _check_scalar(scale, x, "scale")
    _check_scalar(amax, x, "amax")
    if saturated is not None:
        _check_counter(saturated, x)
    if transposed:
        _check_matrix(x)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.ottava.cast_amax(
        x, scale, amax, saturated, fp8_dtype, transposed
    )
    return result


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
        _check_out(scale, (slots,), torch.float32, device, "scale")
        _check_out(history, (length, slots), torch.float32, device, "amax history")
    if last is not None:
        _check_out(last, (total,), torch.float32, device, "last")
    torch.ops.ottava.update_scales(
        list(scales), list(histories), [float(maximum) for maximum in maxima], most_recent, last
    )


def transpose(data: torch.Tensor) -> torch.Tensor:
    """Codes ``[*leading, K]`` to a contiguous ``[K, *leading]``."""
    _check_codes(data)
    _check_matrix(data)
    result: torch.Tensor = torch.ops.ottava.transpose(data)
    return result


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """``float32(q) * scale_inv`` rounded once to ``dtype``; without ``scale_inv`` the bare element values."""
    _check_codes(data)
    fp8_format(fp8_dtype)
    if scale_inv is not None:
        _check_scalar(scale_inv, data, "scale_inv")
    if dtype not in HIGH_PRECISION:
        raise DTypeError(f"cannot decode to {dtype}", expected="torch.float32, torch.bfloat16 or torch.float16")
    result: torch.Tensor = torch.ops.ottava.decode(data, scale_inv, fp8_dtype, dtype)
    return result


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
    if a.device != b.device:
        raise DeviceError(f"a is on {a.device}, b on {b.device}", expected="one device")
    for scale, what in ((scale_a, "scale_a"), (scale_b, "scale_b")):
        if scale is not None:
            _check_scalar(scale, a, what)
    if bias is not None:
        check_bias(bias, b.shape[1], a.device)
    if out_dtype not in HIGH_PRECISION:
        raise DTypeError(f"result dtype {out_dtype}", expected="torch.float32, torch.bfloat16 or torch.float16")
    result: torch.Tensor = torch.ops.ottava.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype)
    return result


def check_bias(bias: torch.Tensor, columns: int, device: torch.device) -> None:
    """Refuse a bias that does not fit a product with ``columns`` columns.

    Raises:
        DTypeError, ShapeError, DeviceError: not a high-precision ``[columns]`` on ``device``.
    """
    check_high_precision(bias, "bias")
    if tuple(bias.shape) != (columns,):
        raise ShapeError(f"bias has shape {tuple(bias.shape)}", expected=f"({columns},)")
    _check_device(bias, device, "bias")


def _check_device(tensor: torch.Tensor, device: torch.device, what: str) -> None:
    if tensor.device != device:
        raise DeviceError(
            f"{what} is on {tensor.device}, its operand on {device}",
            expected="the same device",
            remedy=f"move it with .to({str(device)!r})",
        )


def _check_out(
    out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str = "out"
) -> None:
    if not isinstance(out, torch.Tensor):
        raise DTypeError(f"{what} is a {type(out).__name__}", expected="a torch.Tensor")
    if out.dtype != dtype:
        raise DTypeError(f"{what} has dtype {out.dtype}", expected=str(dtype))
    if tuple(out.shape) != tuple(shape) or not out.is_contiguous():
        raise ShapeError(f"{what} has shape {tuple(out.shape)}", expected=f"a contiguous {tuple(shape)}")
    _check_device(out, device, what)


def amax_out(x: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`amax` into a float32 scalar (eager only, as all the ``_out`` functions)."""
    check_high_precision(x)
    _check_out(out, (), torch.float32, x.device)
    backend_module(x.device.type).amax_out(x, out)


def cast_out(x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`cast` into ``out``."""
    check_high_precision(x)
    _check_scalar(scale, x, "scale")
    fp8_format(fp8_dtype)
    _check_out(out, tuple(x.shape), torch.uint8, x.device)
    backend_module(x.device.type).cast_out(x, scale, fp8_dtype, out)


def quantize_out(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    epsilon: float,
    force_pow_2: bool,
    data: torch.Tensor | None,
    transpose: torch.Tensor | None,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    amax: torch.Tensor,
) -> None:
    """:func:`quantize` into existing buffers; ``data`` and ``transpose`` may be None."""
    check_high_precision(x)
    fp8_format(fp8_dtype)
    check_epsilon(epsilon)
    if data is not None:
        _check_out(data, tuple(x.shape), torch.uint8, x.device, "data")
    if transpose is not None:
        _check_matrix(x)
        _check_out(transpose, (x.shape[-1], *x.shape[:-1]), torch.uint8, x.device, "transpose")
    for value, what in ((scale, "scale"), (scale_inv, "scale_inv"), (amax, "amax")):
        _check_out(value, (), torch.float32, x.device, what)
    backend = backend_module(x.device.type)
    backend.quantize_out(x, fp8_dtype, float(epsilon), force_pow_2, data, transpose, scale, scale_inv, amax)


def transpose_out(data: torch.Tensor, out: torch.Tensor) -> None:
    """:func:`transpose` into ``out``."""
    _check_codes(data)
    _check_matrix(data)
    _check_out(out, (data.shape[-1], *data.shape[:-1]), torch.uint8, data.device)
    backend_module(data.device.type).transpose_out(data, out)


def decode_out(data: torch.Tensor, scale_inv: torch.Tensor | None, fp8_dtype: torch.dtype, out: torch.Tensor) -> None:
    """:func:`decode` into ``out``, whose dtype says what to round to."""
    _check_codes(data)
    fp8_format(fp8_dtype)
    if scale_inv is not None:
        _check_scalar(scale_inv, data, "scale_inv")
    check_high_precision(out, "out")
    _check_out(out, tuple(data.shape), out.dtype, data.device)
    backend_module(data.device.type).decode_out(data, scale_inv, fp8_dtype, out)
