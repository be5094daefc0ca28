"""Quantized data with scales on a grid: one storage and one tensor for every layout.

Invariant: ``original ≈ float32(element) * scale_inv`` of the element's block, in each direction for
itself.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.errors import DeviceError, ShapeError, UsageError
from ottava.kernels.checks import check_dtype
from ottava.kernels.reference import spread
from ottava.layout import Layout, as_matrix_shape
from ottava.tensors.declaration import (
    DerivedTensor,
    InnerTensor,
    StaticField,
    as_data,
    check_flag,
    check_values_dtype,
)
from ottava.tensors.storage import USAGES, QuantizedTensorStorage

#: Data and scales of one direction.
Direction = tuple[torch.Tensor, torch.Tensor]
# What to do where rows or columns are missing that no quantizer was asked for.
_WITHOUT = (
    "a weight that FSDP2 gathers for the backward pass alone has columnwise data only, and "
    "recomputing the "
    "forward pass from it takes reshard_after_forward=False or {}, or gather_quantized(model, "
    "recomputes=True)",
    "a weight that was made under no_grad has columns of its initial values alone: before it is "
    "written "
    "to or gives them up, call weight.update_usage(columnwise_usage=True)",
)
# By the text of the layout: a plain dict, which compiled code can look into.
_INNER: dict[str, tuple[InnerTensor, ...]] = {}


def inner_tensors_of(layout: Layout | None) -> tuple[InnerTensor, ...]:
    """The declaration of tensors of a layout; without one, only names and usages of it."""
    text = "" if layout is None else layout.text
    found = _INNER.get(text)
    if found is None:
        found = _INNER[text] = (*_inner(layout, False), *_inner(layout, True))
    return found


def _inner(layout: Layout | None, columnwise: bool) -> tuple[InnerTensor, InnerTensor]:
    usage: Any = USAGES[columnwise]
    about: dict[str, Any] = {}
    of_scales: dict[str, Any] = {"block_rows": 1}
    if layout is not None:
        rows, turned = layout.block_of(columnwise)[0], columnwise and layout.transposed
        # Transposed squares are made of rows.
        gather = not (turned and layout.square)
        about = {"native": layout.element, "gather": gather, "transposed": turned}
        of_scales = {
            "block_rows": rows,
            "all_rows": rows is None,
            "gather": gather and rows is not None,
        }
        of_scales |= {
            "native": None if layout.scale is torch.float32 else layout.scale,
            "transposed": turned,
        }
    data = InnerTensor(f"_{usage}_data", f"{usage}_data", usage=usage, **about)
    return data, InnerTensor(f"_{usage}_scale_inv", f"{usage}_scale_inv", usage=usage, **of_scales)


def in_order(
    direction: Direction, layout: Layout, columnwise: bool, *, back: bool = False
) -> Direction:
    """Data in the order of the tensor, and scales on the grid over it: views of what is stored, or
    ``back`` again."""
    if not (columnwise and layout.transposed):
        return direction
    data, scales = direction
    return (data.movedim(*((-1, 0) if back else (0, -1))) if data.dim() else data), scales.t()


def zeros(
    layout: Layout, shape: Sequence[int], columnwise: bool, device: torch.device
) -> Direction:
    """Data and scales of zeros, as they are stored."""
    data = torch.zeros(layout.data_shape(shape, columnwise), dtype=torch.uint8, device=device)
    return data, torch.ones(
        layout.scale_shape(shape, columnwise), dtype=layout.stored_scale, device=device
    )


def columns(name: str, rows: str) -> Any:
    """Columnwise data or scales: if they are made of ``rows``, they are given as long as these stay
    as they are."""
    kept = f"_kept{name}"

    def get(self: Any) -> torch.Tensor | None:
        held = getattr(self, kept, None)
        if not isinstance(held, DerivedTensor):
            return held
        return held.tensor if held.fresh(getattr(self, rows), self._writes) else None

    def put(self: Any, value: Any) -> None:
        source = None if value is None else getattr(self, rows)
        if source is not None and self.grid_layout.square and self.grid_layout.transposed:
            value = DerivedTensor(value, source, self._writes)
        setattr(self, kept, value)

    return property(get, put)


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
    #: Where data and scales of rows and columns are held.
    data_names: ClassVar[tuple[str, str]] = ("_rowwise_data", "_columnwise_data")
    scale_names: ClassVar[tuple[str, str]] = ("_rowwise_scale_inv", "_columnwise_scale_inv")
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("layout_text", "layout"),
        StaticField("_values_from_columns", "values_from_columns", default=False),
    )
    #: Whether products read the declared tensors as they are; found when the class is.
    is_plain_operand: ClassVar[bool] = True
    #: By what option both directions get the same values.
    squares: ClassVar[str] = "squares of blocks"

    grid_layout: Layout
    layout_text: str
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _values_from_columns: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = ("__init__", "grid_operand", "gemm_operand")
        cls.is_plain_operand = all(
            getattr(cls, name) is getattr(GridTensorStorage, name) for name in own
        )

    @classmethod
    def layout_of(cls, declared: dict[str, Any]) -> Layout:
        """The layout that declared fields give, which are checked here."""
        given = declared["layout"]
        return given if isinstance(given, Layout) else Layout.of(given)

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        layout = cls.layout_of(declared)
        check_dtype(declared["dtype"])
        check_flag("values_from_columns", declared["values_from_columns"])
        rows, columns = (_checked(usage, declared, layout) for usage in USAGES)
        if rows is not None and columns is not None:
            data = in_order(columns, layout, True)[0]
            if rows[0].shape != data.shape:
                what = f"columnwise_data has shape {tuple(data.shape)} in the order of the tensor"
                raise ShapeError(what, expected=f"{tuple(rows[0].shape)}")
            if rows[0].device != data.device:
                raise DeviceError(
                    f"data is on {rows[0].device} and {data.device}", expected="one device"
                )
        if layout.one_buffer:
            rows, columns = rows or columns, None
        held = [*(rows or (None, None)), *(columns or (None, None))]
        checked: dict[str, Any] = dict(
            zip((inner.argument for inner in cls.inner_tensors), held, strict=True)
        )
        return declared | checked | ({"layout": layout.text} if "layout" in declared else {})

    def _hold(self, declared: dict[str, Any], quantizer: Any) -> None:
        layout = self.layout_of(declared)
        self.grid_layout, self.layout_text, self.rowwise_serves_columnwise = (
            layout,
            layout.text,
            layout.square,
        )
        if not type(self).inner_tensors[0].gather:
            # The declaration of the class has names; that of the instance also what the layout
            # says.
            self.inner_tensors = inner_tensors_of(layout)  # type: ignore[misc]
        super()._hold(declared, quantizer)

    _columnwise_data = columns("_columnwise_data", "_rowwise_data")
    _columnwise_scale_inv = columns("_columnwise_scale_inv", "_rowwise_data")

    def _rows(self) -> torch.Tensor | None:
        return getattr(self, self.data_names[0])  # type: ignore[no-any-return]

    def direction(self, *, columnwise: bool) -> Direction | None:
        """Stored data and scales of one direction, if they are held."""
        side = int(
            columnwise and not self.grid_layout.one_buffer
        )  # torch 2.11's compiler indexes with no bool
        data, scales = getattr(self, self.data_names[side]), getattr(self, self.scale_names[side])
        return None if data is None or scales is None else (data, scales)

    def ordered(self, *, columnwise: bool) -> Direction | None:
        """:meth:`direction` in the order of the tensor: views."""
        held = self.direction(columnwise=columnwise)
        return None if held is None else in_order(held, self.grid_layout, columnwise)

    def _arranged(self, rows: Direction | None, columns: Direction | None) -> list[Any]:
        """Inner tensors in the order of the declaration."""
        found: dict[str, Any] = {}
        for side, held in enumerate((rows, None if self.grid_layout.one_buffer else columns)):
            if held is not None:
                found[self.data_names[side]], found[self.scale_names[side]] = held
        return [found.get(inner.attribute) for inner in self.inner_tensors]

    def _put(self, rows: Direction | None, columns: Direction | None) -> None:
        self._put_inner(self._arranged(rows, columns))

    def _held(self) -> tuple[Direction, bool]:
        """The direction that the values are taken from, and whether it is that of the columns."""
        for columnwise in (self._values_from_columns, not self._values_from_columns):
            held = self.direction(columnwise=columnwise)
            if held is not None:
                return held, columnwise
        raise self._empty()

    def _in_order(self) -> torch.Tensor:
        """The data that the values are taken from, in the order of the tensor."""
        held, columnwise = self._held()
        return in_order(held, self.grid_layout, columnwise)[0]

    def for_usage(self, columnwise: bool) -> Direction:
        """Stored data and scales of one direction; made of the other one where both hold the same
        values.

        Raises:
            UsageError: they are not held.
        """
        held = self.direction(columnwise=columnwise)
        if held is not None:
            return held
        layout = self.grid_layout
        other = self.ordered(columnwise=not columnwise) if layout.square else None
        if other is None:
            self._held()
            raise self._without(
                USAGES[columnwise], f"; {_WITHOUT[columnwise].format(self.squares)}"
            )
        made = other[0], _other_scales(other, layout, columnwise)
        data, scales = in_order(made, layout, columnwise, back=True)
        if not layout.transposed:
            return data, scales
        # What lies the other way in memory is copied by a kernel.
        return (
            kernels.transpose(other[0]) if columnwise and data.dim() else data.contiguous()
        ), scales.contiguous()

    def get_usages(self) -> dict[str, bool]:
        rows, columns = (getattr(self, name) is not None for name in self.data_names)
        return {"rowwise": rows, "columnwise": columns or (rows and self.grid_layout.one_buffer)}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage)
        if self.grid_layout.one_buffer and self._rows() is not None:
            return
        # Before anything is dropped: either may be made of the other.
        rows = self.for_usage(False) if rowwise else None
        self._put(rows, self.for_usage(True) if columnwise else None)

    def _kept(self) -> dict[str, Any]:
        """Columns as they are kept, fresh or not, by the attributes that hold them."""
        return {
            f"_kept{n[1]}": getattr(self, f"_kept{n[1]}", None)
            for n in (self.data_names, self.scale_names)
        }

    def rebuild_derived(self, *, force: bool = False) -> None:
        rows, layout, quantizer = self._rows(), self.grid_layout, self._quantizer
        if rows is None or not rows.dim() or not (layout.transposed and layout.square):
            return
        if force:
            self.mark_written()
        if self.direction(columnwise=True) is None and (
            quantizer is None or quantizer.columnwise_usage
        ):
            self._put(self.direction(columnwise=False), self.for_usage(True))

    def raw_inner(self) -> tuple[InnerTensor, ...]:
        if (
            self._rows() is None
            and self.grid_layout.transposed
            and self.direction(columnwise=True) is not None
        ):
            return tuple(
                inner for inner in self.inner_tensors if inner.attribute == self.data_names[1]
            )
        return super().raw_inner()

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        held = self.direction(columnwise=True)
        super().replace_inner(inner, tensor)
        rows = self.direction(columnwise=False)
        if inner.usage == "rowwise" and rows is not None:
            # Made of the same values.
            self._put(rows, held)

    def size(self, dim: int | None = None) -> Any:
        rows = self._rows()
        shape = (self._in_order() if rows is None or self._values_from_columns else rows).shape
        return shape if dim is None else shape[dim]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        check_values_dtype(dtype)
        (data, scales), columnwise = self._held()
        layout, wanted = self.grid_layout, dtype or self._dtype
        exact = wanted if wanted in (*kernels.HIGH_PRECISION, torch.float64) else torch.float32
        scales = scales if scales.dim() else scales.view(1, 1)
        values = kernels.grid_decode(data, scales, layout, exact, columnwise=columnwise)
        if columnwise and layout.transposed and values.dim():
            values = values.movedim(0, -1)
        return values.to(wanted)

    def grid_operand(self, *, columnwise: bool) -> Direction | None:
        if type(self).gemm_operand is not QuantizedTensorStorage.gemm_operand:
            # A subclass whose operands are something else.
            return None
        side = int(columnwise and not self.grid_layout.one_buffer)
        data, scales = getattr(self, self.data_names[side]), getattr(self, self.scale_names[side])
        if data is None or scales is None:
            data, scales = self.for_usage(columnwise)
        if data.dim() != 2:
            data = data.reshape(self.grid_layout.stored_matrix(data.shape, columnwise))
        return data, scales

    def shared_with_whole(self) -> list[str]:
        if self.grid_layout.block == (None, None):
            return super().shared_with_whole()
        mine, its = as_matrix_shape(self.size()), as_matrix_shape(self._whole.size())
        # Of a transposed view rows were columns.
        its = its if self._values_from_columns == self._whole._values_from_columns else its[::-1]
        blocks = [
            [*zip(self.grid_layout.block_of(c), mine, its, strict=True)] for c in (False, True)
        ]
        cut = [any(side is None and own < whole for side, own, whole in block) for block in blocks]
        return [
            n
            for n, c in zip(self.scale_names, cut, strict=True)
            if c and getattr(self, n) is not None
        ]

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> None:
        shared = self.grid_layout.shared
        if (
            shared is not None
            and isinstance(src, GridTensorStorage)
            and src.grid_layout.shared is None
        ):
            what = "the source has scales for rows and for columns, the destination one for both"
            expected = f"a source whose blocks share scales over {shared}"
            raise UsageError(
                what, expected=expected, remedy="quantize it with the quantizer of the destination"
            )
        # The write reaches transposed data, too, which ``src`` has to have: it is fresh again, for
        # every alias.
        state = self._rows(), self._writes
        kept = [
            each
            for each in self._kept().values()
            if isinstance(each, DerivedTensor) and each.fresh(*state)
        ]
        super().copy_from_storage(src, noop_flag=noop_flag)
        for derived in kept if self._whole is None else ():
            derived.refresh(*state)


def _checked(usage: str, declared: dict[str, Any], layout: Layout) -> Direction | None:
    data = as_data(declared[f"{usage}_data"], layout.element, f"{usage}_data")
    scales = declared[f"{usage}_scale_inv"]
    if (data is None) != (scales is None):
        missing = f"{usage}_{'data' if data is None else 'scale_inv'}"
        raise UsageError(f"{missing} is missing", expected=f"{usage} data with its scales")
    if data is None:
        return None
    if layout.stored_scale is torch.uint8:
        scales = as_data(scales, layout.scale, f"{usage}_scale_inv")
    kernels.check_grid(data, scales, layout, usage == "columnwise", f"{usage}_scale_inv")
    return data, scales


def _other_scales(other: Direction, layout: Layout, columnwise: bool) -> torch.Tensor:
    """Scales of one direction in the order of the tensor, made of those of the other one: one of
    each square."""
    data, scales = other
    if layout.block == (None, None):
        return scales
    squares: Any = layout.shared or layout.block
    sides = [
        zip(squares, layout.block_of(side), strict=True) for side in (not columnwise, columnwise)
    ]
    old, new = ([square // own for square, own in side] for side in sides)
    grid = layout.grid(as_matrix_shape(data.shape), columnwise)
    return spread(scales[:: old[0], :: old[1]], (new[0], new[1]), grid)
