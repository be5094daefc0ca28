"""The inner tensors of a storage on a grid: their declaration, and the checks of a constructor."""

import torch

from ottava.errors import DeviceError, ShapeError, UsageError
from ottava.kernels.checks import check_amax, check_grid
from ottava.layout import SCALES, Layout
from ottava.tensors.declaration import Declared, InnerTensor, Usage, as_bytes, as_data
from ottava.tensors.direction import Direction, in_order

USAGES: tuple[Usage, Usage] = ("rowwise", "columnwise")
# By the text of the layout: a plain dict, which compiled code can look into.
_INNER_TENSORS: dict[str, tuple[InnerTensor, ...]] = {}
_PACKED_INNER_TENSORS: dict[str, tuple[InnerTensor, ...]] = {}


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


def packed_inner_tensors_of(layout: Layout | None) -> tuple[InnerTensor, ...]:
    """The inner tensors of a packed tensor: data, scales and amaxes of rows, then of columns."""
    text = "" if layout is None else layout.text
    inner_tensors = _PACKED_INNER_TENSORS.get(text)
    if inner_tensors is None:
        pairs = inner_tensors_of(layout)
        amaxes = [_amax(layout, usage) for usage in USAGES]
        inner_tensors = (*pairs[:2], amaxes[0], *pairs[2:], amaxes[1])
        _PACKED_INNER_TENSORS[text] = inner_tensors
    return inner_tensors


def _amax(layout: Layout | None, usage: Usage) -> InnerTensor:
    """The amaxes of the second level of a usage."""
    name = f"amax_{usage}"
    if layout is None:
        return InnerTensor(f"_{name}", name, usage=usage, block_rows=1)
    columnwise = usage == "columnwise"
    # An amax of each row is gathered with it. One of each column belongs to all rows.
    by_row = layout.second_level == "row" and not columnwise
    return InnerTensor(
        f"_{name}",
        name,
        usage=usage,
        gather=by_row,
        block_rows=1 if by_row else None,
        all_rows=not by_row,
    )


def _declaration(layout: Layout, columnwise: bool) -> tuple[InnerTensor, InnerTensor]:
    """Data and scales of a usage, as the layout has them."""
    usage: Usage = "columnwise" if columnwise else "rowwise"
    block_rows = layout.block_of(columnwise)[0]
    transposed = columnwise and layout.transposed
    # Transposed squares are made of rows, after these are gathered.
    gathers = not (transposed and layout.square)
    # Elements of columns that share a byte are of neighbouring rows.
    rows_of_byte = layout.elements_per_byte if columnwise else 1
    data = InnerTensor(
        f"_{usage}_data",
        f"{usage}_data",
        usage=usage,
        gather=gathers,
        block_rows=rows_of_byte if rows_of_byte > 1 else None,
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


def checked_packed_directions(
    declared: Declared, layout: Layout
) -> tuple[Direction | None, Direction | None]:
    """:func:`checked_directions` of a packed tensor, whose shape is checked elsewhere."""
    rows, columns = (
        _with_amax(_checked_direction(usage, declared, layout), usage, declared, layout)
        for usage in USAGES
    )
    if rows is not None and columns is not None and rows.data.device != columns.data.device:
        raise DeviceError(
            f"data is on {rows.data.device} and {columns.data.device}", expected="one device"
        )
    if layout.one_buffer:
        return rows or columns, None
    return rows, columns


def _with_amax(
    direction: Direction | None, usage: Usage, declared: Declared, layout: Layout
) -> Direction | None:
    """A direction with the amaxes that the constructor was given for it."""
    amax: torch.Tensor | None = declared[f"amax_{usage}"]
    if layout.second_level == "none":
        if amax is not None:
            raise UsageError(f"amax_{usage} in a layout without a second level", expected="None")
        return direction
    if direction is None:
        # Columns that are made of rows may be outdated, and their amax is that of the rows.
        return None
    if amax is None:
        raise UsageError(f"amax_{usage} is missing", expected=f"{usage} data with its amaxes")
    check_amax(amax, direction.data, layout, usage == "columnwise")
    return direction._replace(amax=amax)


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
