"""Layouts describe the elements of a quantized tensor, and which of them share a scale, as data.

A tensor ``[*leading, K]`` is seen as a matrix of ``M`` rows and ``K`` columns, which a grid cuts
into blocks that have one scale each. Blocks at ragged edges are smaller. Rowwise data serve
products that sum over columns. Columnwise data serve products that sum over rows, and their blocks
are those of the transposed matrix.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ottava.errors import DTypeError, OptionError
from ottava.formats import E8M0, element_format

#: Rows and columns of a grid.
Size = tuple[int, int]
#: Rows and columns of a block, where None means all.
Block = tuple[int | None, int | None]
_FLOAT32_MAX = torch.finfo(torch.float32).max
_ROUNDINGS = {torch.float32: ("nearest", "floor"), E8M0.torch_dtype: ("up", "floor")}


@dataclass(frozen=True)
class Layout:
    """A description of the elements of a tensor, and of the scales on its grid.

    Invariant: ``original ≈ float32(element) * scale_inv`` for the scale of the element's block.

    Attributes:
        element: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or ``torch.int8``.
        block: rows and columns of rowwise data that share a scale, where None means all.
        scale: the format of stored scales, ``torch.float32`` (``scale_inv`` itself) or
            ``torch.float8_e8m0fnu``.
        rounding: how scales are rounded. Float32 scales: ``"nearest"``, or ``"floor"`` to a power
            of two. E8M0 scales: ``"up"``, so that no element is clamped, or ``"floor"``.
        epsilon: the least amax; a smaller one is replaced by it. Only for float32 scales.
        columnwise: how columnwise data are held. ``"own"``: in the tensor's shape;
            ``"transposed"``: as ``[K, *leading]``; ``"same"``: one buffer serves both usages.
        shared: rows and columns of an area whose blocks all have the same scale, or None. It is a
            square of whole blocks. Rowwise and columnwise data then have the same values, as they
            do if blocks are squares.
        finite_as: the replacement of an infinite float32 scale: the largest value of float32
            (``"float32"``), or of the dtype of the quantized values (``"input"``).
        text: the layout in one line, for example
            ``"float8_e4m3fn/1x32/float8_e8m0fnu/up/0.0/own/None/float32"``; derived from the other
            fields.

    Raises:
        DTypeError: ``element`` or ``scale`` is no such dtype.
        OptionError: a field has a value that is not allowed, or two fields contradict each other.
    """

    element: torch.dtype
    block: Block
    scale: torch.dtype = torch.float32
    rounding: str = "nearest"
    epsilon: float = 0.0
    columnwise: str = "own"
    shared: tuple[int, int] | None = None
    finite_as: str = "float32"
    text: str = field(init=False, repr=False, compare=False, default="")
    #: Whether one buffer serves both usages, because ``columnwise`` is ``"same"``, or because the
    #: whole tensor has one scale. Derived from the fields.
    one_buffer = False

    def __post_init__(self) -> None:
        element_format(self.element)
        if not isinstance(self.scale, torch.dtype) or self.scale not in _ROUNDINGS:
            raise DTypeError(
                f"scale is {self.scale!r}", expected="torch.float32 or torch.float8_e8m0fnu"
            )
        for name, value in (("block", self.block), ("shared", self.shared)):
            sizes = value if isinstance(value, tuple) else (0,)
            right = len(sizes) == 2 and all(s is None or (type(s) is int and s > 0) for s in sizes)
            if not right and not (name == "shared" and value is None):
                raise OptionError(
                    f"{name} is {value!r}",
                    expected="(rows, columns), each a size > 0 or None for all",
                )
        columnwise = ("own", "transposed", "same")
        allowed = {
            "rounding": _ROUNDINGS[self.scale],
            "columnwise": columnwise,
            "finite_as": ("float32", "input"),
        }
        for name, words in allowed.items():
            if getattr(self, name) not in words:
                raise OptionError(
                    f"{name} is {getattr(self, name)!r}", expected=f"one of {', '.join(words)}"
                )
        if type(self.epsilon) not in (int, float) or not 0.0 <= self.epsilon <= _FLOAT32_MAX:
            raise OptionError(
                f"epsilon is {self.epsilon!r}", expected="a number >= 0 that float32 holds"
            )
        if self.scale is not torch.float32 and (self.epsilon or self.finite_as != "float32"):
            raise OptionError(
                f"an E8M0 scale with epsilon {self.epsilon!r} and finite_as {self.finite_as!r}",
                expected="0 and 'float32'",
                remedy="these two fields are for scale=torch.float32 alone",
            )
        # Equal layouts must have equal texts, so abs turns -0.0 into 0.0. A frozen dataclass allows
        # its fields to be set only in this way.
        object.__setattr__(self, "epsilon", abs(float(self.epsilon)))
        sides = [] if self.shared is None else [*zip(self.shared, self.block, strict=True)]
        if len({side for side, _ in sides}) > 1 or not all(
            side and size and side % size == 0 for side, size in sides
        ):
            raise OptionError(
                f"blocks of {self.block} share a scale over {self.shared}",
                expected="squares of blocks",
            )
        if self.columnwise == "same" and self.block[0] != self.block[1]:
            raise OptionError(
                f"blocks of {self.block} with columnwise='same'", expected="squares, or one for all"
            )
        whole = self.columnwise == "own" and self.block == (None, None)
        object.__setattr__(self, "one_buffer", whole or self.columnwise == "same")
        object.__setattr__(self, "text", "/".join(map(_written, self._values())))
        _KNOWN.setdefault(self.text, self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling calls the constructor, which checks the fields.
        return Layout, self._values()

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self) if f.init)

    # -- properties derived from the fields --

    @property
    def square(self) -> bool:
        """Whether rowwise and columnwise data hold the same values."""
        rows, columns = self.shared or self.block
        return rows == columns

    @property
    def transposed(self) -> bool:
        """Whether columnwise data are those of the transpose, ``[K, *leading]``."""
        return self.columnwise == "transposed"

    def block_of(self, columnwise: bool, shared: bool = False) -> Block:
        """Rows and columns of the tensor that have one stored scale.

        With ``shared``, rows and columns of the area whose blocks all have the same scale.
        """
        block = (self.shared if shared else None) or self.block
        return (block[1], block[0]) if columnwise else block

    def grid(self, matrix: Sequence[int], columnwise: bool, shared: bool = False) -> Size:
        """Rows and columns of the scales of a matrix ``[M, K]``, as if data were not transposed."""
        return grid_of(matrix, self.block_of(columnwise, shared))

    @property
    def stored_scale(self) -> torch.dtype:
        """The dtype of stored scales, which is uint8 for E8M0."""
        return torch.float32 if self.scale is torch.float32 else torch.uint8

    def scale_shape(self, shape: Sequence[int], columnwise: bool) -> Size:
        """The shape of the stored, unpadded scales of a tensor of ``shape``."""
        rows, columns = self.grid(as_matrix_shape(shape), columnwise)
        return (columns, rows) if columnwise and self.transposed else (rows, columns)

    def stored_block(self, columnwise: bool) -> Block:
        """Rows and columns of stored data that share a scale.

        They are those of the transpose, if the data are stored transposed.
        """
        return self.block if columnwise and self.transposed else self.block_of(columnwise)

    def stored_matrix(self, data_shape: Sequence[int], columnwise: bool) -> Size:
        """Rows and columns of the matrix that stored data of ``data_shape`` are."""
        if columnwise and self.transposed:
            return (data_shape[0] if len(data_shape) else 1), math.prod(data_shape[1:])
        return as_matrix_shape(data_shape)

    def data_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of the stored data of a tensor of ``shape``."""
        return (*shape[-1:], *shape[:-1]) if columnwise and self.transposed else tuple(shape)

    # -- as text, for operators and files --

    @staticmethod
    def of(text: str) -> "Layout":
        """The layout whose :attr:`text` this is.

        Raises:
            OptionError, DTypeError: no layout has this text.
        """
        # The table is a plain dict, because compiled code can look into it.
        layout = _KNOWN.get(text) if isinstance(text, str) else None
        return _parsed(str(text)) if layout is None else layout


_KNOWN: dict[str, Layout] = {}
torch.serialization.add_safe_globals([Layout])


def grid_of(matrix: Sequence[int], block: Block) -> Size:
    """The number of blocks of a matrix along its rows and along its columns.

    It is 1 along a side where a block has all, even if the matrix is empty.
    """
    rows, columns = (
        1 if side is None else -(-size // side) for size, side in zip(matrix, block, strict=True)
    )
    return rows, columns


def as_matrix_shape(shape: Sequence[int]) -> Size:
    """Rows and columns of the matrix that a tensor ``[*leading, K]`` is seen as."""
    return math.prod(shape[:-1]), (shape[-1] if len(shape) else 1)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join("all" if size is None else str(size) for size in value)
    return str(value).removeprefix("torch.")


def _sizes(text: str) -> Any:
    if text == "None":
        return None
    return tuple(None if size == "all" else int(size) for size in text.split("x"))


# The functions that parse the fields of a text, in their order.
_READERS: tuple[Callable[[str], Any], ...] = (
    vars(torch).get,
    _sizes,
    vars(torch).get,
    str,
    float,
    str,
    _sizes,
    str,
)


def _parsed(text: str) -> Layout:
    try:
        values = [reader(word) for reader, word in zip(_READERS, text.split("/"), strict=True)]
        return Layout(*values)
    except ValueError as error:
        raise OptionError(
            f"{text!r:.80} is no layout", expected="what Layout.text gives"
        ) from error
