"""How each form of a matrix becomes a side of a product.

An operand has its sides. A storage says what it is: elements on a grid (``grid_operand``), else
values and a factor (``gemm_operand``). A plain tensor is its values.
"""

from __future__ import annotations

import torch

from ottava.layout import as_matrix_shape
from ottava.tensors.operand import Operand, Side
from ottava.tensors.storage import QuantizedTensorStorage

Tensor = torch.Tensor
#: What products take: a tensor in high precision, a quantized one, or what a quantizer made.
Matrix = Tensor | QuantizedTensorStorage | Operand


def as_matrix(x: Tensor) -> Tensor:
    """``[*leading, K]`` as ``[rows, K]``; K may be 0, for which ``reshape(-1, K)`` has no
    answer."""
    return x if x.dim() == 2 else x.reshape(as_matrix_shape(x.shape))


def stored(x: Matrix) -> Tensor | QuantizedTensorStorage:
    """An operand as a storage; anything else as it is."""
    if isinstance(x, Operand):
        return x.stored()  # type: ignore[no-any-return]
    return x


def side_of(x: Matrix, columnwise: bool) -> Side | None:
    """Elements with scales; None for a matrix that has no such elements.

    Raises:
        UsageError: a storage does not hold this side, and cannot make it.
    """
    if isinstance(x, Operand):
        side = x.columns if columnwise else x.rows
        if side is not None:
            return side
        x = stored(x)
    if not isinstance(x, QuantizedTensorStorage):
        return None
    elements = x.grid_operand(columnwise=columnwise)
    if elements is None:
        return None
    layout = (columnwise and x.column_layout_text) or x.layout_text
    return Side(*elements, layout, columnwise, x)


def dense_side(x: Matrix, columnwise: bool, dtype: torch.dtype) -> Side:
    """Values in ``dtype``, and the factor that they lack, if any."""
    source = stored(x)
    if not isinstance(source, QuantizedTensorStorage):
        return Side(as_matrix(source.detach()).to(dtype), columnwise=columnwise)
    values, scale = source.gemm_operand(columnwise=columnwise, dtype=dtype)
    if scale is not None:
        scale = scale.to(torch.float32)
    return Side(values, scale, columnwise=columnwise)
