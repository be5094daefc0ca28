"""The oracle: every kernel in plain PyTorch, on any device. What the functions do, the table of kernels says.

The rounding to small formats is done on the bits of float32 values, so that nothing depends on how a torch build
converts to float8 (its E5M2 conversion does not saturate, see the numerics page).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ottava.formats import E8M0, MX_BLOCK, FloatFormat, fp8_format
from ottava.kernels.checks import DTypes, Pairs, Shards, Tensor, Tensors

_FLOAT32_MAX = torch.finfo(torch.float32).max
_ABS_MASK = 0x7FFFFFFF
_INF_BITS = 0x7F800000
_MANTISSA = 0x7FFFFF
# The largest scale of E8M0, and 2^-127, which in float32 is a subnormal.
_LARGEST_SCALE = 254
_TWO_TO_MINUS_127 = 0x00400000


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns of a float32 tensor, as int32."""
    return x.contiguous().view(torch.int32)


def float_bits(value: float) -> int:
    """The bit pattern of one float32 value."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def encode(x: Tensor, fmt: FloatFormat) -> Tensor:
    """float32 to data: round to nearest even, saturating, NaN to ``fmt.nan_code``, sign of zero kept."""
    bits = bits_of(x)
    magnitude = bits & _ABS_MASK
    clamped = magnitude.clamp(max=float_bits(fmt.max))
    # The unit in the last place of the value's binade, or of the subnormals below the smallest normal.
    exponent = (clamped >> 23).clamp(min=float_bits(fmt.min_normal) >> 23)
    unit_exponent = exponent - fmt.mantissa_bits
    # Dividing by a power of two is exact here (the quotient is at most 2^(mantissa_bits + 1), and what falls
    # below float32's subnormals is far below half a unit).
    unit = (unit_exponent << 23).view(torch.float32)
    steps = torch.round(torch.div(clamped.view(torch.float32), unit)).to(torch.int32)
    binade = exponent - (float_bits(fmt.min_normal) >> 23)
    code = (binade << fmt.mantissa_bits) + steps
    sign = (bits >> 24) & 0x80
    nan = torch.full_like(code, fmt.nan_code)
    return torch.where(magnitude > _INF_BITS, nan, code | sign).to(torch.uint8)


def _magnitudes(x: Tensor) -> Tensor:
    """|x| in float32, with 0 for NaN."""
    magnitude = x.to(torch.float32).abs()
    return torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude)


def _largest(x: Tensor) -> Tensor:
    """max |x| as a float32 scalar; NaN is ignored, an empty or all-NaN tensor has 0."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return _magnitudes(x).amax()


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


def scale_from_amax(amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, out: Tensors) -> None:
    scale, scale_inv = out
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


def cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, out: Tensor) -> None:
    out.copy_(_cast(x, scale, fp8_dtype))


def transpose(data: Tensor, out: Tensor) -> None:
    out.copy_(data.movedim(-1, 0))


def cast_transpose(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, out: Tensors) -> None:
    made = _cast(x, scale, fp8_dtype)
    out[0].copy_(made)
    out[1].copy_(made.movedim(-1, 0))


def quantize(
    x: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, out: Sequence[Tensor | None]
) -> None:
    data, transpose, scale, scale_inv, amax = out
    seen = _largest(x)
    factor, inverse = torch.empty_like(seen), torch.empty_like(seen)
    scale_from_amax(seen, fp8_dtype, epsilon, force_pow_2, (factor, inverse))
    made = _cast(x, factor, fp8_dtype)
    _write(data, made)
    if transpose is not None:
        transpose.copy_(made.movedim(-1, 0))
    _write(scale, factor)
    _write(scale_inv, inverse)
    _write(amax, seen)


def cast_amax(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    saturated: Tensor | None,
    fp8_dtype: torch.dtype,
    out: Sequence[Tensor | None],
) -> None:
    data, transpose, scale_inv = out
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
    _write(scale_inv, _inverse(factor))


def update_scales(
    scales: Tensors, histories: Tensors, maxima: list[float], most_recent: bool, last: Tensor | None
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


# On MX blocks: 32 elements that share a power of two.


def mx_scale_from_amax(amax: Tensor, fp8_dtype: torch.dtype, floor: bool, out: Tensor) -> None:
    out.copy_(_scales(amax, fp8_dtype, floor))


def _scales(amax: Tensor, fp8_dtype: torch.dtype, floor: bool) -> Tensor:
    """The E8M0 byte of each amax."""
    fmt = fp8_format(fp8_dtype)
    magnitude = amax.contiguous().to(torch.float32).abs()
    if floor:
        scale = (bits_of(magnitude) >> 23) - ((float_bits(fmt.max) >> 23) - 127)
    else:
        bits = bits_of(magnitude * torch.tensor(1.0 / fmt.max, dtype=torch.float32, device=amax.device))
        exponent = bits >> 23
        # At most 2^-127 is scale 0: the exponent field of 0 holds everything below 2^-126.
        reached = torch.where(exponent > 0, torch.zeros_like(bits), torch.full_like(bits, _TWO_TO_MINUS_127))
        scale = exponent + ((bits & _MANTISSA) > reached).to(torch.int32)
    scale = scale.clamp(min=0, max=_LARGEST_SCALE)
    scale = torch.where(magnitude.isinf(), torch.full_like(scale, _LARGEST_SCALE), scale)
    scale = torch.where(magnitude.isnan(), torch.full_like(scale, E8M0.nan_code), scale)
    return scale.to(torch.uint8)


def multiplier(scales: Tensor) -> Tensor:
    """2^(127 - scale) as float32, NaN for 255."""
    scale = scales.to(torch.int32)
    bits = torch.where(
        scale == _LARGEST_SCALE, torch.full_like(scale, _TWO_TO_MINUS_127), (_LARGEST_SCALE - scale) << 23
    )
    values = bits.view(torch.float32)
    return torch.where(scale == E8M0.nan_code, torch.full_like(values, float("nan")), values)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def block_amax(magnitude: Tensor, dim: int) -> Tensor:
    """Largest magnitude of each block of 32 along ``dim`` of a matrix."""
    size = magnitude.shape[dim]
    blocks = -(-size // MX_BLOCK)
    padding = [0, blocks * MX_BLOCK - size] if dim == 1 else [0, 0, 0, blocks * MX_BLOCK - size]
    padded: Tensor = torch.nn.functional.pad(magnitude, padding).unflatten(dim, (blocks, MX_BLOCK))
    # amax refuses what is empty.
    amax: Tensor = padded.amax(dim + 1) if padded.numel() else padded.select(dim + 1, 0)
    return amax


def spread(scales: Tensor, dim: int, size: int) -> Tensor:
    """One entry for each element from one for each block."""
    return scales.repeat_interleave(MX_BLOCK, dim).narrow(dim, 0, size)


def mx_quantize(
    x: Tensor, fp8_dtype: torch.dtype, two_dimensional: bool, floor: bool, out: Sequence[Tensor | None]
) -> None:
    row, row_scales, column, column_scales = out
    matrix = _matrix(x).to(torch.float32)
    magnitude = _magnitudes(matrix)
    for data, scales, dim in ((row, row_scales, 1), (column, column_scales, 0)):
        if data is None or scales is None:
            continue
        amax = block_amax(magnitude, dim)
        if two_dimensional:
            amax = spread(block_amax(amax, 1 - dim), 1 - dim, matrix.shape[1 - dim])
        scales.copy_(_scales(amax, fp8_dtype, floor))
        values = matrix * spread(multiplier(scales), dim, matrix.shape[dim])
        data.copy_(encode(values, fp8_format(fp8_dtype)).view(x.shape))


def mx_decode_exact(data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, columnwise: bool) -> Tensor:
    """The values in float64, which holds all of them."""
    matrix = _matrix(data).contiguous()
    # 2^(scale - 127) from the bits of a float64, whose exponents are biased by 1023.
    powers = ((scales.to(torch.int64) - E8M0.bias + 1023) << 52).view(torch.float64)
    factor = torch.where(scales == E8M0.nan_code, torch.full_like(powers, float("nan")), powers)
    dim = 0 if columnwise else 1
    return (matrix.view(fp8_dtype).to(torch.float64) * spread(factor, dim, matrix.shape[dim])).view(data.shape)


def mx_decode(data: Tensor, scales: Tensor, fp8_dtype: torch.dtype, columnwise: bool, out: Tensor) -> None:
    # In float32 only what overflows is not exact.
    exact = mx_decode_exact(data, scales, fp8_dtype, columnwise)
    out.copy_(exact if out.dtype == torch.float64 else exact.to(torch.float32))


# On many tensors, one after the other.


def _values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Every element as it counts, in one dimension."""
    return x.detach().reshape(-1).to(dtype).to(torch.float32)


def multi_amax(xs: Tensors, dtypes: DTypes, out: Tensor) -> None:
    for i, (x, dtype) in enumerate(zip(xs, dtypes, strict=True)):
        out[i] = _largest(_values(x, dtype))


def multi_cast(xs: Tensors, dtypes: DTypes, scales: Tensor, fp8_dtypes: DTypes, outs: Tensors) -> None:
    for x, dtype, scale, fp8_dtype, out in zip(xs, dtypes, scales.detach(), fp8_dtypes, outs, strict=True):
        out.copy_(_cast(_values(x, dtype), scale, fp8_dtype).view(out.shape))


def mx_multi_amax(shards: Shards, two_dimensional: Sequence[bool], out: Tensor) -> None:
    """The amaxes of whole matrices, whose elements that are not in the shard are zero."""
    found: list[Tensor] = []
    for x, dtype, shape, start, square in zip(*shards, two_dimensional, strict=True):
        matrix = torch.zeros(tuple(shape), dtype=torch.float32, device=x.device)
        matrix.view(-1)[start : start + x.numel()] = _magnitudes(_values(x, dtype))
        by_row = block_amax(matrix, 1)
        found += [block_amax(by_row, 0)] if square else [by_row, block_amax(matrix, 0)]
    out.copy_(torch.cat([amaxes.reshape(-1) for amaxes in found]))


def mx_multi_cast(shards: Shards, fp8_dtypes: DTypes, rowwise: Pairs, columnwise: Pairs) -> None:
    """Data of each shard, with the scales of its matrix."""
    for x, dtype, shape, start, fp8_dtype, by_row, by_column in zip(
        *shards, fp8_dtypes, rowwise, columnwise, strict=True
    ):
        values = _values(x, dtype)
        for pair, dim in ((by_row, 1), (by_column, 0)):
            if pair is not None:
                every = spread(multiplier(pair[0]), dim, shape[dim]).reshape(-1)
                data = encode(values * every[start : start + x.numel()], fp8_format(fp8_dtype))
                pair[1].copy_(data.view(pair[1].shape))
