"""The oracle: every kernel in plain PyTorch, on any device.

:mod:`ottava.kernels` describes the values that the functions compute. Rounding to small formats
works on the bits of float32, so that no result depends on torch's conversions to float8 (that to
E5M2 does not saturate, see the numerics page).
"""

import math
from collections.abc import Sequence

import torch

from ottava.formats import E8M0, INT8, FloatFormat, IntegerFormat, element_format, fp8_format
from ottava.kernels.checks import Outputs, Pairs, Shards, Tensor, Tensors
from ottava.layout import Block, Layout, as_matrix_shape, grid_of

_FLOAT32_MAX = torch.finfo(torch.float32).max
# The largest scale of E8M0, and 2^-127, which in float32 is a subnormal.
_LARGEST_SCALE = 254
_TWO_TO_MINUS_127 = 0x00400000


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns of a float32 tensor, as int32."""
    return x.contiguous().view(torch.int32)


def float_bits(value: float) -> int:
    """The bit pattern of one float32 value."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def encode(x: Tensor, fmt: FloatFormat | IntegerFormat) -> Tensor:
    """float32 values as data, uint8.

    Values are rounded to nearest, ties to even, and saturate. NaN becomes ``fmt.nan_code``. Float
    formats keep the sign of zero.
    """
    if isinstance(fmt, IntegerFormat):
        data = (
            torch.nan_to_num(x, 0.0)
            .round()
            .clamp(-fmt.max, fmt.max)
            .to(torch.int8)
            .view(torch.uint8)
        )
        return data.masked_fill(x.isnan(), fmt.nan_code)
    bits = bits_of(x)
    least = float_bits(fmt.min_normal) >> 23
    clamped = (bits & 0x7FFFFFFF).clamp(max=float_bits(fmt.max))
    # A value below the smallest normal number has the unit in the last place of the subnormals,
    # every other one that of its binade.
    exponent = (clamped >> 23).clamp(min=least)
    unit = ((exponent - fmt.mantissa_bits) << 23).view(torch.float32)
    # Division by this power of two loses nothing: the quotient is at most 2^(mantissa_bits + 1),
    # and a quotient that underflows in float32 is far below half a unit.
    steps = torch.round(torch.div(clamped.view(torch.float32), unit)).to(torch.int32)
    magnitude = ((exponent - least) << fmt.mantissa_bits) + steps
    sign = (bits >> 24) & 0x80
    data = magnitude | sign
    return data.masked_fill(x.isnan(), fmt.nan_code).to(torch.uint8)


def _magnitudes(x: Tensor) -> Tensor:
    """|x| in float32, with 0 for NaN."""
    magnitude = x.to(torch.float32).abs()
    return magnitude.masked_fill(magnitude.isnan(), 0.0)


def _inverse(scale: Tensor) -> Tensor:
    # torch.div of two tensors is correctly rounded. With a Python number as the numerator it may
    # multiply by a reciprocal.
    return torch.div(torch.ones_like(scale), scale)


def _write(outputs: Outputs, *values: Tensor) -> None:
    for out, value in zip(outputs, values, strict=True):
        if out is not None:
            out.copy_(value)


def amax(x: Tensor, out: Tensor) -> None:
    matrix = x.reshape(as_matrix_shape(x.shape))
    out.copy_(block_amax(_magnitudes(matrix), (None, None)).reshape(()))


def scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, out: Outputs
) -> None:
    maximum = torch.full_like(amax, fp8_format(fp8_dtype).max)
    scale = _float_scale(amax, maximum, epsilon, force_pow_2, _FLOAT32_MAX)
    _write(out, scale, _inverse(scale))


def _as_float32(value: float) -> float:
    """The nearest float32, which is infinite for a value beyond its range."""
    return float(torch.tensor(value, dtype=torch.float32))


def _float_scale(
    amax: Tensor, maximum: Tensor, epsilon: float, floor: bool, largest: float
) -> Tensor:
    """``maximum / amax``, at most ``largest``, with ``floor`` rounded down to a power of two.

    The scale is 1 where the amax is 0 or not finite.
    """
    # The tensor is filled on the device, because a CUDA graph cannot capture a copy from the host.
    least = torch.full_like(amax, _as_float32(epsilon))
    a = torch.where(amax < least, least, amax)
    usable = a.isfinite() & (a != 0)
    numerator = maximum.expand_as(a)
    scale = torch.div(numerator, torch.where(usable, a, numerator))
    scale = scale.masked_fill(scale.isinf(), largest)
    if not floor:
        return scale
    # Clearing the mantissa rounds down to a power of two.
    return (bits_of(scale) & -0x800000).view(torch.float32).view(scale.shape)


def transpose(data: Tensor, out: Tensor) -> None:
    out.copy_(data.movedim(-1, 0))


def _transposed(data: Tensor) -> Tensor:
    """The transpose; a tensor without dimensions is its own."""
    if data.dim() == 0:
        return data
    return data.movedim(-1, 0)


def quantize(
    x: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, out: Outputs
) -> None:
    scalars = torch.empty((3,), dtype=torch.float32, device=x.device)
    scale, scale_inv, largest = scalars.unbind()
    amax(x, largest)
    scale_from_amax(largest, fp8_dtype, epsilon, force_pow_2, (scale, scale_inv))
    cast_amax(x, scale, None, None, fp8_dtype, (*out[:2], None))
    _write(out[2:], scale, scale_inv, largest)


def cast_amax(
    x: Tensor,
    scale: Tensor,
    recorded: Tensor | None,
    saturated: Tensor | None,
    fp8_dtype: torch.dtype,
    out: Outputs,
) -> None:
    # The scale is copied, because an output may share its memory: the state of a layer's slot can
    # be one tensor.
    factor, fmt = scale.reshape(()).clone(), fp8_format(fp8_dtype)
    scaled = x.to(torch.float32) * factor
    if recorded is not None:
        largest = torch.empty_like(factor)
        amax(x, largest)
        recorded.copy_(torch.maximum(recorded, largest))
    if saturated is not None:
        saturated.add_((scaled.abs() > fmt.max).sum())
    data = encode(scaled, fmt).view(x.shape)
    _write(out, data, _transposed(data), _inverse(factor))


def update_scales(
    scales: Tensors, histories: Tensors, maxima: list[float], most_recent: bool, last: Tensor | None
) -> None:
    """Update every slot of every tensor.

    A slot whose entry in the first row is 0 saw no values in this step, and stays as it is.
    """
    start = 0
    for scale, history in zip(scales, histories, strict=True):
        end = start + scale.numel()
        newest = history[0].clone()
        if last is not None:
            newest = last[start:end]
        maximum = torch.tensor(maxima[start:end], dtype=torch.float32, device=newest.device)
        _update_scale(scale, history, newest, maximum, most_recent)
        start = end


def _update_scale(
    scale: Tensor, history: Tensor, newest: Tensor, maximum: Tensor, most_recent: bool
) -> None:
    """Update the slots of one tensor, whose amaxes in this step are ``newest``."""
    # A NaN counts only in the step that saw it.
    older = history[1:].masked_fill(history[1:].isnan(), 0.0)
    amax = newest
    if len(older) and not most_recent:
        amax = torch.maximum(newest, older.amax(0))
    rolled = torch.cat([history[1:], newest.unsqueeze(0)])
    rolled[0] = 0.0
    next_scale = _float_scale(amax, maximum, 0.0, False, _FLOAT32_MAX)
    moves = newest != 0
    scale.copy_(torch.where(moves & amax.isfinite() & (amax > 0), next_scale, scale))
    history.copy_(torch.where(moves, rolled, history))


# -- kernels on grids of scales --


def grid_scales(amax: Tensor, text: str, dtype: torch.dtype, out: Outputs) -> None:
    _write(out, *_scales(amax, Layout.of(text), dtype))


def _scales(amax: Tensor, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The float32 factors of elements, and the scales to store, for values in ``dtype``."""
    largest, floor = element_format(layout.element).max, layout.rounding == "floor"
    if layout.scale == E8M0.torch_dtype:
        codes = _e8m0_scales(amax, largest, floor)
        return multiplier(codes), codes
    infinite = _FLOAT32_MAX
    if layout.finite_as == "input":
        infinite = torch.finfo(dtype).max
    scale = _float_scale(amax, torch.full_like(amax, largest), layout.epsilon, floor, infinite)
    return scale, _inverse(scale)


def _e8m0_scales(amax: Tensor, largest: float, floor: bool) -> Tensor:
    """The bytes of E8M0 scales for a format whose largest value is ``largest``."""
    magnitude = amax.contiguous().to(torch.float32).abs()
    if floor:
        scale = (bits_of(magnitude) >> 23) - ((float_bits(largest) >> 23) - 127)
    else:
        # 1 / largest is rounded to float32 before the multiplication, which then rounds once.
        bits = bits_of(magnitude * _as_float32(1.0 / largest))
        exponent = bits >> 23
        # Rounding up adds 1 to the exponent of numbers whose mantissa is above 0. Subnormal numbers
        # have the exponent 0, which means 2^-127 as a scale, so it goes up for those above 2^-127.
        bound = torch.full_like(bits, _TWO_TO_MINUS_127).masked_fill(exponent > 0, 0)
        scale = exponent + ((bits & 0x7FFFFF) > bound).to(torch.int32)
    scale = scale.clamp(min=0, max=_LARGEST_SCALE).masked_fill(magnitude.isinf(), _LARGEST_SCALE)
    return scale.masked_fill(magnitude.isnan(), E8M0.nan_code).to(torch.uint8)


def multiplier(codes: Tensor) -> Tensor:
    """2^(127 - byte) for the bytes of E8M0 scales, as float32; NaN for 255."""
    scale = codes.to(torch.int32)
    bits = ((_LARGEST_SCALE - scale) << 23).masked_fill(scale == _LARGEST_SCALE, _TWO_TO_MINUS_127)
    return bits.view(torch.float32).masked_fill(scale == E8M0.nan_code, math.nan)


def block_amax(magnitude: Tensor, block: Block) -> Tensor:
    """The largest magnitude in each block of a matrix."""
    rows, columns = block
    return _amax_along(_amax_along(magnitude, 0, rows), 1, columns)


def _amax_along(magnitude: Tensor, dim: int, side: int | None) -> Tensor:
    """The largest magnitude in each run of ``side`` elements of a dimension, or in all of it."""
    size = magnitude.shape[dim]
    if side is None or side > size > 0:
        # A larger block is cut to the matrix, so that padding costs nothing. An empty matrix, too,
        # has a block.
        side = max(size, 1)
        count = 1
    else:
        count = -(-size // side)
    missing = count * side - size
    padding = [0, missing] if dim == 1 else [0, 0, 0, missing]
    padded = torch.nn.functional.pad(magnitude, padding)
    blocks: Tensor = padded.unflatten(dim, (count, side))
    return blocks.amax(dim + 1)


def spread(per_block: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """Repeat the entry of each block for each element of a matrix of ``shape``."""
    for dim, (side, size) in enumerate(zip(block, shape, strict=True)):
        times = size
        if side is not None:
            times = min(side, size)
        per_block = per_block.repeat_interleave(times, dim).narrow(dim, 0, size)
    return per_block


def for_blocks(shared: Tensor, layout: Layout, columnwise: bool, shape: Sequence[int]) -> Tensor:
    """Repeat the entry of each shared area for each block of a matrix of ``shape``."""
    if layout.shared is None:
        return shared
    rows, columns = layout.block_of(columnwise)
    # A layout with shared areas has blocks of a size.
    assert rows is not None
    assert columns is not None
    times = layout.shared[0] // rows, layout.shared[1] // columns
    return spread(shared, times, layout.grid(shape, columnwise))


def grid_quantize(x: Tensor, text: str, out: Outputs) -> None:
    layout = Layout.of(text)
    matrix = x.reshape(as_matrix_shape(x.shape)).to(torch.float32)
    magnitude = _magnitudes(matrix)
    fmt = element_format(layout.element)
    for columnwise, outputs in ((False, out[:2]), (True, out[2:])):
        if outputs[0] is None:
            continue
        amaxes = block_amax(magnitude, layout.block_of(columnwise, shared=True))
        amaxes = for_blocks(amaxes, layout, columnwise, matrix.shape)
        scale, stored = _scales(amaxes, layout, x.dtype)
        factors = spread(scale, layout.block_of(columnwise), matrix.shape)
        data = encode(matrix * factors, fmt).view(x.shape)
        if columnwise and layout.transposed:
            data, stored = _transposed(data), stored.t()
        _write(outputs, data, stored)


def grid_decode(
    data: Tensor, scales: Tensor | None, text: str, columnwise: bool, out: Tensor
) -> None:
    layout = Layout.of(text)
    values = data.contiguous().view(layout.element).to(torch.float32)
    if layout.element == torch.int8:
        values = values.masked_fill(data == INT8.nan_code, math.nan)
    if scales is not None:
        shape, block = layout.stored_matrix(data.shape, columnwise), layout.stored_block(columnwise)
        if layout.scale != torch.float32:
            # 2^(scale - 127) as the bits of a float64, whose exponents have the bias 1023. float64
            # holds all products exactly.
            powers = ((scales.to(torch.int64) - E8M0.bias + 1023) << 52).view(torch.float64)
            scales = powers.masked_fill(scales == E8M0.nan_code, math.nan)
        factors = spread(scales.reshape(grid_of(shape, block)), block, shape)
        values = (values.view(shape).to(factors.dtype) * factors).view(data.shape)
    if out.dtype != torch.float64:
        # float32 holds the products exactly, unless they overflow.
        values = values.to(torch.float32)
    out.copy_(values)


def epilogue32(
    sums: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    values = sums * math.prod([scale for scale in (scale_a, scale_b) if scale is not None])
    if bias is not None:
        values = values + bias.to(torch.float32)
    out.copy_(values)


# -- kernels on many tensors, one after the other --


def _values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of ``x`` rounded to ``dtype``, as float32, in one dimension."""
    return x.detach().reshape(-1).to(dtype).to(torch.float32)


def grid_multi_amax(shards: Shards, texts: Sequence[str], out: Tensor) -> None:
    """Write the amaxes of whole matrices, as if elements outside of the shard were zero."""
    amaxes: list[Tensor] = []
    for x, dtype, shape, start, text in zip(*shards, texts, strict=True):
        layout = Layout.of(text)
        matrix = torch.zeros(tuple(shape), dtype=torch.float32, device=x.device)
        matrix.view(-1)[start : start + x.numel()] = _magnitudes(_values(x, dtype))
        amaxes.append(block_amax(matrix, layout.block_of(False, shared=True)).reshape(-1))
        if not layout.square:
            amaxes.append(block_amax(matrix, layout.block_of(True, shared=True)).reshape(-1))
    out.copy_(torch.cat(amaxes))


def grid_multi_cast(
    shards: Shards, texts: Sequence[str], rowwise: Pairs, columnwise: Pairs
) -> None:
    """Write the data of each shard, quantized with the scales of its whole matrix."""
    for x, dtype, shape, start, text, row_pair, column_pair in zip(
        *shards, texts, rowwise, columnwise, strict=True
    ):
        values, layout = _values(x, dtype), Layout.of(text)
        for columnwise_data, pair in ((False, row_pair), (True, column_pair)):
            if pair is None:
                continue
            scales, data = pair
            if scales.dtype == torch.uint8:
                scales = multiplier(scales)
            factors = spread(scales, layout.block_of(columnwise_data), shape).reshape(-1)
            scaled = values * factors[start : start + x.numel()]
            data.copy_(encode(scaled, element_format(layout.element)).view(data.shape))
