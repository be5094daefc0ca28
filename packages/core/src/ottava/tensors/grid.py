"""``GridTensorStorage``: quantized data with scales on a grid, for every layout.

A storage has up to two directions, rows and columns, each of which is data and scales. Its layout
says everything else: which shapes they have (``grid_declaration.py``), how a direction is stored,
and how one is made of the other (``direction.py``). What the aten ops do to blocks is in
``grid_tensor.py``.

Invariant, for each direction: ``original ≈ float32(element) * scale_inv`` of the element's block.
"""

from typing import ClassVar

import torch

from ottava import kernels
from ottava.errors import UsageError
from ottava.kernels.checks import check_dtype
from ottava.layout import Block, Layout, as_matrix_shape
from ottava.tensors.declaration import (
    Declared,
    DerivedTensor,
    InnerTensor,
    StaticField,
    check_flag,
    check_values_dtype,
)
from ottava.tensors.direction import Direction, from_other_usage, in_order
from ottava.tensors.grid_declaration import checked_directions, inner_tensors_of
from ottava.tensors.storage import USAGES, QuantizedTensorStorage, StorageQuantizer


class GridTensorStorage(QuantizedTensorStorage):
    """Quantized data with scales on a grid, without the tensor interface.

    A subclass may have other static fields, and a :meth:`layout_of` that follows from them.

    Args:
        rowwise_data: the bytes of the elements, uint8 ``[*leading, K]`` (a tensor of the element's
            dtype is viewed so).
        rowwise_scale_inv: scales of their blocks, float32 or the bytes of E8M0, see
            :meth:`ottava.Layout.scale_shape`.
        columnwise_data: ``[*leading, K]``, or ``[K, *leading]`` of a layout that transposes them.
        columnwise_scale_inv: the scales of its blocks.
        layout: a :class:`ottava.Layout`, or its text.
        dtype: nominal dtype.
        values_from_columns: where both directions are held, dequantize columnwise data: so does a
            transposed view.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError, UsageError: the arguments do not fit
            together.
    """

    inner_tensors = inner_tensors_of(None)
    #: The attributes with the data of rows and columns, and those with their scales.
    data_names: ClassVar[tuple[str, str]] = ("_rowwise_data", "_columnwise_data")
    scale_names: ClassVar[tuple[str, str]] = ("_rowwise_scale_inv", "_columnwise_scale_inv")
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("layout_text", "layout"),
        StaticField("_values_from_columns", "values_from_columns", default=False),
    )
    #: Whether products read the declared tensors as they are; set when the class is defined.
    is_plain_operand: ClassVar[bool] = True
    #: The option by which both directions get the same values, for errors.
    squares: ClassVar[str] = "squares of blocks"

    grid_layout: Layout
    layout_text: str
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _values_from_columns: bool = False
    # Columnwise data and scales as :meth:`_dated` gives them.
    _dated_column_data: torch.Tensor | DerivedTensor | None = None
    _dated_column_scales: torch.Tensor | DerivedTensor | None = None
    #: The attributes in which columns that are made of rows have the state of these.
    dated_names: ClassVar[tuple[str, ...]] = ("_dated_column_data", "_dated_column_scales")

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_plain_operand = all(
            getattr(cls, name) is getattr(GridTensorStorage, name)
            for name in ("__init__", "grid_operand", "gemm_operand")
        )

    # -- construction --

    @classmethod
    def layout_of(cls, declared: Declared) -> Layout:
        """The layout that follows from declared fields, which are checked here."""
        layout: Layout | str = declared["layout"]
        return layout if isinstance(layout, Layout) else Layout.of(layout)

    @staticmethod
    def inner_tensors_of(layout: Layout) -> tuple[InnerTensor, ...]:
        """The inner tensors as a layout has them."""
        return inner_tensors_of(layout)

    @classmethod
    def check_declared(cls, declared: Declared) -> Declared:
        layout = cls.layout_of(declared)
        check_dtype(declared["dtype"])
        check_flag("values_from_columns", declared["values_from_columns"])
        names = [inner.argument for inner in cls.inner_tensors]
        tensors = cls._checked_tensors(declared, layout)
        checked = declared | dict(zip(names, tensors, strict=True))
        if "layout" in declared:
            checked["layout"] = layout.text
        return checked

    @classmethod
    def _checked_tensors(
        cls, declared: Declared, layout: Layout
    ) -> tuple[torch.Tensor | None, ...]:
        """Declared inner tensors as they are held, in the order of the declaration."""
        rows, columns = checked_directions(declared, layout)
        absent = (None, None)
        return *(rows or absent)[:2], *(columns or absent)[:2]

    def _hold(self, declared: Declared, quantizer: StorageQuantizer | None) -> None:
        layout = self.layout_of(declared)
        self.grid_layout = layout
        self.layout_text = layout.text
        self.rowwise_serves_columnwise = layout.square
        if not type(self).inner_tensors[0].gather:
            # The class declares only names; the layout of the instance says the rest.
            self.inner_tensors = self.inner_tensors_of(layout)  # type: ignore[misc]
        super()._hold(declared, quantizer)

    # -- columns that are made of rows: the storage has them as long as the rows stay as they are --

    def _derives_columns(self) -> bool:
        """Whether columns are made of rows: those of transposed squares are."""
        return self.grid_layout.transposed and self.grid_layout.square

    def _dated(self, columns: torch.Tensor | None) -> torch.Tensor | DerivedTensor | None:
        """Columns with the present state of the rows, if they are made of these."""
        rows = self._rows()
        if columns is None or rows is None or not self._derives_columns():
            return columns
        return DerivedTensor(columns, rows, self._writes)

    def _current(self, columns: torch.Tensor | DerivedTensor | None) -> torch.Tensor | None:
        """The columns that :meth:`_dated` gave; None where the rows changed since."""
        if not isinstance(columns, DerivedTensor):
            return columns
        # The attribute is read here, because this runs in each pass of a layer.
        rows = getattr(self, self.data_names[0])
        return columns.tensor if columns.fresh(rows, self._writes) else None

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        return self._current(self._dated_column_data)

    @_columnwise_data.setter
    def _columnwise_data(self, data: torch.Tensor | None) -> None:
        self._dated_column_data = self._dated(data)

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        return self._current(self._dated_column_scales)

    @_columnwise_scale_inv.setter
    def _columnwise_scale_inv(self, scales: torch.Tensor | None) -> None:
        self._dated_column_scales = self._dated(scales)

    def is_derived(self, inner: InnerTensor) -> bool:
        # The scale of a whole tensor is the same on every shard, and derives from that of the rows.
        is_column = inner.usage == "columnwise" and self._derives_columns()
        return is_column or super().is_derived(inner)

    def rebuild_derived(self, *, force: bool = False) -> None:
        rows, quantizer = self._rows(), self._quantizer
        if rows is None or not rows.dim() or not self._derives_columns():
            return
        if force:
            self.mark_written()
        serves_columns = quantizer is None or quantizer.columnwise_usage
        if serves_columns and self.direction(columnwise=True) is None:
            self._put(self.direction(columnwise=False), self.for_usage(True))

    # -- directions --

    def codes(self) -> torch.Tensor | None:
        """The codes of the elements, one in a byte, in the order and shape of the tensor.

        They are those that :meth:`dequantize` reads; None where these are not the tensor's own
        values, but rotated ones.
        """
        direction, columnwise = self._source_of_values()
        return in_order(direction, self.grid_layout, columnwise).data

    def _rows(self) -> torch.Tensor | None:
        """The data of the rows."""
        data: torch.Tensor | None = getattr(self, self.data_names[0])
        return data

    def direction(self, *, columnwise: bool) -> Direction | None:
        """Stored data and scales of one direction; None where the storage has none."""
        # torch 2.11's compiler indexes with no bool.
        side = 1 if columnwise and not self.grid_layout.one_buffer else 0
        data: torch.Tensor | None = getattr(self, self.data_names[side])
        scales: torch.Tensor | None = getattr(self, self.scale_names[side])
        if data is None or scales is None:
            return None
        return Direction(data, scales)

    def ordered(self, *, columnwise: bool) -> Direction | None:
        """:meth:`direction` in the order of the tensor: views."""
        direction = self.direction(columnwise=columnwise)
        if direction is None:
            return None
        return in_order(direction, self.grid_layout, columnwise)

    def for_usage(self, columnwise: bool) -> Direction:
        """Stored data and scales of one direction; made of the other one where both hold the same
        values.

        Raises:
            UsageError: the storage has neither.
        """
        direction = self.direction(columnwise=columnwise)
        if direction is not None:
            return direction
        if self.grid_layout.square:
            other = self.direction(columnwise=not columnwise)
            if other is not None:
                return from_other_usage(other, self.grid_layout, columnwise, self.size())
        # A storage without any data has another error.
        self._source_of_values()
        raise self._missing(columnwise)

    def _missing(self, columnwise: bool) -> UsageError:
        """The error for a usage whose data are not held and cannot be made."""
        return self._without(USAGES[int(columnwise)], f"; {self._hint(columnwise)}")

    def _hint(self, columnwise: bool) -> str:
        """Where a usage may be missing that no quantizer was asked for, and the remedy."""
        if columnwise:
            return (
                "a weight that was made under no_grad has columns of its initial values alone: "
                "before it is written to or gives them up, call "
                "weight.update_usage(columnwise_usage=True)"
            )
        return (
            "a weight that FSDP2 gathers for the backward pass alone has columnwise data only, and "
            f"recomputing the forward pass from it takes reshard_after_forward=False or "
            f"{self.squares}, or gather_quantized(model, recomputes=True)"
        )

    def _arranged(
        self, rows: Direction | None, columns: Direction | None
    ) -> list[torch.Tensor | None]:
        """Inner tensors in the order of the declaration."""
        if self.grid_layout.one_buffer:
            columns = None
        tensors: dict[str, torch.Tensor] = {}
        if rows is not None:
            tensors[self.data_names[0]], tensors[self.scale_names[0]] = rows[:2]
        if columns is not None:
            tensors[self.data_names[1]], tensors[self.scale_names[1]] = columns[:2]
        return [tensors.get(inner.attribute) for inner in self.inner_tensors]

    def _put(self, rows: Direction | None, columns: Direction | None) -> None:
        self._put_inner(self._arranged(rows, columns))

    def get_usages(self) -> dict[str, bool]:
        rows, columns = (getattr(self, name) is not None for name in self.data_names)
        return {"rowwise": rows, "columnwise": columns or (rows and self.grid_layout.one_buffer)}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage)
        if self.grid_layout.one_buffer and self._rows() is not None:
            return
        # Both are made before either is dropped, because each may be made of the other.
        rows = self.for_usage(False) if rowwise else None
        columns = self.for_usage(True) if columnwise else None
        self._put(rows, columns)

    def raw_inner(self) -> tuple[InnerTensor, ...]:
        if self._rows() is None and self.grid_layout.transposed:
            columns = [i for i in self.inner_tensors if i.attribute == self.data_names[1]]
            if self.direction(columnwise=True) is not None:
                return tuple(columns)
        return super().raw_inner()

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        columns = self.direction(columnwise=True)
        super().replace_inner(inner, tensor)
        rows = self.direction(columnwise=False)
        if inner.usage == "rowwise" and rows is not None:
            # The new tensor holds the same values, so that columns made of the old one are current.
            self._put(rows, columns)

    # -- values --

    def _source_of_values(self) -> tuple[Direction, bool]:
        """The direction that the values are taken from, and whether it is that of the columns."""
        for columnwise in (self._values_from_columns, not self._values_from_columns):
            direction = self.direction(columnwise=columnwise)
            if direction is not None:
                return direction, columnwise
        raise self._empty()

    def _size(self) -> torch.Size:
        rows = self._rows()
        if rows is not None and not self._values_from_columns:
            return rows.shape
        direction, columnwise = self._source_of_values()
        return in_order(direction, self.grid_layout, columnwise).data.shape

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        check_values_dtype(dtype)
        dtype = dtype or self._dtype
        layout = self.grid_layout
        (data, scales, _), columnwise = self._source_of_values()
        if not scales.dim():
            scales = scales.view(1, 1)
        decoded_dtype = dtype
        if dtype not in (*kernels.HIGH_PRECISION, torch.float64):
            decoded_dtype = torch.float32
        values = kernels.grid_decode(data, scales, layout, decoded_dtype, columnwise=columnwise)
        if columnwise and layout.transposed and values.dim():
            values = values.movedim(0, -1)
        return values.to(dtype)

    def grid_operand(self, *, columnwise: bool) -> Direction | None:
        if type(self).gemm_operand is not QuantizedTensorStorage.gemm_operand:
            # A subclass has operands of another kind.
            return None
        direction = self.direction(columnwise=columnwise)
        if direction is None:
            direction = self.for_usage(columnwise)
        data = direction.data
        if data.dim() == 2:
            return direction
        matrix = self.grid_layout.stored_matrix(data.shape, columnwise)
        return direction._replace(data=data.reshape(matrix))

    # -- writes to a view, and from another storage --

    def shared_with_whole(self) -> list[str]:
        whole, layout = self._whole, self.grid_layout
        if not isinstance(whole, GridTensorStorage) or layout.block == (None, None):
            return super().shared_with_whole()
        own_matrix, whole_matrix = as_matrix_shape(self.size()), as_matrix_shape(whole.size())
        if self._values_from_columns != whole._values_from_columns:
            # The rows of a transposed view are columns of the whole.
            whole_matrix = (whole_matrix[1], whole_matrix[0])
        attributes = []
        for attribute, block in self._shared_blocks():
            sides = zip(block, own_matrix, whole_matrix, strict=True)
            is_cut = any(side is None and own < size for side, own, size in sides)
            if is_cut and getattr(self, attribute) is not None:
                attributes.append(attribute)
        return attributes

    def _shared_blocks(self) -> list[tuple[str, Block]]:
        """Attributes of scales, with the rows and columns that have one of them."""
        layout = self.grid_layout
        return [(name, layout.block_of(bool(side))) for side, name in enumerate(self.scale_names)]

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> None:
        shared = self.grid_layout.shared
        if shared and isinstance(src, GridTensorStorage) and src.grid_layout.shared is None:
            raise UsageError(
                "the source has scales for rows and for columns, the destination one for both",
                expected=f"a source whose blocks share scales over {shared}",
                remedy="quantize it with the quantizer of the destination",
            )
        rows, writes = self._rows(), self._writes
        dated = [getattr(self, name) for name in self.dated_names]
        current = [
            columns
            for columns in dated
            if isinstance(columns, DerivedTensor) and columns.fresh(rows, writes)
        ]
        super().copy_from_storage(src, noop_flag=noop_flag)
        if self._whole is None:
            # Current columns were written, too, and so are current again, for every alias.
            for columns in current:
                columns.refresh(rows, writes)
