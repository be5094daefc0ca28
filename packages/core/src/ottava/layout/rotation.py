"""Rotations, as layouts say them."""

from typing import NamedTuple


class Rotation(NamedTuple):
    """A Hadamard transform of groups along the summed dimension, before they are quantized.

    A group ``x`` becomes ``x · diag(signs) · H / sqrt(size)``, with Sylvester's matrix H. Two
    operands that are rotated alike have the product of the unrotated ones.

    Attributes:
        size: elements of a group: 16, 32, 64 or 128. A ragged last group is padded with zeros.
        signs: an integer of ``size`` bits: the sign of element i of a group is minus where bit i is
            set.
        directions: which data are rotated: ``"rowwise"``, ``"columnwise"`` or ``"both"``.
    """

    size: int
    signs: int
    directions: str = "columnwise"

    def turns(self, columnwise: bool) -> bool:
        """Whether data of this direction are rotated."""
        return self.directions in ("both", "columnwise" if columnwise else "rowwise")
