"""How an operand of the forward pass comes to the product of the backward pass that reads it.

A word of :mod:`ottava.recipes.backward` says what is saved, a row of :data:`SAVES`. The products of
``high_precision`` and ``dequantized`` take values, :func:`of_values`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ottava.gemm.operand import Matrix, stored
from ottava.recipes.backward import DEQUANTIZED, HIGH_PRECISION, QUANTIZED
from ottava.tensors.operand import Operand, as_matrix
from ottava.tensors.saving import SavedSpec
from ottava.tensors.storage import QuantizedTensorStorage

Tensor = torch.Tensor
Quantized = Operand | QuantizedTensorStorage
#: Tensors to save, and the spec that rebuilds an operand of them; None for one plain tensor.
Saved = tuple[Sequence[Tensor | None], SavedSpec | None]
#: Takes an operand, its quantized form, and whether other passes read that form, too.
Save = Callable[[Tensor, Quantized, bool], Saved]


class Product(Protocol):
    """One of the three products, of operands in the order of :func:`ottava.gemm.gemm`."""

    def __call__(
        self, a: Matrix, b: Matrix, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...


def save_columns(operand: Tensor, quantized: Quantized, shared: bool) -> Saved:
    """The columns. The form of all microbatches of a step keeps its rows."""
    if shared and isinstance(quantized, QuantizedTensorStorage):
        return quantized.flatten_storage()
    return quantized.flatten_columnwise()


def save_rows(operand: Tensor, quantized: Quantized, shared: bool) -> Saved:
    """The rows that fprop read."""
    storage = stored(quantized)
    assert isinstance(storage, QuantizedTensorStorage)
    if not shared:
        # A user's quantizer may make columns that nobody asked for.
        storage.update_usage(rowwise_usage=True, columnwise_usage=False)
    return storage.flatten_storage()


def save_itself(operand: Tensor, quantized: Quantized, shared: bool) -> Saved:
    """The operand as it came, so that autograd notices a write to it."""
    return (operand,), None


def _save_nothing(operand: Tensor, quantized: Quantized, shared: bool) -> Saved:
    return (None,), None


#: Saves nothing, where no gradient needs the operand.
save_nothing: Save = _save_nothing
SAVES: dict[str, Save] = {
    QUANTIZED: save_columns,
    HIGH_PRECISION: save_itself,
    DEQUANTIZED: save_rows,
}


def save_in(dtype: torch.dtype) -> Save:
    """:func:`save_itself` for an input, as a matrix in ``dtype``, to which torch.autocast may
    cast."""

    def save_matrix(operand: Tensor, quantized: Quantized, shared: bool) -> Saved:
        return (as_matrix(operand.detach()).to(dtype),), None

    return save_matrix


def of_values(product: Product, dtype: torch.dtype) -> Product:
    """``product`` of the values of its second operand, in ``dtype``, quantized or not."""

    def product_of_values(
        a: Matrix, b: Matrix, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        matrix = stored(b)
        if isinstance(matrix, QuantizedTensorStorage):
            return product(a, matrix.dequantize(dtype), bias, out)
        return product(a, matrix.to(dtype), bias, out)

    return product_of_values
