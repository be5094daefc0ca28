"""``Layout``: the fields, what contradicts itself among them, and what follows from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch

from ottava.errors import DTypeError, OptionError
from ottava.formats import E4M3, E8M0, ELEMENTS, UE5M3, ElementFormat, element_format
from ottava.layout.grids import Block, Size, as_matrix_shape, grid_of, multiple
from ottava.layout.rotation import Rotation
from ottava.layout.scales import OWN_RULES, SCALES
from ottava.layout.text import PLACES, Value, fields_of, text_of, text_of_fields

_FLOAT32_MAX = torch.finfo(torch.float32).max
_COLUMNWISE = ("own", "transposed", "same")
_FINITE_AS = ("float32", "input")
_SECOND_LEVELS = ("none", "tensor", "row")
_ERRORS = ("MAE", "MSE")
_ROTATED = ("rowwise", "columnwise", "both")
_ROTATIONS = (16, 32, 64, 128)


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
                f"scale {text_of(self.scale)} with epsilon {self.epsilon!r} and finite_as "
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
        object.__setattr__(self, "text", text_of_fields(self, _NAMED))
        _KNOWN.setdefault(self.text, self)

    def __reduce__(self) -> tuple[type["Layout"], tuple[Value, ...]]:
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
        try:
            return Layout(**fields_of(str(text), _NAMED))  # type: ignore[arg-type]
        except (ValueError, KeyError) as error:
            raise OptionError(
                f"{text!r:.80} is no layout",
                expected="what Layout.text gives",
                remedy="register rules of your own for scales before layouts with them are read",
            ) from error


# Text -> layout. The table is a plain dict, because compiled code can look into it.
_KNOWN: dict[str, Layout] = {}
torch.serialization.add_safe_globals([Layout, Rotation])
# Name -> default: a plain dict, because compiled code cannot read the fields of a dataclass.
_NAMED: dict[str, object] = {
    field.name: field.default for field in fields(Layout) if field.init and field.name not in PLACES
}


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
            f"second_level={layout.second_level!r} over scales in {text_of(layout.scale)}",
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
