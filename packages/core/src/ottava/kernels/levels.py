"""Layouts with small elements, two levels of scales, rotation or choices, as kernels take them."""

from typing import NamedTuple

from ottava.formats import E4M3, E8M0, UE5M3, FloatFormat
from ottava.kernels.scales import top_of
from ottava.layout import OWN_RULES, SCALES, Layout

#: Lanes and positions of a block: positions run along the dimension that a product sums over.
Block = tuple[int, int]

_ELEMENTS = ("E4M3", "E5M2", "INT8", "E2M1", "E2M3", "E3M2", "INT4", "MXINT8", "MXINT8S")
_SCALES: tuple[FloatFormat | None, ...] = (None, E8M0, E4M3, UE5M3)
_SECOND_LEVELS = ("none", "tensor", "row")
_E8M0_RULES = ("up", "floor", "even", "nearest")
# Kernels compute strips of so many lanes, of which each block has the same number of positions.
_STRIP_LANES = 16
_BLOCK_POSITIONS = (16, 32, 64, 128)
_MOST_CANDIDATES = 8
# With a smaller bound a scale of the second level, or its inverse, may leave the range of float32.
_LEAST_BOUND = 1.0
_MASK = 2**64 - 1


class NativeLevels(NamedTuple):
    """A layout as ``LevelsLayout`` of the compiled modules, which has the meaning of the fields."""

    element: int
    scale: int
    rounding: int
    epsilon: float
    finite_as_input: bool
    block: Block
    area: Block
    second: int
    top: float
    candidates: tuple[float, ...]
    squares: bool
    stochastic: bool
    rotation: int
    signs: tuple[int, int]
    rotated: tuple[bool, bool]
    turned: bool


def native_levels(layout: Layout) -> NativeLevels:
    """The layout as compiled modules take it; a side of 0 stands for all."""
    number = SCALES[layout.scale].number
    rounding = int(layout.rounding == "floor")
    if number is E8M0 and layout.rounding in _E8M0_RULES:
        # Layouts with a rule of one's own are only decoded.
        rounding = _E8M0_RULES.index(layout.rounding)
    rotation = layout.rotation
    signs, rotated = (0, 0), (False, False)
    if rotation is not None:
        signs = rotation.signs & _MASK, rotation.signs >> 64
        rotated = rotation.turns(False), rotation.turns(True)
    block = layout.block[0] or 0, layout.block[1] or 0
    return NativeLevels(
        element=_ELEMENTS.index(layout.format.name),
        scale=_SCALES.index(number),
        rounding=rounding,
        epsilon=layout.epsilon,
        finite_as_input=layout.finite_as == "input",
        block=block,
        area=layout.shared or block,
        second=_SECOND_LEVELS.index(layout.second_level),
        top=1.0 if layout.second_level == "none" else top_of(layout),
        candidates=layout.candidates,
        squares=layout.error == "MSE",
        stochastic=layout.stochastic,
        rotation=0 if rotation is None else rotation.size,
        signs=signs,
        rotated=rotated,
        turned=layout.transposed,
    )


def quantizes_levels(layout: Layout) -> bool:
    """Whether kernels of strips quantize into a layout.

    They know every format, rule and option, but not blocks of every size.
    """
    lanes, positions = layout.block
    if layout.rounding in OWN_RULES:
        return False
    if not lanes or positions not in _BLOCK_POSITIONS:
        return False
    if layout.bound is not None and layout.bound < _LEAST_BOUND:
        return False
    if layout.rotation is not None and (lanes > 1 or layout.shared is not None):
        return False
    return not layout.candidates or _chooses(layout)


def _chooses(layout: Layout) -> bool:
    """Whether kernels choose among the candidates of a layout."""
    if len(layout.candidates) > _MOST_CANDIDATES:
        return False
    if layout.square:
        side = (layout.shared or layout.block)[0]
        return side in _BLOCK_POSITIONS
    lanes = layout.block[0]
    return lanes is not None and _STRIP_LANES % lanes == 0


def decodes_levels(layout: Layout) -> bool:
    """Whether kernels decode a layout: its elements are numbers, but for NaN."""
    return layout.format.name in _ELEMENTS[2:]
