"""``Operand``: a quantized matrix as plain tensors, the form in which layers move it.

A quantizer makes an operand for a layer, each product reads one :class:`Side` of it, and the side
that the backward pass reads is saved. A storage wraps the same tensors for users, parameters, FSDP2
and files; :meth:`Operand.stored` makes it where a product asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ottava.kernels.for_layers import LevelTensors, SideTensors, grid_quantize_levels
from ottava.layout import Layout
from ottava.tensors.saving import SavedSpec
from ottava.tensors.storage import QuantizedTensorStorage

Tensor = torch.Tensor
#: Takes a matrix, the text of a layout, and which sides are made; returns both sides.
LevelKernel = Callable[[Tensor, str, bool, bool], tuple[LevelTensors | None, LevelTensors | None]]


def as_matrix(x: Tensor) -> Tensor:
    """``[*leading, K]`` as ``[rows, K]``; a vector is one row."""
    if x.dim() == 2:
        return x
    if x.dim() < 2:
        return x.reshape(1, -1)
    return x.flatten(0, -2)


class Side(NamedTuple):
    """One of the two matrices of a product, in the direction that the product reads.

    A side is one of two things, which its layout tells apart:

    - with a layout, one direction of a quantized matrix: the data and the scales of its elements;
    - without a layout, a matrix in high precision, which a factor may still have to multiply.

    Attributes:
        values: the data, a uint8 matrix, which is transposed where the layout transposes columnwise
            data; or the matrix in high precision.
        scales: the scales of the elements, as they are stored; or the factor, a float32 scalar.
            None if there are none.
        layout: the text of the layout; empty for a matrix in high precision.
        columnwise: whether the product sums along the columns of the matrix. Of a quantized matrix
            it then reads columnwise data.
        source: the storage whose cache keeps the padded or reordered elements of a weight; None for
            elements that only one product reads, and in high precision.
        amax: the amaxes of a second level of scales, a scalar or one for each row of ``values`` as
            ``[outer, reduced]``; None in a layout without one.
    """

    values: Tensor
    scales: Tensor | None = None
    layout: str = ""
    columnwise: bool = False
    source: QuantizedTensorStorage | None = None
    amax: Tensor | None = None

    def is_quantized(self) -> bool:
        """Whether ``values`` are the data of elements, not a matrix in high precision."""
        return self.layout != ""

    def is_turned(self) -> bool:
        """Whether ``values`` are ``[reduced, outer]``: the product sums over their first dimension,
        and the second remains in the result."""
        if not self.columnwise:
            return False
        return not (self.is_quantized() and Layout.of(self.layout).transposed)

    def elements_per_byte(self) -> int:
        """How many elements share a byte along the summed dimension; 1 in high precision."""
        return Layout.of(self.layout).elements_per_byte if self.is_quantized() else 1

    def outer_first(self) -> Tensor:
        """``values`` as ``[outer, reduced]``."""
        return self.values.t() if self.is_turned() else self.values


class OperandQuantizer(Protocol):
    """The quantizer of an operand, a :class:`~ottava.tensors.GridQuantizer`."""

    def storage_of(self, operand: Operand) -> QuantizedTensorStorage:
        """A storage around the tensors of an operand of this quantizer."""


class Operand(NamedTuple):
    """A quantized matrix: a side for each usage that its quantizer was asked for.

    Where one buffer serves both usages, both sides have its tensors.

    Invariant of each side: ``matrix ≈ float32(element) * scale``, with the scale of the element's
    block.

    Attributes:
        rows: for products that sum along each row: fprop reads those of an input and a weight,
            dgrad those of ``grad_output``.
        columns: for products that sum along each column: dgrad reads those of a weight, wgrad those
            of both its operands.
        quantizer: made the operand.
        dtype: the nominal dtype.
        shape: of the matrix, where the data do not tell it: elements share bytes, or are padded.
    """

    rows: Side | None
    columns: Side | None
    quantizer: OperandQuantizer
    dtype: torch.dtype
    shape: Sequence[int] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        side = self.columns if self.rows is None else self.rows
        assert side is not None
        return side.values.device

    def stored(self) -> QuantizedTensorStorage:
        """A bare storage around the same tensors."""
        return self.quantizer.storage_of(self)

    def flatten_columnwise(self) -> tuple[Sequence[Tensor | None], SavedSpec]:
        """The tensors that a backward pass reads, and a spec that rebuilds an operand of them."""
        columns = self.columns
        if columns is None:
            return self.stored().flatten_columnwise()
        if columns.amax is None:
            spec = ColumnsSpec(columns.layout, self.quantizer, self.dtype)
            return (columns.values, columns.scales), spec
        spec = ColumnsSpec(columns.layout, self.quantizer, self.dtype, tensor_count=3)
        return (columns.values, columns.scales, columns.amax), spec


class ColumnsSpec(NamedTuple):
    """Rebuilds the columns of an operand from their saved tensors.

    Attributes:
        layout: the text of the layout of the elements.
        quantizer, dtype: those of the operand.
        tensor_count: how many tensors :meth:`rebuild` takes: two, or three with the amaxes of a
            second level of scales.
    """

    layout: str
    quantizer: OperandQuantizer
    dtype: torch.dtype
    tensor_count: int = 2

    def rebuild(self, tensors: Sequence[Tensor]) -> Operand:
        """An operand without rows."""
        values, scales, *levels = tensors
        amax = levels[0] if levels else None
        columns = Side(values, scales, self.layout, columnwise=True, amax=amax)
        return Operand(None, columns, self.quantizer, self.dtype)


class Quantization:
    """Quantizes the matrices of one role of a layer, on one device.

    A quantizer makes one for the plan of a layer. Everything that depends on the quantizer's
    options, the usages and the device is decided then, and not again for each matrix.

    Args:
        kernel: returns the data and scales of a matrix.
        layout: of the elements.
        quantizer: the quantizer of the operands.
        dtype: the nominal dtype of the operands.
    """

    __slots__ = ("_dtype", "_is_plain", "_kernel", "_one_buffer", "_quantizer", "_text")

    def __init__(
        self,
        kernel: Callable[[Tensor], SideTensors],
        layout: Layout,
        quantizer: OperandQuantizer,
        dtype: torch.dtype,
    ) -> None:
        self._kernel = kernel
        self._text = layout.text
        self._one_buffer = layout.one_buffer
        self._is_plain = layout.is_plain(False) and layout.is_plain(True)
        self._quantizer = quantizer
        self._dtype = dtype

    def __call__(self, matrix: Tensor) -> Operand:
        """The operand of a matrix."""
        data, scales, column_data, column_scales = self._kernel(matrix)
        if self._one_buffer:
            column_data, column_scales = data, scales
        rows = columns = None
        if data is not None:
            rows = Side(data, scales, self._text)
        if column_data is not None:
            columns = Side(column_data, column_scales, self._text, columnwise=True)
        shape = None if self._is_plain else matrix.shape
        return Operand(rows, columns, self._quantizer, self._dtype, shape)


class LevelQuantization:
    """A :class:`Quantization` for layouts with a second level of scales or stochastic rounding.

    Args:
        layout: of the elements.
        rowwise, columnwise: which sides are made.
        quantizer: the quantizer of the operands.
        dtype: the nominal dtype of the operands.
        kernel: returns the data, scales and amaxes of both sides.
    """

    __slots__ = ("_columnwise", "_dtype", "_kernel", "_quantizer", "_rowwise", "_text")

    def __init__(
        self,
        layout: Layout,
        rowwise: bool,
        columnwise: bool,
        quantizer: OperandQuantizer,
        dtype: torch.dtype,
        kernel: LevelKernel = grid_quantize_levels,
    ) -> None:
        self._text = layout.text
        self._rowwise = rowwise
        self._columnwise = columnwise
        self._quantizer = quantizer
        self._dtype = dtype
        self._kernel = kernel

    def __call__(self, matrix: Tensor) -> Operand:
        """The operand of a matrix."""
        sides = self._kernel(matrix, self._text, self._rowwise, self._columnwise)
        return operand_of(sides, self._text, self._quantizer, self._dtype, matrix.shape)


def operand_of(
    sides: tuple[LevelTensors | None, LevelTensors | None],
    layout: str,
    quantizer: OperandQuantizer,
    dtype: torch.dtype,
    shape: torch.Size,
) -> Operand:
    """The operand of data, scales and amaxes of rows and of columns.

    Args:
        sides: the tensors of rows and of columns; None for a side that the operand lacks.
        layout: the text of the layout of the elements.
        quantizer, dtype: those of the operand.
        shape: of the values.
    """
    rows, columns = (
        None if levels is None else Side(levels[0], levels[1], layout, columnwise, amax=levels[2])
        for columnwise, levels in zip((False, True), sides, strict=True)
    )
    return Operand(rows, columns, quantizer, dtype, shape)
