"""Layouts describe the elements of a quantized tensor, and which of them share a scale, as data.

A tensor ``[*leading, K]`` is seen as a matrix of ``M`` rows and ``K`` columns, which a grid cuts
into blocks that have one scale each. Blocks at ragged edges are smaller. Rowwise data serve
products that sum over columns. Columnwise data serve products that sum over rows, and their blocks
are those of the transposed matrix.
"""

from ottava.layout.grids import Block, Size, as_matrix_shape, grid_of, multiple
from ottava.layout.layout import Layout
from ottava.layout.rotation import Rotation
from ottava.layout.scales import OWN_RULES, SCALES, ScaleFormat, ScaleRule, register_scale_rule

__all__ = [
    "OWN_RULES",
    "SCALES",
    "Block",
    "Layout",
    "Rotation",
    "ScaleFormat",
    "ScaleRule",
    "Size",
    "as_matrix_shape",
    "grid_of",
    "multiple",
    "register_scale_rule",
]
