"""``GridTensor``: quantized data with scales on a grid as a ``torch.Tensor``.

A view of a tensor in blocks is made of a view of the data and a view of the scales, in each
direction for itself. There is one where the view consists of whole blocks. What shares a scale
counts as one block, with an exception: a block of all rows, or of all columns, may be cut along
them. The parts go on sharing its scale, and know it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch

from ottava.layout import as_matrix_shape
from ottava.tensors.declaration import Declared
from ottava.tensors.direction import Direction, as_stored, in_order, same_bytes, zeros
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.tensor import QuantizedTensor, blocks

#: Gives the direction of a view, or None where blocks do not allow it. It is called with a
#: direction in the order of the tensor, and with whether that is the columnwise one.
Change = Callable[[Direction, bool], Direction | None]


def _try_view(
    function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor | None:
    """The view that ``function`` gives; None where there is none."""
    try:
        return function(tensor)
    except (RuntimeError, ValueError):  # the latter while a graph is traced
        return None


def try_view(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A view of ``tensor`` in another shape; None where there is none."""
    return _try_view(lambda tensor: tensor.view(shape), tensor)


class GridTensor(QuantizedTensor, GridTensorStorage):
    """Quantized data with scales on a grid, as a ``torch.Tensor`` of its nominal dtype.

    Views, slices, splits and transposes keep the class where they lie on the boundaries of blocks,
    in every direction held, and share the data; elsewhere they give a :class:`DequantizedView`.
    Arguments and errors: :class:`GridTensorStorage`'s, and those of every
    :class:`~ottava.QuantizedTensor`.
    """

    @classmethod
    def laid_out_like(cls, declared: Declared) -> torch.Tensor | None:
        arguments = {inner.attribute: inner.argument for inner in cls.inner_tensors}
        rows: torch.Tensor | None = declared[arguments[cls.data_names[0]]]
        columns: torch.Tensor | None = declared[arguments[cls.data_names[1]]]
        if rows is not None or columns is None:
            return rows
        # Transposed data alone lie in memory as a transposed tensor does.
        scales: torch.Tensor = declared[arguments[cls.scale_names[1]]]
        return in_order(Direction(columns, scales), cls.layout_of(declared), True).data

    def of_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """A tensor of this kind with the directions of this one, which no quantizer has to make."""
        rows = columns = None
        if getattr(self, self.data_names[0]) is not None:
            rows = zeros(self.grid_layout, shape, False, device)
        if getattr(self, self.data_names[1]) is not None:
            columns = zeros(self.grid_layout, shape, True, device)
        arguments = self.get_metadata() | self._arguments_of(rows, columns)
        return type(self)(**(arguments | {"shape": None, "dtype": dtype}))

    def _arguments_of(self, rows: Direction | None, columns: Direction | None) -> Declared:
        """Stored directions as keywords of the constructor."""
        names = [inner.argument for inner in self.inner_tensors]
        return dict(zip(names, self._arranged(rows, columns), strict=True))

    # -- views --

    def view_by(self, change: Change, *, swap: bool = False, part: bool = False) -> Self:
        """A view of this tensor whose directions ``change`` gives; NotImplemented where there is
        none.

        Args:
            swap: whether rows become columns, and columns rows.
            part: whether a scale of the view belongs to other elements of this tensor, too.
        """
        layout = self.grid_layout
        rows, columns = self.ordered(columnwise=False), None
        if not layout.one_buffer:
            columns = self.ordered(columnwise=True)
        derived: Direction | None = None
        if rows is not None and self._derives_columns():
            # The view makes its columns of its rows.
            derived, columns = columns, None
        sources = [(rows, False), (columns, True)]
        if swap and not layout.one_buffer:
            sources.reverse()
        directions: list[Direction | None] = []
        for (source, from_columns), columnwise in zip(sources, (False, True), strict=True):
            if source is None:
                directions.append(None)
                continue
            result = change(source, from_columns)
            if result is None:
                return NotImplemented  # type: ignore[no-any-return]
            directions.append(as_stored(result, layout, columnwise))
        view = self._view_of(directions[0], directions[1], swap=swap, part=part)
        if derived is not None and not swap and view.numel() == self.numel():
            view._take_derived(change(derived, True))
        return view

    def _view_of(
        self, rows: Direction | None, columns: Direction | None, *, swap: bool, part: bool
    ) -> Self:
        """A view of this tensor around stored directions; arguments as of :meth:`view_by`."""
        arguments = self.get_metadata() | {"shape": None} | self._arguments_of(rows, columns)
        if swap:
            arguments["values_from_columns"] = not self._values_from_columns
        view = type(self)(**arguments)
        is_smaller = view.numel() != self.numel()
        # Where one scale serves the whole tensor, the rest has that of the view, too.
        has_one_scale = self.grid_layout.block == (None, None)
        view.mark_view(self, part=part or (is_smaller and has_one_scale))
        return view

    def _take_derived(self, columns: Direction | None) -> None:
        """Use columns in the order of this tensor, if they lie in memory as columns do that are
        made of its rows."""
        if columns is None:
            return
        stored = as_stored(columns, self.grid_layout, True)
        if stored.data.is_contiguous():
            self._put(self.direction(columnwise=False), stored)

    def reshaped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return self.view_by(
            lambda direction, columnwise: self._reshaped_direction(direction, columnwise, function)
        )

    def _reshaped_direction(
        self,
        direction: Direction,
        columnwise: bool,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> Direction | None:
        layout = self.grid_layout
        data = _try_view(function, direction.data)
        if data is None:
            return None
        if layout.block == (None, None):
            return Direction(data, direction.scales)
        columns, old_columns = as_matrix_shape(data.shape)[1], as_matrix_shape(self.shape)[1]
        if columns != old_columns and data.numel():
            # Rows of whole blocks may be joined and cut.
            rows, side = layout.block_of(columnwise, shared=True)
            if rows != 1 or side is None or columns % side or old_columns % side:
                return None
        grid = layout.grid(as_matrix_shape(data.shape), columnwise)
        scales = try_view(direction.scales, grid)
        return None if scales is None else Direction(data, scales)

    def narrowed(self, dim: int, start: int, stop: int) -> Self:
        if (start, stop) == (0, self.shape[dim]):
            return self.view_by(lambda direction, _: direction)
        axis = self._axis_of(dim)
        # A write to the part with another scale would change the values of the rest.
        part = False
        for columnwise in (False, True):
            if self.grid_layout.block_of(columnwise)[axis] is None:
                part = part or self.direction(columnwise=columnwise) is not None
        return self.view_by(
            lambda direction, columnwise: self._narrowed_direction(
                direction, columnwise, dim, start, stop
            ),
            part=part,
        )

    def _axis_of(self, dim: int) -> int:
        """The axis of the matrix that a dimension lies along: 0 for rows, 1 for columns."""
        return int(dim == self.dim() - 1)

    def _narrowed_direction(
        self, direction: Direction, columnwise: bool, dim: int, start: int, stop: int
    ) -> Direction | None:
        layout, scales = self.grid_layout, direction.scales
        data = direction.data.narrow(dim, start, stop - start)
        if layout.block == (None, None):
            return Direction(data, scales)
        axis, step = self._axis_of(dim), 1
        if axis == 0:
            # An entry of a leading dimension is so many rows of the matrix.
            step = math.prod(self.shape[dim + 1 : -1])
        place = start * step, stop * step, self.shape[dim] * step
        block = layout.block_of(columnwise)
        span = blocks(block[axis], *place)
        # An area that shares a scale has to stay whole, too, although each block has its own copy.
        shared_side = layout.block_of(columnwise, shared=True)[axis]
        if span is None or blocks(shared_side, *place) is None:
            return None
        if axis == 1:
            return Direction(data, scales[:, span])
        if block[0] is None or math.prod(self.shape[:dim]) == 1:
            return Direction(data, scales[span])
        if block[0] != 1:
            return None
        # Each row has scales of its own, which are narrowed as the data is.
        by_dims = try_view(scales, (*self.shape[:-1], scales.shape[1]))
        if by_dims is None:
            return None
        grid = layout.grid(as_matrix_shape(data.shape), columnwise)
        rows = try_view(by_dims.narrow(dim, start, stop - start), grid)
        return None if rows is None else Direction(data, rows)

    def _share_freshness(self, other: QuantizedTensor) -> None:
        super()._share_freshness(other)
        if isinstance(other, GridTensor) and self._writes is other._writes:
            for name in self.dated_names:
                setattr(self, name, getattr(other, name))

    def _means_the_same(self, other: QuantizedTensor) -> bool:
        if not isinstance(other, GridTensor):
            return False
        # A tensor that shares more scales may serve where fewer are shared.
        layout, other_layout = self.grid_layout, other.grid_layout
        return layout in (other_layout, replace(other_layout, shared=None))

    # -- a weight that was made under no_grad --

    def for_usage(self, columnwise: bool) -> Direction:
        if columnwise and not self.grid_layout.square and self.direction(columnwise=True) is None:
            self._quantize_initial_columns()
        return super().for_usage(columnwise)

    def _quantize_initial_columns(self) -> None:
        """Give a weight that was made under ``no_grad`` the columns of its initial values.

        It gets none where these were given up, where the rows are not theirs any more, and where
        columns were dropped.
        """
        quantizer, initial = self._quantizer, self.get_high_precision_init_val()
        if quantizer is None or quantizer.columnwise_usage or initial is None:
            return
        if torch.compiler.is_compiling():
            return
        with torch.no_grad():
            quantized: Self = quantizer.with_usage(True, True).quantize(initial.to(self.device))
        rows = self.direction(columnwise=False)
        initial_rows = quantized.direction(columnwise=False)
        if rows is None or initial_rows is None:
            return
        if same_bytes(initial_rows, rows):
            self._put(rows, quantized.direction(columnwise=True))
