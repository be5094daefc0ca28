"""What wrong turns do, by the names that the turns have in ``turns.toml``: formulas of quantities,
and other looks at stored tensors.

In a formula, ``q`` is the interpretation whose quantities are read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ottava.contract import Transform
from ottava.contract.interpretation import Interpretation
from ottava.contract.numbers import (
    FLT_MAX,
    below,
    magnitudes,
    mantissa_bits,
    middles,
    nearest,
    numbers_of_scales,
)
from ottava.contract.steps import Sides, Steps
from ottava_verify.stored import MISSING, Shapes, Stored

#: The quantity as the contract has it.
Usual = Callable[[], Tensor]
#: Another way to compute a quantity.
Way = Callable[[Interpretation, Usual], Tensor]
# Of an interpretation; Any, because formulas are lambdas.
_Formula = Callable[[Any], Tensor]


# Other values of fields of the contract.

_RHT = Transform(
    16, "0x5bd0", "sylvester", "butterfly 1 2 4", "float32(1/sqrt(size))", "source", "zeros"
)


def _square(steps: Steps) -> Sides | None:
    rows, columns = steps.amax.block
    if rows is None or columns is None:
        return steps.amax.area
    return max(rows, columns), max(rows, columns)


def _long(size: int) -> Callable[[Steps], Sides]:
    """Blocks of another length along the summed dimension."""

    def block(steps: Steps) -> Sides:
        rows, columns = steps.amax.block
        return (rows, size) if columns != 1 and rows is not None else (size, columns)

    return block


def _other(name: str, words: tuple[str, str]) -> dict[str, Any]:
    """The other one of two words for a choice of the storage."""
    return {f"storage.{name}": lambda s: words[getattr(s.storage, name) == words[0]]}


def _block(block: object) -> dict[str, Any]:
    return {"amax.block": block, "amax.area": None}


# Other ways to compute quantities.


def _fixed(formula: _Formula) -> Way:
    """A formula that replaces that of the contract."""
    return lambda made, usual: formula(made)


def _in(dtype: str, number: Tensor) -> Tensor:
    """A number, rounded to a dtype of 16 bits."""
    return number.to(getattr(torch, dtype)).float()


def _rounded(dtype: str) -> Way:
    """The quantity, rounded to a dtype of 16 bits."""
    return lambda made, usual: _in(dtype, usual())


def _finite(multiplier: Tensor) -> Tensor:
    return multiplier.clamp(max=FLT_MAX)


def _usable(formula: _Formula) -> Way:
    """A stored scale, where an amax has one."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        amax = made.raised
        return torch.where(amax.isfinite() & (amax != 0), formula(made), usual())

    return way


def _power_up(made: Interpretation, usual: Usual) -> Tensor:
    """The next power of two that is not smaller."""
    mantissa, exponent = torch.frexp(usual().double())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).float()


def _multiplier_stored(made: Interpretation, usual: Usual) -> Tensor:
    if made.steps.scale.format == "E8M0":
        return (254 - made.code).clamp(min=0)
    return made.multiplier


def _even_of_e2m1(made: Interpretation, usual: Usual) -> Tensor:
    largest = torch.frexp(made.maximum).exponent - 1
    return ((made.raised.view(torch.int32) + (1 << 21)) >> 23) - largest


def _ceiling(made: Interpretation, usual: Usual) -> Tensor:
    """The exponent of amax, rounded up, less that of the largest element."""
    mantissa, exponent = torch.frexp(made.raised)
    code = exponent + (mantissa > 0.5) - torch.frexp(made.maximum).exponent + 127
    return torch.where(mantissa == 0, 0, code)


def _exponent_above(made: Interpretation, usual: Usual) -> Tensor:
    """One more than the exponent of amax / maximum, rounded down."""
    mantissa, exponent = torch.frexp(made.raised * (made.one / made.maximum))
    return torch.where(mantissa == 0, 0, exponent + 127)


def _byte_above(made: Interpretation, usual: Usual) -> Tensor:
    name = made.steps.scale.format
    places = below(made.limited, name)
    return places + (magnitudes(name)[places] < made.limited)


def _via(name: str) -> Way:
    """Scaled values rounded to another format."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        scaled = usual()
        numbers = magnitudes(name)[nearest(scaled.abs().nan_to_num(0.0), name)]
        return torch.where(scaled.isnan(), scaled, numbers.copysign(scaled))

    return way


def _ties(away: bool) -> Way:
    """Ties away from zero, or towards it."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        halfway = middles(made.steps.element.format)
        return torch.bucketize(made.saturated.abs().contiguous(), halfway, right=away)

    return way


def _flushed(made: Interpretation, usual: Usual) -> Tensor:
    places = usual()
    return torch.where(places < 1 << mantissa_bits(made.steps.element.format), 0, places)


def _overflow(code: int) -> Way:
    """A code, with a sign, for what would be rounded beyond the largest element."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        numbers = magnitudes(made.steps.element.format)
        limit = numbers[-1] + (numbers[-1] - numbers[-2]) / 2
        # A tie goes to the even code, which is that of the largest element or the next one.
        size = made.scaled.abs()
        beyond = size > limit if len(numbers) % 2 else size >= limit
        return torch.where(beyond, made.scaled.signbit().long() << 7 | code, usual())

    return way


def _nan_signed(made: Interpretation, usual: Usual) -> Tensor:
    signed = made.scaled.signbit().long() << 7 | 0x7F
    return torch.where(made.scaled.isnan(), signed, usual())


# The formulas.

_DIVIDED = {"product": _fixed(lambda q: q.values / q.areas.spread(q.multiplier))}
_INVERSE_PRODUCT = _usable(lambda q: q.raised * (q.one / q.maximum))
_INVERSE_QUOTIENT = _usable(lambda q: q.raised / q.maximum)

#: Edits of the contract and of quantities, by the names of turns.
WAYS: dict[str, Mapping[str, Any]] = {
    # Fields whose values follow from others, or are steps.
    "integer-least": {"element.least": lambda steps: -(steps.element.maximum + 1)},
    "not-random": {"random": None},
    "global-none": {"second_level": None},
    "global-rows": {"second_level.over": (1, None)},
    "global-tensor": {"second_level.over": (None, None)},
    "candidates-none": {"candidates": None},
    "area-none": {"amax.area": None},
    "area-square": {"amax.area": _square},
    "block-other-dimension": _block(lambda steps: steps.amax.block[::-1]),
    "block-tensor": _block((None, None)),
    "block-row": _block((1, None)),
    "block-column": _block((None, 1)),
    "block-tile": _block((128, 128)),
    "transform-none": {"transform": None},
    "transform-added": {"transform": _RHT},
    "nibbles": _other("first", ("low", "high")),
    "held-other": _other("held", ("tensor", "transpose")),
    # Step 2.
    "transform-unscaled": {"transform_factor": _fixed(lambda q: q.one)},
    # Step 3.
    "amax-signed": {"magnitudes": _fixed(lambda q: q.values.clamp(min=0))},
    # Step 4.
    "global-inverse": {
        "level_scale": _fixed(lambda q: q.one / (q.level_amax / q.top)),
        "level_inverse": _fixed(lambda q: q.level_amax / q.top),
    },
    "global-reciprocal": {"level_scale": _fixed(lambda q: _finite(q.one / q.level_amax * q.top))},
    # Step 5: float32 scales.
    "reciprocal": {"quotient": _fixed(lambda q: q.maximum * (q.one / q.raised))},
    "inverse-product": {
        "quotient": _fixed(lambda q: q.one / (q.raised * (q.one / q.maximum))),
        "inverse": _INVERSE_PRODUCT,
    },
    "inverse-quotient": {
        "quotient": _fixed(lambda q: q.one / (q.raised / q.maximum)),
        "inverse": _INVERSE_QUOTIENT,
    },
    "two-quotients": {"inverse": _INVERSE_QUOTIENT},
    "quotient-product": {"inverse": _INVERSE_PRODUCT},
    "power-of-two-up": {"scale": _power_up},
    "power-of-two-nearest": {"scale": lambda q, scale: torch.exp2(torch.log2(scale()).round())},
    "multiplier-stored": {"stored": _multiplier_stored},
    "amax-stored": {"inverse": _fixed(lambda q: q.raised)},
    # Step 5: codes of E8M0.
    "scale-even-e2m1": {"exponent": _even_of_e2m1},
    "scale-ceiling": {"exponent": _ceiling},
    "scale-above": {"exponent": _exponent_above},
    "bias-128": {"stored": lambda q, codes: (codes() + 1).clamp(0, 255)},
    "bias-126": {"stored": lambda q, codes: (codes() - 1).clamp(0, 255)},
    # Step 5: scales in a byte, with a second level.
    "block-divided": {"exact": _fixed(lambda q: q.finite / q.maximum * q.S * q.factor)},
    "block-divided-inverse": {"exact": _fixed(lambda q: q.finite / q.maximum / q.S_inv * q.factor)},
    "block-product": {"exact": _fixed(lambda q: q.finite * (q.one / q.maximum) * q.S * q.factor)},
    "block-divided-last": {"exact": _fixed(lambda q: q.finite * q.S / q.maximum * q.factor)},
    "global-inverted": {"S": _fixed(lambda q: q.S_inv)},
    "block-truncated": {"byte": _fixed(lambda q: below(q.limited, q.steps.scale.format))},
    "block-up": {"byte": _byte_above},
    "block-not-zero": {"byte": lambda q, codes: codes().clamp(min=1)},
    "block-unrounded": {"multiplier": _fixed(lambda q: _finite(q.one / (q.limited * q.S_inv)))},
    "block-zero": {"multiplier": lambda q, usual: torch.where(q.number == 0, 0.0, usual())},
    "global-left-out": {"multiplier": _fixed(lambda q: _finite(q.one / q.number))},
    "global-twice": {"multiplier": _fixed(lambda q: _finite(q.one / (q.number * q.S)))},
    "divided-by-both": {"multiplier": _fixed(lambda q: q.number * q.S_inv), **_DIVIDED},
    "divided-by-quotient": {"multiplier": _fixed(lambda q: q.number / q.S), **_DIVIDED},
    "multiplied-by-quotient": {"multiplier": _fixed(lambda q: _finite(q.S / q.number))},
    # Step 6.
    "divided": {"product": _fixed(lambda q: q.values / q.areas.spread(q.number))},
    "overflow-nan": {"codes": _overflow(0x7F)},
    "overflow-inf": {"codes": _overflow(0x7C)},
    "truncated": {"places": _fixed(lambda q: below(q.saturated.abs(), q.steps.element.format))},
    "ties-away": {"places": _ties(away=True)},
    "ties-to-zero": {"places": _ties(away=False)},
    "via-e4m3": {"scaled": _via("E4M3")},
    "via-e5m2": {"scaled": _via("E5M2")},
    "flushed": {"places": _flushed},
    "nan-signed": {"codes": _nan_signed},
}


def _reciprocal_in(dtype: str) -> Way:
    return _fixed(lambda q: _in(dtype, _in(dtype, q.one / q.level_amax) * q.top))


def _block_divided_in(dtype: str) -> Way:
    return _fixed(lambda q: _in(dtype, q.finite / q.maximum) * q.S * q.factor)


def _both_in(dtype: str) -> Way:
    return _fixed(lambda q: _in(dtype, q.number * q.S_inv))


#: The same, of a size, an epsilon or a dtype, by the names of families.
FAMILIES: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "block-{}": lambda size: _block(_long(size)),
    "epsilon-{}": lambda epsilon: {"scale.epsilon": epsilon},
    "added-{}": lambda epsilon: {"raised": lambda q, amax: amax() + torch.tensor(epsilon)},
    "source-{}": lambda dtype: {"source.rounded_to": dtype},
    "amax-{}": lambda dtype: {"amax": _rounded(dtype)},
    "product-{}": lambda dtype: {"scaled": _rounded(dtype)},
    "global-{}": lambda dtype: {"level_scale": _rounded(dtype)},
    "global-reciprocal-{}": lambda dtype: {"level_scale": _reciprocal_in(dtype)},
    "block-divided-{}": lambda dtype: {"exact": _block_divided_in(dtype)},
    "divided-{}": lambda dtype: {"multiplier": _both_in(dtype), **_DIVIDED},
    "byte-{}": lambda dtype: {"limited": _rounded(dtype)},
    "stored-{}": lambda dtype: {"inverse": _rounded(dtype)},
    "scale-{}": lambda dtype: {
        "inverse": _rounded(dtype),
        "multiplier": _fixed(lambda q: q.one / q.inverse),
    },
    "multiplier-{}": lambda dtype: {"scale": _rounded(dtype)},
    "exponent-{}": lambda more: {"exponent": lambda q, usual: usual() + more},
}


# Looks at stored tensors, which undo another layout.

#: Stored tensors as the contract would have them; None where they are not laid out so.
View = Callable[[Stored, Shapes, str], Stored | None]

# Rows and columns of a tile of scales, as block-scaled products of GPUs read them.
_ROWS, _COLUMNS = 128, 4


def _padded(
    stored: Stored, shapes: Shapes, format: str, is_swizzled: bool = False
) -> Stored | None:
    """Row 32 a + b, column c of a swizzled tile lies at place 16 b + 4 a + c."""
    down, across = shapes.scales
    tiles = -(-down // _ROWS), -(-across // _COLUMNS)
    rows, columns = tiles[0] * _ROWS, tiles[1] * _COLUMNS
    if stored.scales.numel() != rows * columns:
        return None
    scales = stored.scales.reshape(rows, columns)
    if is_swizzled:
        scales = scales.reshape(*tiles, 32, 4, _COLUMNS).permute(0, 3, 2, 1, 4)
        scales = scales.reshape(rows, columns)
    return replace(stored, scales=scales[:down, :across])


def _scales_transposed(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    scales, turned = stored.scales, shapes.scales[::-1]
    if scales.numel() != math.prod(turned):
        return None
    if scales.dim() > 1 and tuple(scales.shape) != turned:
        return None
    return replace(stored, scales=scales.reshape(turned).t())


def _data_transposed(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    data = stored.matrix()
    if tuple(data.shape) != shapes.data[::-1]:
        return None
    return replace(stored, data=data.t())


def _as_codes(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Numbers as the codes of a format; None unless all are numbers of it."""
    if stored.scales.dtype != torch.float32 or format == "float32":
        return None
    if format == "E8M0":
        codes = (torch.frexp(stored.scales).exponent + 126).clamp(0, 254)
    else:
        codes = torch.bucketize(stored.scales.contiguous(), magnitudes(format))
    codes = codes.to(torch.uint8)
    if not torch.equal(numbers_of_scales(codes, format), stored.scales):
        return None
    return replace(stored, scales=codes)


def _as_numbers(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Codes of E8M0 as the powers of two that they are."""
    if stored.scales.dtype != torch.uint8 or format != "float32":
        return None
    return replace(stored, scales=numbers_of_scales(stored.scales, "E8M0"))


def _repeated(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """One number for each row or element, where one would do."""
    first = stored.scales.reshape(-1)[:1]
    if shapes.scales != (1, 1) or not bool((stored.scales == first).all()):
        return None
    return replace(stored, scales=first.view(1, 1))


def _halves(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Bytes of two codes, of which the first half of a row has the low ones."""
    data = stored.matrix()
    codes = torch.cat([data & 0xF, data >> 4], 1)
    return replace(stored, data=codes[:, ::2] | codes[:, 1::2] << 4)


def _level_as(form: str) -> View:
    """The second level in another form than amax."""

    def view(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
        is_amax = stored.level_is == ("amax",)
        return replace(stored, level_is=(form,)) if is_amax else None

    return view


def _level_missing(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    return replace(stored, level_is=(MISSING,)) if stored.level is None else None


#: By the names that the turns have in ``turns.toml``.
VIEWS: dict[str, View] = {
    "scales-padded": _padded,
    "scales-swizzled": partial(_padded, is_swizzled=True),
    "scales-transposed": _scales_transposed,
    "data-transposed": _data_transposed,
    "scales-as-numbers": _as_codes,
    "scales-as-codes": _as_numbers,
    "scales-repeated": _repeated,
    "halves": _halves,
    "level-scale": _level_as("whole/amax"),
    "level-inverse": _level_as("1/(whole/amax)"),
    "level-missing": _level_missing,
}
