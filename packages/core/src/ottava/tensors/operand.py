"""``Operand``: a quantized matrix as plain tensors, the form in which layers move it.

A quantizer makes one for a layer, each product reads one :class:`Side` of it, and the side that the
backward pass reads is saved. A storage wraps the same tensors for users, parameters, FSDP2 and
files; :meth:`Operand.stored` makes it where a product asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ottava.kernels.for_layers import SideTensors
from ottava.layout import Layout

Tensor = torch.Tensor
# A quantizer or a storage. Any, because the modules of both import this one.
Above = Any


class Side(NamedTuple):
    """A matrix in one direction, as a product reads it: quantized, or in high precision.

    Attributes:
        values: the bytes of the elements, transposed where the layout transposes columnwise data;
            or the matrix in high precision.
        scales: the scales of the elements, as they are stored; or a float32 scalar that multiplies
            a matrix in high precision, or None.
        layout: the text of the layout of the elements; empty for high precision.
        columnwise: whether the product sums along the columns of the matrix, and reads columnwise
            data if the side is quantized.
        source: the storage whose cache keeps what products make of the elements; None for elements
            that one product alone reads.
    """

    values: Tensor
    scales: Tensor | None = None
    layout: str = ""
    columnwise: bool = False
    source: Above = None

    def is_turned(self) -> bool:
        """Whether ``values`` are ``[reduced, outer]``: the product sums over their rows."""
        return self.columnwise and not (self.layout and Layout.of(self.layout).transposed)

    def outer_first(self) -> Tensor:
        """``values`` as ``[outer, reduced]``."""
        return self.values.t() if self.is_turned() else self.values


class Operand(NamedTuple):
    """A quantized matrix: a side for each usage that its quantizer was asked for, or two where one
    buffer serves both usages.

    Invariant, of each side: ``matrix ≈ float32(element) * scale`` of the element's block.

    Attributes:
        rows: for products that sum along each row: fprop reads those of an input and a weight,
            dgrad those of ``grad_output``.
        columns: for products that sum along each column: dgrad reads those of a weight, wgrad those
            of both its operands.
        quantizer: the ``GridQuantizer`` that made it.
        dtype: the nominal dtype.
    """

    rows: Side | None
    columns: Side | None
    quantizer: Above
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        side = self.columns if self.rows is None else self.rows
        assert side is not None
        return side.values.device

    def stored(self) -> Above:
        """A bare storage around the same tensors."""
        return self.quantizer.storage_of(self)

    def flatten_columnwise(self) -> tuple[Sequence[Tensor | None], Above]:
        """What the backward pass reads: tensors to save, and a spec that rebuilds an operand."""
        columns = self.columns
        if columns is None:
            return self.stored().flatten_columnwise()  # type: ignore[no-any-return]
        spec = ColumnsSpec(columns.layout, self.quantizer, self.dtype)
        return (columns.values, columns.scales), spec


class ColumnsSpec(NamedTuple):
    """What is left of an operand's columns when their two tensors are saved."""

    layout: str
    quantizer: Above
    dtype: torch.dtype
    #: How many tensors :meth:`rebuild` takes.
    tensor_count: int = 2

    def rebuild(self, tensors: Sequence[Tensor]) -> Operand:
        """An operand that has columns alone."""
        values, scales = tensors
        return Operand(None, Side(values, scales, self.layout, True), self.quantizer, self.dtype)


class Quantization:
    """Makes operands of the matrices that one role of a layer brings, on one device.

    A quantizer makes it once for a layer's plan. What the quantizer's options, the usages and the
    device decide is decided then.

    Args:
        kernel: gives the tensors of a matrix.
        layout: of the elements.
        quantizer: the ``GridQuantizer`` that makes this.
        dtype: the nominal dtype of the operands.
    """

    __slots__ = ("_dtype", "_kernel", "_one_buffer", "_quantizer", "_text")

    def __init__(
        self,
        kernel: Callable[[Tensor], SideTensors],
        layout: Layout,
        quantizer: Above,
        dtype: torch.dtype,
    ) -> None:
        self._kernel = kernel
        self._text = layout.text
        self._one_buffer = layout.one_buffer
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
            columns = Side(column_data, column_scales, self._text, True)
        return Operand(rows, columns, self._quantizer, self._dtype)
