"""How each form of a matrix becomes a side of a product.

- An operand has its sides.
- A storage of elements on a grid gives their data and scales (``grid_operand``).
- Any other storage gives its values in high precision and a factor (``gemm_operand``).
- A plain tensor is in high precision.
"""

from __future__ import annotations

import torch

from ottava.contract.steps import USAGES, Usage
from ottava.errors import OptionError, UsageError
from ottava.tensors.operand import Operand, Side, as_matrix
from ottava.tensors.storage import QuantizedTensorStorage

Tensor = torch.Tensor
#: A matrix that products take: in high precision, as a quantized tensor or storage, or as an
#: operand.
Matrix = Tensor | QuantizedTensorStorage | Operand


def stored(x: Matrix) -> Tensor | QuantizedTensorStorage:
    """An operand as a storage; anything else as it is."""
    if isinstance(x, Operand):
        return x.stored()
    return x


def side_of(x: Matrix, columnwise: bool) -> Side | None:
    """The side of a quantized matrix: data and scales; None for a matrix that has no elements on a
    grid.

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
    # A hybrid storage has another layout for columns, and may have no rows with a layout. Other
    # storages have one layout for both.
    layout = ""
    if columnwise:
        layout = x.column_layout_text
    if not layout:
        layout = x.layout_text
    data, scales, *levels = elements
    assert data is not None
    amax = levels[0] if levels else None
    return Side(data, scales, layout, columnwise, x, amax)


def stored_tensors(x: Matrix, usage: Usage) -> dict[str, Tensor]:
    """What is stored for one usage of a quantized matrix.

    Returns:
        ``data``, uint8; ``scales``, float32, or codes in uint8; and ``amax``, those of the second
        level as a vector, where there is one.

    Raises:
        OptionError: there is no such usage.
        UsageError: the usage is not held, or its elements and scales are on no grid.
    """
    if usage not in USAGES:
        raise OptionError(f"the usage is {usage!r}", expected="rowwise or columnwise")
    side = side_of(x, usage == "columnwise")
    if side is None:
        raise UsageError(
            f"a {type(x).__name__} says nothing of its {usage} data",
            expected="a quantized tensor of elements and scales on a grid",
        )
    parts = {"data": side.values}
    if side.scales is not None:
        parts["scales"] = side.scales
    if side.amax is not None:
        parts["amax"] = side.amax.reshape(-1)
    return {name: part.detach() for name, part in parts.items()}


def dense_side(x: Matrix, columnwise: bool, dtype: torch.dtype) -> Side:
    """The side of a matrix in high precision: its values in ``dtype``, and their factor, if any."""
    source = stored(x)
    if not isinstance(source, QuantizedTensorStorage):
        return Side(as_matrix(source.detach()).to(dtype), columnwise=columnwise)
    values, scale = source.gemm_operand(columnwise=columnwise, dtype=dtype)
    if scale is not None:
        scale = scale.to(torch.float32)
    return Side(values, scale, columnwise=columnwise)
