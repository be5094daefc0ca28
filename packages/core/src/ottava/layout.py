"""Layouts describe the elements of a quantized tensor, and which of them share a scale, as data.

A tensor ``[*leading, K]`` is seen as a matrix of ``M`` rows and ``K`` columns, which a grid cuts
into blocks that have one scale each. Blocks at ragged edges are smaller. Rowwise data serve
products that sum over columns. Columnwise data serve products that sum over rows, and their blocks
are those of the transposed matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from ottava.errors import DTypeError, OptionError
from ottava.formats import E8M0, element_format

#: Rows and columns of a grid.
Size = tuple[int, int]
#: Rows and columns of a block, where None means all.
Block = tuple[int | None, int | None]
_FLOAT32_MAX = torch.finfo(torch.float32).max
#: The format of scales -> the words for how they can be rounded.
_ROUNDINGS = {torch.float32: ("nearest", "floor"), E8M0.torch_dtype: ("up", "floor")}
_COLUMNWISE = ("own", "transposed", "same")
_FINITE_AS = ("float32", "input")
#: The value of a field, as the constructor takes it.
_Value = torch.dtype | Block | str | float | None


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
        _check_sizes("block", self.block)
        if self.shared is not None:
            _check_sizes("shared", self.shared)
        _check_word("rounding", self.rounding, _ROUNDINGS[self.scale])
        _check_word("columnwise", self.columnwise, _COLUMNWISE)
        _check_word("finite_as", self.finite_as, _FINITE_AS)
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
        if self.shared is not None:
            _check_shared(self.shared, self.block)
        if self.columnwise == "same" and self.block[0] != self.block[1]:
            raise OptionError(
                f"blocks of {self.block} with columnwise='same'", expected="squares, or one for all"
            )
        self._derive()

    def _derive(self) -> None:
        """Set the derived fields, in the only way in which a frozen dataclass allows it."""
        # Equal layouts must have equal texts, so abs turns -0.0 into 0.0.
        object.__setattr__(self, "epsilon", abs(float(self.epsilon)))
        whole = self.columnwise == "own" and self.block == (None, None)
        object.__setattr__(self, "one_buffer", whole or self.columnwise == "same")
        object.__setattr__(self, "text", "/".join(map(_text_of, self._values())))
        _KNOWN.setdefault(self.text, self)

    def __reduce__(self) -> tuple[type["Layout"], tuple[_Value, ...]]:
        # Unpickling calls the constructor, which checks the fields.
        return Layout, self._values()

    def _values(self) -> tuple[_Value, ...]:
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
        block = self.block
        if shared and self.shared is not None:
            block = self.shared
        if columnwise:
            return block[1], block[0]
        return block

    def grid(self, matrix: Sequence[int], columnwise: bool, shared: bool = False) -> Size:
        """Rows and columns of the scales of a matrix ``[M, K]``, as if data were not transposed."""
        return grid_of(matrix, self.block_of(columnwise, shared))

    @property
    def stored_scale(self) -> torch.dtype:
        """The dtype of stored scales, which is uint8 for E8M0."""
        if self.scale is torch.float32:
            return torch.float32
        return torch.uint8

    def scale_shape(self, shape: Sequence[int], columnwise: bool) -> Size:
        """The shape of the stored, unpadded scales of a tensor of ``shape``."""
        rows, columns = self.grid(as_matrix_shape(shape), columnwise)
        if columnwise and self.transposed:
            return columns, rows
        return rows, columns

    def stored_block(self, columnwise: bool) -> Block:
        """Rows and columns of stored data that share a scale.

        They are those of the transpose, if the data are stored transposed.
        """
        if columnwise and self.transposed:
            return self.block
        return self.block_of(columnwise)

    def stored_matrix(self, data_shape: Sequence[int], columnwise: bool) -> Size:
        """Rows and columns of the matrix that stored data of ``data_shape`` are."""
        if columnwise and self.transposed:
            rows, columns = as_matrix_shape((*data_shape[1:], *data_shape[:1]))
            return columns, rows
        return as_matrix_shape(data_shape)

    def data_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of the stored data of a tensor of ``shape``."""
        if columnwise and self.transposed:
            return (*shape[-1:], *shape[:-1])
        return tuple(shape)

    # -- as text, for operators and files --

    @staticmethod
    def of(text: str) -> "Layout":
        """The layout whose :attr:`text` this is.

        Raises:
            OptionError, DTypeError: no layout has this text.
        """
        if isinstance(text, str) and text in _KNOWN:
            return _KNOWN[text]
        return _layout_of(str(text))


# Text -> layout. The table is a plain dict, because compiled code can look into it.
_KNOWN: dict[str, Layout] = {}
torch.serialization.add_safe_globals([Layout])


def _check_sizes(name: str, sizes: object) -> None:
    right = isinstance(sizes, tuple) and len(sizes) == 2 and all(map(_is_size, sizes))
    if not right:
        raise OptionError(
            f"{name} is {sizes!r}", expected="(rows, columns), each a size > 0 or None for all"
        )


def _is_size(size: object) -> bool:
    return size is None or (type(size) is int and size > 0)


def _check_word(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise OptionError(f"{name} is {value!r}", expected=f"one of {', '.join(words)}")


def _check_shared(shared: Size, block: Block) -> None:
    """Check that areas of ``shared`` rows and columns are squares of whole blocks."""
    rows, columns = shared
    multiples = [
        side and size and side % size == 0 for side, size in zip(shared, block, strict=True)
    ]
    if rows != columns or not all(multiples):
        raise OptionError(
            f"blocks of {block} share a scale over {shared}", expected="squares of blocks"
        )


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


def _text_of(value: _Value) -> str:
    if isinstance(value, tuple):
        return "x".join("all" if size is None else str(size) for size in value)
    return str(value).removeprefix("torch.")


def _dtype_of(text: str) -> torch.dtype:
    dtype = vars(torch).get(text)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {text!r}")
    return dtype


def _block_of(text: str) -> Block:
    rows, columns = (None if size == "all" else int(size) for size in text.split("x"))
    return rows, columns


def _shared_of(text: str) -> Size | None:
    if text == "None":
        return None
    rows, columns = map(int, text.split("x"))
    return rows, columns


def _layout_of(text: str) -> Layout:
    try:
        element, block, scale, rounding, epsilon, columnwise, shared, finite_as = text.split("/")
        return Layout(
            element=_dtype_of(element),
            block=_block_of(block),
            scale=_dtype_of(scale),
            rounding=rounding,
            epsilon=float(epsilon),
            columnwise=columnwise,
            shared=_shared_of(shared),
            finite_as=finite_as,
        )
    except ValueError as error:
        raise OptionError(
            f"{text!r:.80} is no layout", expected="what Layout.text gives"
        ) from error
