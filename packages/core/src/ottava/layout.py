"""Layouts describe the elements of a quantized tensor, and which of them share a scale, as data.

A tensor ``[*leading, K]`` is seen as a matrix of ``M`` rows and ``K`` columns, which a grid cuts
into blocks that have one scale each. Blocks at ragged edges are smaller. Rowwise data serve
products that sum over columns. Columnwise data serve products that sum over rows, and their blocks
are those of the transposed matrix.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from ottava.errors import DTypeError, OptionError
from ottava.formats import (
    E4M3,
    E8M0,
    ELEMENT_NAMES,
    ELEMENTS,
    UE5M3,
    ElementFormat,
    FloatFormat,
    element_format,
)

#: Rows and columns of a grid.
Size = tuple[int, int]
#: Rows and columns of a block, where None means all.
Block = tuple[int | None, int | None]
_FLOAT32_MAX = torch.finfo(torch.float32).max


class ScaleFormat(NamedTuple):
    """A format of scales.

    Attributes:
        number: the format of its numbers; None for float32.
        stored: the dtype of stored scales.
        native: the dtype of torch with the same bytes; None where stored scales have it already, or
            torch has none.
        rules: the words for how an amax becomes a scale.
    """

    number: FloatFormat | None
    stored: torch.dtype
    native: torch.dtype | None
    rules: tuple[str, ...]


#: The formats of scales, by their dtype or name.
SCALES: dict[torch.dtype | str, ScaleFormat] = {
    torch.float32: ScaleFormat(None, torch.float32, None, ("nearest", "floor")),
    torch.float8_e8m0fnu: ScaleFormat(
        E8M0, torch.uint8, torch.float8_e8m0fnu, ("up", "floor", "even", "nearest")
    ),
    torch.float8_e4m3fn: ScaleFormat(E4M3, torch.uint8, torch.float8_e4m3fn, ("nearest",)),
    "UE5M3": ScaleFormat(UE5M3, torch.uint8, None, ("nearest",)),
}
#: A rule of one's own: from the amaxes of blocks (float32; times the scale of the second level, if
#: there is one) and the layout to the scales that are stored, of the same shape.
ScaleRule = Callable[[torch.Tensor, "Layout"], torch.Tensor]
#: The rules that were registered, by name.
OWN_RULES: dict[str, ScaleRule] = {}


def register_scale_rule(name: str, rule: ScaleRule) -> None:
    """Let layouts have a rule of one's own for scales, as ``rounding=name``.

    A process that reads files with such layouts registers the rule first.

    Args:
        name: letters, digits, dots, hyphens and underscores, beginning with a letter.
        rule: see :data:`ScaleRule`. Equal amaxes must give equal scales.

    Raises:
        OptionError: the name is not of this form, or is taken by another rule.
        DTypeError: ``rule`` is no function.
    """
    known = {word for scale in SCALES.values() for word in scale.rules}
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise OptionError(
            f"a rule for scales named {name!r}",
            expected="letters, digits, dots, hyphens and underscores, beginning with a letter",
        )
    if name in known or OWN_RULES.get(name, rule) is not rule:
        raise OptionError(f"the name {name!r} of a rule is taken", expected="another name")
    if not callable(rule):
        raise DTypeError(f"the rule {name!r} is a {type(rule).__name__}", expected="a function")
    OWN_RULES[name] = rule


_COLUMNWISE = ("own", "transposed", "same")
_FINITE_AS = ("float32", "input")
_SECOND_LEVELS = ("none", "tensor", "row")
_ERRORS = ("MAE", "MSE")
_ROTATED = ("rowwise", "columnwise", "both")
_ROTATIONS = (16, 32, 64, 128)


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


#: The value of a field, as the constructor takes it.
_Value = torch.dtype | Block | str | float | tuple[float, ...] | Rotation | None


@dataclass(frozen=True)
class Layout:
    """A description of the elements of a tensor, and of the scales on its grid.

    Invariant: ``original ≈ float32(element) * scale_inv`` for the scale of the element's block.

    Attributes:
        element: ``torch.float8_e4m3fn``, ``torch.float8_e5m2``, ``torch.int8``, or the name of a
            format (:data:`ottava.formats.ELEMENT_NAMES`), for example ``"E2M1"``. Elements of four
            bits lie two in a byte along the summed dimension, the even one in the low half.
        block: rows and columns of rowwise data that share a scale, where None means all.
        scale: the format of stored scales, ``torch.float32`` (``scale_inv`` itself),
            ``torch.float8_e8m0fnu``, ``torch.float8_e4m3fn`` or ``"UE5M3"``.
        rounding: the rule from an amax to a scale. Float32 scales: ``"nearest"``, or ``"floor"`` to
            a power of two. E8M0 scales: ``"up"``, so that no element is clamped, ``"floor"``,
            ``"even"`` or ``"nearest"``. Other scales: ``"nearest"``. All: a rule of one's own
            (:func:`register_scale_rule`).
        epsilon: the least amax; a smaller one is replaced by it. Only for float32 scales.
        columnwise: how columnwise data are held. ``"own"``: in the tensor's shape;
            ``"transposed"``: as ``[K, *leading]``; ``"same"``: one buffer serves both usages.
        shared: rows and columns of an area whose blocks all have the same scale, or None. It is a
            square of whole blocks. Rowwise and columnwise data then have the same values, as they
            do if blocks are squares.
        finite_as: the replacement of an infinite float32 scale: the largest value of float32
            (``"float32"``), or of the dtype of the quantized values (``"input"``).
        second_level: what has a float32 scale besides those of its blocks: ``"none"``, the
            ``"tensor"``, or each ``"row"`` of the summed dimension (rowwise data: each row,
            columnwise data: each column). Only for scales in E4M3 and UE5M3.
        bound: the scale that the second level gives the block with the largest amax. None: the
            largest number of the scale's format.
        candidates: factors by which the scale of a block may be larger. Each block takes the one
            with the least error, the first of equal ones. Empty: there is no choice. Powers of two
            are those that the rule gives for the amax times the factor. Not together with
            ``stochastic`` or ``rotation``.
        error: the error that candidates are compared by: the sum over the block of magnitudes
            (``"MAE"``) or squares (``"MSE"``).
        stochastic: whether elements are rounded to one of their two neighbours at random, in
            proportion to the distances. Quantizing then takes a seed. Both directions of squares
            are rounded alike.
        rotation: a :class:`Rotation`, or None. Both operands of a product have to be rotated alike.
            Not where both directions hold the same values.
        text: the layout in one line, for example
            ``"float8_e4m3fn/1x32/float8_e8m0fnu/up/0.0/own/None/float32"``, with
            ``/name=value`` for each later field that is not at its default; derived from the other
            fields.

    Raises:
        DTypeError: ``element`` or ``scale`` is no such dtype.
        OptionError: a field has a value that is not allowed, or two fields contradict each other.
    """

    element: torch.dtype | str
    block: Block
    scale: torch.dtype | str = torch.float32
    rounding: str = "nearest"
    epsilon: float = 0.0
    columnwise: str = "own"
    shared: tuple[int, int] | None = None
    finite_as: str = "float32"
    second_level: str = "none"
    bound: float | None = None
    candidates: tuple[float, ...] = ()
    error: str = "MAE"
    stochastic: bool = False
    rotation: Rotation | None = None
    text: str = field(init=False, repr=False, compare=False, default="")
    #: Whether one buffer serves both usages, because ``columnwise`` is ``"same"``, or because the
    #: whole tensor has one scale. Derived from the fields.
    one_buffer = False

    def __post_init__(self) -> None:
        fmt = element_format(self.element)
        # A format has one name in texts: that of its dtype, if torch has one.
        has_dtype = fmt.torch_dtype in ELEMENTS
        object.__setattr__(self, "element", fmt.torch_dtype if has_dtype else fmt.name)
        if not isinstance(self.scale, torch.dtype | str) or self.scale not in SCALES:
            raise DTypeError(
                f"scale is {self.scale!r}",
                expected="torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn or 'UE5M3'",
            )
        _check_sizes("block", self.block)
        if self.shared is not None:
            _check_sizes("shared", self.shared)
        _check_word("rounding", self.rounding, (*SCALES[self.scale].rules, *OWN_RULES))
        _check_word("columnwise", self.columnwise, _COLUMNWISE)
        _check_word("finite_as", self.finite_as, _FINITE_AS)
        _check_word("second_level", self.second_level, _SECOND_LEVELS)
        _check_word("error", self.error, _ERRORS)
        if type(self.epsilon) not in (int, float) or not 0.0 <= self.epsilon <= _FLOAT32_MAX:
            raise OptionError(
                f"epsilon is {self.epsilon!r}", expected="a number >= 0 that float32 holds"
            )
        if type(self.stochastic) is not bool:
            raise OptionError(f"stochastic is {self.stochastic!r}", expected="True or False")
        if self.scale is not torch.float32 and (self.epsilon or self.finite_as != "float32"):
            raise OptionError(
                f"scale {_text_of(self.scale)} with epsilon {self.epsilon!r} and finite_as "
                f"{self.finite_as!r}",
                expected="0 and 'float32'",
                remedy="these two fields are for scale=torch.float32 alone",
            )
        if self.shared is not None:
            _check_shared(self.shared, self.block)
        if self.columnwise == "same" and self.block[0] != self.block[1]:
            raise OptionError(
                f"blocks of {self.block} with columnwise='same'", expected="squares, or one for all"
            )
        for check in _CHECKS:
            check(self)
        self._derive()

    def _derive(self) -> None:
        """Set the derived fields, in the only way in which a frozen dataclass allows it."""
        # Equal layouts must have equal texts, so abs turns -0.0 into 0.0.
        object.__setattr__(self, "epsilon", abs(float(self.epsilon)))
        object.__setattr__(self, "candidates", tuple(float(f) for f in self.candidates))
        if self.bound is not None:
            object.__setattr__(self, "bound", float(self.bound))
        whole = self.columnwise == "own" and self.block == (None, None)
        object.__setattr__(self, "one_buffer", whole or self.columnwise == "same")
        object.__setattr__(self, "text", _text_of_fields(self))
        _KNOWN.setdefault(self.text, self)

    def __reduce__(self) -> tuple[type["Layout"], tuple[_Value, ...]]:
        # Unpickling calls the constructor, which checks the fields.
        return Layout, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    # -- properties derived from the fields --

    @property
    def square(self) -> bool:
        """Whether rowwise and columnwise data hold the same values."""
        rows, columns = self.shared or self.block
        return rows == columns

    @property
    def format(self) -> ElementFormat:
        """The format of the elements."""
        return element_format(self.element)

    @property
    def element_dtype(self) -> torch.dtype:
        """The dtype of torch with the bytes and the numbers of the elements; uint8 if torch has
        none."""
        return self.format.torch_dtype

    @property
    def elements_per_byte(self) -> int:
        """How many elements a byte of stored data has: 1 or 2."""
        return 2 if self.format.bits == 4 else 1

    @property
    def has_powers_of_two(self) -> bool:
        """Whether all scales are powers of two."""
        return self.scale is E8M0.torch_dtype or self.rounding == "floor"

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
        return grid_of(self.padded(matrix, columnwise), self.block_of(columnwise, shared))

    def padded(self, matrix: Sequence[int], columnwise: bool) -> Size:
        """Rows and columns of a matrix whose summed dimension has whole groups of a rotation."""
        rows, columns = matrix
        if self.rotation is None or not self.rotation.turns(columnwise):
            return rows, columns
        if columnwise:
            return multiple(rows, self.rotation.size), columns
        return rows, multiple(columns, self.rotation.size)

    @property
    def stored_scale(self) -> torch.dtype:
        """The dtype of stored scales, which is uint8 for all but float32."""
        return SCALES[self.scale].stored

    def scale_shape(self, shape: Sequence[int], columnwise: bool) -> Size:
        """The shape of the stored, unpadded scales of a tensor of ``shape``."""
        rows, columns = self.grid(as_matrix_shape(shape), columnwise)
        if columnwise and self.transposed:
            return columns, rows
        return rows, columns

    def amax_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...] | None:
        """The shape of the amaxes of the second level of a tensor of ``shape``.

        None for a layout without a second level, ``()`` for one amax, ``(rows,)`` for one of each
        row of the summed dimension.
        """
        if self.second_level == "none":
            return None
        if self.second_level == "tensor":
            return ()
        rows, columns = as_matrix_shape(shape)
        return (columns if columnwise else rows,)

    def block_of_amax(self, columnwise: bool) -> Block | None:
        """Rows and columns of the tensor that have one amax of the second level, if there is
        one."""
        if self.second_level == "none":
            return None
        if self.second_level == "tensor":
            return None, None
        return (None, 1) if columnwise else (1, None)

    def whole_elements(self, columnwise: bool) -> int:
        """Elements along the summed dimension that stored data cannot be cut between: those of a
        byte, or of a group of the rotation."""
        if self.rotation is not None and self.rotation.turns(columnwise):
            return self.rotation.size
        return self.elements_per_byte

    def stored_block(self, columnwise: bool) -> Block:
        """Rows and columns of the matrix of stored data that share a scale, in elements.

        They are those of the transpose, if the data are stored transposed.
        """
        if columnwise and self.transposed:
            return self.block
        return self.block_of(columnwise)

    def stored_matrix(self, data_shape: Sequence[int], columnwise: bool) -> Size:
        """Rows and columns, in elements, of the matrix that stored data of ``data_shape`` are.

        An odd last column in a byte of its own, and the padding of a rotation, count.
        """
        if columnwise and self.transposed:
            rows, columns = as_matrix_shape((*data_shape[1:], *data_shape[:1]))
            rows, columns = columns, rows
        else:
            rows, columns = as_matrix_shape(data_shape)
        return rows, columns * self.elements_per_byte

    def data_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of the stored data of a tensor of ``shape``.

        Rowwise data have the shape of the tensor. Data that are stored transposed have the last
        dimension first, and are a matrix if elements share bytes or groups are padded. The last
        dimension counts bytes; a tensor without dimensions whose elements share bytes or whose
        groups are padded has one.
        """
        rows, columns = self.padded(as_matrix_shape(shape), columnwise)
        if columnwise and self.transposed:
            if self.is_plain(columnwise):
                return (*shape[-1:], *shape[:-1])
            return columns, -(-rows // self.elements_per_byte)
        if not shape and self.is_plain(columnwise):
            return ()
        return *shape[:-1], -(-columns // self.elements_per_byte)

    def is_plain(self, columnwise: bool) -> bool:
        """Whether stored data have one byte for each element of the tensor, and no others."""
        rotated = self.rotation is not None and self.rotation.turns(columnwise)
        return self.elements_per_byte == 1 and not rotated

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
torch.serialization.add_safe_globals([Layout, Rotation])


def _check_sizes(name: str, sizes: object) -> None:
    right = isinstance(sizes, tuple) and len(sizes) == 2 and all(map(_is_size, sizes))
    if not right:
        raise OptionError(
            f"{name} is {sizes!r}", expected="(rows, columns), each a size > 0 or None for all"
        )


def _is_size(size: object) -> bool:
    return size is None or (type(size) is int and size > 0)


def _check_word(name: str, value: str, words: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in words:
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


def _check_packing(layout: Layout) -> None:
    """Check that elements that share a byte lie along the summed dimension, in one block."""
    if layout.elements_per_byte == 1:
        return
    if layout.columnwise != "transposed":
        raise OptionError(
            f"{layout.element} elements with columnwise={layout.columnwise!r}",
            expected="columnwise='transposed'",
            remedy="elements share a byte along the dimension that a product sums over",
        )
    if (layout.block[1] or 0) % 2:
        raise OptionError(
            f"{layout.element} elements in blocks of {layout.block}",
            expected="an even number of columns, because two elements share a byte",
        )


def _check_second_level(layout: Layout) -> None:
    """Check the second level of scales, and the number that it leads up to."""
    number = SCALES[layout.scale].number
    if layout.second_level == "none":
        if layout.bound is not None:
            raise OptionError(
                f"bound is {layout.bound!r} without a second level of scales", expected="None"
            )
        return
    if number not in (E4M3, UE5M3):
        raise OptionError(
            f"second_level={layout.second_level!r} over scales in {_text_of(layout.scale)}",
            expected="scale=torch.float8_e4m3fn or 'UE5M3'",
        )
    bound = layout.bound
    right = bound is None or (type(bound) in (int, float) and 0.0 < bound <= number.max)
    if not right:
        raise OptionError(
            f"bound is {bound!r}", expected=f"a number above 0, at most {number.max}, or None"
        )
    if layout.second_level == "row" and (layout.block[0] != 1 or layout.square):
        raise OptionError(
            f"second_level='row' with blocks of {layout.block} and shared={layout.shared}",
            expected="blocks of one row and several columns, and shared=None",
        )


def _check_candidates(layout: Layout) -> None:
    """Check the factors among which each block chooses, and what they cannot be combined with."""
    factors = layout.candidates
    right = isinstance(factors, tuple) and all(
        type(f) in (int, float) and 0.0 < f <= _FLOAT32_MAX for f in factors
    )
    if not right or len(factors) == 1:
        raise OptionError(
            f"candidates is {factors!r}", expected="a tuple of two or more numbers above 0, or ()"
        )
    if not factors:
        if layout.error != "MAE":
            raise OptionError(
                f"error is {layout.error!r} without candidates", expected="'MAE', the default"
            )
        return
    if layout.stochastic:
        raise OptionError(
            "candidates together with stochastic=True",
            expected="one of the two, because candidates are compared rounded to nearest",
        )
    if layout.rotation is not None:
        raise OptionError(
            "candidates together with a rotation",
            expected="one of the two",
            remedy="if one direction chooses and the other is rotated, make a layout and a "
            "quantizer for each",
        )


def _check_rotation(layout: Layout) -> None:
    """Check the transform, and that directions that hold the same values are not rotated."""
    rotation = layout.rotation
    if rotation is None:
        return
    if not isinstance(rotation, Rotation):
        raise OptionError(
            f"rotation is {rotation!r}", expected="an ottava.layout.Rotation, or None"
        )
    if rotation.size not in _ROTATIONS or type(rotation.size) is not int:
        raise OptionError(
            f"a rotation of {rotation.size!r}", expected="groups of 16, 32, 64 or 128"
        )
    if type(rotation.signs) is not int or not 0 <= rotation.signs < 1 << rotation.size:
        raise OptionError(
            f"the signs of a rotation are {rotation.signs!r}",
            expected=f"an integer of {rotation.size} bits",
        )
    _check_word("directions", rotation.directions, _ROTATED)
    if layout.square or layout.one_buffer:
        raise OptionError(
            "a rotation where both directions hold the same values",
            expected="blocks that are no squares",
            remedy="each direction is rotated along another dimension",
        )
    if rotation.turns(True) and layout.columnwise != "transposed":
        raise OptionError(
            f"rotated columns with columnwise={layout.columnwise!r}",
            expected="columnwise='transposed'",
            remedy="a padded group needs place at the end of the summed dimension",
        )


#: Checks of fields that belong together.
_CHECKS: tuple[Callable[[Layout], None], ...] = (
    _check_packing,
    _check_second_level,
    _check_candidates,
    _check_rotation,
)


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


#: The fields that every text has, by their place. It has the others by name.
_PLACES = ("element", "block", "scale", "rounding", "epsilon", "columnwise", "shared", "finite_as")


def _text_of(value: _Value) -> str:
    if isinstance(value, Rotation):
        return f"{value.size}:{value.signs:#x}:{value.directions}"
    if isinstance(value, tuple):
        return "x".join("all" if size is None else str(size) for size in value)
    return str(value).removeprefix("torch.")


def _text_of_fields(layout: Layout) -> str:
    words = [_text_of(getattr(layout, name)) for name in _PLACES]
    for name, default in _NAMED.items():
        value = getattr(layout, name)
        if value != default:
            words.append(f"{name}={_text_of(value)}")
    return "/".join(words)


def _dtype_of(text: str) -> torch.dtype | str:
    if text in ELEMENT_NAMES or text in SCALES:
        return text
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


def _factors_of(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split("x")))


def _flag_of(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _rotation_of(text: str) -> Rotation:
    size, signs, directions = text.split(":")
    return Rotation(int(size), int(signs, 0), directions)


_READERS: dict[str, Callable[[str], _Value]] = {
    "element": _dtype_of,
    "block": _block_of,
    "scale": _dtype_of,
    "rounding": str,
    "epsilon": float,
    "columnwise": str,
    "shared": _shared_of,
    "finite_as": str,
    "second_level": str,
    "bound": float,
    "candidates": _factors_of,
    "error": str,
    "stochastic": _flag_of,
    "rotation": _rotation_of,
}
# Name -> default: a plain dict, because compiled code cannot read the fields of a dataclass.
_NAMED: dict[str, object] = {
    field.name: field.default
    for field in fields(Layout)
    if field.init and field.name not in _PLACES
}


def _layout_of(text: str) -> Layout:
    try:
        words = text.split("/")
        values = dict(zip(_PLACES, words[: len(_PLACES)], strict=True))
        for word in words[len(_PLACES) :]:
            name, _, value = word.partition("=")
            if name not in _NAMED or name in values:
                raise ValueError(f"{name!r} is no field, or is there twice")
            values[name] = value
        read = {name: _READERS[name](value) for name, value in values.items()}
        return Layout(**read)  # type: ignore[arg-type]
    except (ValueError, KeyError) as error:
        raise OptionError(
            f"{text!r:.80} is no layout",
            expected="what Layout.text gives",
            remedy="register rules of your own for scales before layouts with them are read",
        ) from error
