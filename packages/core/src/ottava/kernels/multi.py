"""Amaxes and data of many shards of weights in one call, from values in a wider dtype.

The kernels round each element to the nominal dtype of its tensor, to nearest even, and then read it
as float32. Therefore shards give the same amaxes and data as the whole weight in that dtype,
wherever it was cut. The amax of a block is the largest of the amaxes that its shards have for it.

The functions work in eager mode only. All tensors of a call must be on one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.kernels import checks
from ottava.kernels.backends import backend_module
from ottava.kernels.checks import DTypes, Layouts, Pairs, Shapes, Shards, Tensor, Tensors
from ottava.layout import Layout, Size

# Larger sizes and positions are mistakes, and would overflow in compiled code.
_TOO_LARGE = 2**62


def grid_amax_sizes(rows: int, cols: int, layout: Layout) -> tuple[int, int]:
    """The numbers of amaxes of a matrix ``[rows, cols]`` in the result of :func:`grid_multi_amax`.

    The first is for blocks of rowwise data, the second for those of columnwise data. If both hold
    the same values, the second is 0.
    """
    matrix = rows, cols
    by_row = math.prod(layout.grid(matrix, False, shared=True))
    if layout.square:
        return by_row, 0
    return by_row, math.prod(layout.grid(matrix, True, shared=True))


def grid_multi_amax(
    xs: Tensors, dtypes: DTypes, shapes: Shapes, starts: Sequence[int], layouts: Layouts
) -> Tensor:
    """The amaxes of the blocks of matrices, each from a contiguous range of its elements.

    NaN is ignored. Infinities count, including those that rounding makes.

    Args:
        xs: the ranges: float32, bfloat16 or float16, any shapes and strides.
        dtypes: the dtype that the elements of each range are rounded to, one of the same three.
        shapes: rows and columns of each matrix.
        starts: where each range begins: ``xs[i]`` holds the elements
            ``starts[i], starts[i] + 1, ...`` of the flattened matrix.
        layouts: the layout of each matrix.

    Returns:
        float32, in one dimension, one matrix after the other. A matrix has an amax for every area
        with one scale, in the order of the flattened grid: first the areas of rowwise data, then
        those of columnwise data, unless both hold the same values. Blocks outside of the range have
        the amax 0.

    Raises:
        ShapeError, DTypeError, DeviceError: the lists or the tensors do not fit together, or a
            range does not lie within its matrix.
    """
    _check_shards(xs, dtypes, shapes, starts, layouts)
    if not len(xs):
        return torch.zeros(0, dtype=torch.float32)
    device = xs[0].device
    sizes = [
        sum(grid_amax_sizes(*shape, layout)) for shape, layout in zip(shapes, layouts, strict=True)
    ]
    amaxes = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    shards, texts = Shards(xs, dtypes, shapes, starts), [layout.text for layout in layouts]
    backend_module(device.type).grid_multi_amax(shards, texts, amaxes)
    return amaxes


def grid_multi_cast(
    xs: Tensors,
    dtypes: DTypes,
    shapes: Shapes,
    starts: Sequence[int],
    layouts: Layouts,
    rowwise: Pairs,
    columnwise: Pairs,
) -> None:
    """Quantize ranges of matrices with known scales: ``cast(float32(round(x)) * scale)``.

    Args:
        xs, dtypes, shapes, starts, layouts: as in :func:`grid_multi_amax`.
        rowwise: for each range None or ``(scales, out)``. ``scales`` are the factors of elements:
            float32 (the bytes of E8M0 scales in layouts that have these), contiguous, on the grid
            of the whole matrix. ``out`` receives the data: uint8, contiguous, of any shape with as
            many elements as the range, at any address.
        columnwise: the same for columnwise data, which are not transposed.

    Raises:
        ShapeError, DTypeError, DeviceError, OptionError: the lists or the tensors do not fit
            together, a range does not lie within its matrix, or one buffer is given twice; nothing
            is written then.
    """
    _check_lengths(len(xs), rowwise=rowwise, columnwise=columnwise)
    _check_shards(xs, dtypes, shapes, starts, layouts)
    addresses = set[int]()
    for name, pairs in (("rowwise", rowwise), ("columnwise", columnwise)):
        for i, (pair, x, shape, layout) in enumerate(zip(pairs, xs, shapes, layouts, strict=True)):
            if pair is None:
                continue
            grid = layout.grid(shape, name == "columnwise")
            out = _check_pair(pair, f"{name}[{i}]", x, grid, layout)
            if x.numel() and out.data_ptr() in addresses:
                raise OptionError(
                    f"{name}[{i}] is a buffer of another result", expected="a buffer of its own"
                )
            addresses.add(out.data_ptr())
    if len(xs):
        shards, texts = Shards(xs, dtypes, shapes, starts), [layout.text for layout in layouts]
        backend_module(xs[0].device.type).grid_multi_cast(shards, texts, rowwise, columnwise)


def _check_pair(pair: object, name: str, x: Tensor, grid: Size, layout: Layout) -> Tensor:
    """The buffer of ``(scales, out)``, after checks of both."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ShapeError(f"{name} is no pair", expected="None or (scales, out)")
    scales, out = pair
    checks.check_out(scales, grid, layout.stored_scale, x.device, f"the scales of {name}")
    checks.check_out(out, None, torch.uint8, x.device, name)
    if out.numel() != x.numel():
        raise ShapeError(f"{name} has {out.numel()} elements", f"{x.numel()}, as its tensor has")
    buffer: Tensor = out
    return buffer


def _check_lengths(count: int, **lists: Sequence[object]) -> None:
    for name, values in lists.items():
        if len(values) != count:
            raise ShapeError(
                f"{len(values)} {name} for {count} tensors", expected="one for each tensor"
            )


def _check_shards(
    xs: Tensors, dtypes: DTypes, shapes: Shapes, starts: Sequence[int], layouts: Layouts
) -> None:
    _check_lengths(len(xs), dtypes=dtypes, shapes=shapes, starts=starts, layouts=layouts)
    for i, (x, dtype, shape, start, layout) in enumerate(
        zip(xs, dtypes, shapes, starts, layouts, strict=True)
    ):
        checks.check_high_precision(x, f"xs[{i}]")
        checks.check_device(x, xs[0].device, f"xs[{i}]")
        checks.check_dtype(dtype, f"dtypes[{i}] is")
        checks.check_layout(layout)
        _check_place(i, x.numel(), shape, start)


def _check_place(i: int, count: int, shape: object, start: object) -> None:
    """Raise an error unless ``count`` elements from ``start`` on are in a matrix of ``shape``."""
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ShapeError(f"shapes[{i}] is {shape!r}", expected="(rows, columns)")
    rows, cols = shape
    if not (isinstance(rows, int) and isinstance(cols, int) and isinstance(start, int)):
        raise DTypeError(f"shapes[{i}] is {shape!r}, starts[{i}] {start!r}", expected="integers")
    if not (0 <= rows < _TOO_LARGE and 0 <= cols < _TOO_LARGE and rows * cols < _TOO_LARGE):
        raise ShapeError(f"shapes[{i}] is {shape!r}", expected="sizes of a matrix")
    if not 0 <= start <= rows * cols - count:
        raise ShapeError(
            f"xs[{i}] has {count} elements from {start} on, its matrix {rows} x {cols}",
            expected="a range within the matrix",
        )
