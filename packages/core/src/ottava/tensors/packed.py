"""``PackedTensorStorage``: data on a grid that are more than elements of a byte and their scales.

A layout needs it if elements share bytes, if a rotation pads the summed dimension, or if scales
have a second level. The shape of the tensor is then a field of its own, because the shape of the
data does not tell it, and the amaxes of the second level are inner tensors.

Invariant, for each direction: ``original ≈ float32(element) * scale * second level``; of rotated
values, if the layout rotates the direction.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch

from ottava import kernels
from ottava.errors import ShapeError, UsageError
from ottava.kernels.elements import unpack
from ottava.kernels.rotation import unrotated
from ottava.layout import Block, Layout, as_matrix_shape, multiple
from ottava.tensors.declaration import (
    Declared,
    DerivedTensor,
    InnerTensor,
    StaticField,
    check_values_dtype,
)
from ottava.tensors.direction import Direction, zeros
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.grid_declaration import checked_packed_directions, packed_inner_tensors_of
from ottava.tensors.grid_tensor import Change, GridTensor, try_view
from ottava.tensors.storage import USAGES
from ottava.tensors.tensor import blocks

#: The attributes with the amaxes of the second level, of rows and of columns.
_AMAXES = ("_amax_rowwise", "_amax_columnwise")
_NOTHING = (None, None, None)
#: Gives the stored direction of a view, or None where bytes or blocks do not allow it. It is called
#: with a stored direction, and with whether that is the columnwise one.
StoredChange = Callable[[Direction, bool], Direction | None]


def needs_packing(layout: Layout) -> bool:
    """Whether tensors of a layout are :class:`PackedTensor`."""
    has_levels = layout.second_level != "none"
    return has_levels or layout.elements_per_byte > 1 or layout.rotation is not None


def _has_plain_data(layout: Layout) -> bool:
    """Whether each element has a byte of its own, without padding, in both directions."""
    return layout.is_plain(False) and layout.is_plain(True)


class PackedTensorStorage(GridTensorStorage):
    """Quantized data with packed elements, padded groups or two levels of scales, without the
    tensor interface.

    Args:
        rowwise_data: uint8 of the shape ``layout.data_shape(shape, False)``.
        rowwise_scale_inv: the scales of their blocks, ``layout.scale_shape(shape, False)``.
        amax_rowwise: float32, ``layout.amax_shape(shape, False)``; None without a second level.
        columnwise_data, columnwise_scale_inv, amax_columnwise: the same of columns.
        layout: a :class:`ottava.Layout`, or its text.
        shape: of the tensor; by default that which the data have with whole bytes and groups.
        dtype: nominal dtype.
        values_from_columns: where both directions are held, dequantize columnwise data.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError, UsageError: the arguments do not fit
            together.
    """

    inner_tensors = packed_inner_tensors_of(None)
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_shape", "shape", default=None),
        *GridTensorStorage.static_fields,
    )
    dated_names = (*GridTensorStorage.dated_names, "_dated_column_amax")

    _shape: tuple[int, ...]
    _amax_rowwise: torch.Tensor | None
    # Columnwise amaxes as :meth:`_dated` gives them.
    _dated_column_amax: torch.Tensor | DerivedTensor | None = None

    @classmethod
    def check_declared(cls, declared: Declared) -> Declared:
        checked = super().check_declared(declared)
        if "shape" in declared:
            checked["shape"] = _shape_of(checked, cls.layout_of(declared), declared["shape"])
        return checked

    @classmethod
    def _checked_tensors(
        cls, declared: Declared, layout: Layout
    ) -> tuple[torch.Tensor | None, ...]:
        rows, columns = checked_packed_directions(declared, layout)
        return *(rows or _NOTHING), *(columns or _NOTHING)

    @staticmethod
    def inner_tensors_of(layout: Layout) -> tuple[InnerTensor, ...]:
        return packed_inner_tensors_of(layout)

    # -- directions --

    @property
    def _amax_columnwise(self) -> torch.Tensor | None:
        return self._current(self._dated_column_amax)

    @_amax_columnwise.setter
    def _amax_columnwise(self, amax: torch.Tensor | None) -> None:
        self._dated_column_amax = self._dated(amax)

    def direction(self, *, columnwise: bool) -> Direction | None:
        direction = super().direction(columnwise=columnwise)
        if direction is None or self.grid_layout.second_level == "none":
            return direction
        side = 1 if columnwise and not self.grid_layout.one_buffer else 0
        return direction._replace(amax=getattr(self, _AMAXES[side]))

    def ordered(self, *, columnwise: bool) -> Direction | None:
        if self.grid_layout.is_plain(columnwise):
            return super().ordered(columnwise=columnwise)
        raise UsageError(
            f"the bytes of a {type(self).__name__} have no order of elements",
            expected="direction(), as it is stored",
        )

    def _arranged(
        self, rows: Direction | None, columns: Direction | None
    ) -> list[torch.Tensor | None]:
        if self.grid_layout.one_buffer:
            columns = None
        return [*(rows or _NOTHING), *(columns or _NOTHING)]

    def _shared_blocks(self) -> list[tuple[str, Block]]:
        blocks_of_scales = super()._shared_blocks()
        for side, name in enumerate(_AMAXES):
            block = self.grid_layout.block_of_amax(bool(side))
            if block is not None:
                blocks_of_scales.append((name, block))
        return blocks_of_scales

    def element_range(self, inner: InnerTensor, start: int, count: int) -> range | None:
        if inner.attribute != self.data_names[0]:
            return super().element_range(inner, start, count)
        data: torch.Tensor = getattr(self, inner.attribute)
        if not data.is_contiguous():
            return None
        matrix = as_matrix_shape(self.size())
        width = self.grid_layout.data_shape(matrix, False)[1]

        def byte_of(element: int) -> int:
            row, column = divmod(element, max(matrix[1], 1))
            return row * width + column // self.grid_layout.elements_per_byte

        first = byte_of(start)
        if not count:
            return range(first, first)
        stop = start + count
        # The padding of a row belongs to its last element.
        ends_row = stop % matrix[1] == 0
        return range(first, byte_of(stop) if ends_row else byte_of(stop - 1) + 1)

    # -- values --

    def _size(self) -> torch.Size:
        if all(getattr(self, name) is None for name in self.data_names):
            raise self._empty()
        return torch.Size(self._shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """High-precision values, in ``dtype`` or the nominal dtype; rotated ones are rotated back,
        in float32."""
        check_values_dtype(dtype)
        dtype = dtype or self._dtype
        direction, columnwise = self._source_of_values()
        rotation = self.grid_layout.rotation
        if rotation is None or not rotation.turns(columnwise):
            return self._in_shape(self._decoded(direction, columnwise, dtype), columnwise).to(dtype)
        values = self._decoded(direction, columnwise, torch.float32)
        return self._in_shape(unrotated(values, rotation), columnwise).to(dtype)

    def codes(self) -> torch.Tensor | None:
        direction, columnwise = self._source_of_values()
        layout = self.grid_layout
        if layout.rotation is not None and layout.rotation.turns(columnwise):
            return None
        data = direction.data
        matrix = layout.stored_matrix(data.shape, columnwise)
        if layout.elements_per_byte == 2:
            data = unpack(data)
        return self._in_shape(data.reshape(matrix), columnwise)

    def _decoded(self, direction: Direction, columnwise: bool, dtype: torch.dtype) -> torch.Tensor:
        """The matrix of stored values of a direction, in ``dtype`` if kernels have it."""
        if dtype not in (*kernels.HIGH_PRECISION, torch.float64):
            dtype = torch.float32
        data, scales, amax = direction
        layout = self.grid_layout
        values = kernels.grid_decode(data, scales, layout, dtype, columnwise=columnwise, amax=amax)
        return values.reshape(layout.stored_matrix(data.shape, columnwise))

    def _in_shape(self, matrix: torch.Tensor, columnwise: bool) -> torch.Tensor:
        """Stored values of a direction without their padding, in the shape of the tensor."""
        turned = columnwise and self.grid_layout.transposed
        rows, columns = as_matrix_shape(self.size())
        matrix = matrix[:, : rows if turned else columns]
        values = (matrix.t() if turned else matrix).reshape(self.size())
        # Fused optimizers write to values as they lie in memory, without a look at their strides.
        return values if _has_plain_data(self.grid_layout) else values.contiguous()


def _shape_of(declared: Declared, layout: Layout, shape: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of the tensor whose inner tensors are declared.

    Without ``shape`` it is that which the data have with whole bytes and groups.

    Raises:
        ShapeError: the data have another shape.
        UsageError: there are neither data nor ``shape``.
    """
    data = {usage: declared[f"{usage}_data"] for usage in USAGES}
    if shape is None:
        shape = _widest_shape(data["rowwise"], data["columnwise"], layout)
    for usage, stored in data.items():
        expected = layout.data_shape(shape, usage == "columnwise")
        if stored is not None and tuple(stored.shape) != expected:
            raise ShapeError(
                f"{usage}_data of a tensor of shape {tuple(shape)} has shape {tuple(stored.shape)}",
                expected=f"{expected}",
            )
    return tuple(shape)


def _widest_shape(
    rows: torch.Tensor | None, columns: torch.Tensor | None, layout: Layout
) -> tuple[int, ...]:
    """The shape of the largest tensor that has these data."""
    if rows is not None:
        width = layout.stored_matrix(rows.shape, False)[1]
        if columns is not None and layout.transposed:
            # Each column has a row of its own there.
            width = columns.shape[0]
        return (*rows.shape[:-1], width)
    if columns is None:
        raise UsageError("a packed tensor needs data", expected="rowwise_data or columnwise_data")
    outer, inner = layout.stored_matrix(columns.shape, True)
    return (inner, outer) if layout.transposed else (outer, inner)


class PackedTensor(GridTensor, PackedTensorStorage):
    """Quantized data with packed elements, padded groups or two levels of scales, as a
    ``torch.Tensor`` of its nominal dtype.

    Views keep the class and share the data where they consist of whole blocks, bytes and groups of
    the rotation, in every direction held. So do transposes of matrices, unless one direction alone
    is rotated. Other views give a :class:`DequantizedView`. Where elements share bytes or are
    padded, the strides are those of a contiguous tensor, however the data lie in memory. Arguments
    and errors: :class:`PackedTensorStorage`'s, and those of every :class:`~ottava.QuantizedTensor`.
    """

    @classmethod
    def laid_out_like(cls, declared: Declared) -> torch.Tensor | None:
        has_order = _has_plain_data(cls.layout_of(declared))
        return super().laid_out_like(declared) if has_order else None

    @classmethod
    def _placement(
        cls, arguments: Declared, shape: Sequence[int] | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[int], Sequence[int] | None, int | torch.SymInt | None]:
        size = _shape_of(arguments, cls.layout_of(arguments), shape)
        like = cls.laid_out_like(arguments)
        if like is None:
            return size, None, None
        return size, like.stride(), like.storage_offset()

    def of_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        rows, columns = (
            zeros(self.grid_layout, shape, bool(side), device)
            if getattr(self, name) is not None
            else None
            for side, name in enumerate(self.data_names)
        )
        arguments = self.get_metadata() | self._arguments_of(rows, columns)
        return type(self)(**(arguments | {"shape": shape, "dtype": dtype}))

    # -- views --

    def view_by(self, change: Change, *, swap: bool = False, part: bool = False) -> Self:
        # The order of the bytes is not that of the elements: see changed().
        return NotImplemented  # type: ignore[no-any-return]

    def changed(self, change: StoredChange, shape: tuple[int, ...], *, part: bool = False) -> Self:
        """A view of ``shape`` whose directions ``change`` gives; NotImplemented where there is
        none.

        Args:
            part: whether the view has some of the elements alone, so that others may have the same
                scales.
        """
        rows, columns, derived = self._sources()
        directions: list[Direction | None] = []
        for source, columnwise in ((rows, False), (columns, True)):
            direction = None if source is None else change(source, columnwise)
            if source is not None and direction is None:
                return NotImplemented  # type: ignore[no-any-return]
            directions.append(direction)
        view = self._view_of_stored(directions[0], directions[1], shape, part=part)
        if derived is not None and not part:
            # The same bytes in another shape go on being those of the rows.
            view._put(directions[0], change(derived, True))
        return view

    def _sources(self) -> tuple[Direction | None, Direction | None, Direction | None]:
        """Rows and columns that views are made of, and columns that views make of their rows."""
        rows, columns = self.direction(columnwise=False), None
        if not self.grid_layout.one_buffer:
            columns = self.direction(columnwise=True)
        if rows is not None and self._derives_columns():
            return rows, None, columns
        return rows, columns, None

    def _view_of_stored(
        self,
        rows: Direction | None,
        columns: Direction | None,
        shape: tuple[int, ...],
        *,
        part: bool = False,
        **fields: object,
    ) -> Self:
        """A view of this tensor around stored directions, with some static fields replaced."""
        arguments = self.get_metadata() | self._arguments_of(rows, columns) | fields
        view = type(self)(**(arguments | {"shape": shape}))
        view.mark_view(self, part=part)
        return view

    def reshaped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        shape = tuple(function(torch.empty(self.shape, device="meta")).shape)
        return self.changed(
            lambda direction, columnwise: self._reshaped_stored(direction, columnwise, shape), shape
        )

    def _reshaped_stored(
        self, direction: Direction, columnwise: bool, shape: tuple[int, ...]
    ) -> Direction | None:
        layout, amax = self.grid_layout, direction.amax
        columns, old_columns = as_matrix_shape(shape)[1], as_matrix_shape(self.shape)[1]
        if columns != old_columns and self.numel():
            # Rows of whole blocks may be joined and cut.
            rows, side = layout.block_of(columnwise, shared=True)
            if columnwise or rows != 1 or side is None:
                return None
            side = math.lcm(side, layout.whole_elements(columnwise))
            if columns % side or old_columns % side:
                return None
        if amax is not None and tuple(amax.shape) != layout.amax_shape(shape, columnwise):
            # Each row has an amax of its own.
            return None
        data = try_view(direction.data, layout.data_shape(shape, columnwise))
        scales = try_view(direction.scales, layout.scale_shape(shape, columnwise))
        if data is None or scales is None:
            return None
        return Direction(data, scales, amax)

    def narrowed(self, dim: int, start: int, stop: int) -> Self:
        if (start, stop) == (0, self.shape[dim]):
            return self.make_like(self)
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return self.changed(
            lambda direction, columnwise: self._narrowed_stored(
                direction, columnwise, dim, start, stop
            ),
            shape,
            part=True,
        )

    def _narrowed_stored(
        self, direction: Direction, columnwise: bool, dim: int, start: int, stop: int
    ) -> Direction | None:
        layout, axis = self.grid_layout, self._axis_of(dim)
        if axis == 0 and math.prod(self.shape[:dim]) != 1:
            return self._rows_apart(direction, columnwise, dim, start, stop)
        place = self._place(columnwise, dim, start, stop)
        if place is None:
            return None
        data, scales, amax = direction
        is_turned = columnwise and layout.transposed
        is_summed = axis == (0 if columnwise else 1)
        if is_summed and not layout.is_plain(columnwise):
            per_byte = layout.elements_per_byte
            data = data[..., place.start // per_byte : place.stop // per_byte]
        elif is_turned:
            data = data.narrow(0 if axis == 1 else dim + 1, start, stop - start)
        else:
            data = data.narrow(dim, start, stop - start)
        span = blocks(layout.block_of(columnwise)[axis], place.start, place.stop, place.stop)
        scales = scales[span] if (axis == 0) != is_turned else scales[:, span]
        if amax is not None and amax.dim() and not is_summed:
            amax = amax[place]
        return Direction(data, scales, amax)

    def _place(self, columnwise: bool, dim: int, start: int, stop: int) -> slice | None:
        """Rows or columns of the matrix that are entries [start, stop) of a dimension; None where
        they cut a byte, a group or an area that shares a scale.

        Those of the summed dimension include what the last byte, or the last group, is filled up
        with.
        """
        layout, axis = self.grid_layout, self._axis_of(dim)
        step = 1 if axis == 1 else math.prod(self.shape[dim + 1 : -1])
        unit = 1
        if axis == (0 if columnwise else 1):
            unit = layout.whole_elements(columnwise)
        entries = start * step, stop * step, self.shape[dim] * step
        if blocks(unit, *entries) is None:
            return None
        first, last, size = (multiple(entry, unit) for entry in entries)
        for is_shared in (False, True):
            if blocks(layout.block_of(columnwise, is_shared)[axis], first, last, size) is None:
                return None
        return slice(first, last)

    def _rows_apart(
        self, direction: Direction, columnwise: bool, dim: int, start: int, stop: int
    ) -> Direction | None:
        """Some rows of each matrix of a stack, which have scales of their own."""
        if columnwise or self.grid_layout.block_of(False, shared=True)[0] != 1:
            return None
        data, scales, amax = direction
        rows_of_scales = self._rows_of_stack(scales, dim, start, stop)
        if amax is not None and amax.dim():
            amax = self._rows_of_stack(amax, dim, start, stop)
            if amax is None:
                return None
        if rows_of_scales is None:
            return None
        return Direction(data.narrow(dim, start, stop - start), rows_of_scales, amax)

    def _rows_of_stack(
        self, by_row: torch.Tensor, dim: int, start: int, stop: int
    ) -> torch.Tensor | None:
        """Those rows of a tensor with an entry for each row of this one; None if no view has
        them."""
        by_dims = try_view(by_row, (*self.shape[:-1], *by_row.shape[1:]))
        if by_dims is None:
            return None
        part = by_dims.narrow(dim, start, stop - start)
        return try_view(part, (math.prod(part.shape[: self.dim() - 1]), *by_row.shape[1:]))

    def turned(self) -> Self:
        """The transpose of a matrix: rows become columns, and columns rows."""
        rotation, layout = self.grid_layout.rotation, self.grid_layout
        is_alike = rotation is None or rotation.directions == "both"
        if self.dim() != 2 or not is_alike:
            return NotImplemented  # type: ignore[no-any-return]
        rows, columns, _ = self._sources()
        if not layout.transposed:
            # Elements that lie in the order of the tensor have a byte each.
            rows, columns = (
                None if side is None else Direction(side.data.t(), side.scales.t(), side.amax)
                for side in (rows, columns)
            )
        if not layout.one_buffer:
            rows, columns = columns, rows
        return self._view_of_stored(
            rows,
            columns,
            (self.shape[1], self.shape[0]),
            values_from_columns=not self._values_from_columns,
        )
