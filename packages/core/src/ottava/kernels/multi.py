"""Many tensors in one call: the amaxes and the data of shards of weights, whose values are kept in a wider dtype.

An element counts as its value rounded to the dtype given for its tensor, to nearest even, and read as float32. So the
shards of a weight, wherever it was cut, have the amaxes and the data of the weight itself in that dtype: the amax of
a whole is the largest of its shards' amaxes. Eager only; all the tensors of a call are on one device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.formats import E4M3, FP8, fp8_format
from ottava.kernels import checks
from ottava.kernels.backends import backend_module
from ottava.kernels.checks import DTypes, Layouts, Pairs, Shapes, Shards, Tensor, Tensors
from ottava.layout import Layout

# Sizes and positions beyond this are mistakes, which would overflow in compiled code.
_TOO_LARGE = 2**62
# One scale for the tensor.
WHOLE = {dtype: Layout(dtype, (None, None)) for dtype in FP8}


def multi_amax(xs: Tensors, dtypes: DTypes, *, checked: bool = False) -> Tensor:
    """The largest magnitude of each tensor, its elements rounded to a dtype: float32 ``[len(xs)]``.

    Args:
        xs: float32, bfloat16 or float16, any shapes and strides.
        dtypes: what the elements of each are rounded to, one of the same three. NaN is ignored, an infinity counts,
            also one that the rounding makes; an empty tensor has 0.
        checked: these very arguments were given before, to a call that raised nothing: they are not looked at again.

    Raises:
        ShapeError, DTypeError, DeviceError: the lists or the tensors do not fit together.
    """
    return grid_multi_amax(xs, dtypes, *_wholes(xs), [WHOLE[E4M3.torch_dtype]] * len(xs), checked=checked)


def multi_cast(
    xs: Tensors, dtypes: DTypes, scales: Tensor, fp8_dtypes: DTypes, outs: Tensors, *, checked: bool = False
) -> None:
    """Data of ``cast(float32(round(x)) * scale)`` of each tensor, as :func:`ottava.kernels.cast` has them.

    Args:
        xs, dtypes: as in :func:`multi_amax`.
        scales: float32 ``[len(xs)]``.
        fp8_dtypes: the format of each.
        outs: uint8, contiguous, of any shape with as many elements as its tensor has; at any address.
        checked: as in :func:`multi_amax`; the scales may be others.

    Raises:
        ShapeError, DTypeError, DeviceError, OptionError: the lists or the tensors do not fit together, or one buffer is
            given twice; nothing is written then.
    """
    _check_lengths(len(xs), dtypes=dtypes, fp8_dtypes=fp8_dtypes, outs=outs)
    checks.check_tensor(scales, "scales", torch.float32)
    if tuple(scales.shape) != (len(xs),):
        raise ShapeError(f"scales have shape {tuple(scales.shape)}", expected=f"({len(xs)},)")
    layouts = [WHOLE[fp8_format(fp8_dtype).torch_dtype] for fp8_dtype in fp8_dtypes]
    pairs = list(zip(scales.detach().view(-1, 1, 1).unbind(), outs, strict=True))
    grid_multi_cast(xs, dtypes, *_wholes(xs), layouts, pairs, [None] * len(xs), checked=checked)


def grid_amax_sizes(rows: int, cols: int, layout: Layout) -> tuple[int, int]:
    """How many amaxes a matrix ``[rows, cols]`` has in the result of :func:`grid_multi_amax`.

    Those of blocks of rowwise data and those of columnwise data; where both hold the same values, the former and 0.
    """
    by_row, by_column = (math.prod(layout.grid((rows, cols), columnwise, shared=True)) for columnwise in (False, True))
    return by_row, (0 if layout.square else by_column)


def grid_multi_amax(
    xs: Tensors, dtypes: DTypes, shapes: Shapes, starts: Sequence[int], layouts: Layouts, *, checked: bool = False
) -> Tensor:
    """The largest magnitudes of the blocks of matrices, each from the contiguous range of it that is at hand.

    Args:
        xs, dtypes: as in :func:`multi_amax`.
        shapes: rows and columns of each matrix.
        starts: where its range begins: ``xs[i]`` holds the elements ``starts[i], starts[i] + 1, ...`` of the
            flattened matrix.
        layouts: of each matrix.
        checked: as in :func:`multi_amax`.

    Returns:
        float32, in one dimension, for one matrix after the other: the amaxes of what has a scale in common, of rowwise
        data, then of columnwise data unless both hold the same values; row by row of the grid. Blocks of which nothing
        is at hand have 0.

    Raises:
        ShapeError, DTypeError, DeviceError: the lists or the tensors do not fit together, or a range does not lie
            within its matrix.
    """
    if not checked:
        _check_shards(xs, dtypes, shapes, starts, layouts)
    if not len(xs):
        return torch.zeros(0, dtype=torch.float32)
    texts = [layout.text for layout in layouts]
    kinds = Counter((*shape, text) for shape, text in zip(shapes, texts, strict=True)).items()
    total = sum(count * sum(grid_amax_sizes(rows, cols, Layout.of(text))) for (rows, cols, text), count in kinds)
    out = torch.zeros(total, dtype=torch.float32, device=xs[0].device)
    backend_module(out.device.type).grid_multi_amax(Shards(xs, dtypes, shapes, starts), texts, out)
    return out


def grid_multi_cast(
    xs: Tensors,
    dtypes: DTypes,
    shapes: Shapes,
    starts: Sequence[int],
    layouts: Layouts,
    rowwise: Pairs,
    columnwise: Pairs,
    *,
    checked: bool = False,
) -> None:
    """Data of ``cast(float32(round(x)) * scale)`` of ranges of matrices, with the scales of blocks that are known.

    Args:
        xs, dtypes, shapes, starts, layouts: as in :func:`grid_multi_amax`.
        rowwise: for each, None or ``(scales, out)``: what elements are multiplied by, float32 (bytes of E8M0 of a
            layout with such scales), contiguous, on the grid of the whole matrix; and the result, uint8, contiguous, of
            any shape with as many elements as the range, at any address.
        columnwise: the same for columnwise data, which are not transposed.
        checked: as in :func:`multi_amax`.

    Raises:
        ShapeError, DTypeError, DeviceError, OptionError: the lists or the tensors do not fit together, a range does not
            lie within its matrix, or one buffer is given twice; nothing is written then.
    """
    if not checked:
        _check_lengths(len(xs), rowwise=rowwise, columnwise=columnwise)
        counts, taken = _check_shards(xs, dtypes, shapes, starts, layouts), set[int]()
        device: Any = xs[0].device if len(xs) else None
        for name, pairs in (("rowwise", rowwise), ("columnwise", columnwise)):
            grids: dict[Any, tuple[int, int]] = {}
            for i, (pair, count, shape, layout) in enumerate(zip(pairs, counts, shapes, layouts, strict=True)):
                if pair is None:
                    continue
                if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                    raise ShapeError(f"{name}[{i}] is no pair", expected="None or (scales, out)")
                (scales, out), stored, key = pair, layout.stored_scale, (*shape, layout.text)
                grid = grids.get(key) or grids.setdefault(key, layout.grid(shape, name == "columnwise"))
                if not _is_buffer(scales, stored, device) or scales.shape != grid:
                    checks.check_out(scales, grid, stored, device, f"the scales of {name}[{i}]")
                if not _is_buffer(out, torch.uint8, device):
                    checks.check_out(out, None, torch.uint8, device, f"{name}[{i}]")
                if out.numel() != count:
                    raise ShapeError(f"{name}[{i}] has {out.numel()} elements", expected=f"{count}, as its tensor has")
                address = out.data_ptr()
                if count and address in taken:
                    raise OptionError(f"{name}[{i}] is a buffer of another result", expected="a buffer of its own")
                taken.add(address)
    if not len(xs):
        return
    shards, texts = Shards(xs, dtypes, shapes, starts), [layout.text for layout in layouts]
    backend_module(xs[0].device.type).grid_multi_cast(shards, texts, rowwise, columnwise)


def _wholes(xs: Tensors) -> tuple[list[tuple[int, int]], list[int]]:
    """Shapes and starts where each tensor is all of a matrix of one row."""
    return [(1, x.numel() if isinstance(x, Tensor) else 0) for x in xs], [0] * len(xs)


def _check_lengths(count: int, **lists: Sequence[Any]) -> None:
    for name, values in lists.items():
        if len(values) != count:
            raise ShapeError(f"{len(values)} {name} for {count} tensors", expected="one for each tensor")


# There may be hundreds of tensors, so that what is right is to be found so with few operations.


def _is_buffer(tensor: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it is what :func:`check_out` takes, of any shape."""
    right = isinstance(tensor, Tensor) and tensor.dtype is dtype and tensor.device == device
    return right and tensor.layout is torch.strided and not tensor.is_nested and tensor.is_contiguous()


def _check_shards(xs: Tensors, dtypes: DTypes, shapes: Shapes, starts: Sequence[int], layouts: Layouts) -> list[int]:
    """How many elements each has."""
    _check_lengths(len(xs), dtypes=dtypes, shapes=shapes, starts=starts, layouts=layouts)
    allowed, strided, counts = checks.HIGH_PRECISION, torch.strided, list[int]()
    device: Any = getattr(xs[0], "device", None) if len(xs) else None
    for i, (x, dtype, shape, start, layout) in enumerate(zip(xs, dtypes, shapes, starts, layouts, strict=True)):
        if not isinstance(x, Tensor) or x.dtype not in allowed or x.layout is not strided or x.is_nested:
            checks.check_high_precision(x, f"xs[{i}]")
        if x.device != device:
            checks.check_device(x, device, f"xs[{i}]")
        if dtype not in allowed:
            checks.check_dtype(dtype, f"dtypes[{i}] is")
        checks.check_layout(layout)
        count = x.numel()
        counts.append(count)
        if not isinstance(shape, (tuple, list)) or len(shape) != 2:
            raise ShapeError(f"shapes[{i}] is {shape!r}", expected="(rows, columns)")
        rows, cols = shape
        if not (isinstance(rows, int) and isinstance(cols, int) and isinstance(start, int)):
            raise DTypeError(f"shapes[{i}] is {shape!r}, starts[{i}] {start!r}", expected="integers")
        if not (0 <= rows < _TOO_LARGE and 0 <= cols < _TOO_LARGE and rows * cols < _TOO_LARGE):
            raise ShapeError(f"shapes[{i}] is {shape!r}", expected="sizes of a matrix")
        if not 0 <= start <= rows * cols - count:
            found = f"xs[{i}] has {count} elements from {start} on, its matrix {rows} x {cols}"
            raise ShapeError(found, expected="a range within the matrix")
    return counts
