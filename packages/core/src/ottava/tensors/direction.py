"""One direction of quantized data: the bytes of elements, and the scales of their blocks.

A tensor may have two directions, whose blocks lie along its rows and along its columns. Storages
hold a direction as it is *stored*, in the form that products read. Views and conversions want it
*in the order of the tensor*: data of the tensor's shape, and scales on the grid over it. The two
forms differ only in columnwise data that a layout transposes, and each is a view of the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ottava import kernels
from ottava.kernels.elements import pack, unpack
from ottava.kernels.reference import spread
from ottava.layout import Block, Layout, Size, as_matrix_shape


class Direction(NamedTuple):
    """Data and scales of one direction, and the amaxes of a second level of scales, if there is
    one."""

    data: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor | None = None


def in_order(stored: Direction, layout: Layout, columnwise: bool) -> Direction:
    """A stored direction in the order of the tensor: views."""
    return _moved(stored, layout, columnwise, 0, -1)


def as_stored(ordered: Direction, layout: Layout, columnwise: bool) -> Direction:
    """The inverse of :func:`in_order`: views."""
    return _moved(ordered, layout, columnwise, -1, 0)


def _moved(
    direction: Direction, layout: Layout, columnwise: bool, source: int, destination: int
) -> Direction:
    """The direction with one dimension of its data moved and its scales transposed, if the layout
    transposes it; unchanged otherwise."""
    if not (columnwise and layout.transposed):
        return direction
    data, scales, amax = direction
    if data.dim():
        data = data.movedim(source, destination)
    return Direction(data, scales.t(), amax)


def same_bytes(one: Direction, other: Direction) -> bool:
    """Whether two stored directions of one layout hold the same."""
    if one.amax is not None and other.amax is not None and not torch.equal(one.amax, other.amax):
        return False
    return torch.equal(one.data, other.data) and torch.equal(one.scales, other.scales)


def zeros(
    layout: Layout, shape: Sequence[int], columnwise: bool, device: torch.device
) -> Direction:
    """A stored direction of zeros, with scales of one."""
    data_shape = layout.data_shape(shape, columnwise)
    scale_shape = layout.scale_shape(shape, columnwise)
    data = torch.zeros(data_shape, dtype=torch.uint8, device=device)
    scales = torch.ones(scale_shape, dtype=layout.stored_scale, device=device)
    amax_shape = layout.amax_shape(shape, columnwise)
    if amax_shape is None:
        return Direction(data, scales)
    return Direction(data, scales, torch.ones(amax_shape, dtype=torch.float32, device=device))


def from_other_usage(
    other: Direction, layout: Layout, columnwise: bool, shape: Sequence[int]
) -> Direction:
    """The stored direction of one usage, made of that of the other usage.

    Both hold the same values, because the layout shares scales over squares.

    Args:
        other: the stored direction of the other usage.
        columnwise: whether the result serves the columnwise usage.
        shape: of the tensor.
    """
    ordered = in_order(other, layout, not columnwise)
    scales = _scales_from_other_usage(ordered.scales, as_matrix_shape(shape), layout, columnwise)
    if layout.elements_per_byte == 2:
        data = _packed_along_the_other(other.data, layout, columnwise, shape)
        stored_scales = scales.t() if columnwise else scales
        return Direction(data, stored_scales.contiguous(), other.amax)
    data, scales, amax = as_stored(ordered._replace(scales=scales), layout, columnwise)
    if not layout.transposed:
        return Direction(data, scales, amax)
    # The elements lie in memory in the order of the other usage, so they are copied.
    if columnwise and data.dim():
        return Direction(kernels.transpose(ordered.data), scales.contiguous(), amax)
    return Direction(data.contiguous(), scales.contiguous(), amax)


def _packed_along_the_other(
    data: torch.Tensor, layout: Layout, columnwise: bool, shape: Sequence[int]
) -> torch.Tensor:
    """Bytes of elements that share them along one dimension of the matrix, along the other one."""
    height, width = layout.stored_matrix(data.shape, not columnwise)
    codes = unpack(data.reshape(height, width // layout.elements_per_byte))
    rows, columns = as_matrix_shape(shape)
    # An odd last element has a byte of its own.
    codes = codes[:, : columns if columnwise else rows]
    return pack(codes.t()).view(layout.data_shape(shape, columnwise))


def _scales_from_other_usage(
    scales: torch.Tensor, matrix: Sequence[int], layout: Layout, columnwise: bool
) -> torch.Tensor:
    """Scales of one usage, made of those of the other: one of each square, repeated for its blocks.

    Both are in the order of the tensor.

    Args:
        scales: those of the other usage.
        matrix: rows and columns of the tensor.
        columnwise: whether the result serves the columnwise usage.
    """
    if layout.block == (None, None):
        return scales
    old_rows, old_columns = _blocks_in_a_square(layout, layout.block_of(not columnwise))
    blocks = _blocks_in_a_square(layout, layout.block_of(columnwise))
    return spread(scales[::old_rows, ::old_columns], blocks, layout.grid(matrix, columnwise))


def _blocks_in_a_square(layout: Layout, block: Block) -> Size:
    """How many blocks a square has along its rows and along its columns."""
    # No side is None: squares that are not the whole tensor have sizes.
    rows, columns = (
        (side or 1) // (block_side or 1)
        for side, block_side in zip(layout.shared or layout.block, block, strict=True)
    )
    return rows, columns
