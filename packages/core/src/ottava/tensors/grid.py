"""Quantized data with scales on a grid: one storage and one tensor for every layout.

Invariant: ``original ≈ float32(element) * scale_inv`` of the element's block, in each direction for itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from ottava import kernels
from ottava.errors import DeviceError, OptionError, ShapeError, UsageError
from ottava.formats import FP8
from ottava.kernels.checks import check_dtype
from ottava.layout import Layout
from ottava.tensors.declaration import InnerTensor, StaticField, as_data, check_values_dtype
from ottava.tensors.freshness import DerivedTensor
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor

#: Data and scales of one direction.
Direction = tuple[torch.Tensor, torch.Tensor]
_USAGES = ("rowwise", "columnwise")


# By the text of the layout, in a plain dict, which compiled code can look into.
_DECLARED: dict[str, tuple[InnerTensor, ...]] = {}


def inner_tensors_of(layout: Layout | None) -> tuple[InnerTensor, ...]:
    """The declaration of tensors of a layout; without one, only names and usages of it."""
    text = "" if layout is None else layout.text
    if text not in _DECLARED:
        _DECLARED[text] = _inner_tensors_of(layout)
    return _DECLARED[text]


def _inner_tensors_of(layout: Layout | None) -> tuple[InnerTensor, ...]:
    declared: list[InnerTensor] = []
    for columnwise, usage in enumerate(_USAGES):
        about: dict[str, Any] = {}
        of_scales: dict[str, Any] = {"block_rows": 1}
        if layout is not None:
            rows = layout.block_of(bool(columnwise))[0]
            # What is transposed has no rows of the tensor, and is made of what has.
            about = {"native": layout.element, "gather": not (columnwise and layout.transposed)}
            native = None if layout.scale is torch.float32 else layout.scale
            of_scales = {"native": native, "block_rows": rows, "all_rows": rows is None}
            of_scales["gather"] = about["gather"] and rows is not None
        declared.append(InnerTensor(f"_{usage}_data", f"{usage}_data", usage=usage, **about))  # type: ignore[arg-type]
        declared.append(
            InnerTensor(f"_{usage}_scale_inv", f"{usage}_scale_inv", usage=usage, **of_scales)  # type: ignore[arg-type]
        )
    return tuple(declared)


def in_order(direction: Direction, layout: Layout, columnwise: bool) -> Direction:
    """Data in the order of the tensor, and scales on the grid over it: views of what is stored; and back again."""
    if not (columnwise and layout.transposed):
        return direction
    data, scales = direction
    return (data.movedim(0, -1) if data.dim() else data), scales.t()


def stored(direction: Direction, layout: Layout, columnwise: bool) -> Direction:
    """What is stored of data and scales in the order of the tensor: views."""
    if not (columnwise and layout.transposed):
        return direction
    data, scales = direction
    return (data.movedim(-1, 0) if data.dim() else data), scales.t()


class GridTensorStorage(QuantizedTensorStorage):
    """Quantized data with scales on a grid, without the tensor interface.

    A subclass may have other static fields, and a property ``grid_layout`` that follows from them.

    Args:
        rowwise_data: the bytes of the elements, uint8 ``[*leading, K]`` (a tensor of the element's dtype is viewed so).
        rowwise_scale_inv: scales of their blocks, float32 or the bytes of E8M0, see :meth:`ottava.Layout.scale_shape`.
        columnwise_data: ``[*leading, K]``, or ``[K, *leading]`` of a layout that transposes them.
        columnwise_scale_inv: the scales of its blocks.
        layout: a :class:`ottava.Layout`, or its text.
        dtype: nominal dtype.
        values_from_columns: where both directions are held, dequantize columnwise data: so does a transposed view.
        quantizer: used by in-place updates.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError, UsageError: the arguments do not fit together.
    """

    inner_tensors = inner_tensors_of(None)
    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype", default=torch.float32),
        StaticField("layout_text", "layout"),
        StaticField("_values_from_columns", "values_from_columns", default=False),
    )
    counts_writes = True
    #: By what option both directions get the same values.
    squares: ClassVar[str] = "squares of blocks"

    layout_text: str
    _rowwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _values_from_columns: bool

    @property
    def grid_layout(self) -> Layout:
        """What the elements are, and which of them share a scale."""
        return Layout.of(self.layout_text)

    @classmethod
    def layout_of(cls, declared: dict[str, Any]) -> Layout:
        """The layout that declared fields give, which are checked here."""
        given = declared["layout"]
        return given if isinstance(given, Layout) else Layout.of(given)

    @classmethod
    def check_declared(cls, declared: dict[str, Any]) -> dict[str, Any]:
        layout = cls.layout_of(declared)
        check_dtype(declared["dtype"])
        if not isinstance(declared["values_from_columns"], bool):
            what = f"values_from_columns is {declared['values_from_columns']!r}"
            raise OptionError(what, expected="True or False")
        sides = [_checked(usage, declared, layout) for usage in _USAGES]
        places = [side[0] for side in sides if side is not None]
        if len(places) == 2:
            rows, columns = places
            if rows.shape != columns.shape:
                what = f"columnwise_data has shape {tuple(columns.shape)} in the order of the tensor"
                raise ShapeError(what, expected=f"{tuple(rows.shape)}")
            if rows.device != columns.device:
                raise DeviceError(f"data is on {rows.device} and {columns.device}", expected="one device")
        checked: dict[str, Any] = {"layout": layout.text} if "layout" in declared else {}
        for columnwise, (usage, side) in enumerate(zip(_USAGES, sides, strict=True)):
            data, scales = (None, None) if side is None else stored(side, layout, bool(columnwise))
            checked |= {f"{usage}_data": data, f"{usage}_scale_inv": scales}
        return declared | checked

    def _hold(self, declared: dict[str, Any]) -> None:
        super()._hold(declared)
        self._declare()

    @classmethod
    def unchecked(cls, tensors: Any, static: Any, quantizer: Any) -> Any:
        made = super().unchecked(tensors, static, quantizer)
        made._declare()
        return made

    def _declare(self) -> None:
        # The declaration of the class has names; that of the instance also what the layout says.
        self.inner_tensors = inner_tensors_of(self.grid_layout)  # type: ignore[misc]

    # -- columns that are made of rows, and given as long as these are what they were --

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        return self._fresh(self._columns)

    @_columnwise_data.setter
    def _columnwise_data(self, value: torch.Tensor | None) -> None:
        self._columns = self._kept(value)

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        return self._fresh(self._column_scales)

    @_columnwise_scale_inv.setter
    def _columnwise_scale_inv(self, value: torch.Tensor | None) -> None:
        self._column_scales = self._kept(value)

    _columns: torch.Tensor | DerivedTensor | None
    _column_scales: torch.Tensor | DerivedTensor | None

    def _derives_columns(self) -> bool:
        layout = self.grid_layout
        return layout.square and layout.transposed and self._rowwise_data is not None

    def _kept(self, value: torch.Tensor | None) -> torch.Tensor | DerivedTensor | None:
        derives = value is not None and self._derives_columns()
        return DerivedTensor(value, self._rowwise_data, self._writes) if derives else value  # type: ignore[arg-type]

    def _fresh(self, kept: torch.Tensor | DerivedTensor | None) -> torch.Tensor | None:
        if not isinstance(kept, DerivedTensor):
            return kept
        return kept.tensor if kept.fresh(self._rowwise_data, self._writes) else None

    # -- directions --

    def direction(self, *, columnwise: bool) -> Direction | None:
        """Stored data and scales of one direction, if they are held."""
        data = self._columnwise_data if columnwise else self._rowwise_data
        scales = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        return None if data is None or scales is None else (data, scales)

    def ordered(self, *, columnwise: bool) -> Direction | None:
        """:meth:`direction` in the order of the tensor: views."""
        held = self.direction(columnwise=columnwise)
        return None if held is None else in_order(held, self.grid_layout, columnwise)

    def _held(self) -> tuple[Direction, bool]:
        """The direction that the values are taken from, and whether it is that of the columns."""
        for columnwise in (self._values_from_columns, not self._values_from_columns):
            held = self.direction(columnwise=columnwise)
            if held is not None:
                return held, columnwise
        raise self._empty()

    @property
    def rowwise_serves_columnwise(self) -> bool:  # type: ignore[override]
        """Whether both directions hold the same values."""
        return self.grid_layout.square

    def for_usage(self, columnwise: bool) -> Direction:
        """Stored data and scales of one direction; made of the other one where both hold the same values.

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
            name = _USAGES[columnwise]
            raise UsageError(
                f"{type(self).__name__} has no {name} data",
                expected=f"a tensor quantized with {name}=True",
                remedy=f"call quantizer.set_usage({name}=True) before quantizing; a weight that FSDP2 gathers for the "
                "backward pass alone has columnwise data only, and recomputing the forward pass from it takes "
                f"reshard_after_forward=False or {self.squares}, or gather_quantized(model, recomputes=True)",
            )
        data, scales = stored((other[0], _other_scales(other, layout, columnwise)), layout, columnwise)
        if not layout.transposed:
            return data, scales
        # What lies the other way in memory is copied by a kernel.
        return (kernels.transpose(other[0]) if columnwise and data.dim() else data.contiguous()), scales.contiguous()

    def get_usages(self) -> dict[str, bool]:
        return {usage: self.direction(columnwise=bool(at)) is not None for at, usage in enumerate(_USAGES)}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        rowwise, columnwise = self._requested_usages(rowwise_usage, columnwise_usage)
        # Before anything is dropped: either may be made of the other.
        rows = self.for_usage(False) if rowwise else (None, None)
        columns = self.for_usage(True) if columnwise else (None, None)
        self.mark_written()
        self._rowwise_data, self._rowwise_scale_inv = rows
        self._columnwise_data, self._columnwise_scale_inv = columns

    def is_derived(self, inner: InnerTensor) -> bool:
        # Transposed columns with scales of their own cannot be made of rows.
        return super().is_derived(inner) and self.grid_layout.square

    def rebuild_derived(self, *, force: bool = False) -> None:
        if not self._derives_columns() or not isinstance(self._columns, DerivedTensor):
            return
        if force:
            self.mark_written()
        if self._columnwise_data is None:
            self._columnwise_data, self._columnwise_scale_inv = self.for_usage(True)

    def replace_inner(self, inner: InnerTensor, tensor: torch.Tensor) -> None:
        columns = self.direction(columnwise=True)
        super().replace_inner(inner, tensor)
        if inner.usage == "rowwise" and columns is not None:
            # Made of the same values.
            self._columnwise_data, self._columnwise_scale_inv = columns

    # -- values --

    def size(self, dim: int | None = None) -> Any:
        held, columnwise = self._held()
        shape = in_order(held, self.grid_layout, columnwise)[0].shape
        return shape if dim is None else shape[dim]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        check_values_dtype(dtype)
        (data, scales), columnwise = self._held()
        layout, wanted = self.grid_layout, dtype or self._dtype
        exact = wanted in (*kernels.HIGH_PRECISION, torch.float64)
        values = kernels.grid_decode(data, scales, layout, wanted if exact else torch.float32, columnwise=columnwise)
        if columnwise and layout.transposed and values.dim():
            values = values.movedim(0, -1)
        return values.to(wanted)

    def grid_operand(self, *, columnwise: bool) -> Direction:
        data, scales = self.for_usage(columnwise)
        matrix = self.grid_layout.stored_matrix(data.shape, columnwise)
        return (data if data.dim() == 2 else data.reshape(matrix)), scales

    def scaled_operand(self, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        layout = self.grid_layout
        if layout.block != (1, None) or layout.scale is not torch.float32 or layout.element not in FP8:
            return None
        data, scales = self.grid_operand(columnwise=columnwise)
        elements = data.view(layout.element)
        return (elements.t() if columnwise and not layout.transposed else elements), scales.reshape(-1)

    def copy_from_storage(self, src: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None) -> None:
        if (
            isinstance(src, GridTensorStorage)
            and self.grid_layout.shared is not None
            and src.grid_layout.shared is None
        ):
            raise UsageError(
                "the source has scales for rows and for columns, the destination one for both",
                expected=f"a source whose blocks share scales over {self.grid_layout.shared}",
                remedy="quantize it with the quantizer of the destination",
            )
        kept = [k for k in (self._columns, self._column_scales) if isinstance(k, DerivedTensor)]
        fresh = [k for k in kept if k.fresh(self._rowwise_data, self._writes)]
        super().copy_from_storage(src, noop_flag=noop_flag)
        for derived in fresh:
            derived.refresh(self._rowwise_data, self._writes)


def _checked(usage: str, declared: dict[str, Any], layout: Layout) -> Direction | None:
    """Data and scales of one direction in the order of the tensor, or a typed error for what does not fit together."""
    columnwise = usage == "columnwise"
    data = as_data(declared[f"{usage}_data"], layout.element, f"{usage}_data")
    scales = declared[f"{usage}_scale_inv"]
    if (data is None) != (scales is None):
        missing = f"{usage}_{'data' if data is None else 'scale_inv'}"
        raise UsageError(f"{missing} is missing", expected=f"{usage} data with its scales")
    if data is None:
        return None
    if layout.stored_scale is torch.uint8:
        scales = as_data(scales, layout.scale, f"{usage}_scale_inv")
    if isinstance(scales, torch.Tensor) and data.device != scales.device:
        raise DeviceError(f"{usage}_data is on {data.device}, its scales on {scales.device}", expected="one device")
    kernels.check_grid(data, scales, layout, columnwise, f"{usage}_scale_inv")
    return in_order((data, scales), layout, columnwise)


def _other_scales(other: Direction, layout: Layout, columnwise: bool) -> torch.Tensor:
    """Scales of one direction in the order of the tensor, made of those of the other one: one of each square."""
    data, scales = other
    own, wanted = layout.block_of(not columnwise), layout.block_of(columnwise)
    grid = layout.grid((math.prod(data.shape[:-1]), data.shape[-1] if data.dim() else 1), columnwise)
    for dim, (side, old, new) in enumerate(zip(layout.shared or own, own, wanted, strict=True)):
        if side is not None and old is not None and new is not None:
            squares = scales[:: side // old] if dim == 0 else scales[:, :: side // old]
            scales = squares.repeat_interleave(side // new, dim).narrow(dim, 0, grid[dim])
    return scales


class GridTensor(QuantizedTensor, GridTensorStorage):
    """Quantized data with scales on a grid, as a ``torch.Tensor`` of its nominal dtype.

    Views, slices, splits and transposes keep the class where they lie on the boundaries of blocks, in every direction
    held, and share the data; elsewhere they give the dequantized values.

    Args:
        shape: shape of the tensor; from the data by default.
        dtype: nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv: see :class:`GridTensorStorage`.
        layout, values_from_columns, quantizer: see :class:`GridTensorStorage`.

    Raises:
        DTypeError, ShapeError, DeviceError, OptionError: the arguments do not fit together.
        UsageError: there is no data, or data without scales.
    """

    @classmethod
    def laid_out_like(cls, declared: dict[str, Any]) -> torch.Tensor | None:
        rows: torch.Tensor | None = declared["rowwise_data"]
        if rows is not None:
            return rows
        columns: torch.Tensor | None = declared["columnwise_data"]
        transposed = columns is not None and columns.dim() and cls.layout_of(declared).transposed
        return columns.movedim(0, -1) if transposed else columns  # type: ignore[union-attr]

    def adopts_bytes_of(self, other: QuantizedTensor) -> bool:
        """Whether copying from ``other`` can copy data and scales instead of quantizing again."""
        if not isinstance(other, GridTensor) or other.shape != self.shape:
            return False
        # Data of one direction would not do for the other, but what shares more scales may serve what shares fewer.
        if self.grid_layout not in (other.grid_layout, dataclasses.replace(other.grid_layout, shared=None)):
            return False
        held = [
            self.direction(columnwise=c) is None or other.direction(columnwise=c) is not None for c in (False, True)
        ]
        return all(held) and (self._whole is None or self.shares_scales(other))
