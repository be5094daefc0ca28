"""``GridQuantizer``: a quantizer that is a layout."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from ottava import kernels
from ottava.collectives import all_reduce_max, process_groups_ready
from ottava.errors import DTypeError
from ottava.kernels import for_layers
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout, as_matrix_shape
from ottava.tensors.direction import as_stored, zeros
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.grid_declaration import inner_tensors_of
from ottava.tensors.grid_tensor import GridTensor
from ottava.tensors.operand import Operand, Side
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.saving import StorageSpec
from ottava.tensors.storage import QuantizedTensorStorage

#: Inner tensors in the order of the declaration.
InnerTensors = Sequence[torch.Tensor | None]


def _data_and_scales(side: Side | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if side is None else (side.values, side.scales)


class GridQuantizer(Quantizer):
    """Quantizes by a layout, along rows, columns or both, each from the values themselves.

    A subclass may have options of its own, from which its :attr:`layout` follows, and classes of
    its own.

    Args:
        layout: what the elements are, and which of them share a scale.
        rowwise, columnwise: usages to produce.

    Raises:
        DTypeError: ``layout`` is none.
    """

    # Found by name on first use: what all ranks agree on stands above tensors.
    shards: ClassVar[Any] = "GridShards"
    process_attributes: ClassVar[tuple[str, ...]] = ("amax_reduction_group",)
    columns_when_asked = True
    storage_class: ClassVar[type[GridTensorStorage]] = GridTensorStorage
    tensor_class: ClassVar[type[GridTensor]] = GridTensor

    def __init__(self, layout: Layout, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if not isinstance(layout, Layout):
            raise DTypeError(
                f"the layout is a {type(layout).__name__}", expected="an ottava.Layout"
            )
        self.layout = layout
        # Known before code is compiled that makes such tensors.
        inner_tensors_of(layout)
        #: The ranks whose largest amax decides a scale that spans the rows; None: this one alone.
        self.amax_reduction_group: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled.
        return self.__dict__ | {"amax_reduction_group": None}

    def make_layout(self) -> Layout:
        """The layout that follows from the options; a subclass that has options defines it."""
        return self.layout

    def option_changed(self) -> None:
        self.layout = self.make_layout()
        inner_tensors_of(self.layout)

    def is_requantization_safe(self) -> bool:
        return not self.stateful

    def static_fields(self) -> dict[str, Any]:
        """What the tensors of this quantizer are told besides data, scales and their dtype."""
        return {"layout": self.layout.text}

    def for_shards(self, group: Any) -> Self:
        copied = self.copy()
        # Only scales that span the rows depend on other shards.
        spanning = any(self.layout.block_of(columnwise)[0] is None for columnwise in (False, True))
        copied.amax_reduction_group = group if spanning else None
        return copied

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        return self._wrap(self.quantize_tensors(tensor), dtype or tensor.dtype)

    def quantize_operand(
        self, matrix: torch.Tensor, dtype: torch.dtype
    ) -> Operand | QuantizedTensorStorage:
        if self.custom or not self.storage_class.is_plain_operand:
            # Its products read a storage.
            return self.quantize_impl(matrix, dtype)
        return self.operand_of(self.quantize_tensors(matrix), dtype)

    def quantize_tensors(self, tensor: torch.Tensor) -> InnerTensors:
        """Data and scales of rows, then of columns, in the order in which storages declare them;
        None for what is not made."""
        if self.amax_reduction_group is not None and process_groups_ready():
            return self._quantize_reduced(tensor)
        return for_layers.grid_quantize(tensor, self.layout.text, *self._sides())

    def operand_of(self, tensors: InnerTensors, dtype: torch.dtype) -> Operand:
        """The operand of a matrix that :meth:`quantize_tensors` made these tensors of."""
        data, scales, column_data, column_scales = tensors
        text = self.layout.text
        rows = None if data is None else Side(data, scales, text)
        if rows is not None and self.layout.one_buffer:
            return Operand(rows, rows._replace(columnwise=True), self, dtype)
        columns = None
        if column_data is not None:
            columns = Side(column_data, column_scales, text, columnwise=True)
        return Operand(rows, columns, self, dtype)

    def storage_of(self, operand: Operand) -> QuantizedTensorStorage:
        """The storage around the tensors of an operand of this quantizer."""
        return self._wrap(self.tensors_of(operand), operand.dtype)

    def tensors_of(self, operand: Operand) -> InnerTensors:
        """What :meth:`operand_of` was given; None for what the operand has no more."""
        rows = _data_and_scales(operand.rows)
        columns = _data_and_scales(operand.columns)
        if not self.layout.one_buffer:
            return *rows, *columns
        return *(columns if operand.rows is None else rows), None, None

    def _sides(self) -> tuple[bool, bool]:
        """Whether rows and columns are made: rows alone where one buffer serves both usages."""
        return (
            (True, False) if self.layout.one_buffer else (self.rowwise_usage, self.columnwise_usage)
        )

    def _quantize_reduced(self, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        """With the amaxes of all ranks where a scale spans the rows."""
        layout, matrix = self.layout, as_matrix_shape(tensor.shape)
        place: Any = [tensor.reshape(-1)], [tensor.dtype], [matrix], [0], [layout]
        amaxes = list(
            kernels.grid_multi_amax(*place).split(kernels.grid_amax_sizes(*matrix, layout))
        )
        for at, wanted in enumerate(self._sides()[: len(amaxes)]):
            # Of squares one amax serves both directions.
            if layout.block_of(bool(at))[0] is None and (wanted or layout.square):
                amaxes[at] = all_reduce_max(amaxes[at], self.amax_reduction_group)
        made: list[Any] = [None] * 4
        pairs: list[list[Any]] = [[None], [None]]
        for columnwise in [
            side for side, wanted in zip((False, True), self._sides(), strict=True) if wanted
        ]:
            amax = amaxes[columnwise and not layout.square].view(
                layout.grid(matrix, columnwise, shared=True)
            )
            scale, scale_inv = kernels.grid_scales(
                for_blocks(amax, layout, columnwise, matrix), layout, tensor.dtype
            )
            data = torch.empty(tensor.shape, dtype=torch.uint8, device=tensor.device)
            pairs[columnwise] = [((scale_inv if scale is None else scale).contiguous(), data)]
            made[2 * columnwise : 2 * columnwise + 2] = as_stored(
                (data, scale_inv), layout, columnwise
            )
        kernels.grid_multi_cast(*place, *pairs)
        return [None if part is None else part.contiguous() for part in made]

    def _wrap(self, tensors: InnerTensors, dtype: torch.dtype) -> QuantizedTensorStorage:
        """Inner tensors in the order of the declaration, which fit together: a bare storage is not
        checked."""
        fields = self.static_fields()
        if not self.internal:
            names = [inner.argument for inner in self.tensor_class.inner_tensors]
            return self.tensor_class(
                **dict(zip(names, tensors, strict=True)), **fields, dtype=dtype, quantizer=self
            )
        known = fields | {"dtype": dtype, "values_from_columns": False}
        static = tuple(
            [known.get(field.argument, field.default) for field in self.storage_class.static_fields]
        )
        if ... in static:
            self.storage_class(**fields)  # refuses to be made without the missing fields
        return StorageSpec(self.storage_class, static, self).rebuild(tensors)  # type: ignore[no-any-return]

    def empty_impl(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> QuantizedTensorStorage:
        made: list[torch.Tensor | None] = []
        for columnwise, wanted in zip((False, True), self._sides(), strict=True):
            made += zeros(self.layout, shape, columnwise, device) if wanted else (None, None)
        return self._wrap(made, dtype)
