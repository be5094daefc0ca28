"""The grid of blocks that a matrix is cut into."""

import math
from collections.abc import Sequence

#: Rows and columns of a grid.
Size = tuple[int, int]
#: Rows and columns of a block, where None means all.
Block = tuple[int | None, int | None]


def multiple(size: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``size``."""
    return -(-size // step) * step


def grid_of(matrix: Sequence[int], block: Block) -> Size:
    """The number of blocks of a matrix along its rows and along its columns.

    It is 1 along a side where a block has all, even if the matrix is empty.
    """
    rows, columns = matrix
    return _blocks_along(rows, block[0]), _blocks_along(columns, block[1])


def _blocks_along(size: int, side: int | None) -> int:
    if side is None:
        return 1
    return -(-size // side)


def as_matrix_shape(shape: Sequence[int]) -> Size:
    """Rows and columns of the matrix that a tensor ``[*leading, K]`` is seen as."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]
