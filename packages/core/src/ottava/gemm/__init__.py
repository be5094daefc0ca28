"""The three GEMMs of a linear layer: quantized operands in, high precision out.

- :mod:`~ottava.gemm.operand`: how a tensor, a storage or an operand becomes a side of a product.
- :mod:`~ottava.gemm.dispatch`: :func:`gemm`, and the choice among the products below.
- :mod:`~ottava.gemm.scaled`: hardware that multiplies FP8 elements as they are.
- :mod:`~ottava.gemm.decoded`: any layout on any device: both sides are decoded, then multiplied.
- :mod:`~ottava.gemm.planned`: the products of a layer, whose decisions are made once.
"""

from ottava.gemm.dispatch import GemmType, gemm, multiply
from ottava.gemm.operand import dense_side, side_of, stored_tensors
from ottava.gemm.planned import LayerProduct
from ottava.tensors.operand import Operand, Side, as_matrix

__all__ = [
    "GemmType",
    "LayerProduct",
    "Operand",
    "Side",
    "as_matrix",
    "dense_side",
    "gemm",
    "multiply",
    "side_of",
    "stored_tensors",
]
