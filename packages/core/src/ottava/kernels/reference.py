"""The oracle: every kernel in plain PyTorch, on any device.

:mod:`ottava.kernels` describes the values that the functions compute.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ottava.formats import fp8_format
from ottava.kernels.checks import Outputs, Pairs, Shards, Tensor, Tensors
from ottava.kernels.elements import decode, encode, pack, unpack
from ottava.kernels.philox import random_words
from ottava.kernels.rotation import rotated
from ottava.kernels.scales import (
    FLOAT32_MAX,
    choice,
    float_scale,
    inverse,
    multipliers_of,
    scale_values,
    scales_of,
    sums_of_blocks,
    top_of,
)
from ottava.layout import Block, Layout, as_matrix_shape, grid_of


def _magnitudes(x: Tensor) -> Tensor:
    """|x| in float32, with 0 for NaN."""
    magnitude = x.to(torch.float32).abs()
    return magnitude.masked_fill(magnitude.isnan(), 0.0)


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
    scale = float_scale(amax, maximum, epsilon, force_pow_2, FLOAT32_MAX)
    _write(out, scale, inverse(scale))


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
    _write(out, data, _transposed(data), inverse(factor))


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
    next_scale = float_scale(amax, maximum, 0.0, False, FLOAT32_MAX)
    moves = newest != 0
    scale.copy_(torch.where(moves & amax.isfinite() & (amax > 0), next_scale, scale))
    history.copy_(torch.where(moves, rolled, history))


# -- kernels on grids of scales --


def grid_scales(amax: Tensor, text: str, dtype: torch.dtype, out: Outputs) -> None:
    _write(out, *scales_of(amax, Layout.of(text), dtype))


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
    rows, columns = (*out[:2], None), (*out[2:], None)
    grid_quantize_levels(x, None, 0, text, (*rows, *columns))


def grid_quantize_levels(
    x: Tensor, seed: Tensor | None, first_row: int, text: str, out: Outputs
) -> None:
    layout = Layout.of(text)
    for columnwise, outputs in ((False, out[:3]), (True, out[3:])):
        if outputs[0] is not None:
            amaxes = amaxes_of(x, layout, columnwise)
            _write(outputs, *quantize_direction(x, layout, columnwise, amaxes, seed, first_row))


class Amaxes(NamedTuple):
    """The amaxes that the scales of one direction follow from.

    Attributes:
        areas: one for each block, or for each area of blocks that share a scale.
        largest: those of the second level, a column; None without a second level.
    """

    areas: Tensor
    largest: Tensor | None


def amaxes_of(x: Tensor, layout: Layout, columnwise: bool) -> Amaxes:
    """The amaxes of one direction of ``x``."""
    magnitude = _magnitudes(_rows_of_direction(x, layout, columnwise))
    areas = block_amax(magnitude, layout.shared or layout.block)
    return Amaxes(areas, _second_level(magnitude, layout))


def _rows_of_direction(x: Tensor, layout: Layout, columnwise: bool) -> Tensor:
    """The values of one direction as a float32 matrix whose rows run along the summed dimension.

    They are those of the transpose for columns, and rotated where the layout rotates the direction.
    """
    matrix = x.reshape(as_matrix_shape(x.shape)).to(torch.float32)
    rows = matrix.t() if columnwise else matrix
    rotation = layout.rotation
    if rotation is not None and rotation.turns(columnwise):
        return rotated(rows, rotation, x.dtype)
    return rows


def quantize_direction(
    x: Tensor,
    layout: Layout,
    columnwise: bool,
    amaxes: Amaxes,
    seed: Tensor | None,
    first_row: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scales and amaxes of the second level of one direction, as they are stored.

    Columns are quantized as the rows of the transpose.

    Args:
        x: the values.
        layout: of the elements.
        columnwise: the direction.
        amaxes: of ``x``, or of a larger tensor that has ``x`` as rows.
        seed: of stochastic rounding.
        first_row: the row of the larger tensor that is the first one of ``x``.
    """
    rows = _rows_of_direction(x, layout, columnwise)
    areas = for_blocks(amaxes.areas, layout, False, rows.shape)
    largest = amaxes.largest

    def spread_blocks(per_block: Tensor) -> Tensor:
        return spread(per_block, layout.block, rows.shape)

    def sums(errors: Tensor) -> Tensor:
        # The rows of squares are those of the tensor, so that both directions choose alike.
        turned = columnwise and layout.square
        area = layout.shared or layout.block
        per_area = sums_of_blocks(errors.t() if turned else errors, area)
        return for_blocks(per_area.t() if turned else per_area, layout, False, rows.shape)

    if layout.candidates:
        factors, stored = choice(rows, areas, layout, x.dtype, largest, spread_blocks, sums)
    else:
        factors, stored = scales_of(areas, layout, x.dtype, largest)
    random = None
    if layout.stochastic:
        assert seed is not None
        # Both directions of squares hold the same values, and so are rounded alike.
        stream = int(columnwise and not layout.square)
        width = as_matrix_shape(x.shape)[1]
        random = random_words(seed, _places(rows, width, columnwise, first_row), stream)
    data = encode(rows * spread_blocks(factors), layout.format, random)
    if layout.elements_per_byte == 2:
        data = pack(data)
    if columnwise and not layout.transposed:
        data, stored = data.t(), stored.t()
    data = data.reshape(layout.data_shape(x.shape, columnwise))
    if largest is None:
        # Without a second level nobody asks for its amaxes.
        return data, stored, stored
    return data, stored, largest.reshape(layout.amax_shape(x.shape, columnwise) or ())


def _second_level(magnitude: Tensor, layout: Layout) -> Tensor | None:
    """The amaxes of the second level as a column: one of each row, or one of all. None without."""
    if layout.second_level == "none":
        return None
    block = (1, None) if layout.second_level == "row" else (None, None)
    return block_amax(magnitude, block).clamp(max=FLOAT32_MAX)


def _places(rows: Tensor, width: int, columnwise: bool, first_row: int) -> Tensor:
    """The places of elements in the whole tensor, row by row: of ``rows``, or of the transpose.

    The padding of a rotation continues the dimension that it pads.

    Args:
        rows: the matrix of one direction.
        width: the number of columns of the tensor.
        columnwise: whether the matrix is the transpose.
        first_row: the row of the whole tensor that the matrix begins with.
    """
    first = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    second = torch.arange(rows.shape[1], device=rows.device)
    if columnwise:
        return first + (first_row + second) * width
    return (first_row + first) * rows.shape[1] + second


def grid_decode(
    data: Tensor, scales: Tensor | None, text: str, columnwise: bool, out: Tensor
) -> None:
    grid_decode_levels(data, scales, None, text, columnwise, out)


def grid_decode_levels(
    data: Tensor,
    scales: Tensor | None,
    amax: Tensor | None,
    text: str,
    columnwise: bool,
    out: Tensor,
) -> None:
    layout = Layout.of(text)
    shape = layout.stored_matrix(data.shape, columnwise)
    if layout.elements_per_byte == 2:
        data = unpack(data)
    values = decode(data, layout.format).reshape(shape)
    if scales is not None:
        block = layout.stored_block(columnwise)
        scales = scales.reshape(grid_of(shape, block))
        factors = spread(scale_values(scales, layout), block, shape)
        values = values.to(factors.dtype) * factors
    if amax is not None:
        values = values * second_factor(amax, layout, columnwise)
    if out.dtype != torch.float64:
        # float32 holds the products exactly, unless they overflow.
        values = values.to(torch.float32)
    out.copy_(values.reshape(out.shape))


def second_factor(amax: Tensor, layout: Layout, columnwise: bool) -> Tensor:
    """What multiplies values for the second level: one number, or a column or row of them."""
    factor = torch.div(amax, torch.full_like(amax, top_of(layout)))
    if layout.second_level == "tensor":
        return factor
    if columnwise and not layout.transposed:
        return factor.unsqueeze(0)
    return factor.unsqueeze(1)


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
                scales = multipliers_of(scales, layout)
            factors = spread(scales, layout.block_of(columnwise_data), shape).reshape(-1)
            scaled = values * factors[start : start + x.numel()]
            data.copy_(encode(scaled, layout.format).view(data.shape))
