"""``PackedTensorStorage``: data on a grid that are more than elements of a byte and their scales.

A layout needs it if elements share bytes, if a rotation pads the summed dimension, or if scales
have a second level. The shape of the tensor is then a field of its own, because the shape of the
data does not tell it, and the amaxes of the second level are inner tensors.

Invariant, for each direction: ``original ≈ float32(element) * scale * second level``; of rotated
values, if the layout rotates the direction.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch

from ottava import kernels
from ottava.errors import ShapeError, UsageError
from ottava.kernels.checks import check_dtype
from ottava.kernels.elements import pack, unpack
from ottava.kernels.rotation import unrotated
from ottava.layout import Layout, as_matrix_shape
from ottava.tensors.declaration import (
    Declared,
    InnerTensor,
    StaticField,
    check_flag,
    check_values_dtype,
)
from ottava.tensors.direction import Direction, scales_from_other_usage, zeros
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.grid_declaration import checked_packed_directions, packed_inner_tensors_of
from ottava.tensors.grid_tensor import Change, GridTensor
from ottava.tensors.tensor import QuantizedTensor

#: The attributes with the amaxes of the second level, of rows and of columns.
_AMAXES = ("_amax_rowwise", "_amax_columnwise")
_NOTHING = (None, None, None)


def needs_packing(layout: Layout) -> bool:
    """Whether tensors of a layout are :class:`PackedTensor`."""
    has_levels = layout.second_level != "none"
    return has_levels or layout.elements_per_byte > 1 or layout.rotation is not None


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

    _shape: tuple[int, ...]
    _amax_rowwise: torch.Tensor | None
    _amax_columnwise: torch.Tensor | None

    @classmethod
    def check_declared(cls, declared: Declared) -> Declared:
        layout = cls.layout_of(declared)
        check_dtype(declared["dtype"])
        check_flag("values_from_columns", declared["values_from_columns"])
        rows, columns = checked_packed_directions(declared, layout)
        names = [inner.argument for inner in cls.inner_tensors]
        tensors = (*(rows or _NOTHING), *(columns or _NOTHING))
        checked = declared | dict(zip(names, tensors, strict=True))
        if "shape" in declared:
            checked["shape"] = shape_of(rows, columns, layout, declared["shape"])
        if "layout" in declared:
            checked["layout"] = layout.text
        return checked

    @staticmethod
    def _inner_tensors_of(layout: Layout) -> tuple[InnerTensor, ...]:
        return packed_inner_tensors_of(layout)

    # -- directions --

    def direction(self, *, columnwise: bool) -> Direction | None:
        direction = super().direction(columnwise=columnwise)
        if direction is None or self.grid_layout.second_level == "none":
            return direction
        side = 1 if columnwise and not self.grid_layout.one_buffer else 0
        return direction._replace(amax=getattr(self, _AMAXES[side]))

    def ordered(self, *, columnwise: bool) -> Direction | None:
        raise UsageError(
            f"the bytes of a {type(self).__name__} have no order of elements",
            expected="direction(), as it is stored",
        )

    def for_usage(self, columnwise: bool) -> Direction:
        direction = self.direction(columnwise=columnwise)
        if direction is not None:
            return direction
        other = self.direction(columnwise=not columnwise)
        if other is not None and self.grid_layout.square:
            return self._turned(other, columnwise)
        self._source_of_values()
        raise self._missing(columnwise)

    def _turned(self, other: Direction, columnwise: bool) -> Direction:
        """The stored direction of one usage, made of that of the other, whose values it shares."""
        layout, matrix = self.grid_layout, as_matrix_shape(self.size())
        height, width = layout.stored_matrix(other.data.shape, not columnwise)
        data = other.data.reshape(height, width // layout.elements_per_byte)
        if layout.elements_per_byte == 2:
            data = pack(unpack(data)[:, : matrix[1 if columnwise else 0]].t())
        else:
            data = data.t().contiguous()
        scales = other.scales if columnwise else other.scales.t()
        scales = scales_from_other_usage(scales, matrix, layout, columnwise)
        if columnwise:
            scales = scales.t()
        shape = layout.data_shape(self.size(), columnwise)
        return Direction(data.reshape(shape), scales.contiguous(), other.amax)

    def _arranged(
        self, rows: Direction | None, columns: Direction | None
    ) -> list[torch.Tensor | None]:
        if self.grid_layout.one_buffer:
            columns = None
        return [*(rows or _NOTHING), *(columns or _NOTHING)]

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
        return (matrix.t() if turned else matrix).reshape(self.size())


def shape_of(
    rows: Direction | None, columns: Direction | None, layout: Layout, shape: Sequence[int] | None
) -> tuple[int, ...]:
    """The shape of the tensor whose directions these are.

    Without ``shape`` it is that which the data have with whole bytes and groups.

    Raises:
        ShapeError: the data have another shape, or none are held.
    """
    if shape is None:
        shape = _widest_shape(rows, columns, layout)
    for direction, columnwise in ((rows, False), (columns, True)):
        if direction is None:
            continue
        expected = layout.data_shape(shape, columnwise)
        if tuple(direction.data.shape) != expected:
            usage = "columnwise" if columnwise else "rowwise"
            raise ShapeError(
                f"{usage}_data of a tensor of shape {tuple(shape)} has shape "
                f"{tuple(direction.data.shape)}",
                expected=f"{expected}",
            )
    return tuple(shape)


def _widest_shape(
    rows: Direction | None, columns: Direction | None, layout: Layout
) -> tuple[int, ...]:
    if rows is None:
        # Without rows the constructor has refused to be called without columns.
        assert columns is not None
        outer, inner = layout.stored_matrix(columns.data.shape, True)
        return (inner, outer) if layout.transposed else (outer, inner)
    width = layout.stored_matrix(rows.data.shape, False)[1]
    if columns is not None and layout.transposed:
        width = columns.data.shape[0]
    return (*rows.data.shape[:-1], width)


class PackedTensor(GridTensor, PackedTensorStorage):
    """Quantized data with packed elements, padded groups or two levels of scales, as a
    ``torch.Tensor`` of its nominal dtype.

    Rows on the boundaries of blocks, other leading dimensions and transposes of matrices keep the
    class and share the data; other views give a :class:`DequantizedView`. Arguments and errors:
    :class:`PackedTensorStorage`'s, and those of every :class:`~ottava.QuantizedTensor`.
    """

    @classmethod
    def laid_out_like(cls, declared: Declared) -> torch.Tensor | None:
        return None

    @classmethod
    def _placement(
        cls, arguments: Declared, shape: Sequence[int] | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[int], Sequence[int] | None, int | torch.SymInt | None]:
        layout = cls.layout_of(arguments)
        rows, columns = checked_packed_directions(arguments, layout)
        return shape_of(rows, columns, layout, shape), None, None

    def of_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        tensors: list[torch.Tensor | None] = []
        for columnwise, name in zip((False, True), self.data_names, strict=True):
            is_held = getattr(self, name) is not None
            tensors += zeros(self.grid_layout, shape, columnwise, device) if is_held else _NOTHING
        arguments = dict(zip([i.argument for i in self.inner_tensors], tensors, strict=True))
        return type(self)(**(self.get_metadata() | arguments | {"shape": shape, "dtype": dtype}))

    # -- views --

    def view_by(self, change: Change, *, swap: bool = False, part: bool = False) -> Self:
        return NotImplemented  # type: ignore[no-any-return]

    def _around(
        self,
        rows: Direction | None,
        columns: Direction | None,
        shape: Sequence[int],
        **more: object,
    ) -> Self:
        """A view of this tensor of ``shape`` around stored directions."""
        names = [inner.argument for inner in self.inner_tensors]
        tensors: Declared = dict(zip(names, self._arranged(rows, columns), strict=True)) | more
        view = self.make_like(self, shape=shape, **tensors)
        view.mark_view(self)
        return view

    def reshaped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        example = torch.empty(self.shape, dtype=torch.uint8, device="meta")
        shape = function(example).shape
        if not self.dim() or shape[-1:] != self.shape[-1:]:
            return NotImplemented  # type: ignore[no-any-return]
        rows, columns = (
            None
            if direction is None
            else direction._replace(
                data=direction.data.view(self.grid_layout.data_shape(shape, columnwise))
            )
            for columnwise in (False, True)
            for direction in [self.direction(columnwise=columnwise)]
        )
        return self._around(rows, columns, shape)

    def narrowed(self, dim: int, start: int, stop: int) -> Self:
        rotation = self.grid_layout.rotation
        has_columns = self.direction(columnwise=True) is not None
        if rotation is not None and rotation.turns(True) and has_columns:
            if (start, stop) == (0, self.shape[dim]):
                return self.make_like(self)
            # A view has whole groups of the rotation. It shares no padding, which is not its own.
            if start % rotation.size or stop % rotation.size:
                return NotImplemented  # type: ignore[no-any-return]
        return QuantizedTensor.narrowed(self, dim, start, stop)

    def turned(self) -> Self:
        """The transpose of a matrix: rows become columns, and columns rows."""
        rotation, layout = self.grid_layout.rotation, self.grid_layout
        is_alike = rotation is None or rotation.directions == "both"
        if self.dim() != 2 or not layout.transposed or not is_alike:
            return NotImplemented  # type: ignore[no-any-return]
        rows, columns = self.direction(columnwise=False), self.direction(columnwise=True)
        from_columns = not self._values_from_columns
        return self._around(columns, rows, self.shape[::-1], values_from_columns=from_columns)
