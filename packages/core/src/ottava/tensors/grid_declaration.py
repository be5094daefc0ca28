"""The inner tensors of a storage on a grid: their declaration, and the checks of a constructor."""

import torch

from ottava.errors import DeviceError, ShapeError, UsageError
from ottava.kernels.checks import check_grid
from ottava.layout import SCALES, Layout
from ottava.tensors.declaration import Declared, InnerTensor, Usage, as_bytes, as_data
from ottava.tensors.direction import Direction, in_order

# By the text of the layout: a plain dict, which compiled code can look into.
_INNER_TENSORS: dict[str, tuple[InnerTensor, ...]] = {}


def inner_tensors_of(layout: Layout | None) -> tuple[InnerTensor, ...]:
    """The inner tensors of a layout: data and scales of rows, then of columns.

    Without a layout only their names and usages are declared.
    """
    text = "" if layout is None else layout.text
    inner_tensors = _INNER_TENSORS.get(text)
    if inner_tensors is None:
        if layout is None:
            inner_tensors = (*_names("rowwise"), *_names("columnwise"))
        else:
            inner_tensors = (*_declaration(layout, False), *_declaration(layout, True))
        _INNER_TENSORS[text] = inner_tensors
    return inner_tensors


def _names(usage: Usage) -> tuple[InnerTensor, InnerTensor]:
    """Data and scales of a usage, of which nothing else is known."""
    data = InnerTensor(f"_{usage}_data", f"{usage}_data", usage=usage)
    scales = InnerTensor(f"_{usage}_scale_inv", f"{usage}_scale_inv", usage=usage, block_rows=1)
    return data, scales


def _declaration(layout: Layout, columnwise: bool) -> tuple[InnerTensor, InnerTensor]:
    """Data and scales of a usage, as the layout has them."""
    usage: Usage = "columnwise" if columnwise else "rowwise"
    block_rows = layout.block_of(columnwise)[0]
    transposed = columnwise and layout.transposed
    # Transposed squares are made of rows, after these are gathered.
    gathers = not (transposed and layout.square)
    data = InnerTensor(
        f"_{usage}_data",
        f"{usage}_data",
        usage=usage,
        gather=gathers,
        native=layout.element_dtype,
        transposed=transposed,
    )
    scales = InnerTensor(
        f"_{usage}_scale_inv",
        f"{usage}_scale_inv",
        usage=usage,
        gather=gathers and block_rows is not None,
        block_rows=block_rows,
        native=SCALES[layout.scale].native,
        all_rows=block_rows is None,
        transposed=transposed,
    )
    return data, scales


def checked_directions(
    declared: Declared, layout: Layout
) -> tuple[Direction | None, Direction | None]:
    """The rows and the columns that a constructor was given, as they are stored.

    Raises:
        DTypeError, ShapeError, DeviceError, UsageError: they do not fit the layout or each other.
    """
    rows = _checked_direction("rowwise", declared, layout)
    columns = _checked_direction("columnwise", declared, layout)
    if rows is not None and columns is not None:
        _check_fit(rows.data, in_order(columns, layout, True).data)
    if layout.one_buffer:
        return rows or columns, None
    return rows, columns


def _checked_direction(usage: Usage, declared: Declared, layout: Layout) -> Direction | None:
    data = as_data(declared[f"{usage}_data"], layout.element_dtype, f"{usage}_data")
    scales: torch.Tensor | None = declared[f"{usage}_scale_inv"]
    if data is None and scales is None:
        return None
    if data is None or scales is None:
        missing = "data" if data is None else "scale_inv"
        raise UsageError(f"{usage}_{missing} is missing", expected=f"{usage} data with its scales")
    if layout.stored_scale is torch.uint8:
        scales = as_bytes(scales, SCALES[layout.scale].native, f"{usage}_scale_inv")
    check_grid(data, scales, layout, usage == "columnwise", f"{usage}_scale_inv")
    return Direction(data, scales)


def _check_fit(rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Refuse data of two directions, in the order of the tensor, that are not of one tensor."""
    if rows.shape != columns.shape:
        raise ShapeError(
            f"columnwise_data has shape {tuple(columns.shape)} in the order of the tensor",
            expected=f"{tuple(rows.shape)}",
        )
    if rows.device != columns.device:
        raise DeviceError(f"data is on {rows.device} and {columns.device}", expected="one device")
