"""``GridQuantizer``: a quantizer that is a layout."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch

from ottava import kernels
from ottava.collectives import Group, all_reduce_max, process_groups_ready
from ottava.contract import Contract
from ottava.errors import DTypeError, UsageError
from ottava.kernels import for_layers
from ottava.kernels.reference import for_blocks
from ottava.layout import Layout, as_matrix_shape
from ottava.tensors.declaration import Declared
from ottava.tensors.direction import Direction, as_stored, zeros
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.grid_declaration import inner_tensors_of, packed_inner_tensors_of
from ottava.tensors.grid_tensor import GridTensor
from ottava.tensors.operand import (
    LevelKernel,
    LevelQuantization,
    Operand,
    Quantization,
    Side,
    operand_of,
)
from ottava.tensors.packed import PackedTensor, PackedTensorStorage, needs_packing
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.row_shard import RowShard, Sides, quantize_over_ranks
from ottava.tensors.saving import StorageSpec
from ottava.tensors.storage import QuantizedTensorStorage

#: Inner tensors in the order of the declaration.
InnerTensors = Sequence[torch.Tensor | None]


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def data_and_scales(side: Side | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tensors of a side, which may lack scales; (None, None) without a side."""
    if side is None:
        return None, None
    return side.values, side.scales


def declare(layout: Layout) -> None:
    """Make the inner tensors of a layout known, which compiled code looks up."""
    inner_tensors_of(layout)
    packed_inner_tensors_of(layout)


class GridQuantizer(Quantizer):
    """Quantizes by a layout, along rows, columns or both, each from the values themselves.

    A subclass may have options of its own, from which its :attr:`layout` follows, and classes of
    its own.

    Args:
        layout: the format of the elements, and which of them share a scale.
        rowwise, columnwise: usages to produce.

    Raises:
        DTypeError: ``layout`` is none.
    """

    # The rule is named, because the module of rules cannot be imported here.
    shards: ClassVar[Any] = "GridShards"
    process_attributes: ClassVar[tuple[str, ...]] = ("amax_reduction_group",)
    columns_when_asked = True
    #: The classes of results. Packed layouts have the packed classes in the place of the default.
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
        declare(layout)
        #: The ranks that have the other rows of the tensors; None: this one has all rows.
        self.amax_reduction_group: Group = None

    def __getstate__(self) -> dict[str, object]:
        # A process group cannot be pickled.
        return self.__dict__ | {"amax_reduction_group": None}

    @property
    def contract(self) -> Contract:
        ranks: Literal["this", "group"] = "this"
        if self.amax_reduction_group is not None:
            ranks = "group"
        return Contract.of_layout(self.layout, ranks=ranks)

    def make_layout(self) -> Layout:
        """The layout that follows from the options; a subclass that has options defines it."""
        return self.layout

    def option_changed(self) -> None:
        self.layout = self.make_layout()
        declare(self.layout)

    def is_requantization_safe(self) -> bool:
        return not self.stateful

    def static_fields(self) -> Declared:
        """The static fields of this quantizer's tensors, except for their dtype."""
        return {"layout": self.layout.text}

    def for_shards(self, group: Group) -> Self:
        """See :meth:`Quantizer.for_shards`.

        Raises:
            UsageError: candidates for a scale that spans the rows, because the errors of all rows
                would have to be added in order.
        """
        copied = self.copy()
        # Scales that span the rows depend on other shards, and so do places in the whole tensor.
        layout = self.layout
        spanning = any(layout.block_of(columnwise)[0] is None for columnwise in (False, True))
        if spanning and layout.candidates:
            raise UsageError(
                f"shards of rows with candidates for a scale that spans the rows: {layout.text}",
                expected="blocks with a number of rows, in both directions",
                remedy="keep the weight in high precision",
            )
        depends = spanning or layout.second_level != "none" or layout.stochastic
        copied.amax_reduction_group = group if depends else None
        return copied

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        quantize = self._quantization(tensor.device, dtype or tensor.dtype, tensor.dim())
        operand = quantize(tensor)
        return self._wrap(self.tensors_of(operand), operand.dtype, tensor.shape)

    def quantization(
        self, device: torch.device, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], Operand | QuantizedTensorStorage]:
        if self.custom or not self._kinds()[0].is_plain_operand:
            # Its products read a storage.
            return partial(self.quantize_impl, dtype=dtype)
        return self._quantization(device, dtype, dims=2)

    def _quantization(
        self, device: torch.device, dtype: torch.dtype, dims: int
    ) -> Quantization | LevelQuantization:
        layout = self.layout_on(device, dims)
        if layout.second_level != "none" or layout.stochastic:
            kernel: LevelKernel = for_layers.grid_quantize_levels
            if self.amax_reduction_group is not None:
                kernel = self._quantize_levels_reduced
            return LevelQuantization(layout, *self._directions(layout), self, dtype, kernel)
        return Quantization(self.kernel(*self._directions(layout)), layout, self, dtype)

    def _directions(self, layout: Layout) -> tuple[bool, bool]:
        """Whether data of rows and of columns are made: of rows alone where one buffer serves both
        usages."""
        if layout.one_buffer:
            return True, False
        return self.rowwise_usage, self.columnwise_usage

    def layout_on(self, device: torch.device, dims: int) -> Layout:
        """The layout of the results for tensors with ``dims`` dimensions on ``device``."""
        return self.layout

    def kernel(
        self, rowwise: bool, columnwise: bool
    ) -> Callable[[torch.Tensor], for_layers.SideTensors]:
        """The function that computes the data and scales of rows, of columns or of both."""
        if self.amax_reduction_group is None:
            return partial(
                for_layers.grid_quantize,
                text=self.layout.text,
                rowwise=rowwise,
                columnwise=columnwise,
            )
        return partial(self._quantize_reduced, rowwise=rowwise, columnwise=columnwise)

    def storage_of(self, operand: Operand) -> QuantizedTensorStorage:
        """The storage around the tensors of an operand of this quantizer."""
        return self._wrap(self.tensors_of(operand), operand.dtype, operand.shape)

    def row_shard(self, rows: torch.Tensor) -> RowShard:
        """Rows of a tensor, to be quantized as in the whole tensor."""
        layout = self.layout_on(rows.device, rows.dim())
        return RowShard(rows, layout, *self._directions(layout))

    def storage_of_sides(
        self, sides: Sides, dtype: torch.dtype, shape: torch.Size
    ) -> QuantizedTensorStorage:
        """The storage around the results of :meth:`RowShard.quantize`, of tensors of ``shape``."""
        return self.storage_of(operand_of(sides, self.layout.text, self, dtype, shape))

    def tensors_of(self, operand: Operand) -> InnerTensors:
        """The inner tensors of the operand's storage, in the order of the declaration; None for
        those that the operand lacks."""
        rows: tuple[torch.Tensor | None, ...] = data_and_scales(operand.rows)
        columns: tuple[torch.Tensor | None, ...] = data_and_scales(operand.columns)
        if self._is_packed():
            rows += (None if operand.rows is None else operand.rows.amax,)
            columns += (None if operand.columns is None else operand.columns.amax,)
        if not self.layout.one_buffer:
            return *rows, *columns
        if operand.rows is None:
            rows = columns
        return *rows, *(None for _ in rows)

    def _is_packed(self) -> bool:
        """Whether the results are packed tensors, which may have amaxes and know their shape."""
        return issubclass(self._kinds()[1], PackedTensor)

    def _kinds(self) -> tuple[type[GridTensorStorage], type[GridTensor]]:
        """The classes of bare storages and of tensors that this quantizer makes."""
        if self.tensor_class is GridTensor and needs_packing(self.layout):
            return PackedTensorStorage, PackedTensor
        return self.storage_class, self.tensor_class

    def _quantize_reduced(
        self, tensor: torch.Tensor, rowwise: bool, columnwise: bool
    ) -> for_layers.SideTensors:
        """With the amaxes of all ranks where a scale spans the rows."""
        if not process_groups_ready():
            return for_layers.grid_quantize(tensor, self.layout.text, rowwise, columnwise)
        layout, matrix = self.layout, as_matrix_shape(tensor.shape)
        if needs_packing(layout) or layout.candidates:
            # A cast by given scales packs no bytes, and chooses no scales.
            sides = self._quantize_levels_reduced(tensor, layout.text, rowwise, columnwise)
            rows, columns = (side[:2] if side else (None, None) for side in sides)
            return *rows, *columns
        requested = rowwise, columnwise
        # The tensor as a list of one range, which is the whole matrix.
        place: Any = [tensor.reshape(-1)], [tensor.dtype], [matrix], [0], [layout]
        sizes = kernels.grid_amax_sizes(*matrix, layout)
        amaxes = list(kernels.grid_multi_amax(*place).split(sizes))
        for by_column in (False, True)[: len(amaxes)]:
            # One amax of a square serves both directions.
            spans_rows = layout.block_of(by_column)[0] is None
            if spans_rows and (requested[by_column] or layout.square):
                amaxes[by_column] = all_reduce_max(amaxes[by_column], self.amax_reduction_group)
        results: list[torch.Tensor | None] = [None] * 4
        pairs: list[list[tuple[torch.Tensor, torch.Tensor] | None]] = [[None], [None]]
        for by_column in (False, True):
            if not requested[by_column]:
                continue
            amax = amaxes[by_column and not layout.square]
            amax = amax.view(layout.grid(matrix, by_column, shared=True))
            scale, scale_inv = kernels.grid_scales(
                for_blocks(amax, layout, by_column, matrix), layout, tensor.dtype
            )
            # Kernels read E8M0 scales themselves, and have no other factor for them.
            factor = scale_inv if scale is None else scale
            ordered = torch.empty(tensor.shape, dtype=torch.uint8, device=tensor.device)
            pairs[by_column] = [(factor.contiguous(), ordered)]
            stored = as_stored(Direction(ordered, scale_inv), layout, by_column)
            results[2 * by_column : 2 * by_column + 2] = stored[:2]
        kernels.grid_multi_cast(*place, *pairs)
        data, scales, column_data, column_scales = map(_contiguous, results)
        return data, scales, column_data, column_scales

    def _quantize_levels_reduced(
        self, tensor: torch.Tensor, text: str, rowwise: bool, columnwise: bool
    ) -> Sides:
        """With the amaxes of all ranks, of blocks and of the second level, where they span the
        rows, and with one seed."""
        if not process_groups_ready():
            return for_layers.grid_quantize_levels(tensor, text, rowwise, columnwise)
        shard = RowShard(tensor, self.layout, rowwise, columnwise)
        return quantize_over_ranks(shard, self.amax_reduction_group)

    def _wrap(
        self, tensors: InnerTensors, dtype: torch.dtype, shape: Sequence[int] | None = None
    ) -> QuantizedTensorStorage:
        """Inner tensors in the order of the declaration, which fit together: a bare storage is not
        checked.

        Args:
            shape: of the tensor, where the data do not tell it.
        """
        fields = self.static_fields()
        storage_class, tensor_class = self._kinds()
        if self._is_packed():
            fields = fields | {"shape": None if shape is None else tuple(shape)}
        if not self.internal:
            names = [inner.argument for inner in tensor_class.inner_tensors]
            return tensor_class(
                **dict(zip(names, tensors, strict=True)), **fields, dtype=dtype, quantizer=self
            )
        known = fields | {"dtype": dtype, "values_from_columns": False}
        static = tuple(
            [known.get(field.argument, field.default) for field in storage_class.static_fields]
        )
        if ... in static:
            storage_class(**fields)  # refuses to be made without the missing fields
        spec = StorageSpec(storage_class, static, self)
        storage: QuantizedTensorStorage
        if self._is_packed() and shape is None:
            # The constructor finds the shape.
            storage = spec.build(tensors)
        else:
            storage = spec.rebuild(tensors)
        return storage

    def empty_impl(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> QuantizedTensorStorage:
        tensors: list[torch.Tensor | None] = []
        directions = self._directions(self.layout)
        for columnwise, is_requested in zip((False, True), directions, strict=True):
            direction: tuple[torch.Tensor | None, ...] = (None, None, None)
            if is_requested:
                direction = zeros(self.layout, shape, columnwise, device)
            tensors += direction if self._is_packed() else direction[:2]
        return self._wrap(tensors, dtype, shape)
